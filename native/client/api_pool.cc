// Stream-ordered allocation and memory pools: answered here, except where a pool needs more memory.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include "api/cuda_abi.h"
#include "client/pools.h"
#include "graphs/capture.h"

using namespace gpupool;          // NOLINT: a file of entry points
using namespace gpupool::client;  // NOLINT

#define ENTER()     \
  Context* context; \
  if (const CUresult e_ = enter(&context)) return e_;
#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;
#define STREAM(stream)  \
  wire::Handle on_wire; \
  Stream* object;       \
  if (const CUresult e_ = resolve_stream(context, stream, &on_wire, &object)) return e_;
#define POOL(handle)                                                             \
  if (Process::get().check() != CUDA_SUCCESS) return CUDA_ERROR_NOT_INITIALIZED; \
  Pool* pool = find_pool(handle);                                                \
  if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;

namespace {

CUresult find_device(CUdevice ordinal, Device** device) {
  if (Process::get().check() != CUDA_SUCCESS) return CUDA_ERROR_NOT_INITIALIZED;
  *device = Process::get().device(ordinal);
  return *device == nullptr ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult allocate(Pool* pool, CUdeviceptr* out, size_t bytes, CUstream stream) {
  ENTER();
  STREAM(stream);
  if (pool == nullptr) {
    pool = current_pool(context->device);
    if (pool == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  REQUIRE(out != nullptr && bytes != 0);
  // The memory of one device's slice is of no use to another one's.
  Context* owner = object != nullptr ? object->context : context;
  if (device_of(pool) != owner->device) return CUDA_ERROR_NOT_SUPPORTED;
  GPUPOOL_CAPTURE(capture_allocation(stream, owner->device->ordinal, bytes, out, &capture_result));
  uint64_t address = 0;
  const CUresult result = allocate_from(pool, owner, object, bytes, &address);
  if (result == CUDA_SUCCESS) *out = address;
  return result;
}

CUresult handle_of(const Pool* pool, CUmemoryPool* out) {
  if (pool == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = reinterpret_cast<CUmemoryPool>(pool->handle);
  return CUDA_SUCCESS;
}

// The device that a location means; pools of pinned device memory are the only ones.
CUresult device_at(const CUmemLocation* location, CUmemAllocationType type, Device** device) {
  REQUIRE(location != nullptr);
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE || type != CU_MEM_ALLOCATION_TYPE_PINNED) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return find_device(location->id, device);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuMemAllocAsync(CUdeviceptr* out, size_t bytes, CUstream stream) {
  return allocate(nullptr, out, bytes, stream);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* out, size_t bytes, CUmemoryPool handle,
                                 CUstream stream) {
  POOL(handle);
  return allocate(pool, out, bytes, stream);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  ENTER();
  STREAM(stream);
  if (address == 0) return CUDA_SUCCESS;
  GPUPOOL_CAPTURE(capture_free(stream, address, &capture_result));
  if (graphs::free_graph_memory(address)) return CUDA_SUCCESS;
  Context* owner = object != nullptr ? object->context : context;
  if (free_to_pool(address, owner, object)) return CUDA_SUCCESS;
  // Memory of cuMemAlloc: behind all that was submitted before.
  const auto range = Process::get().ranges.remove(address, Range::Type::kDevice);
  REQUIRE(range.has_value());
  free_device(range->context, address);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* out, CUdevice ordinal) {
  Device* device;
  if (const CUresult e = find_device(ordinal, &device)) return e;
  REQUIRE(out != nullptr);
  return handle_of(default_pool(device), out);
}

CUresult cuDeviceGetMemPool(CUmemoryPool* out, CUdevice ordinal) {
  Device* device;
  if (const CUresult e = find_device(ordinal, &device)) return e;
  REQUIRE(out != nullptr);
  return handle_of(current_pool(device), out);
}

CUresult cuDeviceSetMemPool(CUdevice ordinal, CUmemoryPool handle) {
  Device* device;
  if (const CUresult e = find_device(ordinal, &device)) return e;
  POOL(handle);
  return set_current_pool(device, pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool* out, CUmemLocation* location,
                                CUmemAllocationType type) {
  Device* device;
  if (const CUresult e = device_at(location, type, &device)) return e;
  REQUIRE(out != nullptr);
  return handle_of(default_pool(device), out);
}

CUresult cuMemGetMemPool(CUmemoryPool* out, CUmemLocation* location, CUmemAllocationType type) {
  Device* device;
  if (const CUresult e = device_at(location, type, &device)) return e;
  REQUIRE(out != nullptr);
  return handle_of(current_pool(device), out);
}

CUresult cuMemSetMemPool(CUmemLocation* location, CUmemAllocationType type, CUmemoryPool handle) {
  Device* device;
  if (const CUresult e = device_at(location, type, &device)) return e;
  POOL(handle);
  return set_current_pool(device, pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolCreate(CUmemoryPool* out, const CUmemPoolProps* properties) {
  if (Process::get().check() != CUDA_SUCCESS) return CUDA_ERROR_NOT_INITIALIZED;
  REQUIRE(out != nullptr && properties != nullptr);
  REQUIRE(properties->allocType == CU_MEM_ALLOCATION_TYPE_PINNED);
  // Neither memory of the host nor memory that other processes could open.
  if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE || properties->usage != 0) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  Device* device;
  if (const CUresult e = find_device(properties->location.id, &device)) return e;
  return handle_of(create_pool(device, properties->maxSize), out);
}

CUresult cuMemPoolDestroy(CUmemoryPool handle) {
  POOL(handle);
  return destroy_pool(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
  POOL(handle);
  trim(pool, keep);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  POOL(handle);
  REQUIRE(value != nullptr);
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      // Permissions, of which this pool makes no use: another stream gets memory back when the
      // program has waited for the one that freed it.
      reuse_flag(pool, attribute) = *static_cast<const int*>(value) != 0 ? 1 : 0;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      set_release_threshold(pool, *static_cast<const cuuint64_t*>(value));
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      REQUIRE(*static_cast<const cuuint64_t*>(value) == 0);
      reset_high(pool, attribute);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  POOL(handle);
  REQUIRE(value != nullptr);
  const PoolStatistics numbers = statistics(pool);
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      *static_cast<int*>(value) = reuse_flag(pool, attribute);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      *static_cast<cuuint64_t*>(value) = release_threshold(pool);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      *static_cast<cuuint64_t*>(value) = numbers.reserved;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      *static_cast<cuuint64_t*>(value) = numbers.reserved_high;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      *static_cast<cuuint64_t*>(value) = numbers.used;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      *static_cast<cuuint64_t*>(value) = numbers.used_high;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc* descriptions,
                            size_t count) {
  POOL(handle);
  REQUIRE(count == 0 || descriptions != nullptr);
  for (size_t i = 0; i < count; i++) {
    if (descriptions[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    Device* device;
    if (const CUresult e = find_device(descriptions[i].location.id, &device)) return e;
    // Slices do not reach each other's memory; a pool's own device always does.
    if (device != device_of(pool)) return CUDA_ERROR_NOT_SUPPORTED;
    REQUIRE(descriptions[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool handle,
                            CUmemLocation* location) {
  POOL(handle);
  REQUIRE(flags != nullptr && location != nullptr);
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  Device* device;
  if (const CUresult e = find_device(location->id, &device)) return e;
  *flags = device == device_of(pool) ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                     : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
