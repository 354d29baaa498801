// cuGetProcAddress, versions 1 and 2, over the generated table.
#include <string.h>

#include <algorithm>
#include <atomic>

#include "api/cuda_abi.h"
#include "frontdoor/exports.h"
#include "frontdoor/log.h"
#include "frontdoor/runtime_caller.h"

#define GPUPOOL_EXPORT extern "C" __attribute__((visibility("default"))) CUresult

namespace gpupool::frontdoor {
namespace {

constexpr size_t kMaxStubs = 4096;
std::atomic<bool> g_said[kMaxStubs];

}  // namespace

int call_of_undefined(unsigned index) {
  if (index < kMaxStubs && !g_said[index].exchange(true, std::memory_order_relaxed)) {
    log(LogLevel::kWarning, "%s is not supported; the program gets CUDA_ERROR_NOT_SUPPORTED",
        kStubNames[index]);
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}

Lookup find_export(const char* base, int version, bool per_thread, Function* found) {
  *found = nullptr;
  const Export* end = kExports + kExportCount;
  const Export* entry =
      std::lower_bound(kExports, end, base,
                       [](const Export& e, const char* name) { return strcmp(e.base, name) < 0; });
  if (entry == end || strcmp(entry->base, base) != 0) return Lookup::kUnknownName;
  const Export* best = nullptr;
  bool any_defined = false;
  for (; entry != end && strcmp(entry->base, base) == 0; ++entry) {
    any_defined = any_defined || entry->probe != entry->stub;
    if (entry->since <= version) best = entry;
  }
  if (best == nullptr) return any_defined ? Lookup::kVersionTooOld : Lookup::kNotDefined;
  if (best->probe == best->stub) {
    *found = best->stub;
    return Lookup::kNotDefined;
  }
  *found = per_thread && best->per_thread != nullptr ? best->per_thread : best->function;
  return Lookup::kFound;
}

}  // namespace gpupool::frontdoor

using gpupool::frontdoor::Function;
using gpupool::frontdoor::LogLevel;
using gpupool::frontdoor::Lookup;

namespace {

CUresult get(const char* symbol, void** pfn, int version, cuuint64_t flags,
             CUdriverProcAddressQueryResult* status, const void* caller) {
  if (symbol == nullptr || pfn == nullptr ||
      flags > CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *pfn = nullptr;
  Function function = nullptr;
  const bool per_thread = flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  Lookup lookup = gpupool::frontdoor::find_export(symbol, version, per_thread, &function);
  // The runtime asks for everything when it starts. For what it does not get its callers see
  // cudaErrorCallRequiresNewerDriver; a stub lets them see cudaErrorNotSupported.
  if (lookup == Lookup::kNotDefined && function != nullptr &&
      gpupool::frontdoor::is_runtime(caller)) {
    lookup = Lookup::kFound;
  }
  if (status != nullptr) {
    *status = lookup == Lookup::kFound           ? CU_GET_PROC_ADDRESS_SUCCESS
              : lookup == Lookup::kVersionTooOld ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                                 : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  if (lookup == Lookup::kFound) {
    *pfn = reinterpret_cast<void*>(function);
    return CUDA_SUCCESS;
  }
  if (gpupool::frontdoor::log_enabled(LogLevel::kDebug)) {
    gpupool::frontdoor::log(LogLevel::kDebug, "cuGetProcAddress: %s for CUDA %d: %s", symbol,
                            version,
                            lookup == Lookup::kUnknownName ? "no such name" : "not supported");
  }
  return CUDA_ERROR_NOT_FOUND;
}

}  // namespace

GPUPOOL_EXPORT cuGetProcAddress_v2(const char* symbol, void** pfn, int cudaVersion,
                                   cuuint64_t flags, CUdriverProcAddressQueryResult* symbolStatus) {
  if (symbol != nullptr && pfn != nullptr && symbol[0] == '\0') {
    // The CUDA runtime's first request: which cuGetProcAddress is this?
    gpupool::frontdoor::note_runtime(__builtin_return_address(0));
    *pfn = reinterpret_cast<void*>(&cuGetProcAddress_v2);
    if (symbolStatus != nullptr) *symbolStatus = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
  }
  return get(symbol, pfn, cudaVersion, flags, symbolStatus, __builtin_return_address(0));
}

GPUPOOL_EXPORT cuGetProcAddress(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags) {
  if (symbol != nullptr && pfn != nullptr && symbol[0] == '\0') {
    gpupool::frontdoor::note_runtime(__builtin_return_address(0));
    *pfn = reinterpret_cast<void*>(&cuGetProcAddress);
    return CUDA_SUCCESS;
  }
  return get(symbol, pfn, cudaVersion, flags, nullptr, __builtin_return_address(0));
}
