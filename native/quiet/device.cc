// Devices: initialisation, properties.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "frontdoor/hooks.h"
#include "quiet/quiet.h"

namespace gpupool::quiet {
namespace {

long number_from(const char* variable, long fallback, long low, long high) {
  const char* text = getenv(variable);
  if (text == nullptr) return fallback;
  char* end = nullptr;
  const long value = strtol(text, &end, 10);
  return end != text && value >= low && value <= high ? value : fallback;
}

void describe_devices(Machine* machine) {
  const long count = number_from("GPUPOOL_QUIET_DEVICES", 1, 0, 16);
  const long mib = number_from("GPUPOOL_QUIET_MEMORY_MIB", 16384, 1, 1 << 20);
  int major = 8, minor = 0;
  if (const char* text = getenv("GPUPOOL_QUIET_COMPUTE_CAPABILITY")) {
    if (sscanf(text, "%d.%d", &major, &minor) != 2) major = 8, minor = 0;
  }
  std::vector<Device> all(count);
  std::vector<frontdoor::DeviceUuid> uuids;
  for (int i = 0; i < count; ++i) {
    all[i].index = i;
    all[i].uuid = {0x71, 0x75, 0x69, 0x65, 0x74, 0, 0x40, 0,
                   0x80, 0,    0,    0,    0,    0, 0,    static_cast<uint8_t>(i + 1)};
    all[i].memory_bytes = static_cast<uint64_t>(mib) << 20;
    all[i].major = major, all[i].minor = minor;
    uuids.push_back(all[i].uuid);
  }
  for (int index : frontdoor::visible_devices(getenv("CUDA_VISIBLE_DEVICES"), uuids)) {
    machine->devices.push_back(all[index]);
    auto* primary = new CUctx_st;
    primary->device = static_cast<int>(machine->devices.size()) - 1;
    primary->primary = true;
    primary->id = machine->devices.size();
    machine->devices.back().primary = primary;
  }
}

int attribute(const Device& device, CUdevice_attribute which) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
      return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      return 49152;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return 232448;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return 233472;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
      return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    case CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT:
    case CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
      return 32;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      return 1500000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      return 1500000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      return 5120;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      return 50 << 20;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return 2048;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
    case CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT:
      return 512;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 132;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 2;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return device.index + 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return device.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return device.minor;
    default:
      return 0;
  }
}

bool ready(CUdevice device, CUresult* error) {
  if (!machine().initialised) return *error = CUDA_ERROR_NOT_INITIALIZED, false;
  if (device < 0 || static_cast<size_t>(device) >= machine().devices.size()) {
    return *error = CUDA_ERROR_INVALID_DEVICE, false;
  }
  return true;
}

}  // namespace

Machine& machine() {
  static Machine* const instance = new Machine;
  return *instance;
}

}  // namespace gpupool::quiet

using namespace gpupool::quiet;

#define CHECK_DEVICE(device)                                  \
  if (CUresult device_error; !ready(device, &device_error)) { \
    return device_error;                                      \
  }

GPUPOOL_API cuInit(unsigned int Flags) {
  if (Flags != 0) return CUDA_ERROR_INVALID_VALUE;
  static std::mutex* const mutex = new std::mutex;
  std::lock_guard lock(*mutex);
  if (!machine().initialised) {
    describe_devices(&machine());
    machine().initialised = true;
  }
  return machine().devices.empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

GPUPOOL_API cuDriverGetVersion(int* driverVersion) {
  if (driverVersion == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *driverVersion = gpupool::frontdoor::kDriverVersion;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetCount(int* count) {
  if (!machine().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = static_cast<int>(machine().devices.size());
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGet(CUdevice* device, int ordinal) {
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CHECK_DEVICE(ordinal)
  *device = ordinal;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetName(char* name, int len, CUdevice dev) {
  CHECK_DEVICE(dev)
  if (name == nullptr || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  snprintf(name, len, "gpupool quiet device");
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice dev) {
  CHECK_DEVICE(dev)
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  memcpy(uuid->bytes, machine().devices[dev].uuid.data(), sizeof uuid->bytes);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceTotalMem_v2(size_t* bytes, CUdevice dev) {
  CHECK_DEVICE(dev)
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *bytes = machine().devices[dev].memory_bytes;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev) {
  CHECK_DEVICE(dev)
  if (pi == nullptr || attrib < 1 || attrib >= CU_DEVICE_ATTRIBUTE_MAX)
    return CUDA_ERROR_INVALID_VALUE;
  *pi = attribute(machine().devices[dev], attrib);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceComputeCapability(int* major, int* minor, CUdevice dev) {
  CHECK_DEVICE(dev)
  if (major == nullptr || minor == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *major = machine().devices[dev].major;
  *minor = machine().devices[dev].minor;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetPCIBusId(char* pciBusId, int len, CUdevice dev) {
  CHECK_DEVICE(dev)
  if (pciBusId == nullptr || len < 13) return CUDA_ERROR_INVALID_VALUE;
  snprintf(pciBusId, len, "0000:%02x:00.0", machine().devices[dev].index + 1);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetByPCIBusId(CUdevice* dev, const char* pciBusId) {
  if (!machine().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (dev == nullptr || pciBusId == nullptr) return CUDA_ERROR_INVALID_VALUE;
  unsigned domain = 0, bus = 0, slot = 0;
  if (sscanf(pciBusId, "%x:%x:%x", &domain, &bus, &slot) != 3) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < machine().devices.size(); ++i) {
    if (domain == 0 && slot == 0 && bus == static_cast<unsigned>(machine().devices[i].index) + 1) {
      *dev = static_cast<CUdevice>(i);
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

GPUPOOL_API cuDeviceCanAccessPeer(int* canAccessPeer, CUdevice dev, CUdevice peerDev) {
  CHECK_DEVICE(dev)
  CHECK_DEVICE(peerDev)
  if (canAccessPeer == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *canAccessPeer = 0;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *mode = CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}
