// Stream-ordered allocation and memory pools. Memory is there at once; freeing waits its turn in
// the stream. Pools keep nothing back, so that trimming has nothing to do.
#include "graphs/capture.h"
#include "simgpu/driver/context.h"

namespace gpupool::simgpu {
namespace {

struct Pool {
  Device* device = nullptr;
  bool is_default = false;
  std::atomic<uint64_t> release_threshold{0};
  std::atomic<uint64_t> used{0}, used_high{0};
  std::atomic<int> reuse[3]{1, 1, 1};
};

HandleTable<Pool>& pools() {
  static auto& table = *new HandleTable<Pool>;
  return table;
}

struct DevicePools {
  std::mutex mutex;
  std::map<Device*, CUmemoryPool> standard, current;
};

DevicePools& device_pools() {
  static auto& instance = *new DevicePools;
  return instance;
}

CUmemoryPool default_pool(Device* device) {
  DevicePools& all = device_pools();
  std::lock_guard lock(all.mutex);
  auto& handle = all.standard[device];
  if (!handle) {
    auto pool = std::make_shared<Pool>();
    pool->device = device;
    pool->is_default = true;
    handle = pools().add<CUmemoryPool>(std::move(pool));
  }
  return handle;
}

CUmemoryPool current_pool(Device* device) {
  CUmemoryPool standard = default_pool(device);
  DevicePools& all = device_pools();
  std::lock_guard lock(all.mutex);
  auto set = all.current.find(device);
  return set == all.current.end() ? standard : set->second;
}

CUresult allocate(CUdeviceptr* out, size_t bytes, CUmemoryPool handle, CUstream stream_handle) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(find_stream(stream_handle, context, &stream));
  auto pool = pools().get(handle);
  if (!out || !bytes || !pool) return CUDA_ERROR_INVALID_VALUE;
  GPUPOOL_CAPTURE(
      capture_allocation(stream_handle, pool->device->ordinal, bytes, out, &capture_result));
  GPUPOOL_TRY(pool->device->join());
  // Pool memory belongs to the device, but ends with the context that the stream is of.
  uint64_t address = pool->device->heap->allocate(bytes, 512, RangeKind::kDevice, stream->context,
                                                  reinterpret_cast<uint64_t>(handle));
  if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
  uint64_t used = pool->used += bytes, high = pool->used_high;
  while (used > high && !pool->used_high.compare_exchange_weak(high, used)) {
  }
  *out = address;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace gpupool::simgpu

using namespace gpupool::simgpu;

GPUPOOL_API cuMemAllocAsync(CUdeviceptr* out, size_t bytes, CUstream stream) {
  GPUPOOL_CURRENT(context);
  return allocate(out, bytes, current_pool(context->device), stream);
}

GPUPOOL_API cuMemAllocFromPoolAsync(CUdeviceptr* out, size_t bytes, CUmemoryPool pool,
                                    CUstream stream) {
  return allocate(out, bytes, pool, stream);
}

GPUPOOL_API cuMemFreeAsync(CUdeviceptr address, CUstream stream_handle) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(find_stream(stream_handle, context, &stream));
  if (!address) return CUDA_SUCCESS;
  GPUPOOL_CAPTURE(capture_free(stream_handle, address, &capture_result));
  if (gpupool::graphs::free_graph_memory(address)) return CUDA_SUCCESS;
  auto allocation = addresses().find(address);
  if (!allocation || allocation->begin != address || allocation->kind != RangeKind::kDevice) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Device* device = driver().devices[size_t(allocation->device)].get();
  const uint64_t bytes = allocation->end - allocation->begin, pool_handle = allocation->pool;
  stream->context->submit_short(stream, [=] {
    if (!device->heap->release(address)) return;
    if (auto pool = pools().get(reinterpret_cast<const void*>(pool_handle))) pool->used -= bytes;
  });
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetDefaultMemPool(CUmemoryPool* out, CUdevice dev) {
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = default_pool(device);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceGetMemPool(CUmemoryPool* out, CUdevice dev) {
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = current_pool(device);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDeviceSetMemPool(CUdevice dev, CUmemoryPool handle) {
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  auto pool = pools().get(handle);
  if (!pool || pool->device != device) return CUDA_ERROR_INVALID_VALUE;
  DevicePools& all = device_pools();
  std::lock_guard lock(all.mutex);
  all.current[device] = handle;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemPoolCreate(CUmemoryPool* out, const CUmemPoolProps* props) {
  GPUPOOL_TRY(driver_status());
  if (!out || !props || props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
    return CUDA_ERROR_INVALID_VALUE;
  if (props->handleTypes != CU_MEM_HANDLE_TYPE_NONE ||
      props->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  Device* device;
  GPUPOOL_TRY(find_device(props->location.id, &device));
  auto pool = std::make_shared<Pool>();
  pool->device = device;
  *out = pools().add<CUmemoryPool>(std::move(pool));
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemPoolDestroy(CUmemoryPool handle) {
  GPUPOOL_TRY(driver_status());
  auto pool = pools().get(handle);
  if (!pool || pool->is_default) return CUDA_ERROR_INVALID_VALUE;
  pools().take(handle);
  DevicePools& all = device_pools();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.current, [&](const auto& entry) { return entry.second == handle; });
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemPoolTrimTo(CUmemoryPool handle, size_t) {
  GPUPOOL_TRY(driver_status());
  return pools().get(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

GPUPOOL_API cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  GPUPOOL_TRY(driver_status());
  auto pool = pools().get(handle);
  if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
  switch (int(attribute)) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      pool->reuse[int(attribute) - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] =
          *static_cast<int*>(value);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      pool->release_threshold = *static_cast<uint64_t*>(value);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      if (*static_cast<uint64_t*>(value)) return CUDA_ERROR_INVALID_VALUE;
      pool->used_high = pool->used.load();
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

GPUPOOL_API cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  GPUPOOL_TRY(driver_status());
  auto pool = pools().get(handle);
  if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
  switch (int(attribute)) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      *static_cast<int*>(value) =
          pool->reuse[int(attribute) - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      *static_cast<uint64_t*>(value) = pool->release_threshold;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      *static_cast<uint64_t*>(value) = pool->used;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      *static_cast<uint64_t*>(value) = pool->used_high;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

GPUPOOL_API cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc* desc, size_t count) {
  GPUPOOL_TRY(driver_status());
  if (!pools().get(handle) || (count && !desc)) return CUDA_ERROR_INVALID_VALUE;
  auto pool = pools().get(handle);
  for (size_t i = 0; i < count; ++i) {
    Device* device;
    GPUPOOL_TRY(find_device(desc[i].location.id, &device));
    if (device != pool->device) return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool handle,
                               CUmemLocation* location) {
  GPUPOOL_TRY(driver_status());
  auto pool = pools().get(handle);
  if (!flags || !pool || !location) return CUDA_ERROR_INVALID_VALUE;
  *flags = location->id == pool->device->ordinal ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                                 : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}
