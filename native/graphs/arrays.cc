#define GPUPOOL_CUDA_ABI_EXACT 1
#include "graphs/arrays.h"

#include <map>
#include <mutex>

#include "graphs/capture.h"
#include "graphs/hooks.h"

namespace gpupool::graphs {
namespace {

struct Array {
  CUDA_ARRAY3D_DESCRIPTOR shape{};
  size_t element = 0;                    // bytes
  size_t row = 0, rows = 0, planes = 0;  // bytes, and how many
  size_t pitch = 0;
  CUcontext context = nullptr;
  CUdevice device = 0;
  CUdeviceptr address = 0;
};

struct Arrays {
  std::mutex lock;
  std::map<uint64_t, Array> all;
};
Arrays& arrays() {
  static auto& instance = *new Arrays;
  return instance;
}

size_t format_bytes(CUarray_format format) {
  switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
      return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
      return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
      return 4;
    default:
      return 0;
  }
}

// The largest extents of every device since compute capability 7.5.
CUresult check(const CUDA_ARRAY3D_DESCRIPTOR& shape) {
  constexpr unsigned kLayout = CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP;
  constexpr unsigned kKnown = kLayout | CUDA_ARRAY3D_SURFACE_LDST | CUDA_ARRAY3D_TEXTURE_GATHER;
  if (shape.Flags & ~kKnown) return CUDA_ERROR_NOT_SUPPORTED;  // sparse, deferred, depth, video
  if (shape.NumChannels != 1 && shape.NumChannels != 2 && shape.NumChannels != 4) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (format_bytes(shape.Format) == 0) {
    return shape.Format >= CU_AD_FORMAT_NV12 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
  }
  const bool layered = shape.Flags & CUDA_ARRAY3D_LAYERED;
  if (shape.Width == 0 || (shape.Depth != 0 && shape.Height == 0 && !layered)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (shape.Flags & CUDA_ARRAY3D_CUBEMAP) {
    if (shape.Width != shape.Height || shape.Depth % 6 != 0 || shape.Depth == 0 ||
        (!layered && shape.Depth != 6)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  size_t width = 131072, height = 65536, depth = 0;
  if (layered || shape.Flags & CUDA_ARRAY3D_CUBEMAP) {
    if (layered && shape.Depth == 0) return CUDA_ERROR_INVALID_VALUE;
    width = height = 32768;
    depth = 2048;
  } else if (shape.Depth != 0) {
    width = height = depth = 16384;
  }
  return shape.Width > width || shape.Height > height || shape.Depth > depth
             ? CUDA_ERROR_INVALID_VALUE
             : CUDA_SUCCESS;
}

CUresult create(CUarray* out, const CUDA_ARRAY3D_DESCRIPTOR& shape) {
  CUcontext context;
  if (const CUresult e = current(&context)) return e;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult e = check(shape)) return e;
  GPUPOOL_CAPTURE_CHECK(check_unsafe());
  Array array;
  array.shape = shape;
  array.element = format_bytes(shape.Format) * shape.NumChannels;
  array.row = shape.Width * array.element;
  array.rows = shape.Height != 0 ? shape.Height : 1;
  array.planes = shape.Depth != 0 ? shape.Depth : 1;
  constexpr size_t kPitch = 64;
  array.pitch = (array.row + kPitch - 1) / kPitch * kPitch;
  array.context = context;
  if (const CUresult e = cuCtxGetDevice(&array.device)) return e;
  // At most 2^21 * 2^14 * 2^14: no overflow.
  if (const CUresult e =
          allocate_memory(array.device, array.pitch * array.rows * array.planes, &array.address)) {
    return e;
  }
  const uint64_t handle = new_handle();
  std::lock_guard lock(arrays().lock);
  arrays().all[handle] = array;
  *out = reinterpret_cast<CUarray>(handle);
  return CUDA_SUCCESS;
}

bool find(CUarray handle, Array* out) {
  std::lock_guard lock(arrays().lock);
  const auto found = arrays().all.find(reinterpret_cast<uint64_t>(handle));
  if (found == arrays().all.end()) return false;
  *out = found->second;
  return true;
}

// One end of a copy: `rows` null where there is one plane only.
CUresult resolve(CUmemorytype* type, CUarray handle, CUdeviceptr* device, size_t* pitch,
                 size_t* rows, size_t x, size_t y, size_t z, size_t width, size_t height,
                 size_t depth) {
  if (*type != CU_MEMORYTYPE_ARRAY) return CUDA_SUCCESS;
  Array array;
  if (!find(handle, &array)) return CUDA_ERROR_INVALID_HANDLE;
  auto within = [](size_t at, size_t count, size_t size) {
    return at <= size && count <= size - at;
  };
  if (!within(x, width, array.row) || !within(y, height, array.rows) ||
      !within(z, depth, array.planes) || x % array.element != 0 || width % array.element != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *type = CU_MEMORYTYPE_DEVICE;
  *device = array.address;
  *pitch = array.pitch;
  if (rows != nullptr) *rows = array.rows;
  return CUDA_SUCCESS;
}

template <typename Copy>
CUresult resolve_planes(Copy* c) {
  if (const CUresult e =
          resolve(&c->srcMemoryType, c->srcArray, &c->srcDevice, &c->srcPitch, &c->srcHeight,
                  c->srcXInBytes, c->srcY, c->srcZ, c->WidthInBytes, c->Height, c->Depth)) {
    return e;
  }
  return resolve(&c->dstMemoryType, c->dstArray, &c->dstDevice, &c->dstPitch, &c->dstHeight,
                 c->dstXInBytes, c->dstY, c->dstZ, c->WidthInBytes, c->Height, c->Depth);
}

// A row of an array's first plane, and memory of another kind.
CUDA_MEMCPY2D row_of(size_t bytes) {
  CUDA_MEMCPY2D copy{};
  copy.WidthInBytes = bytes;
  copy.Height = 1;
  return copy;
}
void from_array(CUDA_MEMCPY2D* copy, CUarray array, size_t offset) {
  copy->srcMemoryType = CU_MEMORYTYPE_ARRAY;
  copy->srcArray = array;
  copy->srcXInBytes = offset;
}
void to_array(CUDA_MEMCPY2D* copy, CUarray array, size_t offset) {
  copy->dstMemoryType = CU_MEMORYTYPE_ARRAY;
  copy->dstArray = array;
  copy->dstXInBytes = offset;
}

}  // namespace

CUresult resolve_arrays(CUDA_MEMCPY2D* c) {
  if (const CUresult e =
          resolve(&c->srcMemoryType, c->srcArray, &c->srcDevice, &c->srcPitch, nullptr,
                  c->srcXInBytes, c->srcY, 0, c->WidthInBytes, c->Height, 1)) {
    return e;
  }
  return resolve(&c->dstMemoryType, c->dstArray, &c->dstDevice, &c->dstPitch, nullptr,
                 c->dstXInBytes, c->dstY, 0, c->WidthInBytes, c->Height, 1);
}

CUresult resolve_arrays(CUDA_MEMCPY3D* copy) { return resolve_planes(copy); }
CUresult resolve_arrays(CUDA_MEMCPY3D_PEER* copy) { return resolve_planes(copy); }

void forget_arrays(CUcontext context) {
  std::lock_guard lock(arrays().lock);
  std::erase_if(arrays().all, [context](const auto& e) { return e.second.context == context; });
}

}  // namespace gpupool::graphs

using namespace gpupool::graphs;  // NOLINT: entry points

#pragma GCC visibility push(default)
extern "C" {

CUresult cuArrayCreate_v2(CUarray* out, const CUDA_ARRAY_DESCRIPTOR* shape) {
  if (shape == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return create(out, {shape->Width, shape->Height, 0, shape->Format, shape->NumChannels, 0});
}

CUresult cuArray3DCreate_v2(CUarray* out, const CUDA_ARRAY3D_DESCRIPTOR* shape) {
  if (shape == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return create(out, *shape);
}

CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR* out, CUarray handle) {
  if (const CUresult e = initialised()) return e;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Array array;
  if (!find(handle, &array)) return CUDA_ERROR_INVALID_HANDLE;
  *out = array.shape;
  return CUDA_SUCCESS;
}

CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR* out, CUarray handle) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUDA_ARRAY3D_DESCRIPTOR shape;
  if (const CUresult e = cuArray3DGetDescriptor_v2(&shape, handle)) return e;
  *out = {shape.Width, shape.Height, shape.Format, shape.NumChannels};
  return CUDA_SUCCESS;
}

CUresult cuArrayDestroy(CUarray handle) {
  CUcontext context;
  if (const CUresult e = current(&context)) return e;
  GPUPOOL_CAPTURE_CHECK(check_unsafe());
  Array array;
  {
    std::lock_guard lock(arrays().lock);
    const auto found = arrays().all.find(reinterpret_cast<uint64_t>(handle));
    if (found == arrays().all.end()) return CUDA_ERROR_INVALID_HANDLE;
    array = found->second;
    arrays().all.erase(found);
  }
  release_memory(array.device, array.address);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoA_v2(CUarray to, size_t offset, CUdeviceptr from, size_t bytes) {
  if (bytes == 0) return initialised();
  CUDA_MEMCPY2D copy = row_of(bytes);
  to_array(&copy, to, offset);
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = from;
  return cuMemcpy2D_v2(&copy);
}

CUresult cuMemcpyAtoD_v2(CUdeviceptr to, CUarray from, size_t offset, size_t bytes) {
  if (bytes == 0) return initialised();
  CUDA_MEMCPY2D copy = row_of(bytes);
  from_array(&copy, from, offset);
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = to;
  return cuMemcpy2D_v2(&copy);
}

CUresult cuMemcpyHtoA_v2(CUarray to, size_t offset, const void* from, size_t bytes) {
  if (bytes == 0) return initialised();
  CUDA_MEMCPY2D copy = row_of(bytes);
  to_array(&copy, to, offset);
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = from;
  return cuMemcpy2D_v2(&copy);
}

CUresult cuMemcpyHtoAAsync_v2(CUarray to, size_t offset, const void* from, size_t bytes,
                              CUstream stream) {
  if (bytes == 0) return initialised();
  CUDA_MEMCPY2D copy = row_of(bytes);
  to_array(&copy, to, offset);
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = from;
  return cuMemcpy2DAsync_v2(&copy, stream);
}

CUresult cuMemcpyAtoH_v2(void* to, CUarray from, size_t offset, size_t bytes) {
  if (bytes == 0) return initialised();
  CUDA_MEMCPY2D copy = row_of(bytes);
  from_array(&copy, from, offset);
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = to;
  return cuMemcpy2D_v2(&copy);
}

CUresult cuMemcpyAtoHAsync_v2(void* to, CUarray from, size_t offset, size_t bytes,
                              CUstream stream) {
  if (bytes == 0) return initialised();
  CUDA_MEMCPY2D copy = row_of(bytes);
  from_array(&copy, from, offset);
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = to;
  return cuMemcpy2DAsync_v2(&copy, stream);
}

CUresult cuMemcpyAtoA_v2(CUarray to, size_t to_offset, CUarray from, size_t from_offset,
                         size_t bytes) {
  if (bytes == 0) return initialised();
  CUDA_MEMCPY2D copy = row_of(bytes);
  to_array(&copy, to, to_offset);
  from_array(&copy, from, from_offset);
  return cuMemcpy2D_v2(&copy);
}

}  // extern "C"
#pragma GCC visibility pop
