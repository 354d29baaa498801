// Allocation: device, pitched, managed and host memory, and what is known of an address.
#include <unistd.h>

#include <algorithm>

#include "graphs/capture.h"
#include "simgpu/driver/context.h"

using namespace gpupool::simgpu;

GPUPOOL_API cuMemGetInfo_v2(size_t* free, size_t* total) {
  GPUPOOL_CURRENT(context);
  const uint64_t all = context->device->gpu.memory_bytes;
  if (free) *free = all - std::min<uint64_t>(all, context->device->card->used_bytes());
  if (total) *total = all;
  return CUDA_SUCCESS;
}

namespace {

CUresult allocate(CUdeviceptr* out, size_t bytes, RangeKind kind, Context* context) {
  if (!out || !bytes) return CUDA_ERROR_INVALID_VALUE;
  GPUPOOL_CAPTURE_CHECK(check_unsafe());
  uint64_t address = context->device->heap->allocate(bytes, 512, kind, context);
  if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = address;
  return CUDA_SUCCESS;
}

CUresult host_allocate(void** out, size_t bytes, unsigned flags) {
  GPUPOOL_CURRENT(context);
  if (!out || !bytes) return CUDA_ERROR_INVALID_VALUE;
  if (flags & ~unsigned(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP |
                        CU_MEMHOSTALLOC_WRITECOMBINED)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  GPUPOOL_CAPTURE_CHECK(check_unsafe());
  uint64_t address = allocate_host(bytes, flags, context);
  if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = reinterpret_cast<void*>(address);
  return CUDA_SUCCESS;
}

}  // namespace

GPUPOOL_API cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) {
  GPUPOOL_CURRENT(context);
  return allocate(out, bytes, RangeKind::kDevice, context);
}

GPUPOOL_API cuMemAllocPitch_v2(CUdeviceptr* out, size_t* pitch, size_t width, size_t height,
                               unsigned int element) {
  GPUPOOL_CURRENT(context);
  if (!pitch || !width || !height || (element != 4 && element != 8 && element != 16)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (width > (size_t{1} << 31) || height > (size_t{1} << 40) / width)
    return CUDA_ERROR_OUT_OF_MEMORY;
  size_t row = (width + 511) / 512 * 512;
  GPUPOOL_TRY(allocate(out, row * height, RangeKind::kDevice, context));
  *pitch = row;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemAllocManaged(CUdeviceptr* out, size_t bytes, unsigned int flags) {
  GPUPOOL_CURRENT(context);
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) return CUDA_ERROR_INVALID_VALUE;
  return allocate(out, bytes, RangeKind::kManaged, context);
}

GPUPOOL_API cuMemFree_v2(CUdeviceptr address) {
  GPUPOOL_CURRENT(current);
  if (!address) return CUDA_SUCCESS;
  GPUPOOL_CAPTURE_CHECK(check_unsafe());
  if (gpupool::graphs::free_graph_memory(address)) return CUDA_SUCCESS;
  auto allocation = addresses().find(address);
  if (!allocation || allocation->begin != address ||
      (allocation->kind != RangeKind::kDevice && allocation->kind != RangeKind::kManaged)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Context* owner = allocation->context;
  owner->wait_idle();  // work that may use it comes first
  if (!owner->device->heap->release(address)) return CUDA_ERROR_INVALID_VALUE;
  return current->status();
}

GPUPOOL_API cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  GPUPOOL_CURRENT(context);
  auto allocation = addresses().find(address);
  if (!allocation) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = allocation->begin;
  if (size) *size = allocation->end - allocation->begin;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemAllocHost_v2(void** out, size_t bytes) { return host_allocate(out, bytes, 0); }

GPUPOOL_API cuMemHostAlloc(void** out, size_t bytes, unsigned int flags) {
  return host_allocate(out, bytes, flags);
}

GPUPOOL_API cuMemFreeHost(void* pointer) {
  GPUPOOL_CURRENT(current);
  if (!pointer) return CUDA_SUCCESS;
  GPUPOOL_CAPTURE_CHECK(check_unsafe());
  auto allocation = addresses().find(reinterpret_cast<uint64_t>(pointer));
  if (!allocation || allocation->kind != RangeKind::kHost ||
      allocation->begin != reinterpret_cast<uint64_t>(pointer)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  allocation->context->wait_idle();
  free_host(*allocation);
  return current->status();
}

GPUPOOL_API cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* pointer, unsigned int flags) {
  GPUPOOL_CURRENT(context);
  if (!out || flags) return CUDA_ERROR_INVALID_VALUE;
  auto allocation = addresses().find(reinterpret_cast<uint64_t>(pointer));
  if (!allocation ||
      (allocation->kind != RangeKind::kHost && allocation->kind != RangeKind::kRegistered)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *out = reinterpret_cast<uint64_t>(pointer);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemHostGetFlags(unsigned int* flags, void* pointer) {
  GPUPOOL_CURRENT(context);
  auto allocation = addresses().find(reinterpret_cast<uint64_t>(pointer));
  if (!flags || !allocation ||
      (allocation->kind != RangeKind::kHost && allocation->kind != RangeKind::kRegistered)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // With unified addressing all host memory is portable and mapped.
  *flags = allocation->flags | CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned int flags) {
  GPUPOOL_CURRENT(context);
  const uint64_t begin = reinterpret_cast<uint64_t>(pointer);
  if (!pointer || !bytes || begin + bytes < begin || flags & ~0xFu) return CUDA_ERROR_INVALID_VALUE;
  if (addresses().find(begin) || addresses().find(begin + bytes - 1)) {
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  Allocation allocation;
  allocation.begin = begin;
  allocation.end = begin + bytes;
  allocation.kind = RangeKind::kRegistered;
  allocation.context = context;
  allocation.flags = flags;
  allocation.readers = kEveryDevice;
  allocation.writers = flags & CU_MEMHOSTREGISTER_READ_ONLY ? 0 : kEveryDevice;
  addresses().insert(allocation);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemHostUnregister(void* pointer) {
  GPUPOOL_CURRENT(current);
  if (!pointer) return CUDA_ERROR_INVALID_VALUE;
  auto allocation = addresses().find(reinterpret_cast<uint64_t>(pointer));
  if (!allocation || allocation->kind != RangeKind::kRegistered ||
      allocation->begin != reinterpret_cast<uint64_t>(pointer)) {
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  allocation->context->wait_idle();
  addresses().erase(allocation->begin);
  return current->status();
}

GPUPOOL_API cuMemAdvise_v2(CUdeviceptr address, size_t bytes, CUmem_advise, CUmemLocation) {
  GPUPOOL_CURRENT(context);
  return bytes && addresses().covers(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

GPUPOOL_API cuMemPrefetchAsync_v2(CUdeviceptr address, size_t bytes, CUmemLocation location,
                                  unsigned int flags, CUstream handle) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(find_stream(handle, context, &stream));
  if (flags || !bytes || !addresses().covers(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
    Device* device;
    GPUPOOL_TRY(find_device(location.id, &device));
  }
  return CUDA_SUCCESS;  // there is one memory: everything is where it is wanted
}
