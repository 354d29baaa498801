// A carrier moves the bytes of one connection, in order, in both directions. It knows nothing of
// frames. What it is made of (a socket, later a ring in shared memory) nobody above may assume.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace gpupool::carriers {

// Part of a gather write or of a scatter read.
struct Part {
  void* data;
  size_t bytes;
};

enum class Status {
  kOk,       // some bytes were moved
  kBlocked,  // none could be moved without waiting
  kClosed,   // the peer has gone, or shutdown() was called
};

struct Moved {
  Status status;
  size_t bytes;  // > 0 exactly if status is kOk
};

enum WaitFor : int {
  kReadable = 1,
  kWritable = 2,
};

// One thread may read while another one writes.
class Carrier {
 public:
  virtual ~Carrier() = default;

  // Waits for room at most some milliseconds if `may_wait`.
  virtual Moved write(const Part* parts, int count, bool may_wait) = 0;
  // Waits for the first byte if `may_wait`, then never returns kBlocked.
  virtual Moved read(const Part* parts, int count, bool may_wait) = 0;

  // Waits until the carrier is readable or writable, as asked for in `what` (WaitFor), at most
  // `timeout_us` microseconds (negative: without limit). Returns what it is, 0 after the time or
  // after wake(). A closed carrier is both.
  virtual int wait(int what, int64_t timeout_us) = 0;

  // Ends all traffic in both directions; blocked waits return. Safe from any thread.
  virtual void shutdown() = 0;

  // In the child of a fork(): lets go of the connection, which stays the parent's.
  // Async-signal-safe.
  virtual void abandon() = 0;

  // For logs: "unix", "tcp".
  virtual const char* kind() const = 0;
};

// Takes a connected stream socket (unix or TCP) and owns it; sets TCP_NODELAY.
std::unique_ptr<Carrier> make_socket_carrier(int fd);

// Connects; null and a sentence in `why` if that fails.
std::unique_ptr<Carrier> connect_unix(const std::string& path, std::string* why);
std::unique_ptr<Carrier> connect_tcp(const std::string& host, uint16_t port, std::string* why);

// Helpers for the handshake and tests: all bytes or false (closed, or `timeout_us` over; negative:
// without limit).
bool write_all(Carrier& carrier, const void* data, size_t bytes, int64_t timeout_us);
bool read_all(Carrier& carrier, void* data, size_t bytes, int64_t timeout_us);

}  // namespace gpupool::carriers
