// Devices: everything is answered from the lease's snapshot.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <stdio.h>
#include <string.h>

#include "api/cuda_abi.h"
#include "client/log.h"
#include "client/state.h"

using namespace gpupool;          // NOLINT: a file of entry points
using namespace gpupool::client;  // NOLINT

namespace {
CUresult find_device(CUdevice ordinal, Device** device) {
  const CUresult state = Process::get().check();
  if (state != CUDA_SUCCESS) return CUDA_ERROR_NOT_INITIALIZED;
  *device = Process::get().device(ordinal);
  return *device == nullptr ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
}  // namespace

#define FIND_DEVICE(ordinal) \
  Device* device;            \
  if (const CUresult e_ = find_device(ordinal, &device)) return e_;
#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;
#define REQUIRE_INIT() \
  if (Process::get().check() != CUDA_SUCCESS) return CUDA_ERROR_NOT_INITIALIZED;

#pragma GCC visibility push(default)
extern "C" {

CUresult cuInit(unsigned int flags) { return Process::get().init(flags); }

CUresult cuDriverGetVersion(int* version) {
  REQUIRE(version != nullptr);
  // Asked before cuInit, also by programs that then find no device: connecting is cheap.
  Process::get().init(0);
  const int known = Process::get().driver_version();
  *version = known != 0 ? known : CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* out, int ordinal) {
  REQUIRE_INIT();
  REQUIRE(out != nullptr);
  FIND_DEVICE(ordinal);
  *out = device->ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  REQUIRE_INIT();
  REQUIRE(count != nullptr);
  *count = static_cast<int>(Process::get().devices().size());
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice ordinal) {
  FIND_DEVICE(ordinal);
  REQUIRE(name != nullptr && length > 0);
  snprintf(name, static_cast<size_t>(length), "%s", device->snapshot.name);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice ordinal) {
  FIND_DEVICE(ordinal);
  REQUIRE(uuid != nullptr);
  memcpy(uuid->bytes, device->snapshot.uuid, sizeof uuid->bytes);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice ordinal) {
  FIND_DEVICE(ordinal);
  REQUIRE(bytes != nullptr);
  *bytes = device->snapshot.memory_bytes;
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(unsigned int* bytes, CUdevice ordinal) {
  FIND_DEVICE(ordinal);
  REQUIRE(bytes != nullptr);
  const uint64_t total = device->snapshot.memory_bytes;
  *bytes = total > 0xFFFFFFFFu ? 0xFFFFFFFFu : static_cast<unsigned>(total);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice ordinal) {
  FIND_DEVICE(ordinal);
  REQUIRE(value != nullptr);
  const int index = static_cast<int>(attribute);
  REQUIRE(index > 0 && index < CU_DEVICE_ATTRIBUTE_MAX);
  *value = index < static_cast<int>(wire::kAttributeCount) ? device->attribute(index) : 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetTexture1DLinearMaxWidth(size_t* width, CUarray_format, unsigned,
                                            CUdevice ordinal) {
  FIND_DEVICE(ordinal);
  REQUIRE(width != nullptr);
  *width =
      static_cast<size_t>(device->attribute(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetExecAffinitySupport(int* value, CUexecAffinityType, CUdevice ordinal) {
  FIND_DEVICE(ordinal);
  REQUIRE(value != nullptr);
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice ordinal) {
  FIND_DEVICE(ordinal);
  REQUIRE(major != nullptr && minor != nullptr);
  *major = device->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  *minor = device->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetProperties(CUdevprop* properties, CUdevice ordinal) {
  FIND_DEVICE(ordinal);
  REQUIRE(properties != nullptr);
  auto get = [device](CUdevice_attribute attribute) { return device->attribute(attribute); };
  properties->maxThreadsPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  properties->maxThreadsDim[0] = get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X);
  properties->maxThreadsDim[1] = get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y);
  properties->maxThreadsDim[2] = get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z);
  properties->maxGridSize[0] = get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X);
  properties->maxGridSize[1] = get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y);
  properties->maxGridSize[2] = get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z);
  properties->sharedMemPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  properties->totalConstantMemory = get(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
  properties->SIMDWidth = get(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
  properties->memPitch = get(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
  properties->regsPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
  properties->clockRate = get(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  properties->textureAlign = get(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice ordinal) {
  FIND_DEVICE(ordinal);
  REQUIRE(id != nullptr && length > 0);
  const int n =
      snprintf(id, static_cast<size_t>(length), "%04x:%02x:%02x.0",
               static_cast<unsigned>(device->attribute(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)),
               static_cast<unsigned>(device->attribute(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)),
               static_cast<unsigned>(device->attribute(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)));
  return n < length ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetByPCIBusId(CUdevice* out, const char* id) {
  REQUIRE_INIT();
  REQUIRE(out != nullptr && id != nullptr);
  // [domain]:[bus]:[device].[function], [domain]:[bus]:[device] or [bus]:[device].[function]
  unsigned domain = 0, bus = 0, device = 0, function = 0;
  char rest = 0;
  const bool full = sscanf(id, "%x:%x:%x.%x%c", &domain, &bus, &device, &function, &rest) == 4 ||
                    (function = 0, sscanf(id, "%x:%x:%x%c", &domain, &bus, &device, &rest) == 3);
  if (!full) {
    domain = 0;
    REQUIRE(sscanf(id, "%x:%x.%x%c", &bus, &device, &function, &rest) == 3);
  }
  for (const auto& it : Process::get().devices()) {
    if (function == 0 &&
        static_cast<unsigned>(it->attribute(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)) == domain &&
        static_cast<unsigned>(it->attribute(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)) == bus &&
        static_cast<unsigned>(it->attribute(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)) == device) {
      *out = it->ordinal;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice ordinal, CUdevice peer) {
  FIND_DEVICE(ordinal);
  REQUIRE(can != nullptr);
  if (Process::get().device(peer) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *can = 0;  // slices are devices of their own, and may sit on different hosts
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute, CUdevice ordinal,
                                 CUdevice peer) {
  FIND_DEVICE(ordinal);
  REQUIRE(value != nullptr);
  if (Process::get().device(peer) == nullptr || peer == ordinal) return CUDA_ERROR_INVALID_DEVICE;
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuProfilerInitialize(const char*, const char*, CUoutput_mode) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuProfilerStart(void) {
  Context* context;
  return enter(&context);
}
CUresult cuProfilerStop(void) {
  Context* context;
  return enter(&context);
}

}  // extern "C"
#pragma GCC visibility pop
