// Devices: names, attributes, memory, PCI addresses.
#include <stdio.h>
#include <string.h>

#include "simgpu/driver/context.h"

using namespace gpupool::simgpu;

namespace {

int attribute(const Device& device, int id) {
  const GpuDescription& gpu = device.gpu;
  const DeviceModel& m = gpu.model;
  const int cc = m.cc_major * 10 + m.cc_minor;
  switch (id) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return m.max_threads_per_block;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      return int(m.shared_per_block);
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
      return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
      return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
      return int(m.registers_per_sm);
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      return int(m.clock_khz);
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
    case CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT:
      return 512;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT:
      return 32;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
      return 1;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return m.multiprocessors;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
      return 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
      return CU_COMPUTEMODE_DEFAULT;
    case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH:
      return 131072;
    case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH:
      return 131072;
    case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT:
      return 65536;
    case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH:
    case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT:
    case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH:
      return 16384;
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
      return 1;
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
      return gpu.ecc;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return int(gpu.pci_bus);
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
      return int(gpu.pci_device);
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
      return int(gpu.pci_domain);
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      return int(gpu.memory_clock_khz);
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      return int(gpu.memory_bus_bits);
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      return int(gpu.l2_cache_bytes);
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return m.max_threads_per_sm;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 3;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
      return 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return m.cc_major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return m.cc_minor;
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return int(m.shared_per_sm);
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
      return 1;
    case CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO:
      return cc == 80 ? 2 : 32;
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
      return 0;
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
      return 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
      return 1;
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
      return 1;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return int(m.shared_per_block_optin);
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
      return m.max_blocks_per_sm;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
      return cc >= 80 ? 1024 : 0;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS:
      return 0;
    case CU_DEVICE_ATTRIBUTE_NUMA_ID:
      return -1;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
      return gpu.numa_node;
    case CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID:
      return int(gpu.pci_device_id);
    default:
      return 0;  // textures, clusters, interoperation and the like: not there
  }
}

}  // namespace

GPUPOOL_API cuDeviceGetCount(int* count) {
  GPUPOOL_TRY(driver_status());
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  *count = int(driver().devices.size());
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGet(CUdevice* device, int ordinal) {
  GPUPOOL_TRY(driver_status());
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  Device* found;
  GPUPOOL_TRY(find_device(ordinal, &found));
  *device = ordinal;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetName(char* name, int len, CUdevice dev) {
  GPUPOOL_TRY(driver_status());
  if (!name || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  snprintf(name, size_t(len), "%s", device->gpu.name.c_str());
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice dev) {
  GPUPOOL_TRY(driver_status());
  if (!uuid) return CUDA_ERROR_INVALID_VALUE;
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  memcpy(uuid->bytes, device->gpu.uuid.data(), 16);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceTotalMem_v2(size_t* bytes, CUdevice dev) {
  GPUPOOL_TRY(driver_status());
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  *bytes = device->gpu.memory_bytes;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev) {
  GPUPOOL_TRY(driver_status());
  if (!pi || int(attrib) <= 0 || int(attrib) >= 256) return CUDA_ERROR_INVALID_VALUE;
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  *pi = attribute(*device, int(attrib));
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetProperties(CUdevprop* prop, CUdevice dev) {
  GPUPOOL_TRY(driver_status());
  if (!prop) return CUDA_ERROR_INVALID_VALUE;
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  *prop = {};
  prop->maxThreadsPerBlock = device->gpu.model.max_threads_per_block;
  prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024;
  prop->maxThreadsDim[2] = 64;
  prop->maxGridSize[0] = 2147483647;
  prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
  prop->sharedMemPerBlock = int(device->gpu.model.shared_per_block);
  prop->totalConstantMemory = 65536;
  prop->SIMDWidth = 32;
  prop->memPitch = 2147483647;
  prop->regsPerBlock = int(device->gpu.model.registers_per_sm);
  prop->clockRate = int(device->gpu.model.clock_khz);
  prop->textureAlign = 512;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceComputeCapability(int* major, int* minor, CUdevice dev) {
  GPUPOOL_TRY(driver_status());
  if (!major || !minor) return CUDA_ERROR_INVALID_VALUE;
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  *major = device->gpu.model.cc_major;
  *minor = device->gpu.model.cc_minor;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetByPCIBusId(CUdevice* dev, const char* text) {
  GPUPOOL_TRY(driver_status());
  if (!dev || !text) return CUDA_ERROR_INVALID_VALUE;
  unsigned domain = 0, bus = 0, device = 0, function = 0;
  // [domain]:[bus]:[device].[function], [domain]:[bus]:[device] or [bus]:[device].[function]
  if (sscanf(text, "%x:%x:%x.%x", &domain, &bus, &device, &function) < 3) {
    domain = 0;
    if (sscanf(text, "%x:%x.%x", &bus, &device, &function) != 3) return CUDA_ERROR_INVALID_VALUE;
  }
  for (const auto& candidate : driver().devices) {
    if (candidate->gpu.pci_domain == domain && candidate->gpu.pci_bus == bus &&
        candidate->gpu.pci_device == device && function == 0) {
      *dev = candidate->ordinal;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

GPUPOOL_API cuDeviceGetPCIBusId(char* text, int len, CUdevice dev) {
  GPUPOOL_TRY(driver_status());
  if (!text || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  std::string id = device->gpu.pci_bus_id();
  if (id.size() + 1 > size_t(len)) return CUDA_ERROR_INVALID_VALUE;
  memcpy(text, id.c_str(), id.size() + 1);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceCanAccessPeer(int* can, CUdevice dev, CUdevice peer) {
  GPUPOOL_TRY(driver_status());
  if (!can) return CUDA_ERROR_INVALID_VALUE;
  Device *one, *other;
  GPUPOOL_TRY(find_device(dev, &one));
  GPUPOOL_TRY(find_device(peer, &other));
  *can = one != other;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attrib, CUdevice source,
                                    CUdevice target) {
  GPUPOOL_TRY(driver_status());
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  Device *one, *other;
  GPUPOOL_TRY(find_device(source, &one));
  GPUPOOL_TRY(find_device(target, &other));
  if (one == other) return CUDA_ERROR_INVALID_DEVICE;
  switch (int(attrib)) {
    case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK:
      *value = 0;
      break;
    case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
    case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
      *value = 1;
      break;
    case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED:
      *value = 0;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetExecAffinitySupport(int* pi, CUexecAffinityType type, CUdevice dev) {
  GPUPOOL_TRY(driver_status());
  if (!pi || int(type) < 0 || int(type) >= int(CU_EXEC_AFFINITY_TYPE_MAX)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  *pi = 0;
  return CUDA_SUCCESS;
}
