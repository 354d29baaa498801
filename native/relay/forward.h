// Frames from one carrier to the other. Only their headers and lists of bulk segments are looked
// at; what they mean is nothing to a relay.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "carriers/carrier.h"
#include "wire/frame_io.h"

namespace gpupool::relay {

// One direction, for one thread.
class Forwarder {
 public:
  // A session has another epoch on each host. `idle` is called while `to` has no room.
  Forwarder(carriers::Carrier& from, uint32_t from_epoch, carriers::Carrier& to, uint32_t to_epoch,
            std::function<void()> idle = {});

  enum class End {
    kFromClosed,  // in order, between two frames
    kToClosed,
    kBadFrame,  // or the end of the stream in the middle of one: problem()
  };
  End run();

  const std::string& problem() const { return problem_; }
  // Whether `to` has whole frames only, and the number of the last one.
  bool between_frames() const { return between_; }
  uint64_t sequence() const { return sequence_; }

 private:
  bool forward();
  bool forward_bulk();
  bool write(carriers::Part* parts, int count);

  carriers::Carrier& from_;
  carriers::Carrier& to_;
  const uint32_t to_epoch_;
  const std::function<void()> idle_;
  wire::FrameReader reader_;
  std::unique_ptr<uint8_t[]> piece_;
  std::string problem_;
  bool between_ = true, cut_off_ = false;
  uint64_t sequence_ = 0;
};

}  // namespace gpupool::relay
