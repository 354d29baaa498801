// What a graph's nodes ask for, checked as CUDA checks the calls that they stand for.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include "client/graph_work.h"

#include <algorithm>

#include "client/modules.h"
#include "client/pools.h"
#include "client/state.h"
#include "graphs/arrays.h"

namespace gpupool::graphs {

using namespace gpupool::client;  // NOLINT: the hooks stand between both

CUresult initialised() {
  const CUresult state = Process::get().check();
  return static_cast<int>(state) == -1 ? CUDA_ERROR_NOT_INITIALIZED : state;
}

CUresult current(CUcontext* context) {
  Context* it;
  if (const CUresult e = enter(&it)) return e;
  *context = reinterpret_cast<CUcontext>(it->handle);
  return CUDA_SUCCESS;
}

CUresult find_stream(CUstream stream, StreamInfo* info) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  wire::Handle on_wire;
  client::Stream* object;
  if (const CUresult e = resolve_stream(context, stream, &on_wire, &object)) return e;
  if (object != nullptr) context = object->context;
  info->context = reinterpret_cast<CUcontext>(context->handle);
  info->legacy = object == nullptr;
  info->blocking = object != nullptr && !(object->flags & CU_STREAM_NON_BLOCKING);
  info->key = object != nullptr ? object->handle : context->handle;
  return CUDA_SUCCESS;
}

CUresult find_event(CUevent event) {
  Event* object;
  return resolve_event(event, &object);
}

