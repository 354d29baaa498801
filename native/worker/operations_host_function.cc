// Functions of the program in a stream, and the answers to their calls.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/session_state.h"

namespace gpupool::worker {
namespace {

using wire::Operation;

bool launch(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::HostFunctionLaunch>();
  if (!decoder.finished()) return session.malformed(command);
  auto refuse = [&](CUresult result) {
    session.tell_host_function(command.context, body.number, result, true);
    return session.answer(command, result);
  };
  Context* context = session.context(command);
  if (context == nullptr) return refuse(CUDA_ERROR_INVALID_CONTEXT);
  Stream* stream = session.stream(context, body.stream);
  if (stream == nullptr) return refuse(CUDA_ERROR_INVALID_HANDLE);
  const DriverTable& driver = session.driver();
  const bool with_status = body.with_status != 0;
  if (with_status ? driver.cuStreamAddCallback == nullptr : driver.cuLaunchHostFunc == nullptr) {
    return refuse(CUDA_ERROR_NOT_SUPPORTED);
  }
  HostFunctions::Call* call =
      session.host_functions().add(body.number, context->id, context->driver, {});
  if (call == nullptr) return refuse(CUDA_ERROR_OUT_OF_MEMORY);
  const CUresult result = session.submit(context, stream, [&] {
    return with_status ? driver.cuStreamAddCallback(stream->driver,
                                                    HostFunctions::enter_with_status, call, 0)
                       : driver.cuLaunchHostFunc(stream->driver, HostFunctions::enter, call);
  });
  if (result == CUDA_SUCCESS) return session.answer(command, CUDA_SUCCESS);
  session.host_functions().remove(call);
  return refuse(result);
}

}  // namespace

bool execute_host_function(SessionState& session, const Command& command) {
  if (static_cast<Operation>(command.operation) == Operation::kLaunchHostFunc) {
    return launch(session, command);
  }
  // An answer among other commands; those that come alone were dealt with ahead, if that mattered.
  wire::Decoder decoder = command.body;
  const uint64_t number = decoder.scalar();
  if (!decoder.finished() || command.wants_reply() || command.bulk_bytes > wire::kMaxBulkSegment) {
    return session.malformed(command);
  }
  std::vector<uint8_t> data(command.bulk_bytes);
  if (!data.empty() && !session.read_bulk(data.data(), data.size())) return false;
  std::string why;
  if (!session.host_functions().answer(static_cast<uint32_t>(number), data.data(), data.size(),
                                       &why)) {
    return session.refuse(why);
  }
  return true;
}

}  // namespace gpupool::worker
