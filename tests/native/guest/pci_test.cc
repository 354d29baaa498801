// A tree as sysfs has it; writing "1" into `remove` and `rescan` does nothing here but leave it.
#include "guest/pci.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace gpupool::test {
namespace {

namespace fs = std::filesystem;
using guest::SharedMemoryDevice;
using guest::SharedMemoryDevices;

constexpr char kSet[] = "0x0000000800000000 0x0000000800ffffff 0x000000000014220c\n";
constexpr char kUnset[] = "0x0000000000000000 0x0000000000ffffff 0x000000002014220c\n";
constexpr char kNothing[] = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";

class Pci : public testing::Test {
 protected:
  Pci() : root_(testing::TempDir() + "pci-" + std::to_string(getpid())) {
    fs::create_directories(root_ / "devices");
    write(root_ / "rescan", "");
  }
  ~Pci() override { fs::remove_all(root_); }

  static void write(const fs::path& file, const std::string& text) { std::ofstream(file) << text; }
  static std::string read(const fs::path& file) {
    std::string text;
    std::ifstream(file) >> text;
    return text;
  }

  // Its folder, below `port` ("" on the root bus).
  fs::path add(const std::string& port, const std::string& name, const std::string& id,
               const std::string& klass, const std::string& memory) {
    const fs::path folder = root_ / "pci0000:00" / port / name;
    fs::create_directories(folder);
    write(folder / "vendor", "0x1af4\n");
    write(folder / "device", id);
    write(folder / "class", klass);
    write(folder / "resource", std::string(kNothing) + kNothing + memory);
    write(folder / "remove", "");
    fs::create_directory_symlink(folder, root_ / "devices" / name);
    return folder;
  }
  fs::path add_port(const std::string& name) {
    return add("", name, "0x000c\n", "0x060400\n", kNothing);
  }
  fs::path add_memory(const std::string& port, const std::string& name, const std::string& memory) {
    return add(port, name, "0x1110\n", "0x050000\n", memory);
  }

  fs::path root_;
};

TEST_F(Pci, FindsSharedMemoryOnly) {
  add_memory("", "0000:00:03.0", kSet);
  add("", "0000:00:04.0", "0x1003\n", "0x078000\n", kSet);
  const auto found = SharedMemoryDevices(root_).find();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].path, root_ / "devices" / "0000:00:03.0");
  EXPECT_TRUE(found[0].has_address);
  EXPECT_EQ(read(root_ / "rescan"), "");
}

TEST_F(Pci, APortIsLookedAtAnewOnceForAMemoryWithoutAnAddress) {
  const fs::path port = add_port("0000:00:02.0");
  add_memory("0000:00:02.0", "0000:01:00.0", kUnset);
  SharedMemoryDevices devices(root_);
  const auto found = devices.find();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_FALSE(found[0].has_address);
  EXPECT_EQ(read(port / "remove"), "1");
  EXPECT_EQ(read(root_ / "rescan"), "1");
  write(root_ / "rescan", "");
  devices.find();
  EXPECT_EQ(read(root_ / "rescan"), "");  // it did not help: not again and again
  fs::remove(root_ / "devices" / "0000:01:00.0");
  devices.find();
  fs::create_directory_symlink(port / "0000:01:00.0", root_ / "devices" / "0000:01:00.0");
  devices.find();
  EXPECT_EQ(read(root_ / "rescan"), "1");  // another one of that name
}

TEST_F(Pci, APortWithSomethingElseIsLeftAlone) {
  const fs::path port = add_port("0000:00:02.0");
  add_memory("0000:00:02.0", "0000:01:00.0", kUnset);
  add("0000:00:02.0", "0000:01:00.1", "0x1041\n", "0x020000\n", kSet);
  const auto found = SharedMemoryDevices(root_).find();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_FALSE(found[0].has_address);
  EXPECT_EQ(read(port / "remove"), "");
  EXPECT_EQ(read(root_ / "rescan"), "");
}

TEST_F(Pci, OnTheRootBusNothingIsRemoved) {
  add_memory("", "0000:00:03.0", kUnset);
  EXPECT_FALSE(SharedMemoryDevices(root_).find()[0].has_address);
  EXPECT_EQ(read(root_ / "rescan"), "");
}

TEST_F(Pci, ATreeThatIsNotThereHasNoDevices) {
  EXPECT_TRUE(SharedMemoryDevices("/no/such/folder").find().empty());
}

}  // namespace
}  // namespace gpupool::test
