// Context-local storage: values that clients (each copy of the CUDA runtime) keep with a context
// under a key of their own. Read on nearly every call of the runtime.
#pragma once

#include "api/cuda_abi.h"

namespace gpupool::frontdoor {

using StorageDestructor = void (*)(CUcontext context, void* key, void* value);

// A null context stands for the calling thread's current one.
CUresult storage_put(CUcontext context, void* key, void* value, StorageDestructor destructor);
CUresult storage_delete(CUcontext context, void* key);
// CUDA_ERROR_INVALID_HANDLE: there is nothing under this key.
CUresult storage_get(void** value, CUcontext context, void* key);

}  // namespace gpupool::frontdoor
