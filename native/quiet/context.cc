// Contexts: primary and others, and each thread's stack of them.
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "frontdoor/hooks.h"
#include "quiet/quiet.h"

namespace gpupool::quiet {
namespace {

using Stack = std::vector<CUcontext>;
thread_local std::unique_ptr<Stack> t_stack;

Stack& stack() {
  if (!t_stack) t_stack = std::make_unique<Stack>();
  return *t_stack;
}

std::atomic<unsigned long long> g_next_id{1000};
std::mutex g_primary_mutex;

// Every context that was made: one that was destroyed may still be current in another thread.
void keep(CUctx_st* context) {
  static std::mutex lock;
  static auto* all = new std::vector<CUctx_st*>;
  std::lock_guard guard(lock);
  all->push_back(context);
}

void end_context(CUcontext context) {
  frontdoor::forget_context(context);
  release_modules(context);
  release_all(context);
}

CUresult create(CUcontext* result, unsigned flags, CUdevice device) {
  if (!machine().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (result == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (device < 0 || static_cast<size_t>(device) >= machine().devices.size())
    return CUDA_ERROR_INVALID_DEVICE;
  auto* context = new CUctx_st;
  keep(context);
  context->device = device;
  context->flags = flags;
  context->id = g_next_id++;
  stack().push_back(context);
  *result = context;
  return CUDA_SUCCESS;
}

CUctx_st* primary_of(CUdevice device, CUresult* error) {
  *error = CUDA_SUCCESS;
  if (!machine().initialised)
    *error = CUDA_ERROR_NOT_INITIALIZED;
  else if (device < 0 || static_cast<size_t>(device) >= machine().devices.size())
    *error = CUDA_ERROR_INVALID_DEVICE;
  return *error == CUDA_SUCCESS ? machine().devices[device].primary : nullptr;
}

}  // namespace

CUcontext current_context() { return t_stack && !t_stack->empty() ? t_stack->back() : nullptr; }

}  // namespace gpupool::quiet

namespace gpupool::frontdoor {

CUresult primary_context_handle(CUdevice device, CUcontext* context) {
  CUresult error;
  *context = quiet::primary_of(device, &error);
  return error;
}

}  // namespace gpupool::frontdoor

using namespace gpupool::quiet;

GPUPOOL_API cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev) {
  CUresult error;
  CUctx_st* primary = primary_of(dev, &error);
  if (primary == nullptr) return error;
  if (pctx == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(g_primary_mutex);
  ++primary->retained;
  *pctx = primary;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
  CUresult error;
  CUctx_st* primary = primary_of(dev, &error);
  if (primary == nullptr) return error;
  {
    std::lock_guard lock(g_primary_mutex);
    if (primary->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--primary->retained != 0) return CUDA_SUCCESS;
  }
  end_context(primary);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDevicePrimaryCtxReset_v2(CUdevice dev) {
  CUresult error;
  CUctx_st* primary = primary_of(dev, &error);
  if (primary == nullptr) return error;
  end_context(primary);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags) {
  CUresult error;
  CUctx_st* primary = primary_of(dev, &error);
  if (primary == nullptr) return error;
  primary->flags = flags;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active) {
  CUresult error;
  CUctx_st* primary = primary_of(dev, &error);
  if (primary == nullptr) return error;
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = primary->flags;
  *active = primary->retained > 0;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxCreate_v2(CUcontext* pctx, unsigned int flags, CUdevice dev) {
  return create(pctx, flags, dev);
}

GPUPOOL_API cuCtxCreate_v3(CUcontext* pctx, CUexecAffinityParam*, int, unsigned int flags,
                           CUdevice dev) {
  return create(pctx, flags, dev);
}

GPUPOOL_API cuCtxCreate_v4(CUcontext* pctx, CUctxCreateParams*, unsigned int flags, CUdevice dev) {
  return create(pctx, flags, dev);
}

GPUPOOL_API cuCtxDestroy_v2(CUcontext ctx) {
  if (!is_valid(ctx) || ctx->primary) return CUDA_ERROR_INVALID_CONTEXT;
  if (current_context() == ctx) stack().pop_back();
  end_context(ctx);
  ctx->magic = 0;  // kept: other threads may still have it current
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxDetach(CUcontext ctx) { return cuCtxDestroy_v2(ctx); }

GPUPOOL_API cuCtxPushCurrent_v2(CUcontext ctx) {
  if (!is_valid(ctx)) return CUDA_ERROR_INVALID_CONTEXT;
  stack().push_back(ctx);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxPopCurrent_v2(CUcontext* pctx) {
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (pctx != nullptr) *pctx = current_context();
  stack().pop_back();
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxSetCurrent(CUcontext ctx) {
  if (!machine().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (ctx != nullptr && !is_valid(ctx)) return CUDA_ERROR_INVALID_CONTEXT;
  if (!stack().empty()) stack().pop_back();
  if (ctx != nullptr) stack().push_back(ctx);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetCurrent(CUcontext* pctx) {
  if (!machine().initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (pctx == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *pctx = current_context();
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetDevice(CUdevice* device) { return cuCtxGetDevice_v2(device, nullptr); }

GPUPOOL_API cuCtxGetDevice_v2(CUdevice* device, CUcontext ctx) {
  if (ctx == nullptr) ctx = current_context();
  if (!is_valid(ctx)) return CUDA_ERROR_INVALID_CONTEXT;
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = ctx->device;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetFlags(unsigned int* flags) {
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  *flags = current_context()->flags;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetId(CUcontext ctx, unsigned long long* ctxId) {
  if (ctx == nullptr) ctx = current_context();
  if (!is_valid(ctx)) return CUDA_ERROR_INVALID_CONTEXT;
  if (ctxId == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *ctxId = ctx->id;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetApiVersion(CUcontext ctx, unsigned int* version) {
  if (ctx != nullptr && !is_valid(ctx)) return CUDA_ERROR_INVALID_CONTEXT;
  *version = 3020;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxSynchronize(void) {
  return current_context() != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

GPUPOOL_API cuCtxSynchronize_v2(CUcontext ctx) {
  if (ctx == nullptr) ctx = current_context();
  return is_valid(ctx) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

GPUPOOL_API cuCtxGetLimit(size_t* pvalue, CUlimit limit) {
  CUctx_st* context = current_context();
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (limit < 0 || size_t(limit) >= std::size(context->limits)) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  *pvalue = context->limits[limit];
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxSetLimit(CUlimit limit, size_t value) {
  size_t before;
  const CUresult known = cuCtxGetLimit(&before, limit);
  if (known == CUDA_SUCCESS) current_context()->limits[limit] = value;
  return known;
}

GPUPOOL_API cuCtxGetStreamPriorityRange(int* leastPriority, int* greatestPriority) {
  if (current_context() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (leastPriority != nullptr) *leastPriority = 0;
  if (greatestPriority != nullptr) *greatestPriority = -5;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetCacheConfig(CUfunc_cache* pconfig) {
  if (pconfig == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *pconfig = CU_FUNC_CACHE_PREFER_NONE;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxSetCacheConfig(CUfunc_cache) { return CUDA_SUCCESS; }
