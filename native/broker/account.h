// The memory account of one slice: what all its workers together have charged. It is rebuilt from
// nothing, since it lives as long as the broker and the workers die with the broker.
#pragma once

#include <cstdint>

namespace gpupool::broker {

// What one worker holds. Its owner keeps it until the process is gone, then calls close().
struct Charge {
  uint64_t bytes = 0;
};

class Ledger {
 public:
  explicit Ledger(uint64_t limit) : limit_(limit) {}

  // False, and nothing changes: it would go over the limit.
  bool charge(Charge& worker, uint64_t bytes);
  // Gives back at most what this worker has charged; returns what was given back. Less than asked
  // for means that the worker does not tell the truth.
  uint64_t refund(Charge& worker, uint64_t bytes);
  // Gives back all that the worker has charged: its process is gone.
  uint64_t close(Charge& worker);
  // False, and nothing changes: more than that is in use.
  bool resize(uint64_t limit);

  uint64_t limit() const { return limit_; }
  uint64_t used() const { return used_; }

 private:
  uint64_t limit_;
  uint64_t used_ = 0;  // the sum of the workers' charges, and never above limit_
};

constexpr uint64_t kDefaultHostBytes = 4ull << 30;
constexpr uint64_t kBorneBytes = 16ull << 20;

// Memory of the device and, in `host`, what the workers take of the host's for it. `borne` is what
// drivers took by themselves when the slice was full: that little comes out of the card's reserve.
class SliceAccount : public Ledger {
 public:
  using Ledger::Ledger;
  Ledger host{kDefaultHostBytes};
  Ledger borne{kBorneBytes};
};

}  // namespace gpupool::broker
