#include "guest/pci.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <sstream>

#include "broker/fd.h"

namespace gpupool::guest {
namespace {

constexpr char kVendor[] = "0x1af4", kDevice[] = "0x1110";  // ivshmem
constexpr char kBridge[] = "0x0604";                        // the class of PCI bridges and ports
constexpr int kMemoryBar = 2;
constexpr uint64_t kUnset = 0x20000000;  // IORESOURCE_UNSET, include/linux/ioport.h

using broker::Fd;

std::string contents(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[4096];
  const ssize_t bytes = file ? read(file.get(), text, sizeof text) : 0;
  return {text, static_cast<size_t>(std::max<ssize_t>(bytes, 0))};
}

bool write_one(const std::string& path) {
  const Fd file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  return file && write(file.get(), "1", 1) == 1;
}

// The file has a line for each resource: first and last address, flags.
bool has_address(const std::string& device) {
  std::istringstream lines(contents(device + "/resource"));
  std::string line;
  for (int i = 0; i <= kMemoryBar; i++) {
    if (!std::getline(lines, line)) return false;
  }
  const char* at = line.c_str();
  char* end = nullptr;
  const uint64_t first = strtoull(at, &end, 16);
  strtoull(end, &end, 16);
  return first != 0 && (strtoull(end, &end, 16) & kUnset) == 0;
}

// Names in a folder that are addresses of devices (0000:01:00.0).
std::vector<std::string> devices_in(const std::string& folder) {
  std::vector<std::string> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir(folder.c_str()), closedir);
  while (const dirent* entry = directory == nullptr ? nullptr : readdir(directory.get())) {
    if (strlen(entry->d_name) == 12 && entry->d_name[4] == ':' && entry->d_name[7] == ':') {
      found.emplace_back(entry->d_name);
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

std::vector<SharedMemoryDevice> SharedMemoryDevices::look() const {
  std::vector<SharedMemoryDevice> found;
  const std::string folder = pci_ + "/devices";
  for (const std::string& name : devices_in(folder)) {
    const std::string device = folder + "/" + name;
    if (contents(device + "/vendor").starts_with(kVendor) &&
        contents(device + "/device").starts_with(kDevice)) {
      found.push_back({device, has_address(device)});
    }
  }
  return found;
}

bool SharedMemoryDevices::make_room(const std::string& device) const {
  char real[PATH_MAX];
  if (realpath(device.c_str(), real) == nullptr) return false;
  const std::string port = std::string(real).substr(0, std::string(real).rfind('/'));
  if (!contents(port + "/class").starts_with(kBridge) || devices_in(port).size() != 1) return false;
  return write_one(port + "/remove") && write_one(pci_ + "/rescan");
}

std::vector<SharedMemoryDevice> SharedMemoryDevices::find() {
  std::vector<SharedMemoryDevice> found = look();
  std::set<std::string> without;
  bool changed = false;
  for (const SharedMemoryDevice& device : found) {
    if (device.has_address) continue;
    without.insert(device.path);
    if (!tried_.contains(device.path)) changed |= make_room(device.path);
  }
  tried_ = std::move(without);
  return changed ? look() : found;
}

}  // namespace gpupool::guest
