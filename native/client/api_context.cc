// Contexts: the primary context of each device, contexts that a program creates, and each thread's
// stack of them. Only creating, destroying, synchronising and limits reach the worker.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <unistd.h>

#include "api/cuda_abi.h"
#include "client/contexts.h"
#include "client/log.h"
#include "client/pools.h"
#include "client/state.h"
#include "frontdoor/hooks.h"
#include "graphs/capture.h"

using namespace gpupool;          // NOLINT: a file of entry points
using namespace gpupool::client;  // NOLINT

namespace gpupool::client {

namespace {

constexpr unsigned kKnownFlags = CU_CTX_SCHED_MASK | CU_CTX_MAP_HOST | CU_CTX_LMEM_RESIZE_TO_MAX |
                                 CU_CTX_COREDUMP_ENABLE | CU_CTX_USER_COREDUMP_ENABLE |
                                 CU_CTX_SYNC_MEMOPS;

Context* new_context(Device* device, bool primary, unsigned flags, unsigned api_version) {
  static std::atomic<uint64_t> next_id{1};
  Context* context = Process::get().tables.contexts.allocate();
  if (context == nullptr) return nullptr;
  context->context = context;
  context->device = device;
  context->primary = primary;
  context->flags = flags;
  context->api_version = api_version;
  context->id = next_id.fetch_add(1);
  context->active = false;
  context->sticky = 0;
  context->refused = 0;
  context->cache_config = CU_FUNC_CACHE_PREFER_NONE;
  context->shared_config = CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE;
  Process::get().tables.contexts.publish(context);
  return context;
}

// How threads wait: one setting per connection, the last context's.
void apply_schedule(const Context& context) {
  if (!context.active.load()) return;
  const bool blocking = (context.flags & CU_CTX_SCHED_MASK) == CU_CTX_SCHED_BLOCKING_SYNC;
  channel_of(&context).set_blocking_sync(blocking);
}

// Makes the context in the worker. With device.lock held.
CUresult create_in_worker(Context* context) {
  Device& device = *context->device;
  Channel* channel;
  const CUresult connected = Process::get().channel(device, &channel);
  if (connected != CUDA_SUCCESS) return connected;
  for (int attempt = 0; attempt < 64; attempt++) {
    const wire::ContextCreate body{context->wire, context->flags, context->primary ? 1u : 0u,
                                   device.arena_base, device.arena_bytes};
    PendingCall call;
    const CUresult result = channel->call(
        op(Operation::kCtxCreateV4), context->wire_id(), sizeof body,
        [&](wire::Encoder& encoder) { encoder.put(body); }, &call);
    if (result != CUDA_SUCCESS) return result;
    wire::Decoder decoder = call.decoder();
    const auto answer = decoder.get<wire::ContextCreated>();
    if (!decoder.ok()) return CUDA_ERROR_UNKNOWN;
    if (answer.arena_accepted != 0) {
      context->sticky = 0;
      context->refused = 0;
      context->active.store(true, std::memory_order_release);
      apply_schedule(*context);
      return CUDA_SUCCESS;
    }
    // In the worker's process something else has these addresses.
    if (!device.next_arena()) break;
  }
  log(Level::kError, "client and worker found no addresses that are free on both sides");
  return CUDA_ERROR_OUT_OF_MEMORY;
}

// True if it was alive. What clients keep with the context is for the caller to forget, without any
// lock: that runs code of theirs.
// With `wait` its work is done afterwards, and what it printed has come.
bool destroy(Context* context, bool wait) {
  if (!context->active.exchange(false)) return false;
  if (wait && !channel_of(context).lost()) {
    PendingCall call;
    channel_of(context).call(
        op(Operation::kCtxDestroyV2), context->wire_id(), sizeof(wire::Handle),
        [&](wire::Encoder& encoder) { encoder.handle(context->wire); }, &call);
  } else if (!channel_of(context).lost()) {
    Channel::Post post(channel_of(context), op(Operation::kCtxDestroyV2), context->wire_id(),
                       sizeof(wire::Handle));
    post.encoder().handle(context->wire);
  }
  drop_objects_of(context);
  return true;
}

// A primary context that nobody retains may be made current all the same.
bool destroyed(const Context* context) { return !context->primary && !context->active.load(); }

void forget(Context* context) {
  frontdoor::forget_context(reinterpret_cast<CUcontext>(context->handle));
}

CUresult initialized() {
  if (thread_state().in_host_function) return CUDA_ERROR_NOT_PERMITTED;
  return Process::get().check() == CUDA_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

}  // namespace

Context* primary_context(Device* device) {
  std::lock_guard guard(device->lock);
  if (device->primary == nullptr) {
    device->primary = new_context(device, true, device->primary_flags, CUDA_VERSION);
  }
  return device->primary;
}

CUresult retain_primary(Device* device, Context** out) {
  Context* context = primary_context(device);
  if (context == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard guard(device->lock);
  if (!context->active.load()) {
    context->flags = device->primary_flags;
    const CUresult result = create_in_worker(context);
    if (result != CUDA_SUCCESS) return result;
  } else if (channel_of(context).lost()) {
    return CUDA_ERROR_DEVICE_UNAVAILABLE;
  }
  device->primary_count++;
  *out = context;
  return CUDA_SUCCESS;
}

}  // namespace gpupool::client

#define INITIALIZED() \
  if (const CUresult e_ = initialized()) return e_;
#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;

#pragma GCC visibility push(default)
extern "C" {

CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice ordinal) {
  INITIALIZED();
  Device* device = Process::get().device(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  REQUIRE(out != nullptr);
  Context* context;
  const CUresult result = retain_primary(device, &context);
  if (result == CUDA_SUCCESS) *out = reinterpret_cast<CUcontext>(context->handle);
  return result;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
  INITIALIZED();
  Device* device = Process::get().device(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  bool ended = false;
  {
    std::lock_guard guard(device->lock);
    if (device->primary_count == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--device->primary_count == 0) ended = destroy(device->primary, false);
  }
  if (ended) forget(device->primary);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice ordinal) {
  INITIALIZED();
  Device* device = Process::get().device(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  bool ended = false;
  {
    // The handle stays; what the context held is gone. It works again after the next retain.
    std::lock_guard guard(device->lock);
    if (device->primary != nullptr) ended = destroy(device->primary, true);
    device->primary_count = 0;
  }
  if (ended) forget(device->primary);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned int flags) {
  INITIALIZED();
  Device* device = Process::get().device(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  REQUIRE((flags & ~kKnownFlags) == 0);
  std::lock_guard guard(device->lock);
  device->primary_flags = flags;
  if (device->primary != nullptr) {
    device->primary->flags = flags;
    apply_schedule(*device->primary);
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned int* flags, int* active) {
  INITIALIZED();
  Device* device = Process::get().device(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  REQUIRE(flags != nullptr && active != nullptr);
  std::lock_guard guard(device->lock);
  *flags = device->primary_flags;
  *active = device->primary != nullptr && device->primary->active.load() ? 1 : 0;
  return CUDA_SUCCESS;
}

static CUresult create_context(CUcontext* out, unsigned flags, CUdevice ordinal, unsigned version) {
  INITIALIZED();
  Device* device = Process::get().device(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  REQUIRE(out != nullptr && (flags & ~kKnownFlags) == 0);
  Context* context = new_context(device, false, flags, version);
  if (context == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result;
  {
    std::lock_guard guard(device->lock);
    result = create_in_worker(context);
  }
  if (result != CUDA_SUCCESS) {
    Process::get().tables.contexts.retire(context);
    return result;
  }
  thread_state().stack.push_back(context);
  *out = reinterpret_cast<CUcontext>(context->handle);
  return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext* out, unsigned int flags, CUdevice device) {
  return create_context(out, flags, device, 3020);
}

CUresult cuCtxCreate_v3(CUcontext* out, CUexecAffinityParam*, int count, unsigned int flags,
                        CUdevice device) {
  if (count != 0) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  return create_context(out, flags, device, 3020);
}

CUresult cuCtxCreate_v4(CUcontext* out, CUctxCreateParams* parameters, unsigned int flags,
                        CUdevice device) {
  if (parameters != nullptr) {
    if (parameters->numExecAffinityParams != 0) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    if (parameters->cigParams != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  }
  return create_context(out, flags, device, 3020);
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
  INITIALIZED();
  REQUIRE(handle != nullptr);
  Context* context = find_context(handle);
  if (context == nullptr || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
  if (!destroy(context, true)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  forget(context);
  // A context that is on top of the caller's stack is popped; elsewhere it stays, unusable.
  auto& stack = thread_state().stack;
  if (!stack.empty() && stack.back() == context) stack.pop_back();
  // The slot is not used again: other threads' stacks may point to it.
  return CUDA_SUCCESS;
}

CUresult cuCtxAttach(CUcontext* out, unsigned int flags) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  REQUIRE(out != nullptr && flags == 0);
  *out = reinterpret_cast<CUcontext>(context->handle);
  return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext handle) { return cuCtxDestroy_v2(handle); }

CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  INITIALIZED();
  REQUIRE(handle != nullptr);
  Context* context = find_context(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (destroyed(context)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  thread_state().stack.push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext* out) {
  INITIALIZED();
  auto& stack = thread_state().stack;
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (out != nullptr) *out = reinterpret_cast<CUcontext>(stack.back()->handle);
  stack.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext handle) {
  INITIALIZED();
  auto& stack = thread_state().stack;
  if (handle == nullptr) {
    if (!stack.empty()) stack.pop_back();
    return CUDA_SUCCESS;
  }
  Context* context = find_context(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (destroyed(context)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (stack.empty()) {
    stack.push_back(context);
  } else {
    stack.back() = context;
  }
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* out) {
  INITIALIZED();
  REQUIRE(out != nullptr);
  Context* context = current_context();
  *out = context == nullptr ? nullptr : reinterpret_cast<CUcontext>(context->handle);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* out) { return cuCtxGetDevice_v2(out, nullptr); }

CUresult cuCtxGetDevice_v2(CUdevice* out, CUcontext handle) {
  INITIALIZED();
  Context* context = handle == nullptr ? current_context() : find_context(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  REQUIRE(out != nullptr);
  *out = context->device->ordinal;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int* flags) {
  INITIALIZED();
  Context* context = current_context();
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  REQUIRE(flags != nullptr);
  *flags = context->flags;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned int flags) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  REQUIRE((flags & ~kKnownFlags) == 0);
  context->flags = flags;
  apply_schedule(*context);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext handle, unsigned long long* id) {
  INITIALIZED();
  Context* context = handle == nullptr ? current_context() : find_context(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  REQUIRE(id != nullptr);
  *id = context->id;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext handle, unsigned int* version) {
  INITIALIZED();
  Context* context = handle == nullptr ? current_context() : find_context(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  REQUIRE(version != nullptr);
  *version = context->api_version;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  if (least != nullptr) *least = context->device->snapshot.stream_priority_least;
  if (greatest != nullptr) *greatest = context->device->snapshot.stream_priority_greatest;
  return CUDA_SUCCESS;
}

static CUresult synchronize(Context* context) {
  if (const CUresult e = check_context(context)) return e;
  GPUPOOL_CAPTURE_CHECK(check_context_wait(reinterpret_cast<CUcontext>(context->handle)));
  PendingCall call;
  const uint64_t time = pool_time();
  const CUresult result = settle(context, channel_of(context).call(
                                              op(Operation::kCtxSynchronize), context->wire_id(), 0,
                                              [](wire::Encoder&) {}, &call));
  if (result == CUDA_SUCCESS) pool_observed_all(context, time);
  return result;
}

CUresult cuCtxSynchronize(void) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  return synchronize(context);
}

CUresult cuCtxSynchronize_v2(CUcontext handle) {
  if (handle == nullptr) return cuCtxSynchronize();
  INITIALIZED();
  Context* context = find_context(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return synchronize(context);
}

// Waited for: the driver tells by the result what it makes of the value, and whether there is room.
CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  REQUIRE(limit >= 0 && limit < CU_LIMIT_MAX);
  PendingCall call;
  return settle(context, channel_of(context).call(
                             op(Operation::kCtxSetLimit), context->wire_id(), 16,
                             [&](wire::Encoder& encoder) {
                               encoder.scalar(static_cast<uint64_t>(limit));
                               encoder.scalar(value);
                             },
                             &call));
}

CUresult cuCtxGetCacheConfig(CUfunc_cache* config) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  REQUIRE(config != nullptr);
  *config = context->cache_config;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCacheConfig(CUfunc_cache config) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  REQUIRE(config >= CU_FUNC_CACHE_PREFER_NONE && config <= CU_FUNC_CACHE_PREFER_EQUAL);
  context->cache_config = config;  // a preference, which devices with a unified cache ignore
  return CUDA_SUCCESS;
}

CUresult cuCtxGetSharedMemConfig(CUsharedconfig* config) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  REQUIRE(config != nullptr);
  *config = context->shared_config;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetSharedMemConfig(CUsharedconfig config) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  context->shared_config = config;
  return CUDA_SUCCESS;
}

CUresult cuCtxResetPersistingL2Cache(void) {
  Context* context;
  return enter(&context);
}

CUresult cuCtxGetExecAffinity(CUexecAffinityParam*, CUexecAffinityType) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
}

CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned int flags) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  REQUIRE(flags == 0);
  const Context* peer = find_context(handle);
  if (peer == nullptr || peer == context) return CUDA_ERROR_INVALID_CONTEXT;
  return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
}

CUresult cuCtxDisablePeerAccess(CUcontext handle) {
  Context* context;
  if (const CUresult e = enter(&context)) return e;
  if (find_context(handle) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

}  // extern "C"
#pragma GCC visibility pop
