// A session's books: what it has charged to its slice, of the device and of the host, compared with
// what this process really holds. A driver allocates by itself (variables, heaps, stacks, code,
// contexts) and so does what parses a tenant's text; whatever is held beyond what was charged is
// charged too, and a session that the slice has no room for ends.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "worker/session.h"

namespace gpupool::worker {

class Books final : public MemoryAccount {
 public:
  // `usage` null: the driver does not tell, what was charged in advance has to do.
  Books(MemoryAccount& slice, DeviceUsage* usage) : slice_(slice), usage_(usage) {}

  bool charge(uint64_t bytes) override;
  void refund(uint64_t bytes) override;
  State query() override { return slice_.query(); }

  // The session's first context stands: what the driver holds by now is its own, and comes out of
  // the card's reserve.
  void open();
  // After something for which the driver may have taken memory. False: it holds more than was
  // charged, and the slice has no room for it.
  bool settle();
  // The same with what the slice bears of a driver's own; `why` says what is wrong.
  bool settle_or_end(std::string* why);

  // Tells how busy the device is with this session. False: not at all, or nobody knows.
  bool report_busy();

  // Before memory of the host is taken for something that the client sends. False: too much.
  bool charge_host(uint64_t bytes) override;
  void refund_host(uint64_t bytes) override;
  // Compares with the heap of this process.
  bool settle_host(std::string* why);

 private:
  bool report_busy_locked();
  bool settle_locked(uint64_t* missing);
  void give_back(uint64_t bytes);
  bool cover_host();

  MemoryAccount& slice_;
  DeviceUsage* const usage_;
  std::mutex lock_;
  std::optional<uint32_t> told_busy_;
  uint64_t charged_ = 0;  // by the session's own doing
  uint64_t beyond_ = 0;   // charged since the driver holds more
  uint64_t borne_ = 0;    // and what was not, for which the slice has no room
  uint64_t own_ = 0;      // the driver's own, from before the session did anything
  bool opened_ = false;

  uint64_t heap_at_start_ = heap();
  uint64_t held_ = 0;          // of the host, for what the client sent
  uint64_t measured_ = 0;      // of the heap, when it was last looked at, and what came since
  uint64_t host_charged_ = 0;  // to the slice
  static uint64_t heap();
};

}  // namespace gpupool::worker
