// Page-locked buffers between the connection and the driver, each with an event that tells when the
// driver is done with it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "worker/driver_table.h"

namespace gpupool::worker {

struct StagingBuffer {
  uint8_t* data = nullptr;
  CUevent event = nullptr;
  CUcontext context = nullptr;  // of the event
  bool pending = false;         // the event was recorded and not seen since
};

class Staging {
 public:
  static constexpr uint64_t kBytes = 256 * 1024;  // of one buffer: it stays in a core's cache
  static constexpr size_t kBuffers = 64;          // at most, 16 MiB

  explicit Staging(const DriverTable& driver) : driver_(driver) {}

  // A buffer that nobody uses, with an event of this context, which is current. Waits for the
  // device if all are in use. Null: there is no memory.
  StagingBuffer* acquire(CUcontext context);
  // Marks it as in use by what was submitted to the stream so far, and gives it back.
  CUresult release_after(StagingBuffer* buffer, CUstream stream);
  CUresult record(StagingBuffer* buffer, CUstream stream);
  // Gives it back: nobody uses it. From any thread.
  void release(StagingBuffer* buffer);
  // Events of a context die with it.
  void forget_context(CUcontext context);

 private:
  const DriverTable& driver_;
  std::mutex lock_;
  std::condition_variable returned_;
  std::vector<std::unique_ptr<StagingBuffer>> all_;
  std::vector<StagingBuffer*> free_;     // nobody uses them
  std::vector<StagingBuffer*> pending_;  // in the order in which they were given back
  size_t out_ = 0;                       // acquired, not given back
};

}  // namespace gpupool::worker
