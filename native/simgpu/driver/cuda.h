// CUDA's types and functions, each under its exported name.
#pragma once

#ifndef GPUPOOL_CUDA_ABI_EXACT
#define GPUPOOL_CUDA_ABI_EXACT 1
#endif
#include "api/cuda_abi.h"

// For the definitions of the driver's functions.
#define GPUPOOL_API extern "C" __attribute__((visibility("default"))) CUresult
