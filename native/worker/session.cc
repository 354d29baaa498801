#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/session.h"

#include <string.h>

#include <algorithm>
#include <new>
#include <system_error>

#include "worker/plain.h"
#include "worker/session_state.h"

namespace gpupool::worker {
namespace {
constexpr uint64_t kAnswerCredit = 512 * 1024;
}

using carriers::Part;
using wire::FrameKind;
using wire::FrameReader;
using wire::Operation;

bool is_sticky(CUresult error) {
  switch (error) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
      return true;
    default:
      return false;
  }
}

SessionState::SessionState(std::unique_ptr<carriers::Carrier> carrier, const Assignment& assignment,
                           Driver& driver, MemoryAccount& account)
    : carrier_(std::move(carrier)),
      assignment_(assignment),
      driver_(driver),
      account_(account, assignment.usage),
      writer_(*carrier_, assignment.epoch),
      base_credit_(assignment.initial_credit),
      told_(assignment.initial_credit),
      memory_(driver.table(), account_),
      virtual_memory_(driver.table(), account_, memory_),
      staging_(driver.table()),
      lent_(driver.table(), *carrier_),
      host_functions_(
          [this](uint32_t context, CUcontext driver_context, uint32_t number, CUresult status) {
            enter_on_this_thread(driver_context);
            send_finished_copies();
            tell_host_function(context, number, status, false);
          }),
      reader_(*carrier_, assignment.epoch, *this) {}

SessionState::~SessionState() {
  carrier_->shutdown();  // waiter threads that send come back
  bookkeeper_.stop();
  host_functions_.close();
  waiters_.stop();
  std::vector<Context*> open;
  contexts.for_each([&](wire::Handle, Context& context) { open.push_back(&context); });
  for (Context* context : open) destroy_context(context);
  virtual_memory_.close();
  memory_.close();
}

// ---- The reader -------------------------------------------------------------------------------

SessionOutcome SessionState::run() {
  try {
    const SessionOutcome outcome = serve();
    const std::string why = ended_why();
    return why.empty() ? outcome : SessionOutcome{SessionEnd::kProtocolError, why};
  } catch (const std::bad_alloc&) {
    refuse("there is no more memory of the host for this session");
    return {SessionEnd::kProtocolError, refused_};
  } catch (const std::system_error& error) {  // a thread that cannot be started
    refuse(std::string("the session has used up the host's resources: ") + error.what());
    return {SessionEnd::kProtocolError, refused_};
  }
}

SessionOutcome SessionState::serve() {
  for (;;) {
    switch (reader_.next(pending_frees_.empty())) {
      case FrameReader::Result::kFrame:
        if (std::lock_guard turn(turn_); !take_frame()) {
          if (refused_.empty() && carrier_->broken() != nullptr) refuse(carrier_->broken());
          if (refused_.empty())
            return {SessionEnd::kClientGone, "the client closed the connection"};
          return {SessionEnd::kProtocolError, refused_};
        }
        grant_credit();
        continue;
      case FrameReader::Result::kClosed:
        return {SessionEnd::kClientGone, "the client closed the connection"};
      case FrameReader::Result::kBad:
        refuse(reader_.reason());
        return {SessionEnd::kProtocolError, refused_};
      case FrameReader::Result::kBlocked:
        break;
    }
    {
      std::lock_guard turn(turn_);
      free_ready(false);
    }
    if (!pending_frees_.empty()) reader_.wait(2000);
  }
}

namespace {
// Work that goes on when the client has answered: while it is outstanding somebody has to read.
bool makes_the_device_wait(uint16_t operation) {
  return operation == static_cast<uint16_t>(Operation::kLaunchHostFunc) ||
         operation == static_cast<uint16_t>(Operation::kPulledCopy);
}
}  // namespace

