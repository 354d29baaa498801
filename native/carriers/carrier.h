// A carrier moves the bytes of one connection, in order, in both directions. It knows nothing of
// frames. What it is made of (a socket, a ring in shared memory) nobody above may assume.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace gpupool::carriers {

class SpinGate;

// Part of a gather write or of a scatter read.
struct Part {
  void* data;
  size_t bytes;
  bool bulk = false;  // may travel apart, see Carrier::bulk_apart(); written after what does not
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

  // For logs: "unix", "tcp", "ring".
  virtual const char* kind() const = 0;

  // What is wrong with what the peer did; null: nothing. Then read() is kClosed, and what still can
  // be written goes out.
  virtual const char* broken() const { return nullptr; }
  // Whether the host lets threads that wait for this carrier look again and again.
  virtual bool may_spin() const { return true; }
  // Whether the peer runs on other processors than those that this machine has: then spinning on
  // the only one does not keep it from answering.
  virtual bool peer_elsewhere() const { return false; }
  // For how long looking is worth it even if the last waits were long.
  virtual int64_t glance_ns() const { return 0; }

  // ---- Bulk data ---------------------------------------------------------------------------
  // Where they travel apart, read() never returns any: they are read with read_bulk(), or used
  // where they lie. Each frame's begin anew, on both sides.

  virtual bool bulk_apart() const { return false; }
  virtual void begin_bulk_in() {}
  virtual void begin_bulk_out() {}
  virtual Moved read_bulk(void* to, size_t bytes, bool may_wait) {
    const Part part{to, bytes};
    return read(&part, 1, may_wait);
  }
  // The next bulk data where they lie, if they are there as one piece; the peer can change them at
  // any time. They count as read, and stay until release_bulk() with their `end` or a later one.
  virtual const uint8_t* lend_bulk(size_t /*bytes*/, uint64_t* /*end*/) { return nullptr; }
  // Waits until so many bulk bytes are there; false: there never will be.
  virtual bool wait_for_bulk(size_t /*bytes*/) { return false; }
  // What was lent up to `end` is given back; from any thread. `all`: nothing is lent any more.
  virtual void release_bulk(uint64_t /*end*/, bool /*all*/) {}
  // Where the next bulk data to be written would lie, as one piece, when there is room: waits for
  // it. Null: never. A part of the next write() that is there already is not copied.
  virtual uint8_t* bulk_room(size_t /*bytes*/) { return nullptr; }
  // How many of the next bulk bytes lie in one piece, read or written.
  virtual size_t bulk_run_in() { return SIZE_MAX; }
  virtual size_t bulk_run_out() { return SIZE_MAX; }
  // All memory that lend_bulk() and bulk_room() point into: two pieces, or none.
  virtual int bulk_memory(Part /*pieces*/[2]) const { return 0; }
};

// Takes a connected stream socket (unix or TCP) and owns it; sets TCP_NODELAY. `gate` (a worker's,
// which stays the caller's): read() spins before it waits, as often as the gate allows.
std::unique_ptr<Carrier> make_socket_carrier(int fd, SpinGate* gate = nullptr);
// The descriptor that came with what was read so far from a carrier of connect_unix(), the caller's
// from now on; -1: none. Later ones are dropped.
int take_descriptor(Carrier& carrier);
// Gives the socket of such a carrier up to the caller.
int release_socket(std::unique_ptr<Carrier> carrier);

// Connects; null and a sentence in `why` if that fails.
std::unique_ptr<Carrier> connect_unix(const std::string& path, std::string* why);
std::unique_ptr<Carrier> connect_tcp(const std::string& host, uint16_t port, std::string* why);

// Helpers for the handshake and tests: all bytes or false (closed, or `timeout_us` over; negative:
// without limit).
bool write_all(Carrier& carrier, const void* data, size_t bytes, int64_t timeout_us);
bool read_all(Carrier& carrier, void* data, size_t bytes, int64_t timeout_us);

}  // namespace gpupool::carriers
