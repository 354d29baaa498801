// The copying functions. Where data come from or go to is checked here, so that errors are told at
// the call.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>

#include <utility>

#include "api/cuda_abi.h"
#include "client/copies.h"
#include "client/state.h"
#include "graphs/arrays.h"
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
  if (const CUresult e_ = resolve_stream(context, stream, &on_wire)) return e_;

namespace {

// Where the bytes of a rectangle lie, and how many they span.
uint64_t span(uint64_t pitch, uint64_t width, uint64_t height) {
  return height == 0 || width == 0 ? 0 : (height - 1) * pitch + width;
}

// The owner of device memory: a copy between contexts of one device runs in the current one.
CUresult check_device(Context* context, uint64_t address, uint64_t bytes) {
  Context* owner = nullptr;
  REQUIRE(Process::get().ranges.device_range(address, bytes, &owner));
  REQUIRE(owner->device == context->device);
  return CUDA_SUCCESS;
}

// Page-locked memory is read and written when the stream gets there, other memory at the call.
bool page_locked(uint64_t host, uint64_t bytes) {
  const auto range = Process::get().ranges.find(host);
  return range && !range->on_device() && bytes <= range->bytes - (host - range->base);
}

// What the stream does to memory of the program before a copy that reads it at the call.
CUresult settle_host_memory(CUstream stream, uint64_t host, uint64_t bytes) {
  return host_memory_changes(host, bytes) ? cuStreamSynchronize(stream) : CUDA_SUCCESS;
}

CUresult to_device(CUdeviceptr device, const void* host, size_t bytes, CUstream stream,
                   bool synchronous) {
  ENTER();
  if (bytes == 0) return CUDA_SUCCESS;
  REQUIRE(host != nullptr);
  if (const CUresult e = check_device(context, device, bytes)) return e;
  if (synchronous) GPUPOOL_CAPTURE_CHECK(check_synchronous());
  GPUPOOL_CAPTURE(capture_copy(stream, CU_MEMORYTYPE_DEVICE, device, CU_MEMORYTYPE_HOST,
                               reinterpret_cast<uint64_t>(host), bytes, &capture_result));
  STREAM(stream);
  HostRows rows;
  rows.host = reinterpret_cast<uint64_t>(host);
  rows.device = device;
  rows.width = bytes;
  if (host_memory_in_use() && page_locked(rows.host, bytes)) {
    if (!synchronous && host_memory_changes(rows.host, bytes)) {
      return copy_to_device_later(context, rows, on_wire);
    }
    if (const CUresult e = settle_host_memory(stream, rows.host, bytes)) return e;
  }
  return copy_to_device(context, rows, on_wire, synchronous);
}

CUresult from_device(void* host, CUdeviceptr device, size_t bytes, CUstream stream,
                     bool synchronous) {
  ENTER();
  if (bytes == 0) return CUDA_SUCCESS;
  REQUIRE(host != nullptr);
  if (const CUresult e = check_device(context, device, bytes)) return e;
  if (synchronous) GPUPOOL_CAPTURE_CHECK(check_synchronous());
  GPUPOOL_CAPTURE(capture_copy(stream, CU_MEMORYTYPE_HOST, reinterpret_cast<uint64_t>(host),
                               CU_MEMORYTYPE_DEVICE, device, bytes, &capture_result));
  STREAM(stream);
  HostRows rows;
  rows.host = reinterpret_cast<uint64_t>(host);
  rows.device = device;
  rows.width = bytes;
  if (!synchronous && page_locked(rows.host, bytes)) {
    return copy_from_device_later(context, rows, on_wire);
  }
  return copy_from_device(context, rows, on_wire);
}

// A device-to-device copy between devices (slices): through this process.
CUresult across(Context* to, uint64_t destination, Context* from, uint64_t source, uint64_t bytes) {
  constexpr uint64_t kPiece = 4 * 1024 * 1024;
  if (const CUresult e = check_context(to)) return e;
  if (const CUresult e = check_context(from)) return e;
  std::vector<uint8_t> piece(std::min(bytes, kPiece));
  for (uint64_t done = 0; done < bytes; done += piece.size()) {
    const uint64_t now = std::min<uint64_t>(bytes - done, piece.size());
    HostRows rows;
    rows.host = reinterpret_cast<uint64_t>(piece.data());
    rows.width = now;
    rows.device = source + done;
    if (const CUresult e = copy_from_device(from, rows, kLegacyStream)) return e;
    rows.device = destination + done;
    if (const CUresult e = copy_to_device(to, rows, kLegacyStream, true)) return e;
  }
  return CUDA_SUCCESS;
}

CUresult on_device(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER();
  if (bytes == 0) return CUDA_SUCCESS;
  Context *to_owner = nullptr, *from_owner = nullptr;
  REQUIRE(Process::get().ranges.device_range(to, bytes, &to_owner));
  REQUIRE(Process::get().ranges.device_range(from, bytes, &from_owner));
  if (to_owner->device != from_owner->device) {
    // What was submitted before on either device comes first.
    return across(to_owner, to, from_owner, from, bytes);
  }
  REQUIRE(to_owner->device == context->device);
  return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}

// cuMemcpy: what a pointer is, its number says.
CUresult any(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, bool synchronous) {
  ENTER();
  if (bytes == 0) return CUDA_SUCCESS;
  REQUIRE(to != 0 && from != 0);
  Process& process = Process::get();
  auto in_arena = [&process](uint64_t address) {
    for (const auto& device : process.devices()) {
      if (device->arena_bytes != 0 && address - device->arena_base < device->arena_bytes)
        return true;
    }
    return false;
  };
  const bool to_device_memory = in_arena(to) || process.ranges.device_range(to, 1);
  const bool from_device_memory = in_arena(from) || process.ranges.device_range(from, 1);
  if (to_device_memory && from_device_memory) return on_device(to, from, bytes, stream);
  if (to_device_memory) {
    return to_device(to, reinterpret_cast<void*>(from), bytes, stream, synchronous);
  }
  if (from_device_memory) {
    return from_device(reinterpret_cast<void*>(to), from, bytes, stream, synchronous);
  }
  if (synchronous) GPUPOOL_CAPTURE_CHECK(check_synchronous());
  GPUPOOL_CAPTURE(capture_copy(stream, CU_MEMORYTYPE_HOST, to, CU_MEMORYTYPE_HOST, from, bytes,
                               &capture_result));
  // Between host memory: in stream order, so what the stream does to it is done first.
  if (const CUresult e = cuStreamSynchronize(stream)) return e;
  memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  return CUDA_SUCCESS;
}

struct Side {
  CUmemorytype type;
  uint64_t address;  // of the first byte that is copied
  uint64_t pitch;
};

// One side of a 2D or 3D copy: its memory type (unified is resolved) and where it begins.
CUresult side(CUmemorytype type, const void* host, CUdeviceptr device, uint64_t offset,
              uint64_t pitch, Side* out) {
  switch (type) {
    case CU_MEMORYTYPE_HOST:
      *out = {type, reinterpret_cast<uint64_t>(host) + offset, pitch};
      REQUIRE(host != nullptr);
      return CUDA_SUCCESS;
    case CU_MEMORYTYPE_DEVICE:
      *out = {type, device + offset, pitch};
      return CUDA_SUCCESS;
    case CU_MEMORYTYPE_UNIFIED: {
      const bool known = Process::get().ranges.device_range(device, 1);
      *out = {known ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST, device + offset, pitch};
      return CUDA_SUCCESS;
    }
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult copy_plane(Context* context, const Side& to, const Side& from, uint64_t width,
                    uint64_t height, wire::Handle stream, bool synchronous) {
  if (to.type == CU_MEMORYTYPE_DEVICE) {
    if (const CUresult e = check_device(context, to.address, span(to.pitch, width, height)))
      return e;
  }
  if (from.type == CU_MEMORYTYPE_DEVICE) {
    if (const CUresult e = check_device(context, from.address, span(from.pitch, width, height))) {
      return e;
    }
  }
  if (to.type == CU_MEMORYTYPE_DEVICE && from.type == CU_MEMORYTYPE_DEVICE) {
    return copy_on_device(context,
                          {to.address, to.pitch, from.address, from.pitch, width, height, stream});
  }
  if (to.type == CU_MEMORYTYPE_DEVICE) {
    return copy_to_device(context, {from.address, from.pitch, to.address, to.pitch, width, height},
                          stream, synchronous);
  }
  if (from.type == CU_MEMORYTYPE_DEVICE) {
    return copy_from_device(
        context, {to.address, to.pitch, from.address, from.pitch, width, height}, stream);
  }
  for (uint64_t row = 0; row < height; row++) {
    memmove(reinterpret_cast<void*>(to.address + row * to.pitch),
            reinterpret_cast<void*>(from.address + row * from.pitch), width);
  }
  return CUDA_SUCCESS;
}

constexpr uint64_t kMaxExtent = 1ull << 40;  // of any size or offset: products stay below 2^64 here

CUresult copy_2d(const CUDA_MEMCPY2D* asked, CUstream stream, bool synchronous) {
  ENTER();
  REQUIRE(asked != nullptr);
  CUDA_MEMCPY2D resolved = *asked;
  if (const CUresult e = graphs::resolve_arrays(&resolved)) return e;
  const CUDA_MEMCPY2D* copy = &resolved;
  const uint64_t width = copy->WidthInBytes, height = copy->Height;
  REQUIRE(width < kMaxExtent && height < (1ull << 22) && copy->srcY < (1ull << 22) &&
          copy->dstY < (1ull << 22) && copy->srcXInBytes < kMaxExtent &&
          copy->dstXInBytes < kMaxExtent && copy->srcPitch < kMaxExtent &&
          copy->dstPitch < kMaxExtent);
  const uint64_t from_pitch = copy->srcPitch != 0 ? copy->srcPitch : width + copy->srcXInBytes;
  const uint64_t to_pitch = copy->dstPitch != 0 ? copy->dstPitch : width + copy->dstXInBytes;
  REQUIRE(from_pitch >= width + copy->srcXInBytes && to_pitch >= width + copy->dstXInBytes);
  if (width == 0 || height == 0) return CUDA_SUCCESS;
  if (synchronous) GPUPOOL_CAPTURE_CHECK(check_synchronous());
  GPUPOOL_CAPTURE(capture_copy(stream, *asked, &capture_result));
  Side to, from;
  if (const CUresult e = side(copy->srcMemoryType, copy->srcHost, copy->srcDevice,
                              copy->srcY * from_pitch + copy->srcXInBytes, from_pitch, &from)) {
    return e;
  }
  if (const CUresult e = side(copy->dstMemoryType, copy->dstHost, copy->dstDevice,
                              copy->dstY * to_pitch + copy->dstXInBytes, to_pitch, &to)) {
    return e;
  }
  STREAM(stream);
  if (from.type == CU_MEMORYTYPE_HOST && host_memory_in_use()) {
    if (const CUresult e =
            settle_host_memory(stream, from.address, span(from.pitch, width, height))) {
      return e;
    }
  }
  return copy_plane(context, to, from, width, height, on_wire, synchronous);
}

CUresult copy_3d(Context* context, const CUDA_MEMCPY3D* asked, CUstream stream, bool synchronous) {
  REQUIRE(asked != nullptr);
  CUDA_MEMCPY3D resolved = *asked;
  if (const CUresult e = graphs::resolve_arrays(&resolved)) return e;
  const CUDA_MEMCPY3D* copy = &resolved;
  const uint64_t width = copy->WidthInBytes, height = copy->Height, depth = copy->Depth;
  constexpr uint64_t kRows = 1ull << 22;
  REQUIRE(width < kMaxExtent && height < kRows && depth < kRows && copy->srcY < kRows &&
          copy->dstY < kRows && copy->srcZ < kRows && copy->dstZ < kRows &&
          copy->srcXInBytes < kMaxExtent && copy->dstXInBytes < kMaxExtent &&
          copy->srcPitch < kMaxExtent && copy->dstPitch < kMaxExtent && copy->srcHeight < kRows &&
          copy->dstHeight < kRows && copy->srcLOD == 0 && copy->dstLOD == 0);
  const uint64_t from_pitch = copy->srcPitch != 0 ? copy->srcPitch : width + copy->srcXInBytes;
  const uint64_t to_pitch = copy->dstPitch != 0 ? copy->dstPitch : width + copy->dstXInBytes;
  const uint64_t from_height = copy->srcHeight != 0 ? copy->srcHeight : height + copy->srcY;
  const uint64_t to_height = copy->dstHeight != 0 ? copy->dstHeight : height + copy->dstY;
  REQUIRE(from_pitch >= width + copy->srcXInBytes && to_pitch >= width + copy->dstXInBytes);
  REQUIRE(from_height >= height + copy->srcY && to_height >= height + copy->dstY);
  REQUIRE(from_pitch * from_height < kMaxExtent && to_pitch * to_height < kMaxExtent);
  if (width == 0 || height == 0 || depth == 0) return CUDA_SUCCESS;
  if (synchronous) GPUPOOL_CAPTURE_CHECK(check_synchronous());
  GPUPOOL_CAPTURE(capture_copy(stream, *asked, &capture_result));
  STREAM(stream);
  if (copy->srcMemoryType != CU_MEMORYTYPE_DEVICE && host_memory_in_use()) {
    if (const CUresult e = cuStreamSynchronize(stream)) return e;
  }
  Side to, from;  // of the first plane
  if (const CUresult e =
          side(copy->srcMemoryType, copy->srcHost, copy->srcDevice,
               (copy->srcZ * from_height + copy->srcY) * from_pitch + copy->srcXInBytes, from_pitch,
               &from)) {
    return e;
  }
  if (const CUresult e = side(copy->dstMemoryType, copy->dstHost, copy->dstDevice,
                              (copy->dstZ * to_height + copy->dstY) * to_pitch + copy->dstXInBytes,
                              to_pitch, &to)) {
    return e;
  }
  // All planes are looked at before the first is copied.
  const uint64_t from_plane = from_pitch * from_height, to_plane = to_pitch * to_height;
  for (const auto& [end, plane] : {std::pair{&from, from_plane}, {&to, to_plane}}) {
    if (end->type != CU_MEMORYTYPE_DEVICE) continue;
    const uint64_t bytes = (depth - 1) * plane + span(end->pitch, width, height);
    if (const CUresult e = check_device(context, end->address, bytes)) return e;
  }
  for (uint64_t z = 0; z < depth; z++, from.address += from_plane, to.address += to_plane) {
    if (const CUresult e = copy_plane(context, to, from, width, height, on_wire, synchronous))
      return e;
  }
  return CUDA_SUCCESS;
}

CUresult copy_3d(const CUDA_MEMCPY3D* copy, CUstream stream, bool synchronous) {
  ENTER();
  return copy_3d(context, copy, stream, synchronous);
}

// One side of a copy between contexts: the context's device has to have the memory.
CUresult peer_side(CUmemorytype type, CUcontext handle, CUdeviceptr address, Context** owner) {
  *owner = nullptr;
  if (type == CU_MEMORYTYPE_HOST) return CUDA_SUCCESS;
  if (type == CU_MEMORYTYPE_ARRAY) return CUDA_ERROR_NOT_SUPPORTED;
  Context* context = find_context(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  Context* has = nullptr;
  if (!Process::get().ranges.device_range(address, 1, &has)) {
    return type == CU_MEMORYTYPE_UNIFIED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  }
  REQUIRE(has->device == context->device);
  *owner = context;
  return check_context(context);
}

CUresult copy_3d_peer(const CUDA_MEMCPY3D_PEER* peer, CUstream stream, bool synchronous) {
  ENTER();
  REQUIRE(peer != nullptr);
  Context *from, *to;
  if (const CUresult e = peer_side(peer->srcMemoryType, peer->srcContext, peer->srcDevice, &from)) {
    return e;
  }
  if (const CUresult e = peer_side(peer->dstMemoryType, peer->dstContext, peer->dstDevice, &to)) {
    return e;
  }
  CUDA_MEMCPY3D copy{};
  copy.srcXInBytes = peer->srcXInBytes;
  copy.srcY = peer->srcY;
  copy.srcZ = peer->srcZ;
  copy.srcLOD = peer->srcLOD;
  copy.srcMemoryType = peer->srcMemoryType;
  copy.srcHost = peer->srcHost;
  copy.srcDevice = peer->srcDevice;
  copy.srcPitch = peer->srcPitch;
  copy.srcHeight = peer->srcHeight;
  copy.dstXInBytes = peer->dstXInBytes;
  copy.dstY = peer->dstY;
  copy.dstZ = peer->dstZ;
  copy.dstLOD = peer->dstLOD;
  copy.dstMemoryType = peer->dstMemoryType;
  copy.dstHost = peer->dstHost;
  copy.dstDevice = peer->dstDevice;
  copy.dstPitch = peer->dstPitch;
  copy.dstHeight = peer->dstHeight;
  copy.WidthInBytes = peer->WidthInBytes;
  copy.Height = peer->Height;
  copy.Depth = peer->Depth;
  Context* owner = from != nullptr ? from : to;
  if (owner == nullptr || owner->device == context->device) owner = context;
  const bool here = owner == context;
  if (from == nullptr || to == nullptr || from->device == to->device) {
    return copy_3d(owner, &copy, here ? stream : nullptr, synchronous);
  }
  // Between devices: through this process's memory, behind what was submitted before on either.
  const uint64_t bytes = copy.WidthInBytes * copy.Height * copy.Depth;
  REQUIRE(copy.WidthInBytes < kMaxExtent && copy.Height < (1ull << 22) &&
          copy.Depth < (1ull << 22) && bytes < kMaxExtent);
  if (bytes == 0) return CUDA_SUCCESS;
  std::vector<uint8_t> packed(bytes);
  CUDA_MEMCPY3D half = copy;
  half.dstMemoryType = CU_MEMORYTYPE_HOST;
  half.dstHost = packed.data();
  half.dstXInBytes = half.dstY = half.dstZ = 0;
  half.dstPitch = copy.WidthInBytes;
  half.dstHeight = copy.Height;
  if (const CUresult e = copy_3d(from, &half, nullptr, true)) return e;
  half = copy;
  half.srcMemoryType = CU_MEMORYTYPE_HOST;
  half.srcHost = packed.data();
  half.srcXInBytes = half.srcY = half.srcZ = 0;
  half.srcPitch = copy.WidthInBytes;
  half.srcHeight = copy.Height;
  return copy_3d(to, &half, nullptr, true);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return any(to, from, bytes, nullptr, true);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return any(to, from, bytes, stream, false);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return to_device(to, from, bytes, nullptr, true);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return to_device(to, from, bytes, stream, false);
}

CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return from_device(to, from, bytes, nullptr, true);
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return from_device(to, from, bytes, stream, false);
}

CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                      CUcontext from_context, size_t bytes) {
  return cuMemcpyPeerAsync(to, to_context, from, from_context, bytes, nullptr);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                           CUcontext from_context, size_t bytes, CUstream stream) {
  ENTER();
  if (find_context(to_context) == nullptr || find_context(from_context) == nullptr) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  return on_device(to, from, bytes, stream);
}

CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D* copy) { return copy_2d(copy, nullptr, true); }
CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* copy) { return copy_2d(copy, nullptr, true); }
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* copy, CUstream stream) {
  return copy_2d(copy, stream, false);
}
CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* copy) {
  return copy_3d_peer(copy, nullptr, true);
}
CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* copy, CUstream stream) {
  return copy_3d_peer(copy, stream, false);
}
CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D* copy) { return copy_3d(copy, nullptr, true); }
CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* copy, CUstream stream) {
  return copy_3d(copy, stream, false);
}

}  // extern "C"
#pragma GCC visibility pop
