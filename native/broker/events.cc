#include "broker/events.h"

#include "broker/loop.h"

namespace gpupool::broker {
namespace {

constexpr size_t kMaxKept = 4096;

}  // namespace

void EventLog::connect(Sink sink) {
  sink_ = std::move(sink);
  while (sink_ && !kept_.empty() && sink_(kept_.front())) kept_.pop_front();
  if (sink_) lost_ = 0;
}

void EventLog::add(Event event) {
  event.set_sequence(next_++);
  event.set_unix_ns(unix_ns());
  if (sink_ && kept_.empty() && sink_(event)) return;
  if (kept_.size() == kMaxKept) {
    kept_.pop_front();
    lost_++;
  }
  kept_.push_back(std::move(event));
}

}  // namespace gpupool::broker
