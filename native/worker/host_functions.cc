#define GPUPOOL_CUDA_ABI_EXACT 1
#include "worker/host_functions.h"

#include <string.h>

namespace gpupool::worker {

HostFunctions::~HostFunctions() {
  close();
  if (teller_.joinable()) teller_.join();
}

HostFunctions::Call* HostFunctions::add(uint32_t number, uint32_t context, CUcontext driver_context,
                                        std::vector<Place> places) {
  std::lock_guard guard(lock_);
  if (calls_.size() >= kMost) return nullptr;
  auto [entry, fresh] = calls_.try_emplace(number);
  if (!fresh) return nullptr;
  entry->second = std::make_unique<Call>();
  Call* call = entry->second.get();
  call->owner = this;
  call->number = number;
  call->context = context;
  call->driver_context = driver_context;
  call->places = std::move(places);
  count_.store(calls_.size(), std::memory_order_release);
  if (!teller_.joinable()) teller_ = std::thread([this] { tell_all(); });
  return call;
}

void HostFunctions::remove(Call* call) {
  std::lock_guard guard(lock_);
  calls_.erase(call->number);
  count_.store(calls_.size(), std::memory_order_release);
}

void HostFunctions::enter(void* call) {
  auto* it = static_cast<Call*>(call);
  it->owner->run(it, CUDA_SUCCESS);
}

void HostFunctions::enter_with_status(CUstream, CUresult status, void* call) {
  auto* it = static_cast<Call*>(call);
  it->owner->run(it, status);
}

void HostFunctions::run(Call* call, CUresult status) {
  std::unique_lock guard(lock_);
  if (call->answered) return;  // dropped with its context
  to_tell_.push_back({call->number, call->context, call->driver_context, status});
  entered_.notify_one();
  answered_.wait(guard, [&] { return call->answered || closed_; });
  const auto found = calls_.find(call->number);
  if (found != calls_.end() && found->second.get() == call) calls_.erase(found);
  count_.store(calls_.size(), std::memory_order_release);
}

void HostFunctions::tell_all() {
  std::unique_lock guard(lock_);
  for (;;) {
    entered_.wait(guard, [this] { return closed_ || !to_tell_.empty(); });
    if (closed_) return;
    const Told told = to_tell_.front();
    to_tell_.pop_front();
    guard.unlock();
    tell_(told.context, told.driver_context, told.number, told.status);
    guard.lock();
  }
}

bool HostFunctions::answer(uint32_t number, const uint8_t* data, uint64_t bytes, std::string* why) {
  {
    std::lock_guard guard(lock_);
    const auto found = calls_.find(number);
    if (found == calls_.end() || found->second->answered) return true;
    uint64_t wanted = 0;
    for (const Place& place : found->second->places) wanted += place.bytes;
    if (bytes != wanted) {
      *why = "an answer with more or less data than a copy asked for";
      return false;
    }
    for (const Place& place : found->second->places) {
      memcpy(place.data, data, place.bytes);
      data += place.bytes;
    }
    found->second->answered = true;
  }
  answered_.notify_all();
  return true;
}

void HostFunctions::close() {
  {
    std::lock_guard guard(lock_);
    closed_ = true;
  }
  answered_.notify_all();
  entered_.notify_all();
}

void HostFunctions::drop_context(uint32_t context) {
  {
    std::lock_guard guard(lock_);
    for (auto at = calls_.begin(); at != calls_.end();) {
      if (at->second->context != context) {
        ++at;
        continue;
      }
      at->second->answered = true;
      dropped_.push_back(std::move(at->second));
      at = calls_.erase(at);
    }
    count_.store(calls_.size(), std::memory_order_release);
  }
  answered_.notify_all();
}

}  // namespace gpupool::worker
