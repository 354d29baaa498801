// One copy of up to three dimensions, checked against the address table and then put into a stream.
#pragma once

#include "simgpu/driver/context.h"

namespace gpupool::simgpu {

enum class Side { kDevice, kHost, kEither };  // kEither: the address tells

struct CopyEnd {
  uint64_t address = 0;  // of the first byte
  uint64_t pitch = 0;    // bytes from row to row
  uint64_t slice = 0;    // bytes from slice to slice
  Side side = Side::kEither;
};

struct Copy {
  CopyEnd target, source;
  uint64_t width = 0, height = 1, depth = 1;  // width in bytes
};

// Checks the copy; `wait` says that the call returns when it is done.
CUresult copy(const Copy& what, CUstream stream, bool wait);

// Fills rows with a pattern of 1, 2 or 4 bytes.
struct Fill {
  uint64_t address = 0, pitch = 0, width = 0, height = 1;  // width in elements
  uint32_t value = 0, element = 1;
};
CUresult fill(const Fill& what, CUstream stream);

// For graphs: the checks, and the work itself.
CUresult check(const Copy& what);
CUresult check(const Fill& what);
void perform(const Copy& what);
void perform(const Fill& what);
CUresult copy_of(const CUDA_MEMCPY3D& parameters, Copy* out);  // api_copy.cc

}  // namespace gpupool::simgpu
