// Catches what the driver writes to standard output (the device's printf), so that it can be sent
// to the client whose it is.
#pragma once

#include <mutex>
#include <string>
#include <thread>

namespace gpupool::worker {

class PrintfCapture {
 public:
  PrintfCapture();
  ~PrintfCapture();
  PrintfCapture(const PrintfCapture&) = delete;
  PrintfCapture& operator=(const PrintfCapture&) = delete;

  // Everything that was written so far; from any thread.
  std::string take();

 private:
  void drain_locked();
  void drain_loop();

  int read_end_ = -1, saved_stdout_ = -1, stop_[2] = {-1, -1};
  std::mutex lock_;
  std::string text_;
  std::thread drainer_;  // so that a kernel with much output does not wait for room in the pipe
};

}  // namespace gpupool::worker