bool SessionState::take_frame() {
  const wire::FrameHeader header = reader_.header();
  const auto kind = static_cast<FrameKind>(header.kind);
  if (reader_.received() + reader_.bulk_left() > base_credit_.load(std::memory_order_relaxed)) {
    return refuse("more was sent than was granted");
  }
  if (header.acknowledged > writer_.sequence()) return refuse("a wrong acknowledgement");
  if (kind == FrameKind::kCredit) {
    if (header.body_bytes != 0 || header.bulk_count != 0)
      return refuse("a credit frame with a body");
    return true;
  }
  if (kind != FrameKind::kCommands) return refuse("a frame of a kind that a client does not send");
  const uint8_t* at = reader_.body();
  size_t left = header.body_bytes;
  int segment = 0;
  while (left > 0) {
    wire::CommandHeader head;
    if (left < sizeof head) return refuse("a command does not fit its frame");
    memcpy(&head, at, sizeof head);
    const size_t minimum = sizeof head + ((head.flags & wire::kWantsReply) ? 8 : 0);
    if (head.bytes < minimum || head.bytes > left || head.bytes % 8 != 0) {
      return refuse("a command does not fit its frame");
    }
    if (segment + head.bulk_count > header.bulk_count) {
      return refuse("a command claims more bulk segments than there are");
    }
    if (makes_the_device_wait(head.operation)) {
      lent_.collect(0);  // the deputy reads what must find room
      if (!reader_.delegate(&at)) return false;
    }
    Command command;
    command.operation = head.operation;
    command.flags = head.flags;
    command.bulk_count = head.bulk_count;
    command.thread = head.thread;
    command.context = head.context;
    if (command.wants_reply()) memcpy(&command.call, at + sizeof head, 8);
    for (int i = 0; i < head.bulk_count; i++) command.bulk_bytes += reader_.segments()[segment++];
    command.body = wire::Decoder(at + minimum, head.bytes - minimum);
    const uint64_t left_after = reader_.bulk_left() - command.bulk_bytes;
    if (!execute(command)) return false;
    if (reader_.bulk_left() > left_after && !skip_bulk(reader_.bulk_left() - left_after))
      return false;
    commands_done.fetch_add(1, std::memory_order_relaxed);
    at += head.bytes;
    left -= head.bytes;
  }
  if (segment != header.bulk_count) return refuse("bulk segments that belong to no command");
  taken_.store(reader_.sequence(), std::memory_order_relaxed);
  return keep_books();
}

bool SessionState::execute(const Command& command) {
  switch (static_cast<Operation>(command.operation)) {
    case Operation::kLaunchKernel:
    case Operation::kOccupancyMaxActiveClusters:
    case Operation::kOccupancyMaxPotentialClusterSize:
      return execute_launch(*this, command);
    case Operation::kCtxCreateV4:
    case Operation::kCtxDestroyV2:
    case Operation::kCtxSynchronize:
    case Operation::kCtxSetLimit:
      return execute_context(*this, command);
    case Operation::kMemAllocV2:
    case Operation::kMemFreeV2:
    case Operation::kMemGetInfoV2:
      return execute_memory(*this, command);
    case Operation::kMemcpyHtoDAsyncV2:
    case Operation::kPulledCopy:
    case Operation::kMemcpyDtoHAsyncV2:
    case Operation::kMemcpy2DAsyncV2:
      return execute_copy(*this, command);
    case Operation::kModuleLoadDataEx:
    case Operation::kModuleUnload:
    case Operation::kModuleGetFunction:
    case Operation::kModuleGetGlobalV2:
    case Operation::kFuncGetAttribute:
    case Operation::kFuncSetAttribute:
    case Operation::kOccupancyMaxActiveBlocksPerMultiprocessorWithFlags:
      return execute_module(*this, command);
    case Operation::kStreamCreateWithPriority:
    case Operation::kStreamDestroyV2:
    case Operation::kStreamSynchronize:
    case Operation::kStreamQuery:
    case Operation::kEventCreate:
    case Operation::kEventDestroyV2:
    case Operation::kEventSynchronize:
    case Operation::kEventQuery:
      return execute_stream(*this, command);
    case Operation::kLinkCreateV2:
    case Operation::kLinkAddDataV2:
    case Operation::kLinkComplete:
    case Operation::kLinkDestroy:
      return execute_link(*this, command);
    case Operation::kLaunchHostFunc:
    case Operation::kHostFunctionDone:
      return execute_host_function(*this, command);
    case Operation::kMemAddressReserve:
    case Operation::kMemAddressFree:
    case Operation::kMemCreate:
    case Operation::kMemRelease:
    case Operation::kMemMap:
    case Operation::kMemUnmap:
    case Operation::kMemSetAccess:
      return execute_virtual_memory(*this, command);
    case Operation::kGraphInstantiateWithFlags:
    case Operation::kGraphExecUpdateV2:
    case Operation::kGraphExecDestroy:
    case Operation::kGraphLaunch:
    case Operation::kGraphUpload:
      return execute_graph(*this, command);
    default:
      return execute_plain(*this, command);
  }
}

// ---- Sending ----------------------------------------------------------------------------------

bool SessionState::send(FrameKind kind, const void* body, uint32_t bytes, const Part* bulk,
                        int bulk_count) {
  // The client reads whenever it waits for room, so this ends; the reader need not read meanwhile.
  const uint64_t granted = credit();
  told_.store(granted, std::memory_order_relaxed);
  return writer_.send(kind, body, bytes, bulk, bulk_count, taken_.load(std::memory_order_relaxed),
                      granted, [this] {
                        carrier_->wait(carriers::kWritable, -1);
                        return true;
                      });
}

