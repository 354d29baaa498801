// Contexts: primary and made ones, the thread's stack of them, limits.
#include <algorithm>

#include "graphs/capture.h"
#include "simgpu/driver/context.h"

using namespace gpupool::simgpu;

namespace {

constexpr unsigned kContextFlags = 0xFF;

bool valid_flags(unsigned flags) {
  return !(flags & ~kContextFlags) && (flags & CU_CTX_SCHED_MASK) != 3 &&
         (flags & CU_CTX_SCHED_MASK) < 5;
}

CUresult create(CUcontext* out, unsigned flags, CUdevice dev, unsigned api_version) {
  GPUPOOL_TRY(driver_status());
  if (!out || !valid_flags(flags)) return CUDA_ERROR_INVALID_VALUE;
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  auto* context = new Context(device, false, flags | CU_CTX_MAP_HOST);
  context->api_version = api_version;
  {
    std::lock_guard lock(driver().mutex);
    if (CUresult status = context->activate(); status != CUDA_SUCCESS) {
      delete context;
      return status;
    }
  }
  {
    std::lock_guard lock(driver().contexts_mutex);
    driver().contexts.insert(context);
  }
  context_stack().push_back(context);
  *out = handle_of(context);
  return CUDA_SUCCESS;
}

// The context a handle names, when it can be used; null handle: the current one.
CUresult named(CUcontext handle, Context** context) {
  if (!handle) return current_context(context);
  GPUPOOL_TRY(driver_status());
  *context = find_context(handle);
  if (!*context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!(*context)->active) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  return CUDA_SUCCESS;
}

CUresult current_even_faulty(Context** context) {
  GPUPOOL_TRY(driver_status());
  *context = current_or_null();
  return *context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult destroy(Context* context) {
  if (context->primary) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context->active) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (current_or_null() == context) context_stack().pop_back();
  context->wait_idle();  // its work is done, and what it printed is seen
  context->deactivate();
  return CUDA_SUCCESS;
}

}  // namespace

