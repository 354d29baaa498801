// Memory: device allocations (one round trip), pinned host memory (local), and questions about
// pointers (local).
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "api/cuda_abi.h"
#include "client/copies.h"
#include "client/log.h"
#include "client/pools.h"
#include "client/state.h"
#include "graphs/capture.h"

using namespace gpupool;          // NOLINT: a file of entry points
using namespace gpupool::client;  // NOLINT

#define ENTER()     \
  Context* context; \
  if (const CUresult e_ = enter(&context)) return e_;
#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;

namespace {

constexpr uint64_t kPitchAlignment = 512;

CUresult allocate(Context* context, uint64_t bytes, CUdeviceptr* out) {
  GPUPOOL_CAPTURE_CHECK(check_unsafe());
  uint64_t address = 0;
  if (const CUresult e = allocate_device(context, bytes, &address)) return e;
  Range range;
  range.base = address;
  range.bytes = bytes;
  range.type = Range::Type::kDevice;
  range.context = context;
  if (!Process::get().ranges.add(range)) {
    log(Level::kError, "the worker gave memory that is in use already");
    return CUDA_ERROR_UNKNOWN;
  }
  *out = address;
  return CUDA_SUCCESS;
}

// Host memory is the process's own: pinning has no meaning over a wire, but programs ask whether a
// pointer is pinned.
CUresult allocate_host(Context* context, void** out, size_t bytes, unsigned flags) {
  GPUPOOL_CAPTURE_CHECK(check_unsafe());
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t mapped = (bytes + page - 1) / page * page;
  if (mapped < bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  void* at = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  Range range;
  range.base = reinterpret_cast<uint64_t>(at);
  range.bytes = bytes;
  range.type = Range::Type::kPinnedHost;
  range.context = context;
  range.flags = flags;
  if (!Process::get().ranges.add(range)) {
    munmap(at, mapped);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *out = at;
  return CUDA_SUCCESS;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  ENTER();
  REQUIRE(free != nullptr && total != nullptr);
  PendingCall call;
  const CUresult result = channel_of(context).call(
      op(Operation::kMemGetInfoV2), context->wire_id(), 0, [](wire::Encoder&) {}, &call);
  if (result != CUDA_SUCCESS) return settle(context, result);
  wire::Decoder decoder = call.decoder();
  *free = decoder.scalar();
  *total = decoder.scalar();
  return decoder.ok() ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) {
  ENTER();
  REQUIRE(out != nullptr && bytes != 0);
  return allocate(context, bytes, out);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr* out, size_t* pitch, size_t width, size_t height,
                            unsigned int element) {
  ENTER();
  REQUIRE(out != nullptr && pitch != nullptr && width != 0 && height != 0);
  REQUIRE(element == 4 || element == 8 || element == 16);
  REQUIRE(width <=
          static_cast<uint64_t>(context->device->attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH)));
  const uint64_t row = (width + kPitchAlignment - 1) / kPitchAlignment * kPitchAlignment;
  if (height > ~0ull / row) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUresult result = allocate(context, row * height, out);
  if (result == CUDA_SUCCESS) *pitch = row;
  return result;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  ENTER();
  if (address == 0) return CUDA_SUCCESS;
  GPUPOOL_CAPTURE_CHECK(check_unsafe());
  if (graphs::free_graph_memory(address)) return CUDA_SUCCESS;
  const auto range = Process::get().ranges.remove(address, Range::Type::kDevice);
  if (range.has_value()) {
    free_device(range->context, address);
    return CUDA_SUCCESS;
  }
  // Of a pool: CUDA leaves it to the program that nothing uses it any more.
  return free_to_pool(address, nullptr, nullptr) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  ENTER();
  const auto range = Process::get().ranges.find(address);
  if (!range || !range->on_device()) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = range->base;
  if (bytes != nullptr) *bytes = range->bytes;
  return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned int flags) {
  ENTER();
  REQUIRE(out != nullptr && bytes != 0);
  REQUIRE((flags & ~(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP |
                     CU_MEMHOSTALLOC_WRITECOMBINED)) == 0);
  return allocate_host(context, out, bytes, flags);
}

CUresult cuMemAllocHost_v2(void** out, size_t bytes) {
  ENTER();
  REQUIRE(out != nullptr && bytes != 0);
  return allocate_host(context, out, bytes, 0);
}

// Memory of the program that copies or functions of it may still use: CUDA waits as well.
static void wait_for_uses(uint64_t address) {
  if (!host_memory_in_use()) return;
  const auto range = Process::get().ranges.find(address);
  if (!range || range->on_device() || check_context(range->context) != CUDA_SUCCESS) return;
  cuCtxSynchronize_v2(reinterpret_cast<CUcontext>(range->context->handle));
}

CUresult cuMemFreeHost(void* pointer) {
  ENTER();
  GPUPOOL_CAPTURE_CHECK(check_unsafe());
  wait_for_uses(reinterpret_cast<uint64_t>(pointer));
  const auto range =
      Process::get().ranges.remove(reinterpret_cast<uint64_t>(pointer), Range::Type::kPinnedHost);
  REQUIRE(range.has_value());
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  munmap(pointer, (range->bytes + page - 1) / page * page);
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* pointer, unsigned int flags) {
  ENTER();
  REQUIRE(out != nullptr && flags == 0);
  const auto range = Process::get().ranges.find(reinterpret_cast<uint64_t>(pointer));
  REQUIRE(range.has_value() && !range->on_device());
  // The device cannot reach this host's memory; CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY says so.
  log(Level::kInfo, "cuMemHostGetDevicePointer: host memory cannot be mapped into a remote device");
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemHostGetFlags(unsigned int* flags, void* pointer) {
  ENTER();
  REQUIRE(flags != nullptr);
  const auto range = Process::get().ranges.find(reinterpret_cast<uint64_t>(pointer));
  REQUIRE(range.has_value() && range->type == Range::Type::kPinnedHost);
  *flags = range->flags;
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned int flags) {
  ENTER();
  REQUIRE(pointer != nullptr && bytes != 0);
  if (flags & CU_MEMHOSTREGISTER_IOMEMORY) return CUDA_ERROR_NOT_SUPPORTED;
  Range range;
  range.base = reinterpret_cast<uint64_t>(pointer);
  range.bytes = bytes;
  range.type = Range::Type::kRegisteredHost;
  range.context = context;
  range.flags = flags;
  REQUIRE(range.base + bytes > range.base);
  if (!Process::get().ranges.add(range)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* pointer) {
  ENTER();
  REQUIRE(pointer != nullptr);
  wait_for_uses(reinterpret_cast<uint64_t>(pointer));
  return Process::get().ranges.remove(reinterpret_cast<uint64_t>(pointer),
                                      Range::Type::kRegisteredHost)
             ? CUDA_SUCCESS
             : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

// What cuPointerGetAttribute says of one attribute; `range` null: an address that CUDA knows
// nothing of. INVALID_VALUE where the single query has to fail.
static CUresult attribute_of(const Range* range, uint64_t address, CUpointer_attribute attribute,
                             void* data) {
  const bool device = range != nullptr && range->on_device();
  const bool known = range != nullptr;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(data) =
          known ? reinterpret_cast<CUcontext>(range->context->handle) : nullptr;
      return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(data) = !known   ? 0
                                      : device ? CU_MEMORYTYPE_DEVICE
                                               : CU_MEMORYTYPE_HOST;
      return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<CUdeviceptr*>(data) = device ? address : 0;
      return device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *static_cast<void**>(data) = known && !device ? reinterpret_cast<void*>(address) : nullptr;
      return known && !device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      *static_cast<unsigned*>(data) = device && range->sync_memops ? 1 : 0;
      return device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<unsigned long long*>(data) = known ? range->buffer_id : 0;
      return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<int*>(data) = 0;  // 32 bits, although it is called a boolean
      return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = known ? range->context->device->ordinal : CU_DEVICE_INVALID;
      return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *static_cast<int*>(data) = 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<uint64_t*>(data) = known ? range->base : 0;
      return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<size_t*>(data) = known ? range->bytes : 0;
      return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      *static_cast<int*>(data) = device ? 1 : 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      *static_cast<uint64_t*>(data) = 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      *static_cast<int*>(data) = 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      *static_cast<unsigned*>(data) = device ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE : 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      *static_cast<CUmemoryPool*>(data) = known ? range->pool : nullptr;
      return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      *static_cast<size_t*>(data) = device ? range->bytes : 0;
      return device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      *static_cast<uint64_t*>(data) = device ? range->base : 0;
      return device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      *static_cast<unsigned long long*>(data) = known ? range->buffer_id : 0;
      return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  ENTER();
  REQUIRE(data != nullptr);
  const auto range = Process::get().ranges.find(address);
  return attribute_of(range ? &*range : nullptr, address, attribute, data);
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** data,
                                CUdeviceptr address) {
  if (Process::get().check() != CUDA_SUCCESS) return CUDA_ERROR_NOT_INITIALIZED;
  REQUIRE(count != 0 && attributes != nullptr && data != nullptr);
  const auto range = Process::get().ranges.find(address);
  // Attributes that do not apply are zero, or -2 for the device; the call succeeds.
  for (unsigned i = 0; i < count; i++) {
    REQUIRE(data[i] != nullptr);
    attribute_of(range ? &*range : nullptr, address, attributes[i], data[i]);
  }
  return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute,
                               CUdeviceptr address) {
  ENTER();
  REQUIRE(value != nullptr && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
  // Copies are synchronous towards the host wherever this asks for it.
  REQUIRE(
      Process::get().ranges.set_sync_memops(address, *static_cast<const unsigned*>(value) != 0));
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
