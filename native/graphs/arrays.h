// CUDA arrays as what they are without textures and surfaces: device memory of rows and planes
// whose address nobody sees.
#pragma once

#include "api/cuda_abi.h"

namespace gpupool::graphs {

// Replaces the ends of a copy that are arrays by their memory. CUDA_ERROR_INVALID_HANDLE: no such
// array; CUDA_ERROR_INVALID_VALUE: the copy leaves it, or cuts elements.
CUresult resolve_arrays(CUDA_MEMCPY2D* copy);
CUresult resolve_arrays(CUDA_MEMCPY3D* copy);
CUresult resolve_arrays(CUDA_MEMCPY3D_PEER* copy);

// A context's arrays end with it.
void forget_arrays(CUcontext context);

}  // namespace gpupool::graphs
