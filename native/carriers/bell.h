// What wakes the other side of a ring when it sleeps, and tells when it is gone.
#pragma once

#include <cstdint>
#include <memory>

namespace gpupool::carriers {

class Bell {
 public:
  enum class Heard { kBell, kNothing, kGone };

  virtual ~Bell() = default;
  // Never waits. One that the other side has not heard yet is as good as two.
  virtual void ring() = 0;
  // Whoever is about to wait() has told the other side so, and looks once more afterwards.
  virtual void arm() {}
  // Waits at most `timeout_us` microseconds (negative: without limit); takes in what rang since.
  // By one thread at a time.
  virtual Heard wait(int64_t timeout_us) = 0;
  // Whether wait() would return kGone once the bells are taken in. From any thread, never waits.
  virtual bool gone() = 0;
  // From any thread and from handlers of signals: wait() returns kGone, also the other side's.
  virtual void shutdown() = 0;
  virtual void abandon() = 0;  // as Carrier's
};

// Bytes on a connected stream socket, which it owns.
std::unique_ptr<Bell> make_socket_bell(int fd);

}  // namespace gpupool::carriers
