// The cuMemcpy family, over copies.h.
#include <type_traits>

#include "frontdoor/default_stream.h"
#include "graphs/arrays.h"
#include "simgpu/driver/copies.h"

using namespace gpupool::simgpu;
using gpupool::frontdoor::default_stream;

namespace {

uint64_t number(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

Copy linear(uint64_t target, Side target_side, uint64_t source, Side source_side, uint64_t bytes) {
  Copy c;
  c.target = {target, 0, 0, target_side};
  c.source = {source, 0, 0, source_side};
  c.width = bytes;
  return c;
}

// One side of a 2D or 3D copy.
CUresult end_of(CUmemorytype type, const void* host, CUdeviceptr device, uint64_t x, uint64_t y,
                uint64_t z, uint64_t pitch, uint64_t rows, const Copy& c, CopyEnd* end) {
  uint64_t base;
  switch (int(type)) {
    case CU_MEMORYTYPE_HOST:
      base = number(host), end->side = Side::kEither;
      break;
    case CU_MEMORYTYPE_DEVICE:
      base = device, end->side = Side::kDevice;
      break;
    case CU_MEMORYTYPE_UNIFIED:
      base = device, end->side = Side::kEither;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  // A pitch of 0 means rows without a gap.
  if (!pitch) pitch = x + c.width;
  if (pitch >> 46 || rows >> 46 || x > pitch || c.width > pitch - x)
    return CUDA_ERROR_INVALID_VALUE;
  if (c.depth > 1 || z) {
    if (!rows) rows = y + c.height;
    if (rows < y + c.height) return CUDA_ERROR_INVALID_VALUE;
  }
  __uint128_t slice = __uint128_t(pitch) * rows;
  __uint128_t offset = slice * z + __uint128_t(pitch) * y + x;
  if (slice >> 47 || offset >> 47) return CUDA_ERROR_INVALID_VALUE;
  end->pitch = pitch;
  end->slice = uint64_t(slice);
  end->address = base + uint64_t(offset);
  return base ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult copy_2d(const CUDA_MEMCPY2D* parameters, CUstream stream, bool wait) {
  GPUPOOL_CURRENT(context);
  if (!parameters) return CUDA_ERROR_INVALID_VALUE;
  if (!parameters->WidthInBytes || !parameters->Height) return CUDA_SUCCESS;
  CUDA_MEMCPY2D resolved = *parameters;
  GPUPOOL_TRY(gpupool::graphs::resolve_arrays(&resolved));
  const CUDA_MEMCPY2D* p = &resolved;
  Copy c;
  c.width = p->WidthInBytes;
  c.height = p->Height;
  GPUPOOL_TRY(end_of(p->dstMemoryType, p->dstHost, p->dstDevice, p->dstXInBytes, p->dstY, 0,
                     p->dstPitch, 0, c, &c.target));
  GPUPOOL_TRY(end_of(p->srcMemoryType, p->srcHost, p->srcDevice, p->srcXInBytes, p->srcY, 0,
                     p->srcPitch, 0, c, &c.source));
  return copy(c, stream, wait);
}

template <class Parameters>
CUresult read_3d(const Parameters* parameters, Copy* out) {
  Parameters resolved = *parameters;
  GPUPOOL_TRY(gpupool::graphs::resolve_arrays(&resolved));
  const Parameters* p = &resolved;
  if (p->srcLOD || p->dstLOD) return CUDA_ERROR_INVALID_VALUE;
  Copy c;
  c.width = p->WidthInBytes;
  c.height = p->Height;
  c.depth = p->Depth;
  GPUPOOL_TRY(end_of(p->dstMemoryType, p->dstHost, p->dstDevice, p->dstXInBytes, p->dstY, p->dstZ,
                     p->dstPitch, p->dstHeight, c, &c.target));
  GPUPOOL_TRY(end_of(p->srcMemoryType, p->srcHost, p->srcDevice, p->srcXInBytes, p->srcY, p->srcZ,
                     p->srcPitch, p->srcHeight, c, &c.source));
  *out = c;
  return CUDA_SUCCESS;
}

template <class Parameters>
CUresult copy_3d(const Parameters* p, CUstream stream, bool wait) {
  GPUPOOL_CURRENT(context);
  if (!p || p->srcLOD || p->dstLOD) return CUDA_ERROR_INVALID_VALUE;
  if constexpr (std::is_same_v<Parameters, CUDA_MEMCPY3D_PEER>) {
    // The side of the host ignores its context.
    if ((p->srcMemoryType != CU_MEMORYTYPE_HOST && !find_context(p->srcContext)) ||
        (p->dstMemoryType != CU_MEMORYTYPE_HOST && !find_context(p->dstContext))) {
      return CUDA_ERROR_INVALID_CONTEXT;
    }
  }
  if (!p->WidthInBytes || !p->Height || !p->Depth) return CUDA_SUCCESS;
  Copy c;
  GPUPOOL_TRY(read_3d(p, &c));
  return copy(c, stream, wait);
}

CUresult copy_peer(CUdeviceptr target, CUcontext target_context, CUdeviceptr source,
                   CUcontext source_context, size_t bytes, CUstream stream, bool wait) {
  GPUPOOL_CURRENT(context);
  if (!find_context(target_context) || !find_context(source_context))
    return CUDA_ERROR_INVALID_CONTEXT;
  return copy(linear(target, Side::kDevice, source, Side::kDevice, bytes), stream, wait);
}

}  // namespace

CUresult gpupool::simgpu::copy_of(const CUDA_MEMCPY3D& parameters, Copy* out) {
  return read_3d(&parameters, out);
}

GPUPOOL_API cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
  return copy(linear(dst, Side::kEither, src, Side::kEither, bytes), default_stream(), true);
}
GPUPOOL_API cuMemcpyHtoD_v2(CUdeviceptr dst, const void* src, size_t bytes) {
  return copy(linear(dst, Side::kDevice, number(src), Side::kEither, bytes), default_stream(),
              true);
}
GPUPOOL_API cuMemcpyDtoH_v2(void* dst, CUdeviceptr src, size_t bytes) {
  return copy(linear(number(dst), Side::kEither, src, Side::kDevice, bytes), default_stream(),
              true);
}
GPUPOOL_API cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
  return copy(linear(dst, Side::kDevice, src, Side::kDevice, bytes), default_stream(), false);
}
GPUPOOL_API cuMemcpyPeer(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src,
                         CUcontext src_context, size_t bytes) {
  return copy_peer(dst, dst_context, src, src_context, bytes, default_stream(), false);
}
GPUPOOL_API cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  return copy(linear(dst, Side::kEither, src, Side::kEither, bytes), stream, false);
}
GPUPOOL_API cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, size_t bytes, CUstream stream) {
  return copy(linear(dst, Side::kDevice, number(src), Side::kEither, bytes), stream, false);
}
GPUPOOL_API cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  return copy(linear(number(dst), Side::kEither, src, Side::kDevice, bytes), stream, false);
}
GPUPOOL_API cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  return copy(linear(dst, Side::kDevice, src, Side::kDevice, bytes), stream, false);
}
GPUPOOL_API cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src,
                              CUcontext src_context, size_t bytes, CUstream stream) {
  return copy_peer(dst, dst_context, src, src_context, bytes, stream, false);
}
GPUPOOL_API cuMemcpy2D_v2(const CUDA_MEMCPY2D* p) { return copy_2d(p, default_stream(), true); }
GPUPOOL_API cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* p) {
  return copy_2d(p, default_stream(), true);
}
GPUPOOL_API cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* p, CUstream stream) {
  return copy_2d(p, stream, false);
}
GPUPOOL_API cuMemcpy3D_v2(const CUDA_MEMCPY3D* p) { return copy_3d(p, default_stream(), true); }
GPUPOOL_API cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* p, CUstream stream) {
  return copy_3d(p, stream, false);
}
GPUPOOL_API cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* p) {
  return copy_3d(p, default_stream(), false);
}
GPUPOOL_API cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* p, CUstream stream) {
  return copy_3d(p, stream, false);
}