void SessionState::grant_credit() {
  // Told with every frame; by one of its own only if half of it is used up without any.
  base_credit_.store(reader_.received() + assignment_.initial_credit, std::memory_order_relaxed);
  const uint64_t target = credit();
  if (target - told_.load(std::memory_order_relaxed) < assignment_.initial_credit / 2) return;
  std::lock_guard guard(send_lock_);
  send(FrameKind::kCredit, nullptr, 0, nullptr, 0);
}

void SessionState::took_ahead(uint64_t bytes) {
  ahead_.fetch_add(bytes, std::memory_order_relaxed);
  // The client keeps some of its credit for answers: told before that is used up.
  if (credit() - told_.load(std::memory_order_relaxed) < kAnswerCredit) return;
  std::lock_guard guard(send_lock_);
  send(FrameKind::kCredit, nullptr, 0, nullptr, 0);
}

// A frame that is nothing but one answer is dealt with at once.
bool SessionState::take_ahead(const wire::FrameHeader& header, const uint8_t* body,
                              const std::vector<uint8_t>& bulk, std::string* why) {
  wire::CommandHeader head;
  if (static_cast<FrameKind>(header.kind) != FrameKind::kCommands ||
      header.body_bytes != sizeof head + 8) {
    return false;
  }
  memcpy(&head, body, sizeof head);
  if (head.operation != static_cast<uint16_t>(Operation::kHostFunctionDone) ||
      head.bytes != header.body_bytes || head.flags != 0 || head.bulk_count != header.bulk_count) {
    return false;
  }
  uint64_t number;
  memcpy(&number, body + sizeof head, 8);
  return host_functions_.answer(static_cast<uint32_t>(number), bulk.data(), bulk.size(), why);
}

void SessionState::tell_host_function(uint32_t context, uint32_t number, CUresult status,
                                      bool refused) {
  const wire::HostFunctionCall body{number, status, refused ? 1u : 0u, 0};
  send_event(wire::EventKind::kHostCallback, context, &body, sizeof body);
}

void SessionState::send_finished_copies() {
  outgoing_.for_each_before(nullptr, [this](Outgoing& copy) { send_finished(*this, copy); });
}

bool SessionState::reply(uint64_t call, CUresult result, const void* body, size_t body_bytes,
                         const Part* bulk, int bulk_count, bool more) {
  const size_t bytes = sizeof(wire::ReplyHeader) + body_bytes;
  uint8_t small[512];
  std::vector<uint8_t> large;
  uint8_t* frame = small;
  if (bytes > sizeof small) {
    large.resize(bytes);
    frame = large.data();
  }
  const wire::ReplyHeader header{
      static_cast<uint32_t>(bytes),      static_cast<uint16_t>(more ? wire::kMoreFollows : 0),
      static_cast<uint16_t>(bulk_count), call,
      static_cast<int32_t>(result),      0};
  memcpy(frame, &header, sizeof header);
  if (body_bytes > 0) memcpy(frame + sizeof header, body, body_bytes);
  std::lock_guard guard(send_lock_);
  return send(FrameKind::kReplies, frame, static_cast<uint32_t>(bytes), bulk, bulk_count);
}

void SessionState::send_event(wire::EventKind kind, uint32_t context, const void* body,
                              size_t bytes) {
  std::vector<uint8_t> frame(sizeof(wire::EventHeader) + wire::align8(bytes));
  const wire::EventHeader header{static_cast<uint32_t>(frame.size()), static_cast<uint16_t>(kind),
                                 0, context, 0};
  memcpy(frame.data(), &header, sizeof header);
  memcpy(frame.data() + sizeof header, body, bytes);
  std::lock_guard guard(send_lock_);
  send(FrameKind::kEvents, frame.data(), static_cast<uint32_t>(frame.size()), nullptr, 0);
}

void SessionState::before_reply(uint32_t context_id, CUresult result, bool printing) {
  if (printing) send_text(wire::EventKind::kPrintf, context_id, printf_.take());
  // A sticky error is the reply's own status; what the driver says about it goes ahead.
  if (result != CUDA_SUCCESS || printing) {
    send_text(wire::EventKind::kStandardError, context_id, reports_.take());
  }
}

