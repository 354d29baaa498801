// When a session's books are compared with what is: after frames, and while the client is silent.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/session_state.h"
#include "worker/waiting.h"

namespace gpupool::worker {

namespace {
constexpr int64_t kDeviceUs = 1000000, kHostUs = 100000, kRecentUs = 500000;
}

// Many small commands, many bytes, or some time: then the session's books are compared with what
// is.
bool SessionState::keep_books() {
  constexpr uint64_t kCommands = 16384, kBytes = 64 << 20;
  bookkeeper_.stir();
  std::string why;
  const uint64_t commands = commands_done.load(std::memory_order_relaxed);
  const int64_t now = monotonic_us();
  if (commands - looked_at_commands_ < kCommands &&
      reader_.received() - looked_at_bytes_ < kBytes && now - looked_host_us_ < kHostUs) {
    return true;
  }
  looked_at_bytes_ = reader_.received();
  looked_at_commands_ = commands;
  looked_host_us_ = now;
  if (!account_.settle_host(&why)) return refuse(why);
  if (now - looked_device_us_ < kDeviceUs) return true;
  looked_device_us_ = now;
  return account_.settle_or_end(&why) || refuse(why);
}

// The bookkeeper's look. While a command is executed it does not look: the driver may just have
// taken what the command is about to compare, and to refuse. The frame's end does, then.
bool SessionState::look_at_books() {
  const bool busy = account_.report_busy();
  std::unique_lock turn(turn_, std::try_to_lock);
  if (!turn.owns_lock()) return true;
  std::string why;
  const int64_t now = monotonic_us();
  const bool recent = now - looked_device_us_ < kRecentUs;  // while the client talks, frames do it
  if (!recent) looked_device_us_ = now;
  if (!recent && !account_.settle_or_end(&why)) {
    {
      std::lock_guard guard(ended_lock_);
      ended_why_ = why;
    }
    // If a thread waits for a client that does not read, that client is not told.
    std::unique_lock sending(send_lock_, std::try_to_lock);
    if (sending.owns_lock()) send_refusal(why);
    carrier_->shutdown();
    return false;
  }
  const uint64_t taken = taken_.load(std::memory_order_relaxed);
  if (taken != looked_at_frame_) {
    looked_at_frame_ = taken;
    return true;
  }
  return busy || work_outstanding();
}

// Of the bookkeeper's thread, with its turn: the session's own thread takes no command.
bool SessionState::work_outstanding() {
  bool outstanding = false;
  contexts.for_each([&](wire::Handle, Context& context) {
    if (outstanding || context.driver == nullptr || context.busy.empty()) return;
    enter_on_this_thread(context.driver);
    for (const Stream* stream : context.busy) {
      outstanding = outstanding || driver().cuStreamQuery(stream->driver) == CUDA_ERROR_NOT_READY;
    }
  });
  enter_on_this_thread(nullptr);
  return outstanding;
}

std::string SessionState::ended_why() {
  std::lock_guard guard(ended_lock_);
  return ended_why_;
}

}  // namespace gpupool::worker
