// Memory: allocating, freeing, how much there is.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <algorithm>

#include "worker/session_state.h"

namespace gpupool::worker {

bool execute_memory(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto operation = static_cast<wire::Operation>(command.operation);
  Context* context = session.context(command);
  if (operation == wire::Operation::kMemGetInfoV2) {
    if (!decoder.finished() || !command.wants_reply()) return session.malformed(command);
    const MemoryAccount::State state = session.account().query();
    const uint64_t used = std::min(state.used_bytes, state.limit_bytes);
    const uint64_t words[2] = {state.limit_bytes - used, state.limit_bytes};
    return session.answer(command, CUDA_SUCCESS, words, sizeof words);
  }
  const uint64_t argument = decoder.scalar();
  if (!decoder.finished()) return session.malformed(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  if (operation == wire::Operation::kMemFreeV2) {
    if (!session.memory().forget(argument))
      return session.answer(command, CUDA_ERROR_INVALID_VALUE);
    session.free_later(context, argument);
    return session.answer(command, CUDA_SUCCESS);
  }
  if (!command.wants_reply()) return session.malformed(command);
  uint64_t address = 0;
  session.make_current(context);
  session.free_ready(false);
  CUresult result = session.memory().allocate(argument, context->id, &address);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    // What is free already, but was in use by the device until now, is free for the program.
    session.free_ready(true);
    result = session.memory().allocate(argument, context->id, &address);
  }
  return session.answer(command, result, &address, sizeof address);
}

}  // namespace gpupool::worker
