#include "broker/events.h"

#include <string>

#include "broker/log.h"
#include "broker/loop.h"

namespace gpupool::broker {
namespace {

constexpr size_t kMaxKept = 4096;

}  // namespace

void EventLog::connect(Sink sink) {
  sink_ = std::move(sink);
  if (sink_) lost_ = untold_ = 0;
  flush();
}

void EventLog::flush() {
  if (sink_ && untold_ != 0) {
    log(LogLevel::kWarning, "gpupoold reads too slowly: " + std::to_string(untold_) +
                                " events were dropped; it asks for the state instead");
    untold_ = 0;
  }
  while (sink_ && !kept_.empty() && sink_(kept_.front())) kept_.pop_front();
}

void EventLog::add(Event event) {
  event.set_sequence(next_++);
  event.set_unix_ns(unix_ns());
  if (sink_ && kept_.empty() && sink_(event)) return;
  if (kept_.size() == kMaxKept) {
    kept_.pop_front();
    lost_++;
    untold_++;
  }
  kept_.push_back(std::move(event));
}

}  // namespace gpupool::broker
