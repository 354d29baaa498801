// What the front door asks of the client library.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include "frontdoor/hooks.h"

#include "client/contexts.h"

namespace gpupool::frontdoor {

CUresult primary_context_handle(CUdevice ordinal, CUcontext* context) {
  using namespace gpupool::client;  // NOLINT
  if (Process::get().check() != CUDA_SUCCESS) return CUDA_ERROR_NOT_INITIALIZED;
  Device* device = Process::get().device(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  Context* primary = primary_context(device);
  if (primary == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *context = reinterpret_cast<CUcontext>(primary->handle);
  return CUDA_SUCCESS;
}

}  // namespace gpupool::frontdoor
