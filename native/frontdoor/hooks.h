// What the front door needs from the library that it is linked into, beyond the public functions
// (it calls cuCtxGetCurrent, cuCtxGetId, cuModuleLoadData, cuModuleEnumerateFunctions,
// cuDeviceGetCount, cuDeviceGetUuid_v2, cuDeviceGetAttribute and cuDriverGetVersion itself), and
// what it offers to that library.
#pragma once

#include "api/cuda_abi.h"

namespace gpupool::frontdoor {

// To be defined by the library: the handle of the device's primary context, without retaining it.
// The same value as cuDevicePrimaryCtxRetain gives, valid before the first retain.
CUresult primary_context_handle(CUdevice device, CUcontext* context);

// To be called by the library when a context ends (destroyed, or a primary context reset or
// released for the last time): runs the destructors of what clients stored with it.
void forget_context(CUcontext context);

// The CUDA version that our libraries speak; what cuDriverGetVersion says unless a real driver's
// version is known.
constexpr int kDriverVersion = 13000;

}  // namespace gpupool::frontdoor
