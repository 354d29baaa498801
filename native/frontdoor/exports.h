// The table of all public names, generated (api/exports.cc), and how it is searched.
#pragma once

#include <cstddef>

namespace gpupool::frontdoor {

using Function = int (*)();

struct Export {
  const char* base;  // the name that cuGetProcAddress is asked for
  int since;         // CUDA version in which this ABI of it appeared
  Function function;
  Function per_thread;  // its _ptds or _ptsz twin, or nullptr
  Function probe;       // equal to `stub` when the library does not define the function
  Function stub;
};

extern const Export kExports[];
extern const size_t kExportCount;
extern const char* const kStubNames[];

enum class Lookup { kFound, kUnknownName, kVersionTooOld, kNotDefined };

// The newest ABI of `base` that is not newer than `version` (for instance 12040). For kNotDefined
// `found` is a stub, which says CUDA_ERROR_NOT_SUPPORTED.
Lookup find_export(const char* base, int version, bool per_thread, Function* found);

// What a stub does: says once what was called, and returns CUDA_ERROR_NOT_SUPPORTED.
int call_of_undefined(unsigned index);

}  // namespace gpupool::frontdoor
