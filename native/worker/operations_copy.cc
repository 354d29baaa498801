// Copies. Data to the device go from the connection into page-locked buffers and from there by the
// driver; data from the device the other way round, while the next piece is being copied.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>

#include <algorithm>
#include <deque>

#include "worker/session_state.h"
#include "worker/waiting.h"

namespace gpupool::worker {
namespace {

using wire::Operation;

constexpr uint64_t kMaxCopy = 1ull << 46;
constexpr size_t kPiecesAhead = 8;  // of a long copy from the device
constexpr uint64_t kLeastStraight = 64 * 1024;
constexpr size_t kPiecesHandedOver = Staging::kBuffers / 4;  // a waiter thread takes up to so many

// A copy in pieces that fit into staging buffers: whole rows, or parts of one.
struct Plan {
  uint64_t device = 0, pitch = 0, width = 0, bytes = 0;  // one row: pitch 0, width = bytes

  struct Piece {
    uint64_t device, width, rows, bytes;
  };
  // `run`: no more than that, where the copy is one row.
  Piece at(uint64_t done, uint64_t run = ~uint64_t{0}) const {
    const uint64_t row = done / width, column = done % width;
    const uint64_t address = device + row * pitch + column;
    if (width == bytes) {
      const uint64_t part = std::min({Staging::kBytes, width - column, run});
      return {address, part, 1, part};
    }
    if (column == 0 && width <= Staging::kBytes) {
      const uint64_t rows = std::min(Staging::kBytes / width, (bytes - done) / width);
      return {address, width, rows, rows * width};
    }
    const uint64_t part = std::min(Staging::kBytes, width - column);
    return {address, part, 1, part};
  }

