// The part of NVML's interface that the simulated machine answers, described by us: return codes,
// structures as they lie in memory, and the state behind the functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "simgpu/machine/card_state.h"
#include "simgpu/machine/description.h"

#define GPUPOOL_NVML extern "C" __attribute__((visibility("default")))

using nvmlReturn_t = int;

namespace gpupool::nvml {

enum : nvmlReturn_t {
  kSuccess = 0,
  kUninitialized = 1,
  kInvalidArgument = 2,
  kNotSupported = 3,
  kNoPermission = 4,
  kNotFound = 6,
  kInsufficientSize = 7,
  kDriverNotLoaded = 9,
  kArgumentVersionMismatch = 25,
};

struct Memory {
  unsigned long long total, free, used;
};
struct MemoryV2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct Utilization {
  unsigned gpu, memory;
};
struct PciInfoV2 {
  char bus_id[16];
  unsigned domain, bus, device, pci_device_id, pci_subsystem_id, reserved[4];
};
struct PciInfoV3 {
  char bus_id_legacy[16];
  unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
  char bus_id[32];
};
struct ProcessInfoV1 {
  unsigned pid;
  unsigned long long used_bytes;
};
struct ProcessInfoV2 {  // also version 3
  unsigned pid;
  unsigned long long used_bytes;
  unsigned gpu_instance, compute_instance;
};
struct DeviceAttributes {
  unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices,
      compute_slices;
  unsigned long long memory_mib;
};

struct Device {
  unsigned index = 0;
  simgpu::GpuDescription gpu;
  std::unique_ptr<simgpu::CardState> card;
};
using Handle = Device*;

struct Library {
  std::mutex mutex;
  int references = 0;
  simgpu::MachineDescription machine;
  // Kept from the first nvmlInit on: handles stay what they are over a shutdown.
  std::vector<std::unique_ptr<Device>> devices;
  bool loaded = false;
};
Library& library();

nvmlReturn_t ready();               // kUninitialized before nvmlInit
nvmlReturn_t check(Handle handle);  // and whether it is a device's handle
nvmlReturn_t give(const std::string& text, char* out, unsigned length);

}  // namespace gpupool::nvml

#define GPUPOOL_NVML_TRY(expression)                                 \
  do {                                                               \
    if (nvmlReturn_t code_ = (expression); code_ != 0) return code_; \
  } while (0)
