// The virtual machine's PCI devices that are memory shared with its host (ivshmem).
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace gpupool::guest {

struct SharedMemoryDevice {
  std::string path;  // its folder in sysfs; the memory is its `resource2`
  bool has_address;  // false: the memory cannot be mapped
};

// Below a port of a q35 machine the firmware leaves 2 MiB for a device that comes later, and the
// kernel does not widen that by itself: a larger one has no address then. It gets one when the port
// is removed and looked for again, which is done once for each such device: only a port with
// nothing else below it, which therefore nobody can miss. Devices that have an address are left
// alone.
class SharedMemoryDevices {
 public:
  // `pci`: the folder of the bus in sysfs.
  explicit SharedMemoryDevices(std::string pci = "/sys/bus/pci") : pci_(std::move(pci)) {}

  // All, by their path; one without an address was given one, if that was possible.
  std::vector<SharedMemoryDevice> find();

 private:
  std::vector<SharedMemoryDevice> look() const;
  bool make_room(const std::string& device) const;

  const std::string pci_;
  std::set<std::string> tried_;
};

}  // namespace gpupool::guest