void SessionState::send_text(wire::EventKind kind, uint32_t context_id, const std::string& text) {
  constexpr size_t kPiece = wire::kMaxFrameBody / 2;
  for (size_t done = 0; done < text.size(); done += kPiece) {
    const size_t bytes = std::min(kPiece, text.size() - done);
    std::vector<uint8_t> body(8 + wire::align8(bytes));
    wire::Encoder encoder(body.data());
    encoder.bytes(text.data() + done, bytes);
    send_event(kind, context_id, body.data(), body.size());
  }
}

bool SessionState::answer(const Command& command, CUresult result, const void* body,
                          size_t body_bytes) {
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) {
    send_text(wire::EventKind::kStandardError, command.context, reports_.take());
  }
  if (command.wants_reply()) {
    return reply(command.call, result, body, result == CUDA_SUCCESS ? body_bytes : 0);
  }
  if (result == CUDA_SUCCESS) [[likely]]
    return true;
  if (is_sticky(result)) {
    Context* context = context_by_id(command.context);
    if (context != nullptr && context->sticky_told) return true;
    if (context != nullptr) context->sticky_told = true;
    const uint64_t words[2] = {static_cast<uint32_t>(result), reader_.sequence()};
    send_event(wire::EventKind::kStickyError, command.context, words, sizeof words);
  } else {
    const uint64_t word = static_cast<uint32_t>(result) | static_cast<uint64_t>(command.operation)
                                                              << 32;
    send_event(wire::EventKind::kAsyncError, command.context, &word, sizeof word);
  }
  return true;
}

bool SessionState::malformed(const Command& command) {
  const char* name = wire::operation_name(command.operation);
  return refuse(std::string("a malformed command: ") + (name != nullptr ? name : "?"));
}

bool SessionState::unknown(const Command& command) {
  return answer(command, CUDA_ERROR_NOT_SUPPORTED);
}

bool SessionState::refuse(const std::string& why) {
  refused_ = why;
  std::lock_guard guard(send_lock_);
  send_refusal(why);
  return false;
}

void SessionState::send_refusal(const std::string& why) {
  std::vector<uint8_t> body(sizeof(wire::RefusedBody) + wire::align8(why.size()));
  const wire::RefusedBody head{static_cast<uint32_t>(wire::RefusalCode::kBadFrame),
                               static_cast<uint32_t>(why.size())};
  memcpy(body.data(), &head, sizeof head);
  memcpy(body.data() + sizeof head, why.data(), why.size());
  // A client that does not read must not keep the worker alive: one attempt.
  writer_.send(FrameKind::kRefused, body.data(), static_cast<uint32_t>(body.size()), nullptr, 0, 0,
               0, [] { return false; });
}

// ---- Contexts, streams, memory ----------------------------------------------------------------

Context* SessionState::context_by_id(uint32_t id) {
  if (context_cache_ != nullptr && context_cache_->id == id) return context_cache_;
  const auto found = contexts_by_id_.find(id);
  if (found == contexts_by_id_.end()) {
    // Also a context that was just made.
    context_cache_ = nullptr;
    contexts.for_each([&](wire::Handle handle, Context& context) {
      if (handle.index == id && context.driver != nullptr) context_cache_ = &context;
    });
    if (context_cache_ != nullptr) contexts_by_id_[id] = context_cache_;
    return context_cache_;
  }
  return context_cache_ = found->second;
}

Stream* SessionState::stream(Context* context, wire::Handle handle) {
  if (handle.generation == 0) return handle.index == 1 ? &context->legacy : nullptr;
  return streams.find(handle);
}

void SessionState::make_current(Context* context) {
  driver().cuCtxSetCurrent(context == nullptr ? nullptr : context->driver);
  current_ = context;
}

