// Memory, copies and memsets. Device memory is the process's own memory.
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>

#include "quiet/quiet.h"

namespace gpupool::quiet {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<uint64_t, Allocation> by_begin;
  uint64_t device_bytes = 0;
  uint64_t next_id = 1;
};

Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

constexpr uint64_t kAlignment = 512;

std::map<uint64_t, Allocation>::iterator find_locked(Registry& r, uint64_t address) {
  auto after = r.by_begin.upper_bound(address);
  if (after == r.by_begin.begin()) return r.by_begin.end();
  auto found = std::prev(after);
  return address - found->second.begin < found->second.bytes ? found : r.by_begin.end();
}

uint64_t capacity() {
  CUcontext context = current_context();
  return context != nullptr ? machine().devices[context->device].memory_bytes : 0;
}

template <typename T>
CUresult fill(CUdeviceptr destination, size_t pitch, T value, size_t width, size_t height) {
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (destination == 0 || destination % sizeof(T) != 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t row = 0; row < height; ++row) {
    auto* start = reinterpret_cast<T*>(destination + row * pitch);
    std::fill(start, start + width, value);
  }
  return CUDA_SUCCESS;
}

CUresult copy(void* destination, const void* source, size_t bytes) {
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (bytes != 0 && (destination == nullptr || source == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  memmove(destination, source, bytes);
  return CUDA_SUCCESS;
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

CUresult copy_2d(const CUDA_MEMCPY2D* c) {
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (c == nullptr || c->srcMemoryType == CU_MEMORYTYPE_ARRAY ||
      c->dstMemoryType == CU_MEMORYTYPE_ARRAY) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto* source = static_cast<const char*>(
      c->srcMemoryType == CU_MEMORYTYPE_HOST ? c->srcHost : pointer(c->srcDevice));
  auto* destination = static_cast<char*>(
      c->dstMemoryType == CU_MEMORYTYPE_HOST ? c->dstHost : pointer(c->dstDevice));
  for (size_t row = 0; row < c->Height; ++row) {
    memmove(destination + c->dstXInBytes + (c->dstY + row) * c->dstPitch,
            source + c->srcXInBytes + (c->srcY + row) * c->srcPitch, c->WidthInBytes);
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult allocate(uint64_t bytes, MemoryKind kind, CUcontext context, uint64_t* address) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  Registry& r = registry();
  if (bytes > UINT64_MAX - kAlignment) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (kind == MemoryKind::kDevice) {
    std::lock_guard lock(r.mutex);
    if (size > capacity() || r.device_bytes > capacity() - size) return CUDA_ERROR_OUT_OF_MEMORY;
    r.device_bytes += size;
  }
  void* memory = nullptr;
  const bool got = posix_memalign(&memory, kAlignment, size) == 0;
  std::lock_guard lock(r.mutex);
  if (!got) {
    if (kind == MemoryKind::kDevice) r.device_bytes -= size;
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *address = reinterpret_cast<uint64_t>(memory);
  r.by_begin[*address] = {*address, bytes, kind, context, r.next_id++};
  return CUDA_SUCCESS;
}

CUresult release(uint64_t address, MemoryKind kind) {
  Registry& r = registry();
  {
    std::lock_guard lock(r.mutex);
    auto found = r.by_begin.find(address);
    if (found == r.by_begin.end() || found->second.kind != kind) return CUDA_ERROR_INVALID_VALUE;
    if (kind == MemoryKind::kDevice) {
      r.device_bytes -= (found->second.bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
    r.by_begin.erase(found);
  }
  if (kind != MemoryKind::kRegistered) free(pointer(address));
  return CUDA_SUCCESS;
}

void release_all(CUcontext context) {
  std::vector<uint64_t> addresses;
  {
    Registry& r = registry();
    std::lock_guard lock(r.mutex);
    for (const auto& [begin, allocation] : r.by_begin) {
      if (allocation.context == context && allocation.kind == MemoryKind::kDevice)
        addresses.push_back(begin);
    }
  }
  for (uint64_t address : addresses) release(address, MemoryKind::kDevice);
}

bool find_allocation(uint64_t address, Allocation* found) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  auto it = find_locked(r, address);
  if (it == r.by_begin.end()) return false;
  *found = it->second;
  return true;
}

uint64_t memory_in_use() {
  std::lock_guard lock(registry().mutex);
  return registry().device_bytes;
}

void charge_physical(int64_t bytes) {
  std::lock_guard lock(registry().mutex);
  registry().device_bytes += bytes;
}

void note_mapping(uint64_t begin, uint64_t bytes, CUcontext context) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  r.by_begin[begin] = {begin, bytes, MemoryKind::kMapped, context, r.next_id++};
}

void forget_mapping(uint64_t begin) {
  std::lock_guard lock(registry().mutex);
  registry().by_begin.erase(begin);
}

}  // namespace gpupool::quiet

using namespace gpupool::quiet;

GPUPOOL_API cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *total = capacity();
  *free = *total - std::min<uint64_t>(memory_in_use(), *total);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemAlloc_v2(CUdeviceptr* dptr, size_t bytesize) {
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (dptr == nullptr) return CUDA_ERROR_INVALID_VALUE;
  uint64_t address = 0;
  CUresult error = allocate(bytesize, MemoryKind::kDevice, current_context(), &address);
  if (error == CUDA_SUCCESS) *dptr = address;
  return error;
}

GPUPOOL_API cuMemAllocPitch_v2(CUdeviceptr* dptr, size_t* pPitch, size_t WidthInBytes,
                               size_t Height, unsigned int) {
  if (pPitch == nullptr || WidthInBytes == 0 || Height == 0 || WidthInBytes > (size_t{1} << 40))
    return CUDA_ERROR_INVALID_VALUE;
  *pPitch = (WidthInBytes + 511) / 512 * 512;
  if (Height > SIZE_MAX / *pPitch) return CUDA_ERROR_OUT_OF_MEMORY;
  return cuMemAlloc_v2(dptr, *pPitch * Height);
}

GPUPOOL_API cuMemFree_v2(CUdeviceptr dptr) {
  return dptr == 0 ? CUDA_SUCCESS : release(dptr, MemoryKind::kDevice);
}

GPUPOOL_API cuMemHostAlloc(void** pp, size_t bytesize, unsigned int) {
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (pp == nullptr) return CUDA_ERROR_INVALID_VALUE;
  uint64_t address = 0;
  CUresult error = allocate(bytesize, MemoryKind::kHost, current_context(), &address);
  if (error == CUDA_SUCCESS) *pp = pointer(address);
  return error;
}

GPUPOOL_API cuMemAllocHost_v2(void** pp, size_t bytesize) {
  return cuMemHostAlloc(pp, bytesize, 0);
}

GPUPOOL_API cuMemFreeHost(void* p) {
  return p == nullptr ? CUDA_SUCCESS : release(reinterpret_cast<uint64_t>(p), MemoryKind::kHost);
}

GPUPOOL_API cuMemHostRegister_v2(void* p, size_t bytesize, unsigned int) {
  if (p == nullptr || bytesize == 0) return CUDA_ERROR_INVALID_VALUE;
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  const auto address = reinterpret_cast<uint64_t>(p);
  if (find_locked(r, address) != r.by_begin.end()) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  r.by_begin[address] = {address, bytesize, MemoryKind::kRegistered, current_context(),
                         r.next_id++};
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemHostUnregister(void* p) {
  CUresult error = release(reinterpret_cast<uint64_t>(p), MemoryKind::kRegistered);
  return error == CUDA_SUCCESS ? error : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

GPUPOOL_API cuMemHostGetDevicePointer_v2(CUdeviceptr* pdptr, void* p, unsigned int) {
  if (pdptr == nullptr || p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *pdptr = reinterpret_cast<CUdeviceptr>(p);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemHostGetFlags(unsigned int* pFlags, void* p) {
  Allocation found;
  if (pFlags == nullptr || !find_allocation(reinterpret_cast<uint64_t>(p), &found))
    return CUDA_ERROR_INVALID_VALUE;
  *pFlags = CU_MEMHOSTALLOC_DEVICEMAP;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemGetAddressRange_v2(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr) {
  Allocation found;
  if (!find_allocation(dptr, &found)) return CUDA_ERROR_NOT_FOUND;
  if (pbase != nullptr) *pbase = found.begin;
  if (psize != nullptr) *psize = found.bytes;
  return CUDA_SUCCESS;
}

namespace {

bool is_host(const Allocation& a) {
  return a.kind == MemoryKind::kHost || a.kind == MemoryKind::kRegistered;
}

template <typename T>
CUresult put(void* data, T value) {
  memcpy(data, &value, sizeof value);
  return CUDA_SUCCESS;
}

// `known` false: zeros, as cuPointerGetAttributes gives for memory that CUDA does not know.
CUresult pointer_attribute(void* data, CUpointer_attribute attribute, CUdeviceptr p,
                           const Allocation& a, bool known) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return put(data, known ? a.context : nullptr);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return put<unsigned>(data, !known       ? 0
                                 : is_host(a) ? CU_MEMORYTYPE_HOST
                                              : CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return put<CUdeviceptr>(data, known ? p : 0);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return put<void*>(data, known && is_host(a) ? pointer(p) : nullptr);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return put<unsigned long long>(data, known ? a.id : 0);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return put<int>(data, 0);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return put<int>(data, !known ? -2 : a.context != nullptr ? a.context->device : 0);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return put<CUdeviceptr>(data, known ? a.begin : 0);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return put<size_t>(data, known ? a.bytes : 0);
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return put<int>(data, known ? 1 : 0);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return put<int>(data, 0);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return put<uint64_t>(data, 0);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      return put<unsigned>(data, known ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE : 0);
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace

GPUPOOL_API cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
  if (data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Allocation found;
  const bool known = find_allocation(ptr, &found);
  if (!known && attribute != CU_POINTER_ATTRIBUTE_IS_MANAGED &&
      attribute != CU_POINTER_ATTRIBUTE_MAPPED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return pointer_attribute(data, attribute, ptr, found, known);
}

GPUPOOL_API cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute* attributes,
                                   void** data, CUdeviceptr ptr) {
  if (attributes == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Allocation found;
  const bool known = find_allocation(ptr, &found);
  for (unsigned i = 0; i < numAttributes; ++i) {
    CUresult error = pointer_attribute(data[i], attributes[i], ptr, found, known);
    if (error != CUDA_SUCCESS) return error;
  }
  return CUDA_SUCCESS;
}

GPUPOOL_API cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) {
  return copy(pointer(dst), pointer(src), ByteCount);
}
GPUPOOL_API cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream) {
  return copy(pointer(dst), pointer(src), ByteCount);
}
GPUPOOL_API cuMemcpyPeer(CUdeviceptr dst, CUcontext, CUdeviceptr src, CUcontext, size_t ByteCount) {
  return copy(pointer(dst), pointer(src), ByteCount);
}
GPUPOOL_API cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext, CUdeviceptr src, CUcontext,
                              size_t ByteCount, CUstream) {
  return copy(pointer(dst), pointer(src), ByteCount);
}
GPUPOOL_API cuMemcpyHtoD_v2(CUdeviceptr dst, const void* src, size_t ByteCount) {
  return copy(pointer(dst), src, ByteCount);
}
GPUPOOL_API cuMemcpyDtoH_v2(void* dst, CUdeviceptr src, size_t ByteCount) {
  return copy(dst, pointer(src), ByteCount);
}
GPUPOOL_API cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) {
  return copy(pointer(dst), pointer(src), ByteCount);
}
GPUPOOL_API cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, size_t ByteCount, CUstream) {
  return copy(pointer(dst), src, ByteCount);
}
GPUPOOL_API cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, size_t ByteCount, CUstream) {
  return copy(dst, pointer(src), ByteCount);
}
GPUPOOL_API cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream) {
  return copy(pointer(dst), pointer(src), ByteCount);
}
GPUPOOL_API cuMemcpy2D_v2(const CUDA_MEMCPY2D* pCopy) { return copy_2d(pCopy); }
GPUPOOL_API cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* pCopy) { return copy_2d(pCopy); }
GPUPOOL_API cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* pCopy, CUstream) { return copy_2d(pCopy); }

GPUPOOL_API cuMemsetD8_v2(CUdeviceptr d, unsigned char v, size_t n) {
  return fill<uint8_t>(d, 0, v, n, 1);
}
GPUPOOL_API cuMemsetD16_v2(CUdeviceptr d, unsigned short v, size_t n) {
  return fill<uint16_t>(d, 0, v, n, 1);
}
GPUPOOL_API cuMemsetD32_v2(CUdeviceptr d, unsigned int v, size_t n) {
  return fill<uint32_t>(d, 0, v, n, 1);
}
GPUPOOL_API cuMemsetD8Async(CUdeviceptr d, unsigned char v, size_t n, CUstream) {
  return fill<uint8_t>(d, 0, v, n, 1);
}
GPUPOOL_API cuMemsetD16Async(CUdeviceptr d, unsigned short v, size_t n, CUstream) {
  return fill<uint16_t>(d, 0, v, n, 1);
}
GPUPOOL_API cuMemsetD32Async(CUdeviceptr d, unsigned int v, size_t n, CUstream) {
  return fill<uint32_t>(d, 0, v, n, 1);
}
GPUPOOL_API cuMemsetD2D8_v2(CUdeviceptr d, size_t pitch, unsigned char v, size_t w, size_t h) {
  return fill<uint8_t>(d, pitch, v, w, h);
}
GPUPOOL_API cuMemsetD2D16_v2(CUdeviceptr d, size_t pitch, unsigned short v, size_t w, size_t h) {
  return fill<uint16_t>(d, pitch, v, w, h);
}
GPUPOOL_API cuMemsetD2D32_v2(CUdeviceptr d, size_t pitch, unsigned int v, size_t w, size_t h) {
  return fill<uint32_t>(d, pitch, v, w, h);
}
GPUPOOL_API cuMemsetD2D8Async(CUdeviceptr d, size_t pitch, unsigned char v, size_t w, size_t h,
                              CUstream) {
  return fill<uint8_t>(d, pitch, v, w, h);
}
GPUPOOL_API cuMemsetD2D16Async(CUdeviceptr d, size_t pitch, unsigned short v, size_t w, size_t h,
                               CUstream) {
  return fill<uint16_t>(d, pitch, v, w, h);
}
GPUPOOL_API cuMemsetD2D32Async(CUdeviceptr d, size_t pitch, unsigned int v, size_t w, size_t h,
                               CUstream) {
  return fill<uint32_t>(d, pitch, v, w, h);
}
