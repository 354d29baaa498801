// Every function of NVML's, so that whatever a program asks for by name is there. These are weak:
// the library that defines one has its own.
#include "nvml/library.h"

namespace {
nvmlReturn_t not_supported() {
  const nvmlReturn_t code = gpupool::nvml::ready();
  return code != gpupool::nvml::kSuccess ? code : gpupool::nvml::kNotSupported;
}
}  // namespace

// Arguments are in registers or the caller's to clean up, whatever they are.
#define GPUPOOL_NVML_FUNCTION(name)                                            \
  extern "C" __attribute__((weak, visibility("default"))) nvmlReturn_t name(); \
  nvmlReturn_t name() { return not_supported(); }
#include "nvml/functions.inc"
