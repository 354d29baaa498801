#include "simgpu/driver/copies.h"

#include <string.h>

#include <memory>

#include "graphs/capture.h"
#include "simgpu/exec/written.h"

namespace gpupool::simgpu {
namespace {

constexpr uint64_t kShort = 64 << 10;  // bytes that are copied or filled at the call
constexpr uint64_t kStaged = 1 << 20;  // pageable sources up to this size are kept aside

// Bytes from the first to the last one touched; false: more than addresses can say.
bool extent(const CopyEnd& end, const Copy& what, uint64_t* bytes) {
  __uint128_t total = __uint128_t(what.depth - 1) * end.slice +
                      __uint128_t(what.height - 1) * end.pitch + what.width;
  if (total >> 47) return false;
  *bytes = uint64_t(total);
  return true;
}

struct Checked {
  bool pageable = false;  // neither device memory nor host memory that CUDA knows
};

CUresult check(const CopyEnd& end, const Copy& what, Checked* checked) {
  uint64_t bytes;
  if (!end.address || !extent(end, what, &bytes)) return CUDA_ERROR_INVALID_VALUE;
  AddressTable& table = addresses();
  auto known = table.find(end.address);
  if (known) return table.covers(end.address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  if (end.side == Side::kDevice || table.in_span(end.address)) return CUDA_ERROR_INVALID_VALUE;
  checked->pageable = true;
  return CUDA_SUCCESS;
}

}  // namespace

void perform(const Copy& c) {
  for (uint64_t z = 0; z < c.depth; ++z) {
    for (uint64_t y = 0; y < c.height; ++y) {
      const uint64_t to = c.target.address + z * c.target.slice + y * c.target.pitch;
      const uint64_t from = c.source.address + z * c.source.slice + y * c.source.pitch;
      memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), c.width);
      written_memory().mark_copy(to, from, c.width);
    }
  }
}

namespace {
template <class T>
void fill_row(void* at, T value, uint64_t count) {
  auto* out = static_cast<T*>(at);
  for (uint64_t i = 0; i < count; ++i) out[i] = value;
}

}  // namespace

void perform(const Fill& f) {
  for (uint64_t y = 0; y < f.height; ++y) {
    void* row = reinterpret_cast<void*>(f.address + y * f.pitch);
    written_memory().mark(f.address + y * f.pitch, f.width * f.element);
    if (f.element == 1) {
      memset(row, int(f.value), f.width);
    } else if (f.element == 2) {
      fill_row<uint16_t>(row, uint16_t(f.value), f.width);
    } else {
      fill_row<uint32_t>(row, f.value, f.width);
    }
  }
}

CUresult check(const Copy& what) {
  Checked checked;
  GPUPOOL_TRY(check(what.target, what, &checked));
  return check(what.source, what, &checked);
}

CUresult check(const Fill& what) {
  if (what.element != 1 && what.element != 2 && what.element != 4) return CUDA_ERROR_INVALID_VALUE;
  if (what.address % what.element) return CUDA_ERROR_INVALID_VALUE;
  const __uint128_t row = __uint128_t(what.width) * what.element;
  if (what.height > 1 && (what.pitch < row || what.pitch % what.element))
    return CUDA_ERROR_INVALID_VALUE;
  const __uint128_t bytes = __uint128_t(what.height - 1) * what.pitch + row;
  return bytes >> 47 || !addresses().covers(what.address, uint64_t(bytes))
             ? CUDA_ERROR_INVALID_VALUE
             : CUDA_SUCCESS;
}

namespace {

// As a graph's node has it.
CUDA_MEMCPY3D parameters_of(const Copy& c) {
  CUDA_MEMCPY3D p{};
  p.srcMemoryType = c.source.side == Side::kDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_UNIFIED;
  p.dstMemoryType = c.target.side == Side::kDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_UNIFIED;
  p.srcDevice = c.source.address;
  p.dstDevice = c.target.address;
  p.srcPitch = c.source.pitch ? c.source.pitch : c.width;
  p.dstPitch = c.target.pitch ? c.target.pitch : c.width;
  p.srcHeight = c.depth > 1 ? c.source.slice / p.srcPitch : c.height;
  p.dstHeight = c.depth > 1 ? c.target.slice / p.dstPitch : c.height;
  p.WidthInBytes = c.width;
  p.Height = c.height;
  p.Depth = c.depth;
  return p;
}

}  // namespace

CUresult copy(const Copy& what, CUstream handle, bool wait) {
  GPUPOOL_CURRENT(context);
  if (wait) GPUPOOL_CAPTURE_CHECK(check_synchronous());
  if (what.width && what.height && what.depth) {
    GPUPOOL_CAPTURE(capture_copy(handle, parameters_of(what), &capture_result));
  }
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(find_stream(handle, context, &stream));
  if (!what.width || !what.height || !what.depth) return CUDA_SUCCESS;
  Checked target, source;
  GPUPOOL_TRY(check(what.target, what, &target));
  GPUPOOL_TRY(check(what.source, what, &source));
  // The stream may be another device's; its context then does the work.
  Context* worker = stream->context;
  const uint64_t bytes = what.width * what.height * what.depth;
  auto work = [what, worker] {
    if (worker->status() == CUDA_SUCCESS) perform(what);
  };
  if (wait || target.pageable) return worker->perform(stream, work);
  if (source.pageable) {
    // The caller may change the source as soon as the call returns.
    if (bytes > kStaged || what.height > 1 || what.depth > 1) return worker->perform(stream, work);
    auto staged = std::make_shared_for_overwrite<uint8_t[]>(bytes);
    memcpy(staged.get(), reinterpret_cast<const void*>(what.source.address), bytes);
    Copy aside = what;
    aside.source.address = reinterpret_cast<uint64_t>(staged.get());
    worker->submit_short(stream, [aside, staged, worker] {
      if (worker->status() == CUDA_SUCCESS) perform(aside);
    });
  } else if (bytes <= kShort) {
    worker->submit_short(stream, work);
  } else {
    worker->submit(stream, work);
  }
  return CUDA_SUCCESS;
}

CUresult fill(const Fill& what, CUstream handle) {
  GPUPOOL_CURRENT(context);
  if (what.width && what.height) {
    GPUPOOL_CAPTURE(capture_fill(handle, what.address, what.pitch, what.value, what.element,
                                 what.width, what.height, &capture_result));
  }
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(find_stream(handle, context, &stream));
  if (!what.width || !what.height) return CUDA_SUCCESS;
  GPUPOOL_TRY(check(what));
  const uint64_t bytes = what.width * what.element * what.height;
  Context* worker = stream->context;
  auto work = [what, worker] {
    if (worker->status() == CUDA_SUCCESS) perform(what);
  };
  if (bytes <= kShort) {
    worker->submit_short(stream, work);
  } else {
    worker->submit(stream, work);
  }
  return CUDA_SUCCESS;
}

}  // namespace gpupool::simgpu
