#define GPUPOOL_CUDA_ABI_EXACT 1
#include "client/host_calls.h"

#include <pthread.h>
#include <signal.h>

#include <thread>

#include "client/state.h"

namespace gpupool::client {

namespace {
constexpr size_t kMost = 8192;  // outstanding on one device before the program waits
}

std::atomic<uint64_t> HostCalls::outstanding_{0};

uint32_t HostCalls::add(const Item& item) {
  std::unique_lock guard(lock_);
  while (items_.size() >= kMost && !channel_of(item.context).lost()) {
    changed_.wait_for(guard, std::chrono::milliseconds(100));
  }
  uint32_t number = next_++;
  while (number == 0 || items_.contains(number)) number = next_++;
  items_[number] = item;
  outstanding_.fetch_add(1, std::memory_order_acq_rel);
  if (!started_) {
    started_ = true;
    channel_of(item.context).keep_credit_for_answers();
    // Signals belong to the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([this] { serve(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  } else if (items_.size() == 1) {
    changed_.notify_all();
  }
  return number;
}

uint32_t HostCalls::add_function(Context* context, CUhostFn function, void* data) {
  Item item;
  item.context = context;
  item.function = function;
  item.data = data;
  return add(item);
}

uint32_t HostCalls::add_callback(Context* context, CUstream stream, CUstreamCallback callback,
                                 void* data) {
  Item item;
  item.context = context;
  item.stream = stream;
  item.callback = callback;
  item.data = data;
  return add(item);
}

uint32_t HostCalls::add_source(Context* context, const void* from, uint64_t bytes) {
  Item item;
  item.context = context;
  item.source = from;
  item.bytes = bytes;
  return add(item);
}

void HostCalls::drop(std::map<uint32_t, Item>::iterator item) {
  items_.erase(item);
  outstanding_.fetch_sub(1, std::memory_order_acq_rel);
  changed_.notify_all();
}

void HostCalls::called(uint32_t, const wire::HostFunctionCall& call) {
  std::lock_guard guard(lock_);
  const auto found = items_.find(call.number);
  if (found == items_.end() || found->second.called) return;
  if (call.refused != 0) {
    drop(found);
    return;
  }
  found->second.called = true;
  found->second.status = static_cast<CUresult>(call.status);
  ready_.push_back(call.number);
  has_ready_.store(true, std::memory_order_release);
}

void HostCalls::context_failed(const Context* context) {
  std::lock_guard guard(lock_);
  for (auto at = items_.begin(); at != items_.end();) {
    const auto item = at++;
    if (item->second.context == context && !item->second.called &&
        item->second.callback == nullptr) {
      drop(item);
    }
  }
  has_ready_.store(true, std::memory_order_release);  // the thread looks again whether to read
}

void HostCalls::serve() {
  pthread_setname_np(pthread_self(), "gpupool-calls");
  thread_state().in_host_function = true;
  std::unique_lock guard(lock_);
  for (;;) {
    if (ready_.empty()) {
      if (items_.empty()) {
        changed_.wait(guard);
        continue;
      }
      has_ready_.store(false, std::memory_order_release);
      Channel& channel = channel_of(items_.begin()->second.context);
      guard.unlock();
      const bool there = channel.wait_for_event(has_ready_);
      guard.lock();
      if (!there) {
        // Nothing comes any more; whoever waits for functions must not wait for ever.
        while (!items_.empty()) drop(items_.begin());
        ready_.clear();
        changed_.wait(guard);
      }
      continue;
    }
    const uint32_t number = ready_.front();
    ready_.pop_front();
    const auto found = items_.find(number);
    if (found == items_.end()) continue;
    const Item item = found->second;
    guard.unlock();
    if (item.function != nullptr) item.function(item.data);
    if (item.callback != nullptr) item.callback(item.stream, item.status, item.data);
    channel_of(item.context).answer_call(item.context->wire_id(), number, item.source, item.bytes);
    guard.lock();
    drop(items_.find(number));
  }
}

}  // namespace gpupool::client
