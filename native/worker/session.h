// One session of one client on one slice: reads the client's commands from an accepted connection,
// checks them, executes them through the driver and answers, until the client goes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "carriers/carrier.h"
#include "worker/driver.h"

namespace gpupool::worker {

// The slice's memory account, kept by the broker. Called from the session's thread and its waiter
// threads, so implementations lock.
class MemoryAccount {
 public:
  struct State {
    uint64_t limit_bytes = 0;  // the slice's size
    uint64_t used_bytes = 0;   // by all sessions of the slice together
  };
  virtual ~MemoryAccount() = default;
  // Before physical memory is created. False: it would not fit in the slice.
  virtual bool charge(uint64_t bytes) = 0;
  // After the memory was given back.
  virtual void refund(uint64_t bytes) = 0;
  virtual State query() = 0;
  // What the driver took by itself, for which the slice has no room: a little of it, of all the
  // slice's sessions together, is borne.
  virtual bool bear(uint64_t /*bytes*/) { return false; }
  virtual void refund_borne(uint64_t /*bytes*/) {}
  // The same for memory of the host, of which the slice's sessions together have a share too.
  virtual bool charge_host(uint64_t /*bytes*/) { return true; }
  virtual void refund_host(uint64_t /*bytes*/) {}
  // How busy the device is with this session, in thousandths of its time.
  virtual void tell_busy(uint32_t /*permille*/) {}
};

// What this process holds of the session's device, as the driver itself tells.
class DeviceUsage {
 public:
  virtual ~DeviceUsage() = default;
  virtual std::optional<uint64_t> bytes() = 0;  // nullopt: it does not tell now
  // The share of the device's time that this process had lately, in thousandths.
  virtual std::optional<uint32_t> busy_permille() { return std::nullopt; }
};

// What the broker says when it hands a connection over.
struct Assignment {
  uint32_t epoch = 0;           // as in the connection's kWelcome
  uint16_t minor = 0;           // protocol version of the connection
  uint64_t initial_credit = 0;  // as in kWelcome
  int device_ordinal = 0;       // of the physical (or MIG) device in this process's driver
  uint64_t arena_base = 0;      // proposed by the client in its Hello
  uint64_t arena_bytes = 0;
  DeviceUsage* usage = nullptr;  // null: the driver does not tell what it holds
};

enum class SessionEnd {
  kClientGone,     // the connection was closed: the normal end
  kProtocolError,  // what came was no valid frame or command; the client was told
  kDriverLost,     // the driver is unusable
};

struct SessionOutcome {
  SessionEnd end = SessionEnd::kClientGone;
  std::string sentence;  // why, for the log
};

struct SessionCounters {  // for people; read at any time
  uint64_t commands = 0, launches = 0, bytes_to_device = 0, bytes_from_device = 0;
};

class Session {
 public:
  // The driver must be initialised (Driver::load). `carrier` stands right behind kWelcome.
  Session(std::unique_ptr<carriers::Carrier> carrier, const Assignment& assignment, Driver& driver,
          MemoryAccount& account);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Runs on the calling thread until the session ends. Afterwards the process should exit: that
  // gives everything back to the driver.
  SessionOutcome run();

  // Makes run() return soon; from any thread or, since it only shuts the carrier down, a handler.
  void stop();

  SessionCounters counters() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gpupool::worker
