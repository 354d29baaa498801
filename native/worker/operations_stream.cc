// Streams and events.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <algorithm>

#include "worker/session_state.h"
#include "worker/waiting.h"

namespace gpupool::worker {
namespace {

using wire::Operation;

bool create_stream(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::StreamCreate>();
  if (!decoder.finished()) return session.malformed(command);
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  Stream* stream = session.streams.create(body.stream);
  if (stream == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  CUstream made = nullptr;
  const CUresult result = session.query(context, [&] {
    return session.driver().cuStreamCreateWithPriority(&made, body.flags, body.priority);
  });
  if (result != CUDA_SUCCESS) {
    session.streams.erase(body.stream);
    return session.answer(command, result);
  }
  stream->driver = made;
  stream->context = context;
  stream->non_blocking = (body.flags & CU_STREAM_NON_BLOCKING) != 0;
  stream->fence_seen = 0;
  if (stream->non_blocking) context->non_blocking_streams++;
  return session.answer(command, CUDA_SUCCESS);
}

bool destroy_stream(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const wire::Handle handle = decoder.handle();
  if (!decoder.finished()) return session.malformed(command);
  Stream* stream = session.streams.find(handle);
  if (stream == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  Context* context = stream->context;
  // Its work goes on, and nobody can ask the stream any more whether it is done: the memory that
  // is freed from now on has to wait for it by other means.
  session.query(context, [&] { return CUDA_SUCCESS; });
  if (stream->busy) {
    if (session.driver().cuStreamQuery(stream->driver) == CUDA_ERROR_NOT_READY) {
      CUevent event = nullptr;
      if (session.driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS) {
        session.driver().cuEventRecord(event, stream->driver);
        session.driver().cuStreamWaitEvent(context->legacy.driver, event, 0);
        session.driver().cuEventDestroy_v2(event);
        if (!context->legacy.busy) {
          context->legacy.busy = true;
          context->busy.push_back(&context->legacy);
        }
      }
    }
    std::erase(context->busy, stream);
  }
  if (stream->non_blocking) context->non_blocking_streams--;
  const CUresult result = session.driver().cuStreamDestroy_v2(stream->driver);
  session.streams.erase(handle);
  return session.answer(command, result);
}

bool create_event(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const wire::Handle handle = decoder.handle();
  const auto flags = decoder.narrow<unsigned>();
  if (!decoder.finished()) return session.malformed(command);
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  Event* event = session.events.create(handle);
  if (event == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  CUevent made = nullptr;
  const CUresult result =
      session.query(context, [&] { return session.driver().cuEventCreate(&made, flags); });
  if (result != CUDA_SUCCESS) {
    session.events.erase(handle);
    return session.answer(command, result);
  }
  event->driver = made;
  event->context = context->id;
  return session.answer(command, CUDA_SUCCESS);
}

bool destroy_event(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const wire::Handle handle = decoder.handle();
  if (!decoder.finished()) return session.malformed(command);
  Event* event = session.events.find(handle);
  Context* context = event == nullptr ? nullptr : session.context_by_id(event->context);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  const CUresult result =
      session.query(context, [&] { return session.driver().cuEventDestroy_v2(event->driver); });
  session.events.erase(handle);
  return session.answer(command, result);
}

}  // namespace

bool execute_stream(SessionState& session, const Command& command) {
  switch (static_cast<Operation>(command.operation)) {
    case Operation::kStreamCreateWithPriority:
      return create_stream(session, command);
    case Operation::kStreamDestroyV2:
      return destroy_stream(session, command);
    case Operation::kEventCreate:
      return create_event(session, command);
    case Operation::kEventDestroyV2:
      return destroy_event(session, command);
    default:
      break;
  }
  wire::Decoder decoder = command.body;
  const wire::Handle handle = decoder.handle();
  if (!decoder.finished() || !command.wants_reply()) return session.malformed(command);
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  const DriverTable& driver = session.driver();
  const auto operation = static_cast<Operation>(command.operation);
  if (operation == Operation::kStreamSynchronize || operation == Operation::kStreamQuery) {
    Stream* stream = session.stream(context, handle);
    if (stream == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
    const CUstream it = stream->driver;
    if (operation == Operation::kStreamQuery) {
      const CUresult result = session.query(context, [&] { return driver.cuStreamQuery(it); });
      session.send_finished_copies();
      return session.answer(command, result);
    }
    return poll_or_wait(
        session, command, context, [&driver, it] { return driver.cuStreamQuery(it); },
        [&driver, it] { return driver.cuStreamSynchronize(it); });
  }
  Event* event = session.event(handle);
  if (event == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  const CUevent it = event->driver;
  if (operation == Operation::kEventQuery) {
    const CUresult result = session.query(context, [&] { return driver.cuEventQuery(it); });
    session.send_finished_copies();
    return session.answer(command, result);
  }
  return poll_or_wait(
      session, command, context, [&driver, it] { return driver.cuEventQuery(it); },
      [&driver, it] { return driver.cuEventSynchronize(it); });
}

}  // namespace gpupool::worker
