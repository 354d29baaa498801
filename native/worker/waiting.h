// Calls that wait for the device: polled for some microseconds, then given to a waiter thread.
#pragma once

#include <time.h>

#include <utility>

#include "worker/session_state.h"

namespace gpupool::worker {

inline int64_t monotonic_us() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

constexpr int kPollUs = 20;

// `poll()`: CUDA_ERROR_NOT_READY, or that the wait is over. `wait()`: the driver's call, which
// waits and says the result; it runs on some thread with the context current.
template <typename Poll, typename Wait>
bool poll_or_wait(SessionState& session, const Command& command, Context* context, Poll&& poll,
                  Wait&& wait) {
  const bool printing = context->printing;
  CUresult result = session.query(context, poll);
  if (result == CUDA_ERROR_NOT_READY) {
    const int64_t end = monotonic_us() + kPollUs;
    do {
      result = poll();
    } while (result == CUDA_ERROR_NOT_READY && monotonic_us() < end);
  }
  if (result != CUDA_ERROR_NOT_READY) {
    // The driver hands out printf's output, and errors, in its waiting calls.
    if (printing || result != CUDA_SUCCESS) result = wait();
    session.send_finished_copies();
    session.before_reply(command.context, result, printing);
    return session.answer(command, result);
  }
  const uint64_t call = command.call;
  const uint32_t id = command.context;
  const CUcontext driver_context = context->driver;
  auto task = [&session, call, id, driver_context, printing, wait] {
    session.enter_on_this_thread(driver_context);
    const CUresult waited = wait();
    session.send_finished_copies();
    session.before_reply(id, waited, printing);
    session.reply(call, waited, nullptr, 0);
  };
  if (session.waiters().run(task)) return true;
  result = wait();
  session.send_finished_copies();
  session.before_reply(id, result, printing);
  return session.answer(command, result);
}

}  // namespace gpupool::worker
