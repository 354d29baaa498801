// A descriptor that is given up for a moment when the process has none left. A backlog that cannot
// be taken would stay full, and the loop spin.
#pragma once

#include "broker/fd.h"

namespace gpupool::broker {

class Reserve {
 public:
  Reserve();
  // After accept() has failed with `error` (errno): true, if that was for want of descriptors; then
  // the next of those who knock has been turned away.
  bool turn_away(int listener, int error);

 private:
  Fd fd_;
};

}  // namespace gpupool::broker
