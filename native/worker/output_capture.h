// Catches what the driver writes to standard output (the device's printf) or standard error (an
// assertion's message, the simulated GPU's reports), so that it can be sent to the client whose it
// is.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace gpupool::worker {

class OutputCapture {
 public:
  enum class Kind {
    kWait,  // all of it for the client: while too much lies here it goes to `overflow`
    kTee,   // goes on to where it went before; what the client does not take soon is cut off
  };

  // From now on what this process writes to `fd`. A driver may write more in one call than is kept
  // here: the rest is given to `overflow`, by a thread of this object's own, in order.
  OutputCapture(int fd, Kind kind, std::function<void(const std::string&)> overflow = {});
  ~OutputCapture();
  OutputCapture(const OutputCapture&) = delete;
  OutputCapture& operator=(const OutputCapture&) = delete;

  // Everything that was written so far; from any thread.
  std::string take();

 private:
  bool drain_locked();  // false: no room for more
  void drain_loop();

  const int fd_;
  const Kind kind_;
  const std::function<void(const std::string&)> overflow_;
  int read_end_ = -1, before_ = -1, stop_[2] = {-1, -1};
  std::mutex lock_;
  std::string text_;
  std::thread drainer_;  // so that a kernel with much output does not wait for room in the pipe
};

}  // namespace gpupool::worker
