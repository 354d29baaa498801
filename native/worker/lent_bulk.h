// Copies to the device that read from where a ring's bulk data lie. They are only made where
// nothing but such copies is under way, so that the client gets its room back soon.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "carriers/carrier.h"
#include "worker/driver_table.h"

namespace gpupool::worker {

class LentBulk {
 public:
  LentBulk(const DriverTable& driver, carriers::Carrier& carrier)
      : driver_(driver), carrier_(carrier) {}

  // Whether this carrier's bulk data can be used where they lie. Page-locks them at the first time;
  // a context is current.
  bool usable(CUcontext context);
  // What was lent up to `end` is in use by what was submitted to the stream.
  void give_back_after(uint64_t end, uint64_t bytes, CUcontext context, CUstream stream);
  // Gives back what the device has read; waits for it until at most `most` bytes are lent.
  void collect(uint64_t most);
  static constexpr uint64_t kAll = ~uint64_t{0};
  // Before a context ends, when its work is over.
  void forget_context(CUcontext context, bool broken);

 private:
  struct Entry {
    CUevent event;
    uint64_t end, bytes;
  };
  void give_back(size_t count);

  const DriverTable& driver_;
  carriers::Carrier& carrier_;
  enum class State { kUnknown, kLocked, kUnusable } state_ = State::kUnknown;
  CUcontext owner_ = nullptr;    // of the page-locked memory
  CUcontext context_ = nullptr;  // of the events
  std::deque<Entry> lent_;
  uint64_t lent_bytes_ = 0;
  std::vector<CUevent> spare_;
};

}  // namespace gpupool::worker
