// cuGetErrorName and cuGetErrorString.
#include <algorithm>
#include <iterator>

#include "api/cuda_abi.h"

#define GPUPOOL_EXPORT extern "C" __attribute__((visibility("default"))) CUresult

namespace {

struct ResultName {
  int value;
  const char* name;
  const char* sentence;
};

constexpr ResultName kResults[] = {
#define GPUPOOL_RESULT(value, name, sentence) {value, name, sentence},
#include "api/result_names.inc"
#undef GPUPOOL_RESULT
};

const ResultName* find(CUresult error) {
  const ResultName* found =
      std::lower_bound(std::begin(kResults), std::end(kResults), static_cast<int>(error),
                       [](const ResultName& r, int value) { return r.value < value; });
  return found != std::end(kResults) && found->value == static_cast<int>(error) ? found : nullptr;
}

}  // namespace

GPUPOOL_EXPORT cuGetErrorName(CUresult error, const char** pStr) {
  if (pStr == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ResultName* found = find(error);
  *pStr = found != nullptr ? found->name : nullptr;
  return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

GPUPOOL_EXPORT cuGetErrorString(CUresult error, const char** pStr) {
  if (pStr == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const ResultName* found = find(error);
  *pStr = found != nullptr ? found->sentence : nullptr;
  return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
