// What every libnvidia-ml.so.1 of ours has: the devices that the functions of library.cc and
// device.cc tell about. A library gives start() and its kind of Device, and defines further
// functions if it can answer them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "nvml/nvml.h"

namespace gpupool::nvml {

struct Process {
  unsigned pid;
  uint64_t used_bytes;
};

struct ProcessUse {
  unsigned pid;
  unsigned percent;  // of the device's time
};

struct MemoryUse {
  uint64_t total_bytes, used_bytes;
};

struct Device {
  virtual ~Device() = default;

  // How it does now; on kSuccess the result is set.
  virtual nvmlReturn_t memory(MemoryUse* use) = 0;
  virtual nvmlReturn_t processes(std::vector<Process>* list) = 0;
  virtual nvmlReturn_t utilization(Utilization* percent) = 0;
  virtual nvmlReturn_t process_utilization(std::vector<ProcessUse>* list) = 0;

  unsigned index = 0;
  std::string name;
  std::string uuid;  // "GPU-…"
  unsigned pci_domain = 0, pci_bus = 0, pci_device = 0;
  unsigned pci_device_id = 0;  // device and vendor; 0: not known
  int cc_major = 0, cc_minor = 0;
  bool ecc = false;
  unsigned memory_bus_bits = 0;                       // 0: not known
  unsigned core_clock_mhz = 0, memory_clock_mhz = 0;  // the highest; 0: not known
};
using Handle = Device*;

struct Library {
  std::mutex mutex;
  int references = 0;
  std::string driver_version;  // empty: not known
  int cuda_version = 0;
  // Devices stay where they are once they are there: handles keep over a shutdown.
  std::vector<std::unique_ptr<Device>> devices;
};
Library& library();

// Given by each library. Called, with the mutex held, by an nvmlInit that finds no other user.
nvmlReturn_t start(Library& library);
// The name of a process that may be told; nothing: there is none.
std::optional<std::string> process_name(unsigned pid);

// The first argument of a process's command line.
std::optional<std::string> command_of(unsigned pid);

nvmlReturn_t ready();               // kUninitialized before nvmlInit
nvmlReturn_t check(Handle handle);  // and whether it is a device's handle
nvmlReturn_t give(const std::string& text, char* out, unsigned length);
// Checks the handle, then where the value goes.
nvmlReturn_t set(Handle device, unsigned* out, unsigned value);
nvmlReturn_t set(Handle device, int* out, int value);
nvmlReturn_t set_known(Handle device, unsigned* out, unsigned value);  // 0: kNotSupported
nvmlReturn_t refuse(Handle device);                                    // kNotSupported

}  // namespace gpupool::nvml

#define GPUPOOL_NVML_TRY(expression)                                 \
  do {                                                               \
    if (nvmlReturn_t code_ = (expression); code_ != 0) return code_; \
  } while (0)