  // Checks everything that a client could have got wrong.
  bool valid(const SessionState& session) const {
    if (bytes == 0 || bytes > kMaxCopy || width == 0 || width > bytes || bytes % width != 0)
      return false;
    const uint64_t rows = bytes / width;
    if (rows == 1) return session.device_range(device, width);
    if (pitch < width || pitch > kMaxCopy || (rows - 1) > kMaxCopy / pitch) return false;
    return session.device_range(device, (rows - 1) * pitch + width);
  }
};

Plan plan_of(uint64_t device, uint64_t bytes, uint64_t pitch, uint64_t width) {
  if (pitch == 0) return {device, 0, bytes, bytes};
  return {device, pitch, width, bytes};
}

// A stream that waits for the client must not keep the session from reading what others want.
size_t most_buffers(const SessionState& session) {
  return session.host_functions().outstanding() ? Staging::kMostBuffers : Staging::kBuffers;
}

CUresult submit_piece(SessionState& session, Context* context, Stream* stream, const Plan& plan,
                      const Plan::Piece& piece, uint8_t* host, bool to_device) {
  const DriverTable& driver = session.driver();
  return session.submit(context, stream, [&]() -> CUresult {
    if (piece.rows == 1 || plan.pitch == piece.width) {
      return to_device
                 ? driver.cuMemcpyHtoDAsync_v2(piece.device, host, piece.bytes, stream->driver)
                 : driver.cuMemcpyDtoHAsync_v2(host, piece.device, piece.bytes, stream->driver);
    }
    if (driver.cuMemcpy2DAsync_v2 == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    CUDA_MEMCPY2D copy{};
    copy.WidthInBytes = piece.width;
    copy.Height = piece.rows;
    copy.srcMemoryType = to_device ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    copy.dstMemoryType = to_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    if (to_device) {
      copy.srcHost = host;
      copy.srcPitch = piece.width;
      copy.dstDevice = piece.device;
      copy.dstPitch = plan.pitch;
    } else {
      copy.srcDevice = piece.device;
      copy.srcPitch = plan.pitch;
      copy.dstHost = host;
      copy.dstPitch = piece.width;
    }
    return driver.cuMemcpy2DAsync_v2(&copy, stream->driver);
  });
}

bool to_device(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::CopyToDevice>();
  const bool is_inline = (body.flags & wire::kCopyInline) != 0;
  std::string_view data;
  if (is_inline) data = decoder.raw(body.bytes);
  if (!decoder.finished() || (!is_inline && command.bulk_bytes != body.bytes)) {
    return session.malformed(command);
  }
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  Stream* stream = session.stream(context, body.stream);
  if (stream == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  const Plan plan = plan_of(body.destination, body.bytes, body.pitch, body.width);
  if (!plan.valid(session)) return session.answer(command, CUDA_ERROR_INVALID_VALUE);
  session.make_current(context);
  const bool lends = !is_inline && session.may_lend(context);
  for (uint64_t done = 0; done < body.bytes;) {
    const Plan::Piece piece = lends ? plan.at(done, session.bulk_run_in()) : plan.at(done);
    uint64_t end;
    if (const uint8_t* lying = lends ? session.lend_bulk(piece.bytes, &end) : nullptr) {
      // The driver only reads there.
      const CUresult result =
          submit_piece(session, context, stream, plan, piece, const_cast<uint8_t*>(lying), true);
      session.lent(end, piece.bytes, context, stream);
      if (result != CUDA_SUCCESS) return session.answer(command, result);
      done += piece.bytes;
      continue;
    }
    StagingBuffer* buffer = session.staging().acquire(context->driver, most_buffers(session));
    if (buffer == nullptr) return session.answer(command, CUDA_ERROR_OUT_OF_MEMORY);
    if (is_inline) {
      memcpy(buffer->data, data.data() + done, piece.bytes);
    } else if (!session.read_bulk(buffer->data, piece.bytes)) {
      session.staging().release(buffer);
      return false;
    }
    const CUresult result = submit_piece(session, context, stream, plan, piece, buffer->data, true);
    session.staging().release_after(buffer, stream->driver);
    if (result != CUDA_SUCCESS) return session.answer(command, result);
    done += piece.bytes;
  }
  session.bytes_in.fetch_add(body.bytes, std::memory_order_relaxed);
  if ((body.flags & wire::kCopySynchronous) != 0) {
    if (stream == &context->legacy) {
      session.set_fence(context);
    } else {
      session.driver().cuStreamSynchronize(stream->driver);
    }
  }
  return session.answer(command, CUDA_SUCCESS);
}

// A copy to the device whose source the client reads when the stream gets there.
bool pulled(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::CopyToDevice>();
  if (!decoder.finished() || body.flags != 0 || command.bulk_bytes != 0 ||
      body.bytes > wire::kMaxBulkSegment) {
    return session.malformed(command);
  }
  const uint32_t number = body.reserved;
  auto refuse = [&](CUresult result) {
    session.tell_host_function(command.context, number, result, true);
    return session.answer(command, result);
  };
  Context* context = session.context(command);
  if (context == nullptr) return refuse(CUDA_ERROR_INVALID_CONTEXT);
  Stream* stream = session.stream(context, body.stream);
  if (stream == nullptr) return refuse(CUDA_ERROR_INVALID_HANDLE);
  const Plan plan = plan_of(body.destination, body.bytes, body.pitch, body.width);
  const auto launch = session.driver().cuLaunchHostFunc;
  if (launch == nullptr) return refuse(CUDA_ERROR_NOT_SUPPORTED);
  if (!plan.valid(session)) return refuse(CUDA_ERROR_INVALID_VALUE);
  session.make_current(context);
  std::vector<std::pair<StagingBuffer*, Plan::Piece>> pieces;
  std::vector<HostFunctions::Place> places;
  for (uint64_t done = 0; done < body.bytes; done += pieces.back().second.bytes) {
    StagingBuffer* buffer = session.staging().acquire(context->driver, most_buffers(session));
    if (buffer == nullptr) {
      for (const auto& [taken, piece] : pieces) session.staging().release(taken);
      return refuse(CUDA_ERROR_OUT_OF_MEMORY);
    }
    pieces.emplace_back(buffer, plan.at(done));
    places.push_back({buffer->data, pieces.back().second.bytes});
  }
  HostFunctions::Call* call =
      session.host_functions().add(number, context->id, context->driver, std::move(places));
  CUresult result =
      call == nullptr ? CUDA_ERROR_OUT_OF_MEMORY : session.submit(context, stream, [&] {
        return launch(stream->driver, HostFunctions::enter, call);
      });
  if (result != CUDA_SUCCESS) {
    if (call != nullptr) session.host_functions().remove(call);
    for (const auto& [buffer, piece] : pieces) session.staging().release(buffer);
    return refuse(result);
  }
  for (const auto& [buffer, piece] : pieces) {
    if (result == CUDA_SUCCESS) {
      result = submit_piece(session, context, stream, plan, piece, buffer->data, true);
    }
    session.staging().release_after(buffer, stream->driver);
  }
  session.bytes_in.fetch_add(body.bytes, std::memory_order_relaxed);
  return session.answer(command, result);
}

// Waits until no more than `most` pieces are on their way. Sends them, if nobody else does.
void wait_for_pieces(SessionState& session, Outgoing& copy, size_t most) {
  for (;;) {
    CUevent event;
    {
      std::lock_guard guard(copy.lock);
      if (!copy.entries.empty()) copy.entries.front().held = false;
      send_finished(session, copy);
      if (copy.entries.size() <= most) return;
      copy.entries.front().held = true;
      event = copy.entries.front().buffer->event;
    }
    session.driver().cuEventSynchronize(event);
  }
}

// All pieces of a copy are sent, or an error is told. False: the client has gone.
bool finish(SessionState& session, Outgoing& copy) {
  wait_for_pieces(session, copy, 0);
  session.outgoing().remove(&copy);
  return !copy.gone;
}

// As many pieces as a device that does nothing else can copy straight to where the client reads
// them; the rest goes the usual way. (A long copy keeps the reader waiting in any case.) False: the
// client has gone.
bool from_idle_device(SessionState& session, const Command& command, Context* context,
                      Stream* stream, const Plan& plan, bool small, uint64_t* done) {
  if (plan.bytes < kLeastStraight || context->printing) return true;
  if (!small) {
    const CUresult waited = session.submit(
        context, stream, [&] { return session.driver().cuStreamSynchronize(stream->driver); });
    if (waited != CUDA_SUCCESS) return true;
  }
  if (!session.may_lend(context)) return true;
  session.send_finished_copies();
  while (*done < plan.bytes) {
    const Plan::Piece piece = plan.at(*done, session.bulk_run_out());
    bool made = false;
    CUresult result = CUDA_SUCCESS;
    if (!session.reply_from_device(
            command.call, piece.bytes, stream, *done + piece.bytes != plan.bytes, &made, &result,
            [&](uint8_t* room) {
              return submit_piece(session, context, stream, plan, piece, room, false);
            })) {
      return false;
    }
    // An error comes again where it is told.
    if (!made || result != CUDA_SUCCESS) return true;
    *done += piece.bytes;
    session.bytes_out.fetch_add(piece.bytes, std::memory_order_relaxed);
  }
  return true;
}

bool from_device(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::CopyFromDevice>();
  if (!decoder.finished() || !command.wants_reply()) return session.malformed(command);
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  Stream* stream = session.stream(context, body.stream);
  if (stream == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  const Plan plan = plan_of(body.source, body.bytes, body.pitch, body.width);
  if (!plan.valid(session)) return session.answer(command, CUDA_ERROR_INVALID_VALUE);
  session.make_current(context);
  const uint64_t pieces = (body.bytes + Staging::kBytes - 1) / Staging::kBytes;
  const bool small = session.host_functions().outstanding()
                         ? pieces <= Staging::kMostBuffers / 2
                         : pieces <= kPiecesHandedOver && plan.pitch == 0;

  uint64_t straight = 0;
  if (!from_idle_device(session, command, context, stream, plan, small, &straight)) return false;
  if (straight == body.bytes) return true;

  auto outgoing = std::make_shared<Outgoing>();
  outgoing->call = command.call;
  outgoing->left = body.bytes - straight;
  outgoing->context = command.context;
  outgoing->printing = context->printing;
  session.outgoing().add(outgoing);
  for (uint64_t done = straight; done < body.bytes && !outgoing->over;) {
    // A long copy stays with the reader, so that what comes after it in the stream stays behind it.
    if (!small) wait_for_pieces(session, *outgoing, kPiecesAhead - 1);
    const Plan::Piece piece = plan.at(done);
    StagingBuffer* buffer = session.staging().acquire(context->driver, most_buffers(session));
    CUresult result = buffer == nullptr ? CUDA_ERROR_OUT_OF_MEMORY
                                        : submit_piece(session, context, stream, plan, piece,
                                                       buffer->data, false);
    if (result == CUDA_SUCCESS) result = session.staging().record(buffer, stream->driver);
    if (result != CUDA_SUCCESS) {
      if (buffer != nullptr) {
        session.driver().cuStreamSynchronize(stream->driver);
        session.staging().release(buffer);
      }
      std::unique_lock guard(outgoing->lock);
      const bool told = outgoing->over;
      outgoing->over = true;
      guard.unlock();
      if (!finish(session, *outgoing)) return false;
      return told || session.answer(command, result);
    }
    std::lock_guard guard(outgoing->lock);
    outgoing->entries.push_back({buffer, piece.bytes});
    done += piece.bytes;
  }
  session.bytes_out.fetch_add(body.bytes - straight, std::memory_order_relaxed);
  if (!small) return finish(session, *outgoing);

  const int64_t end = monotonic_us() + kPollUs;
  do {
    std::lock_guard guard(outgoing->lock);
    send_finished(session, *outgoing);
    if (!outgoing->entries.empty()) continue;
    session.outgoing().remove(outgoing.get());
    return !outgoing->gone;
  } while (monotonic_us() < end);
  const CUcontext driver_context = context->driver;
  auto task = [&session, driver_context, outgoing] {
    session.enter_on_this_thread(driver_context);
    finish(session, *outgoing);
  };
  return session.waiters().run(task) || finish(session, *outgoing);
}

bool on_device(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::CopyRows>();
  if (!decoder.finished()) return session.malformed(command);
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  Stream* stream = session.stream(context, body.stream);
  if (stream == nullptr) return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  if (body.width == 0 || body.height == 0 || body.width > kMaxCopy ||
      body.height > kMaxCopy / body.width) {
    return session.answer(command, CUDA_ERROR_INVALID_VALUE);
  }
  const uint64_t bytes = body.width * body.height;
  const Plan to{body.destination, body.destination_pitch, body.width, bytes};
  const Plan from{body.source, body.source_pitch, body.width, bytes};
  if (!to.valid(session) || !from.valid(session)) {
    return session.answer(command, CUDA_ERROR_INVALID_VALUE);
  }
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = body.source;
  copy.srcPitch = body.source_pitch;
  copy.dstDevice = body.destination;
  copy.dstPitch = body.destination_pitch;
  copy.WidthInBytes = body.width;
  copy.Height = body.height;
  const auto call = session.driver().cuMemcpy2DAsync_v2;
  if (call == nullptr) return session.answer(command, CUDA_ERROR_NOT_SUPPORTED);
  return session.answer(
      command, session.submit(context, stream, [&] { return call(&copy, stream->driver); }));
}

}  // namespace

void send_finished(SessionState& session, Outgoing& copy) {
  for (Outgoing::Entry& entry : copy.entries) {
    if (entry.sent) continue;
    const CUresult result = session.driver().cuEventQuery(entry.buffer->event);
    if (result == CUDA_ERROR_NOT_READY) break;
    entry.sent = true;
    if (copy.over) continue;
    if (copy.left == entry.bytes) {
      // The client may take this one's end for that of earlier ones that it is ordered with.
      session.outgoing().for_each_before(
          &copy, [&session](Outgoing& earlier) { send_finished(session, earlier); });
    }
    if (copy.printing && (result != CUDA_SUCCESS || copy.left == entry.bytes)) {
      // What was printed goes ahead of the last reply; the driver hands it out when it is waited
      // for.
      session.driver().cuEventSynchronize(entry.buffer->event);
      session.before_reply(copy.context, result, true);
    }
    if (result == CUDA_SUCCESS) {
      copy.left -= entry.bytes;
      const carriers::Part part{entry.buffer->data, entry.bytes};
      copy.gone = !session.reply(copy.call, CUDA_SUCCESS, nullptr, 0, &part, 1, copy.left != 0);
    } else {
      copy.gone = !session.reply(copy.call, result, nullptr, 0);
    }
    copy.over = copy.gone || result != CUDA_SUCCESS;
  }
  while (!copy.entries.empty() && copy.entries.front().sent && !copy.entries.front().held) {
    session.staging().release(copy.entries.front().buffer);
    copy.entries.pop_front();
  }
  if (copy.left == 0 || copy.over) copy.done.store(true, std::memory_order_release);
}

bool execute_copy(SessionState& session, const Command& command) {
  switch (static_cast<Operation>(command.operation)) {
    case Operation::kMemcpyHtoDAsyncV2:
      return to_device(session, command);
    case Operation::kPulledCopy:
      return pulled(session, command);
    case Operation::kMemcpyDtoHAsyncV2:
      return from_device(session, command);
    default:
      return on_device(session, command);
  }
}

}  // namespace gpupool::worker
