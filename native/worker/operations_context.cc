// Contexts: creating, destroying, synchronising, limits.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/session_state.h"
#include "worker/waiting.h"

namespace gpupool::worker {
namespace {

constexpr int kMaxContexts = 64;

bool create(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::ContextCreate>();
  if (!decoder.finished() || !command.wants_reply() || command.context != body.context.index) {
    return session.malformed(command);
  }
  const DriverTable& driver = session.driver();
  const int device = session.assignment().device_ordinal;
  int count = 0;
  bool id_taken = false, has_primary = false;
  session.contexts.for_each([&](wire::Handle handle, Context& context) {
    count++;
    id_taken = id_taken || handle.index == body.context.index;
    has_primary = has_primary || context.primary;
  });
  if (count >= kMaxContexts) return session.answer(command, CUDA_ERROR_OUT_OF_MEMORY);
  // The driver has one primary context: two objects for it would end it under one another.
  if (id_taken || (body.primary != 0 && has_primary)) {
    return session.answer(command, CUDA_ERROR_INVALID_VALUE);
  }

  CUcontext made = nullptr;
  CUresult result;
  if (body.primary != 0) {
    if (driver.cuDevicePrimaryCtxSetFlags_v2 != nullptr) {
      driver.cuDevicePrimaryCtxSetFlags_v2(device, body.flags);
    }
    result = driver.cuDevicePrimaryCtxRetain(&made, device);
  } else {
    result = driver.cuCtxCreate_v2 == nullptr ? CUDA_ERROR_NOT_SUPPORTED
                                              : driver.cuCtxCreate_v2(&made, body.flags, device);
    if (result == CUDA_SUCCESS) {
      CUcontext popped;
      driver.cuCtxPopCurrent_v2(&popped);
    }
  }
  if (result != CUDA_SUCCESS) return session.answer(command, result);
  driver.cuCtxSetCurrent(made);

  wire::ContextCreated created{};
  if (!session.memory().reserved() &&
      !session.memory().reserve(device, body.arena_base, body.arena_bytes)) {
    session.make_current(nullptr);
    if (body.primary != 0) {
      driver.cuDevicePrimaryCtxRelease_v2(device);
    } else {
      driver.cuCtxDestroy_v2(made);
    }
    return session.answer(command, CUDA_SUCCESS, &created, sizeof created);
  }
  // A later context has to live with the arena that is there.
  created.arena_base = session.memory().arena_base();
  created.arena_bytes = session.memory().arena_bytes();
  created.arena_accepted = created.arena_base == body.arena_base ? 1 : 0;
  Context* context = session.contexts.create(body.context);
  if (context == nullptr) {
    session.make_current(nullptr);
    if (body.primary != 0) {
      driver.cuDevicePrimaryCtxRelease_v2(device);
    } else {
      driver.cuCtxDestroy_v2(made);
    }
    return session.answer(command, CUDA_ERROR_INVALID_VALUE);
  }
  context->driver = made;
  context->id = body.context.index;
  context->handle = body.context;
  context->primary = body.primary != 0;
  context->legacy.context = context;
  session.make_current(context);
  if (count == 0) {
    session.account().open();
  } else if (!session.account().settle()) {  // the first one's memory is the card's reserve
    session.destroy_context(context);
    return session.answer(command, CUDA_ERROR_OUT_OF_MEMORY);
  }
  return session.answer(command, CUDA_SUCCESS, &created, sizeof created);
}

// A driver takes the heap and printf's buffer when they are first used, so they are charged here;
// what it takes at once for other limits is seen in what it holds.
bool set_limit(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const int number = decoder.narrow<int32_t>();
  const uint64_t value = decoder.scalar();
  if (!decoder.finished()) return session.malformed(command);
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  if (number < 0 || number >= CU_LIMIT_MAX) {
    return session.answer(command, CUDA_ERROR_INVALID_VALUE);
  }
  const auto limit = static_cast<CUlimit>(number);
  // A part of the card's cache, which all slices use.
  if (limit == CU_LIMIT_PERSISTING_L2_CACHE_SIZE) {
    return session.answer(command, CUDA_ERROR_UNSUPPORTED_LIMIT);
  }
  const auto set = session.driver().cuCtxSetLimit;
  const auto get = session.driver().cuCtxGetLimit;
  if (set == nullptr || get == nullptr) return session.answer(command, CUDA_ERROR_NOT_SUPPORTED);
  size_t before = 0;
  const CUresult known = session.query(context, [&] { return get(&before, limit); });
  if (known != CUDA_SUCCESS) return session.answer(command, known);

  const bool later = limit == CU_LIMIT_MALLOC_HEAP_SIZE || limit == CU_LIMIT_PRINTF_FIFO_SIZE;
  LimitCharge unused;
  LimitCharge& held =
      later ? context->limits.try_emplace(limit, LimitCharge{before, 0}).first->second : unused;
  // Brings the charge to what a limit of this size needs. False: the slice has no room for it.
  const auto charge = [&](uint64_t size) {
    const uint64_t wanted = later && size > held.own ? size - held.own : 0;
    if (wanted > held.charged && !session.account().charge(wanted - held.charged)) return false;
    if (wanted < held.charged) session.account().refund(held.charged - wanted);
    held.charged = wanted;
    return true;
  };
  if (value > before && !charge(value)) return session.answer(command, CUDA_ERROR_OUT_OF_MEMORY);
  CUresult result = set(limit, value);
  size_t granted = before;
  if (result == CUDA_SUCCESS) get(&granted, limit);
  if (!charge(granted) || !session.account().settle()) {
    set(limit, before);
    charge(before);
    session.account().settle();
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  return session.answer(command, result);
}

}  // namespace

bool execute_context(SessionState& session, const Command& command) {
  if (static_cast<wire::Operation>(command.operation) == wire::Operation::kCtxCreateV4) {
    return create(session, command);
  }
  if (static_cast<wire::Operation>(command.operation) == wire::Operation::kCtxSetLimit) {
    return set_limit(session, command);
  }
  wire::Decoder decoder = command.body;
  if (static_cast<wire::Operation>(command.operation) == wire::Operation::kCtxDestroyV2) {
    const wire::Handle handle = decoder.handle();
    if (!decoder.finished()) return session.malformed(command);
    Context* context = session.contexts.find(handle);
    if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
    const bool printing = context->printing;
    session.destroy_context(context);
    session.before_reply(command.context, CUDA_SUCCESS, printing);
    return session.answer(command, CUDA_SUCCESS);
  }
  if (!decoder.finished() || !command.wants_reply()) return session.malformed(command);
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  const auto synchronize = session.driver().cuCtxSynchronize;
  return poll_or_wait(
      session, command, context,
      [&session, context] {
        // A stream in error is not idle: the waiting call says which error.
        return session.idle(context) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
      },
      [synchronize] { return synchronize(); });
}

}  // namespace gpupool::worker
