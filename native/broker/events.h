// What happened, for gpupoold: numbered, and kept while nobody is connected or who is reads slowly.
// Of more than fit the oldest are dropped, so that the numbers of what is sent later show the gap.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>

#include "broker.pb.h"

namespace gpupool::broker {

class EventLog {
 public:
  // Takes an event and says whether it was sent.
  using Sink = std::function<bool(const Event& event)>;

  // Sends what was kept, then every event as it happens; an empty sink: keeps them again.
  void connect(Sink sink);
  void add(Event event);                   // fills in number and time
  void flush();                            // the sink takes events again
  uint64_t lost() const { return lost_; }  // since the last connect()

 private:
  Sink sink_;
  std::deque<Event> kept_;
  uint64_t next_ = 1;
  uint64_t lost_ = 0;
  uint64_t untold_ = 0;  // of them, not in the log yet
};

}  // namespace gpupool::broker