CUresult find_device(CUdevice device) {
  return Process::get().device(device) == nullptr ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult context_for(CUcontext handle, Context** context) {
  if (handle == nullptr) return enter(context);
  *context = find_context(handle);
  return *context == nullptr ? CUDA_ERROR_INVALID_CONTEXT : check_context(*context);
}

CUresult function_of(const KernelWork& work, Function** function) {
  Context* context;
  if (const CUresult e = context_for(work.context, &context)) return e;
  return function_in(context, work.callee(), function);
}

CUresult find_kernel(CUfunction handle, CUcontext context_handle, KernelLayout* layout) {
  Context* context;
  if (const CUresult e = context_for(context_handle, &context)) return e;
  Function* function;
  if (const CUresult e = function_in(context, handle, &function)) return e;
  for (const auto& parameter : function->parameters) {
    layout->parameters.push_back(
        {static_cast<uint32_t>(parameter.offset), static_cast<uint32_t>(parameter.bytes)});
  }
  layout->parameter_bytes = function->parameter_bytes;
  layout->known = function->layout_known;
  layout->context = reinterpret_cast<CUcontext>(context->handle);
  return CUDA_SUCCESS;
}

CUresult check(const KernelWork& work) {
  Context* context;
  if (const CUresult e = context_for(work.context, &context)) return e;
  Function* function;
  if (const CUresult e = function_in(context, work.callee(), &function)) return e;
  for (const auto& [attribute, value] : work.attributes) {
    if (attribute == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      const unsigned cluster[] = {value.clusterDim.x, value.clusterDim.y, value.clusterDim.z};
      if (const CUresult e = check_cluster(context, work.grid, cluster)) return e;
    } else if (attribute == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT ||
               attribute == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT ||
               attribute == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return check_launch(context, function,
                      {work.grid, work.block, work.shared_bytes, work.cooperative()});
}

bool is_device_memory(CUdeviceptr address) {
  return Process::get().ranges.device_range(address, 1);
}

// ---- Copies and memsets -------------------------------------------------------------------------

namespace {

bool is_device(CUmemorytype type, CUdeviceptr address) {
  return type == CU_MEMORYTYPE_UNIFIED ? is_device_memory(address) : type != CU_MEMORYTYPE_HOST;
}

}  // namespace

Direction direction_of(const CUDA_MEMCPY3D& copy) {
  const bool to = is_device(copy.dstMemoryType, copy.dstDevice);
  const bool from = is_device(copy.srcMemoryType, copy.srcDevice);
  if (to) return from ? Direction::kOnDevice : Direction::kToDevice;
  return from ? Direction::kFromDevice : Direction::kOnHost;
}

namespace {

// Finds one end of a copy, and whether its sizes make sense.
CUresult end_of(CUmemorytype type, const void* host, CUdeviceptr device, uint64_t x, uint64_t y,
                uint64_t z, uint64_t pitch, uint64_t rows, const CUDA_MEMCPY3D& copy, End* end) {
  constexpr uint64_t kMost = 1ull << 32;
  if (x > kMost || y > kMost || z > kMost || pitch > kMost || rows > kMost) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  uint64_t base = device;
  if (type == CU_MEMORYTYPE_HOST) {
    base = reinterpret_cast<uint64_t>(host);
  } else if (type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (pitch == 0) pitch = x + copy.WidthInBytes;
  if (rows == 0) rows = y + copy.Height;
  if (base == 0 || pitch < x + copy.WidthInBytes || (copy.Depth > 1 && rows < y + copy.Height)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  rows = std::max(rows, y + copy.Height);
  const auto offset = (static_cast<__uint128_t>(z) * rows + y) * pitch + x;
  const auto last = (static_cast<__uint128_t>(z + copy.Depth) * rows) * pitch;
  if (offset >= wire::kMaxGraphExtent || last >= wire::kMaxGraphExtent) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *end = {base + static_cast<uint64_t>(offset), pitch, rows};
  return CUDA_SUCCESS;
}

}  // namespace

CUresult ends_of(const CUDA_MEMCPY3D& asked, End* to, End* from) {
  CUDA_MEMCPY3D copy = asked;
  if (const CUresult e = resolve_arrays(&copy)) return e;
  constexpr uint64_t kMost = 1ull << 32;
  if (copy.WidthInBytes > kMost * 256 || copy.Height > kMost || copy.Depth > kMost ||
      copy.srcLOD != 0 || copy.dstLOD != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (const CUresult e = end_of(copy.srcMemoryType, copy.srcHost, copy.srcDevice, copy.srcXInBytes,
                                copy.srcY, copy.srcZ, copy.srcPitch, copy.srcHeight, copy, from)) {
    return e;
  }
  return end_of(copy.dstMemoryType, copy.dstHost, copy.dstDevice, copy.dstXInBytes, copy.dstY,
                copy.dstZ, copy.dstPitch, copy.dstHeight, copy, to);
}

namespace {

CUresult check_range(CUcontext context_handle, uint64_t address, uint64_t bytes) {
  Context *context, *owner = nullptr;
  if (const CUresult e = context_for(context_handle, &context)) return e;
  if (!Process::get().ranges.device_range(address, bytes, &owner)) return CUDA_ERROR_INVALID_VALUE;
  return owner->device == context->device ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace

wire::GraphFill wire_fill(const MemsetWork& work) {
  const auto& fill = work.fill;
  return {fill.dst, fill.pitch, fill.width, fill.height, fill.value, fill.elementSize};
}

CUresult check(const MemcpyWork& work) {
  End to, from;
  if (const CUresult e = ends_of(work.copy, &to, &from)) return e;
  auto bytes = [&](const End& end) {
    return ((work.copy.Depth - 1) * end.rows + work.copy.Height - 1) * end.pitch +
           work.copy.WidthInBytes;
  };
  if (is_device(work.copy.dstMemoryType, work.copy.dstDevice)) {
    if (const CUresult e = check_range(work.context, to.address, bytes(to))) return e;
  }
  if (is_device(work.copy.srcMemoryType, work.copy.srcDevice)) {
    if (const CUresult e = check_range(work.context, from.address, bytes(from))) return e;
  }
  return CUDA_SUCCESS;
}

CUresult check(const MemsetWork& work) {
  const auto& fill = work.fill;
  constexpr uint64_t kMost = wire::kMaxGraphExtent;
  if (fill.width > kMost || fill.height > kMost || fill.pitch > kMost ||
      fill.dst % fill.elementSize != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (fill.height > 1 && (fill.pitch < fill.width * fill.elementSize ||
                          fill.pitch % fill.elementSize != 0 || fill.height > kMost / fill.pitch)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return check_range(fill.ctx, fill.dst,
                     (fill.height - 1) * fill.pitch + fill.width * fill.elementSize);
}

// ---- Memory of allocation nodes -----------------------------------------------------------------

CUresult allocate_memory(CUdevice ordinal, size_t bytes, CUdeviceptr* address) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  if (context->device->ordinal != ordinal) return CUDA_ERROR_NOT_SUPPORTED;
  uint64_t at = 0;
  if (const CUresult e = allocate_device(context, bytes, &at)) return e;
  Range range;
  range.base = at;
  range.bytes = bytes;
  range.type = Range::Type::kDevice;
  range.context = context;
  if (!Process::get().ranges.add(range)) return CUDA_ERROR_UNKNOWN;
  *address = at;
  return CUDA_SUCCESS;
}

void release_memory(CUdevice, CUdeviceptr address) {
  // Gone already if its context has ended.
  const auto range = Process::get().ranges.remove(address, Range::Type::kDevice);
  if (!range || !range->context->active.load()) return;
  free_device(range->context, address);
}

}  // namespace gpupool::graphs
