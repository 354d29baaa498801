// The stream between the relays of two hosts: a carrier that survives interruptions of the
// connection below it. Both sides keep what the other has not confirmed yet; after an interruption
// each says how far it has got, and the rest is sent once more, so that nothing is lost or comes
// twice (doc/relay.md).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "carriers/carrier.h"
#include "carriers/patience.h"
#include "carriers/spin_gate.h"
#include "relay/tls.h"

namespace gpupool::relay {

// What makes a connection anew. Called by the thread that reads, with the time at which it has to
// give up.
class Renewal {
 public:
  virtual ~Renewal() = default;
  // Null: not yet, or never (`hopeless`); `why` is a sentence. Does not wait past the deadline.
  virtual std::unique_ptr<TlsConnection> renew(int64_t deadline_ns, bool* hopeless,
                                               std::string* why) = 0;
  // Readable when there is something to be taken in while the connection stands; -1: never.
  virtual int news() const { return -1; }
  // Takes it in. True: there is a new connection although the old one seems to be there.
  virtual bool take_news() { return false; }
};

struct LinkLimits {
  int64_t interruption_ns = 10'000'000'000;
  size_t window = 8 << 20;  // bytes that may be unconfirmed, a power of two
};

class Link final : public carriers::Carrier {
 public:
  // `gate`: of the thread that reads; stays the caller's.
  Link(Renewal& renewal, const LinkLimits& limits, carriers::SpinGate* gate = nullptr);
  ~Link() override;

  // Both sides say that they speak the same. False: `why`.
  bool begin(std::unique_ptr<TlsConnection> connection, int64_t deadline_ns, std::string* why);

  // ---- Carrier: one thread writes, one reads ----
  carriers::Moved write(const carriers::Part* parts, int count, bool may_wait) override;
  carriers::Moved read(const carriers::Part* parts, int count, bool may_wait) override;
  int wait(int what, int64_t timeout_us) override;
  void shutdown() override;
  void abandon() override {}
  const char* kind() const override { return "tls"; }

  // The thread that reads: takes in what has come, as far as there is room, and confirms; never
  // waits while the connection stands. For when it waits for something else.
  void pump();
  // Ends in order: the other side reads all that was written, then the sentence.
  void say_goodbye(const std::string& sentence);
  // How much memory of the device the session has, and how busy it keeps that: the other side is
  // told soon. By the thread that reads.
  void tell_usage(uint64_t bytes, uint32_t busy_permille);
  // Called by the thread that reads when the other side has told.
  std::function<void(uint64_t bytes, uint32_t busy_permille)> on_usage;
  // Why it is closed: the other side's last word, or what became of the connection.
  std::string ending() const;
  bool ended_by_peer() const;

 private:
  enum class State { kUp, kBroken, kClosed };
  using Shared = std::shared_ptr<TlsConnection>;

  size_t room_locked() const;
  void put_locked(const void* data, size_t bytes);
  void append_locked(uint32_t kind, const carriers::Part* parts, int count, size_t bytes);
  bool flush_locked();
  void flush();
  size_t fill(void* to, size_t bytes);
  bool take_in();
  bool scan();
  size_t deliver(const carriers::Part* parts, int count);
  void confirm();
  void keep_alive();
  bool mend();
  bool exchange(TlsConnection& connection, int64_t deadline_ns, uint64_t* received,
                std::string* why) const;
  void break_locked(const std::string& why);
  void close(const std::string& why, bool by_peer = false);
  void await_data(int64_t timeout_ns);
  int64_t silence_ns() const;

  const LinkLimits limits_;
  Renewal& renewal_;
  carriers::SpinGate* const gate_;
  carriers::Patience patience_{carriers::Patience::kWorkerSpinNs,
                               carriers::Patience::kWorkerWorthwhileNs};

  mutable std::mutex lock_;  // of the connection and of all that follows
  std::condition_variable changed_;
  State state_ = State::kUp;
  Shared connection_;
  std::string broken_why_, ending_;
  bool by_peer_ = false;
  // The stream that goes out: positions since its beginning.
  std::unique_ptr<uint8_t[]> out_;
  uint64_t appended_ = 0, written_ = 0, confirmed_ = 0;

  // Of the thread that reads.
  std::unique_ptr<uint8_t[]> in_;
  // Records up to `in_scanned_` have been looked at, be their data there or still to come.
  size_t in_begin_ = 0, in_scanned_ = 0, in_end_ = 0;
  uint64_t received_ = 0;   // of the stream that comes in
  uint64_t delivered_ = 0;  // of it, what is done with
  uint64_t told_ = 0;       // of that, what the other side has been told
  size_t record_left_ = 0;  // of the record whose data are next, not delivered yet
  int64_t heard_ns_ = 0;
  std::atomic<uint64_t> delivered_told_{0};  // delivered_, for whoever writes
  std::atomic<int64_t> spoke_ns_{0};
};

}  // namespace gpupool::relay
