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
  CUcontext owner = nullptr;    // in which the memory was allocated; null: not the driver's
  bool out = false;             // acquired, not given back
};

class Staging {
 public:
  static constexpr uint64_t kBytes = 256 * 1024;  // of one buffer: it stays in a core's cache
  static constexpr size_t kBuffers = 64;          // at most, 16 MiB
  static constexpr size_t kMostBuffers = 512;     // while functions of the client hold streams up

  explicit Staging(const DriverTable& driver) : driver_(driver) {}
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // A buffer that nobody uses, with an event of this context, which is current. Waits for the
  // device if `most` are in use. Null: there is no memory.
  StagingBuffer* acquire(CUcontext context, size_t most = kBuffers);
  // Marks it as in use by what was submitted to the stream so far, and gives it back.
  CUresult release_after(StagingBuffer* buffer, CUstream stream);
  CUresult record(StagingBuffer* buffer, CUstream stream);
  // Gives it back: nobody uses it. From any thread.
  void release(StagingBuffer* buffer);
  // Before a context ends, when its work is over: its events and its memory go. `broken`: the
  // driver takes no calls for this context any more.
  void forget_context(CUcontext context, bool broken);

 private:
  void drop_spare(size_t most);  // with lock_ held

  const DriverTable& driver_;
  std::mutex lock_;
  std::condition_variable returned_;
  std::vector<std::unique_ptr<StagingBuffer>> all_;
  std::vector<StagingBuffer*> free_;     // nobody uses them
  std::vector<StagingBuffer*> pending_;  // in the order in which they were given back
};

}  // namespace gpupool::worker
