// Memory that a program maps by itself. All of these wait for an answer: they are rare, and their
// errors belong to the call.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/session_state.h"

namespace gpupool::worker {

using wire::Operation;

bool execute_virtual_memory(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  VirtualMemory& memory = session.virtual_memory();
  const auto operation = static_cast<Operation>(command.operation);
  wire::Handle handle{};
  if (operation == Operation::kMemCreate || operation == Operation::kMemRelease) {
    handle = decoder.handle();
  }
  uint64_t words[3] = {};
  const int count = operation == Operation::kMemRelease  ? 0
                    : operation == Operation::kMemCreate ? 1
                    : operation == Operation::kMemUnmap || operation == Operation::kMemAddressFree
                        ? 2
                        : 3;
  for (int i = 0; i < count; i++) words[i] = decoder.scalar();
  if (operation == Operation::kMemMap) handle = decoder.handle();
  if (!decoder.finished() || !command.wants_reply()) return session.malformed(command);
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  session.make_current(context);
  uint64_t address = 0;
  CUresult result = CUDA_ERROR_NOT_SUPPORTED;
  switch (operation) {
    case Operation::kMemAddressReserve:
      result = memory.reserve(words[0], words[1], words[2], &address);
      return session.answer(command, result, &address, sizeof address);
    case Operation::kMemAddressFree:
      result = memory.free(words[0], words[1]);
      break;
    case Operation::kMemCreate:
      session.free_ready(false);
      result = memory.create(handle, words[0]);
      if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        session.free_ready(true);
        result = memory.create(handle, words[0]);
      }
      break;
    case Operation::kMemRelease:
      result = memory.release(handle);
      break;
    case Operation::kMemMap:
      result = memory.map(words[0], words[1], words[2], handle);
      break;
    case Operation::kMemUnmap:
      result = memory.unmap(words[0], words[1]);
      break;
    case Operation::kMemSetAccess:
      if (words[2] > CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
        result = CUDA_ERROR_INVALID_VALUE;
      } else {
        result = memory.set_access(words[0], words[1], static_cast<unsigned>(words[2]));
      }
      break;
    default:
      break;
  }
  return session.answer(command, result);
}

}  // namespace gpupool::worker
