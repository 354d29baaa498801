#include "simgpu/driver/copies.h"

#include <string.h>

#include <memory>

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

void perform_copy(const Copy& c) {
  for (uint64_t z = 0; z < c.depth; ++z) {
    for (uint64_t y = 0; y < c.height; ++y) {
      memmove(
          reinterpret_cast<void*>(c.target.address + z * c.target.slice + y * c.target.pitch),
          reinterpret_cast<const void*>(c.source.address + z * c.source.slice + y * c.source.pitch),
          c.width);
    }
  }
}

template <class T>
void fill_row(void* at, T value, uint64_t count) {
  auto* out = static_cast<T*>(at);
  for (uint64_t i = 0; i < count; ++i) out[i] = value;
}

void perform_fill(const Fill& f) {
  for (uint64_t y = 0; y < f.height; ++y) {
    void* row = reinterpret_cast<void*>(f.address + y * f.pitch);
    if (f.element == 1) {
      memset(row, int(f.value), f.width);
    } else if (f.element == 2) {
      fill_row<uint16_t>(row, uint16_t(f.value), f.width);
    } else {
      fill_row<uint32_t>(row, f.value, f.width);
    }
  }
}

}  // namespace

CUresult copy(const Copy& what, CUstream handle, bool wait) {
  GPUPOOL_CURRENT(context);
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
    if (worker->status() == CUDA_SUCCESS) perform_copy(what);
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
      if (worker->status() == CUDA_SUCCESS) perform_copy(aside);
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
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(find_stream(handle, context, &stream));
  if (!what.width || !what.height) return CUDA_SUCCESS;
  if (what.address % what.element) return CUDA_ERROR_INVALID_VALUE;
  const __uint128_t row = __uint128_t(what.width) * what.element;
  if (what.height > 1 && (what.pitch < row || what.pitch % what.element))
    return CUDA_ERROR_INVALID_VALUE;
  const __uint128_t bytes = __uint128_t(what.height - 1) * what.pitch + row;
  if (bytes >> 47 || !addresses().covers(what.address, uint64_t(bytes)))
    return CUDA_ERROR_INVALID_VALUE;
  Context* worker = stream->context;
  auto work = [what, worker] {
    if (worker->status() == CUDA_SUCCESS) perform_fill(what);
  };
  if (bytes <= kShort) {
    worker->submit_short(stream, work);
  } else {
    worker->submit(stream, work);
  }
  return CUDA_SUCCESS;
}

}  // namespace gpupool::simgpu