void SessionState::set_fence(Context* context) {
  context->fence++;
  if (context->non_blocking_streams == 0) return;
  if (context->fence_event == nullptr &&
      driver().cuEventCreate(&context->fence_event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
    context->fence_event = nullptr;
    driver().cuStreamSynchronize(context->legacy.driver);  // then there is nothing to wait for
    return;
  }
  driver().cuEventRecord(context->fence_event, context->legacy.driver);
  context->fence_recorded = context->fence;
}

void SessionState::pass_fence(Context* context, Stream* stream) {
  if (context->fence_recorded != context->fence && context->fence_event == nullptr) {
    set_fence(context);
  }
  if (context->fence_event != nullptr) {
    driver().cuStreamWaitEvent(stream->driver, context->fence_event, 0);
  }
  stream->fence_seen = context->fence;
}

bool SessionState::idle(Context* context) {
  if (current_ != context) make_current(context);
  while (!context->busy.empty()) {
    Stream* stream = context->busy.back();
    if (driver().cuStreamQuery(stream->driver) != CUDA_SUCCESS) return false;
    stream->busy = false;
    context->busy.pop_back();
  }
  return true;
}

void SessionState::free_later(Context* context, uint64_t address) {
  bool all_idle = true;
  for (auto& [id, it] : contexts_by_id_) all_idle = all_idle && idle(it);
  if (all_idle) {
    memory_.release(address);
    return;
  }
  PendingFree pending{address, context->driver, {}};
  for (auto& [id, it] : contexts_by_id_) {
    for (Stream* stream : it->busy) {
      if (current_ != it) make_current(it);
      CUevent event = nullptr;
      if (driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) continue;
      if (driver().cuEventRecord(event, stream->driver) == CUDA_SUCCESS) {
        pending.events.push_back(event);
      } else {
        driver().cuEventDestroy_v2(event);
      }
    }
  }
  pending_frees_.push_back(std::move(pending));
}

void SessionState::free_ready(bool wait) {
  for (auto at = pending_frees_.begin(); at != pending_frees_.end();) {
    bool done = true;
    for (CUevent event : at->events) {
      if (wait) {
        driver().cuEventSynchronize(event);
      } else if (driver().cuEventQuery(event) == CUDA_ERROR_NOT_READY) {
        done = false;
        break;
      }
    }
    if (!done) {
      ++at;
      continue;
    }
    for (CUevent event : at->events) driver().cuEventDestroy_v2(event);
    memory_.release(at->address);
    at = pending_frees_.erase(at);
  }
}

void SessionState::destroy_context(Context* context) {
  make_current(context);
  const DriverTable& table = driver();
  const bool broken = is_sticky(table.cuCtxSynchronize());
  free_ready(true);
  graph_execs.for_each([&](wire::Handle handle, GraphExec& exec) {
    if (exec.context == context->id) drop_graph_exec(*this, handle, broken);
  });
  host_functions_.drop_context(context->id);
  links.for_each([&](wire::Handle handle, Link& link) {
    if (link.context != context->id) return;
    if (link.driver != nullptr) table.cuLinkDestroy(link.driver);
    account_.refund_host(link.host_charged);
    links.erase(handle);
  });
  modules.for_each([&](wire::Handle handle, Module& module) {
    if (module.context == context->id) drop_module(*this, handle, !broken);
  });
  streams.for_each([&](wire::Handle handle, Stream& stream) {
    if (stream.context != context) return;
    if (!broken) table.cuStreamDestroy_v2(stream.driver);
    streams.erase(handle);
  });
  events.for_each([&](wire::Handle handle, Event& event) {
    if (event.context != context->id) return;
    if (!broken) table.cuEventDestroy_v2(event.driver);
    events.erase(handle);
  });
  if (context->fence_event != nullptr && !broken) table.cuEventDestroy_v2(context->fence_event);
  staging_.forget_context(context->driver, broken);
  lent_.forget_context(context->driver, broken);
  for (uint64_t address : memory_.of_context(context->id)) {
    memory_.forget(address);
    memory_.release(address);
  }
  memory_.trim();
  if (!context->primary) {
    table.cuCtxDestroy_v2(context->driver);
  } else if (broken && table.cuDevicePrimaryCtxReset_v2 != nullptr) {
    table.cuDevicePrimaryCtxReset_v2(assignment_.device_ordinal);
  } else {
    table.cuDevicePrimaryCtxRelease_v2(assignment_.device_ordinal);
  }
  for (const auto& [limit, charge] : context->limits) account_.refund(charge.charged);
  contexts_by_id_.erase(context->id);
  context_cache_ = current_ = nullptr;
  contexts.erase(context->handle);
}

// ---- The outside ------------------------------------------------------------------------------

class Session::Impl {
 public:
  Impl(std::unique_ptr<carriers::Carrier> carrier, const Assignment& assignment, Driver& driver,
       MemoryAccount& account)
      : state(std::move(carrier), assignment, driver, account) {}
  SessionState state;
};

Session::Session(std::unique_ptr<carriers::Carrier> carrier, const Assignment& assignment,
                 Driver& driver, MemoryAccount& account)
    : impl_(std::make_unique<Impl>(std::move(carrier), assignment, driver, account)) {}

Session::~Session() = default;

SessionOutcome Session::run() { return impl_->state.run(); }
void Session::stop() { impl_->state.stop(); }

SessionCounters Session::counters() const {
  const SessionState& state = impl_->state;
  return {state.commands_done.load(), state.launches.load(), state.bytes_in.load(),
          state.bytes_out.load()};
}

}  // namespace gpupool::worker
