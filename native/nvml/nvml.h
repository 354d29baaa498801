// NVML's interface, described by us: return codes and structures as they lie in memory.
#pragma once

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
  kTimeout = 10,
  kGpuIsLost = 15,
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
struct ProcessSample {
  unsigned pid;
  unsigned long long timestamp_us;
  unsigned gpu, memory, encoder, decoder;
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
  unsigned long long used_bytes;  // ~0: not available
  unsigned gpu_instance, compute_instance;
};
struct DeviceAttributes {
  unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices,
      compute_slices;
  unsigned long long memory_mib;
};
struct FieldValue {
  unsigned field, scope;
  long long timestamp_us, latency_us;
  unsigned value_type;
  nvmlReturn_t status;
  unsigned long long value;
};
static_assert(sizeof(Memory) == 24 && sizeof(MemoryV2) == 40 && sizeof(PciInfoV2) == 52 &&
              sizeof(PciInfoV3) == 68 && sizeof(ProcessInfoV1) == 16 &&
              sizeof(ProcessInfoV2) == 24 && sizeof(ProcessSample) == 32 &&
              sizeof(FieldValue) == 40);

// The version that a caller puts into a structure's first member.
template <class Struct>
constexpr unsigned version_of(unsigned version) {
  return sizeof(Struct) | version << 24;
}

}  // namespace gpupool::nvml
