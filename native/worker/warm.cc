#include "worker/warm.h"

#include <dlfcn.h>

#include "api/cuda_abi.h"

namespace gpupool::worker {

bool retain_primary_context(const std::string& directory, int ordinal, std::string* why) {
  const std::string path = directory.empty() ? "libcuda.so.1" : directory + "/libcuda.so.1";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return *why = "the driver is not loaded", false;
  const auto get = reinterpret_cast<CUresult (*)(CUdevice*, int)>(dlsym(library, "cuDeviceGet"));
  const auto retain = reinterpret_cast<CUresult (*)(CUcontext*, CUdevice)>(
      dlsym(library, "cuDevicePrimaryCtxRetain"));
  CUdevice device;
  CUcontext context;
  const CUresult result = get == nullptr || retain == nullptr     ? CUDA_ERROR_NOT_FOUND
                          : get(&device, ordinal) != CUDA_SUCCESS ? CUDA_ERROR_INVALID_DEVICE
                                                                  : retain(&context, device);
  if (result == CUDA_SUCCESS) return true;
  *why = "the primary context could not be retained: CUDA error " + std::to_string(result);
  return false;
}

}  // namespace gpupool::worker