GPUPOOL_API cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t n) {
  return fill({dst, 0, n, 1, value, 1}, default_stream());
}
GPUPOOL_API cuMemsetD16_v2(CUdeviceptr dst, unsigned short value, size_t n) {
  return fill({dst, 0, n, 1, value, 2}, default_stream());
}
GPUPOOL_API cuMemsetD32_v2(CUdeviceptr dst, unsigned int value, size_t n) {
  return fill({dst, 0, n, 1, value, 4}, default_stream());
}
GPUPOOL_API cuMemsetD2D8_v2(CUdeviceptr dst, size_t pitch, unsigned char value, size_t width,
                            size_t height) {
  return fill({dst, pitch, width, height, value, 1}, default_stream());
}
GPUPOOL_API cuMemsetD2D16_v2(CUdeviceptr dst, size_t pitch, unsigned short value, size_t width,
                             size_t height) {
  return fill({dst, pitch, width, height, value, 2}, default_stream());
}
GPUPOOL_API cuMemsetD2D32_v2(CUdeviceptr dst, size_t pitch, unsigned int value, size_t width,
                             size_t height) {
  return fill({dst, pitch, width, height, value, 4}, default_stream());
}
GPUPOOL_API cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t n, CUstream stream) {
  return fill({dst, 0, n, 1, value, 1}, stream);
}
GPUPOOL_API cuMemsetD16Async(CUdeviceptr dst, unsigned short value, size_t n, CUstream stream) {
  return fill({dst, 0, n, 1, value, 2}, stream);
}
GPUPOOL_API cuMemsetD32Async(CUdeviceptr dst, unsigned int value, size_t n, CUstream stream) {
  return fill({dst, 0, n, 1, value, 4}, stream);
}
GPUPOOL_API cuMemsetD2D8Async(CUdeviceptr dst, size_t pitch, unsigned char value, size_t width,
                              size_t height, CUstream stream) {
  return fill({dst, pitch, width, height, value, 1}, stream);
}
GPUPOOL_API cuMemsetD2D16Async(CUdeviceptr dst, size_t pitch, unsigned short value, size_t width,
                               size_t height, CUstream stream) {
  return fill({dst, pitch, width, height, value, 2}, stream);
}
GPUPOOL_API cuMemsetD2D32Async(CUdeviceptr dst, size_t pitch, unsigned int value, size_t width,
                               size_t height, CUstream stream) {
  return fill({dst, pitch, width, height, value, 4}, stream);
}