GPUPOOL_API cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice dev) {
  GPUPOOL_TRY(driver_status());
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  std::lock_guard lock(driver().mutex);
  if (!device->primary->active) GPUPOOL_TRY(device->primary->activate());
  ++device->primary->retained;
  *out = handle_of(device->primary);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  std::lock_guard lock(driver().mutex);
  Context* context = device->primary;
  if (!context->retained) return CUDA_ERROR_INVALID_CONTEXT;
  if (--context->retained == 0 && context->active) context->deactivate();
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDevicePrimaryCtxReset_v2(CUdevice dev) {
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  if (device->primary->active) device->primary->wait_idle();
  std::lock_guard lock(driver().mutex);
  if (device->primary->active) device->primary->deactivate();
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags) {
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  if (!valid_flags(flags)) return CUDA_ERROR_INVALID_VALUE;
  device->primary->flags = flags;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active) {
  Device* device;
  GPUPOOL_TRY(find_device(dev, &device));
  if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
  *flags = device->primary->flags;
  *active = device->primary->active;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxCreate_v2(CUcontext* out, unsigned int flags, CUdevice dev) {
  return create(out, flags, dev, 3020);
}

GPUPOOL_API cuCtxCreate_v3(CUcontext* out, CUexecAffinityParam*, int count, unsigned int flags,
                           CUdevice dev) {
  if (count) return driver_status() ? driver_status() : CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  return create(out, flags, dev, 3020);
}

GPUPOOL_API cuCtxCreate_v4(CUcontext* out, CUctxCreateParams* params, unsigned int flags,
                           CUdevice dev) {
  if (params && (params->numExecAffinityParams || params->cigParams)) {
    return driver_status() ? driver_status() : CUDA_ERROR_NOT_SUPPORTED;
  }
  return create(out, flags, dev, 3020);
}

GPUPOOL_API cuCtxDestroy_v2(CUcontext handle) {
  GPUPOOL_TRY(driver_status());
  if (!handle) return CUDA_ERROR_INVALID_VALUE;
  Context* context = find_context(handle);
  return context ? destroy(context) : CUDA_ERROR_INVALID_CONTEXT;
}

GPUPOOL_API cuCtxAttach(CUcontext* out, unsigned int flags) {
  if (!out || flags) return CUDA_ERROR_INVALID_VALUE;
  GPUPOOL_CURRENT(context);
  *out = handle_of(context);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxDetach(CUcontext handle) { return cuCtxDestroy_v2(handle); }

GPUPOOL_API cuCtxPushCurrent_v2(CUcontext handle) {
  GPUPOOL_TRY(driver_status());
  Context* context = find_context(handle);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context->active && !context->primary) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  context_stack().push_back(context);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxPopCurrent_v2(CUcontext* out) {
  GPUPOOL_TRY(driver_status());
  auto& stack = context_stack();
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (out) *out = handle_of(stack.back());
  stack.pop_back();
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxSetCurrent(CUcontext handle) {
  GPUPOOL_TRY(driver_status());
  if (!handle) {
    set_current(nullptr);
    return CUDA_SUCCESS;
  }
  Context* context = find_context(handle);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context->active && !context->primary) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  set_current(context);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetCurrent(CUcontext* out) {
  GPUPOOL_TRY(driver_status());
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = handle_of(current_or_null());
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetDevice_v2(CUdevice* dev, CUcontext handle) {
  GPUPOOL_TRY(driver_status());
  if (!dev) return CUDA_ERROR_INVALID_VALUE;
  Context* context = handle ? find_context(handle) : current_or_null();
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  *dev = context->device->ordinal;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetDevice(CUdevice* dev) { return cuCtxGetDevice_v2(dev, nullptr); }

GPUPOOL_API cuCtxGetFlags(unsigned int* flags) {
  if (!flags) return CUDA_ERROR_INVALID_VALUE;
  Context* context;
  GPUPOOL_TRY(current_even_faulty(&context));
  *flags = context->flags;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxSetFlags(unsigned int flags) {
  if (!valid_flags(flags)) return CUDA_ERROR_INVALID_VALUE;
  GPUPOOL_CURRENT(context);
  context->flags = flags;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetId(CUcontext handle, unsigned long long* id) {
  if (!id) return CUDA_ERROR_INVALID_VALUE;
  Context* context;
  GPUPOOL_TRY(named(handle, &context));
  *id = context->id;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetApiVersion(CUcontext handle, unsigned int* version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  Context* context;
  GPUPOOL_TRY(named(handle, &context));
  *version = context->api_version;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxSynchronize_v2(CUcontext handle) {
  Context* context;
  GPUPOOL_TRY(named(handle, &context));
  GPUPOOL_CAPTURE_CHECK(check_context_wait(handle_of(context)));
  return context->synchronize();
}

GPUPOOL_API cuCtxSynchronize() { return cuCtxSynchronize_v2(nullptr); }

GPUPOOL_API cuCtxSetLimit(CUlimit limit, size_t value) {
  GPUPOOL_CURRENT(context);
  return context->set_limit(limit, value);
}

GPUPOOL_API cuCtxGetLimit(size_t* value, CUlimit limit) {
  GPUPOOL_CURRENT(context);
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  return context->get_limit(limit, value);
}

GPUPOOL_API cuCtxGetCacheConfig(CUfunc_cache* config) {
  GPUPOOL_CURRENT(context);
  if (!config) return CUDA_ERROR_INVALID_VALUE;
  *config = CUfunc_cache(context->cache_config.load());
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxSetCacheConfig(CUfunc_cache config) {
  GPUPOOL_CURRENT(context);
  if (int(config) < 0 || int(config) > 3) return CUDA_ERROR_INVALID_VALUE;
  context->cache_config = config;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetSharedMemConfig(CUsharedconfig* config) {
  GPUPOOL_CURRENT(context);
  if (!config) return CUDA_ERROR_INVALID_VALUE;
  *config = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxSetSharedMemConfig(CUsharedconfig config) {
  GPUPOOL_CURRENT(context);
  if (int(config) < 0 || int(config) > 2) return CUDA_ERROR_INVALID_VALUE;
  context->shared_config = config;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  GPUPOOL_CURRENT(context);
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxResetPersistingL2Cache() {
  GPUPOOL_CURRENT(context);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxGetExecAffinity(CUexecAffinityParam* param, CUexecAffinityType type) {
  GPUPOOL_CURRENT(context);
  if (!param || int(type) != CU_EXEC_AFFINITY_TYPE_SM_COUNT) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
}

GPUPOOL_API cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
  GPUPOOL_CURRENT(context);
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  Context* other = find_context(peer);
  if (!other || !other->active || other->device == context->device)
    return CUDA_ERROR_INVALID_CONTEXT;
  uint32_t bit = 1u << other->device->ordinal;
  if (context->peers.fetch_or(bit) & bit) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuCtxDisablePeerAccess(CUcontext peer) {
  GPUPOOL_CURRENT(context);
  Context* other = find_context(peer);
  if (!other) return CUDA_ERROR_INVALID_CONTEXT;
  uint32_t bit = 1u << other->device->ordinal;
  if (!(context->peers.fetch_and(~bit) & bit)) return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
  return CUDA_SUCCESS;
}
