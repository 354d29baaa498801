// Who calls: a copy of the CUDA runtime, or a program that uses the driver API itself.
//
// For a launch with impossible dimensions the driver API says CUDA_ERROR_INVALID_VALUE, programs of
// the runtime API get cudaErrorInvalidConfiguration (9); and the runtime passes the driver's code
// on unchanged. So the driver has to know which of them asks.
#pragma once

#include "api/cuda_abi.h"

namespace gpupool::frontdoor {

// What a launch's checks return for impossible dimensions; never leaves the library as such.
constexpr CUresult kInvalidConfiguration = static_cast<CUresult>(9);

// Remembers the module (executable or library) with this return address as one with a runtime in
// it.
void note_runtime(const void* return_address);

// True if such a module calls.
bool is_runtime(const void* return_address);

// `result`, with kInvalidConfiguration turned into what this caller expects.
CUresult result_for_caller(CUresult result, const void* return_address);

}  // namespace gpupool::frontdoor
