#include "broker/mounts.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "broker/fd.h"

namespace gpupool::broker {
namespace {

// From a container of podman's, with a name that has a blank, as proc(5) says it is written.
constexpr char kTable[] =
    "571 570 0:21 / /proc rw,nosuid - proc proc rw\n"
    "580 570 0:24 /gpupool/slices/GPU-1/socket /run/gpupool/slice ro,nosuid - tmpfs tmpfs rw\n"
    "581 570 0:24 /a\\040b\\134c /mnt rw shared:1 - tmpfs tmpfs rw\n"
    "582 570 254:0 / / rw - ext4 /dev/root rw";

TEST(Mounts, AMountIsItsFileSystemAndPath) {
  EXPECT_TRUE(has_mount(kTable, {"0:24", "/gpupool/slices/GPU-1/socket"}));
  EXPECT_TRUE(has_mount(kTable, {"0:24", "/a b\\c"}));
  EXPECT_TRUE(has_mount(kTable, {"254:0", "/"}));
  EXPECT_FALSE(has_mount(kTable, {"0:25", "/gpupool/slices/GPU-1/socket"}));
  EXPECT_FALSE(has_mount(kTable, {"0:24", "/gpupool/slices/GPU-1"}));
  EXPECT_FALSE(has_mount(kTable, {"0:24", "/gpupool/slices/GPU-1/socket/"}));
  EXPECT_FALSE(has_mount(kTable, {"0:24", "/run/gpupool/slice"}));  // where it is mounted
}

TEST(Mounts, BrokenLinesShowNothing) {
  for (const char* text :
       {"", "\n\n", "1 2 0:24", "1 2 0:24 /x", "  0:24 /x /y ", "\\", "1 2 3 \\04 \\"}) {
    EXPECT_FALSE(has_mount(text, {"0:24", "/x"})) << text;
  }
}

TEST(Mounts, TheRootIsAPlaceThatEverybodySees) {
  const Fd root(open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const DirectoryPlace place = place_of(root.get());
  ASSERT_TRUE(place.known());
  EXPECT_TRUE(is_shown(static_cast<uint32_t>(getpid()), place));
}

TEST(Mounts, APlainDirectoryIsNotShown) {
  char name[] = "/tmp/gpupool-mounts-XXXXXX";
  ASSERT_NE(mkdtemp(name), nullptr);
  const Fd directory(open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const DirectoryPlace place = place_of(directory.get());
  ASSERT_TRUE(place.known());
  EXPECT_TRUE(place.path.ends_with(std::string(name).substr(4))) << place.path;
  EXPECT_FALSE(is_shown(static_cast<uint32_t>(getpid()), place));
  EXPECT_FALSE(is_shown(0, place));
  EXPECT_FALSE(is_shown(static_cast<uint32_t>(getpid()), DirectoryPlace{}));
  rmdir(name);
}

}  // namespace
}  // namespace gpupool::broker
