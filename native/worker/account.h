// The slice's memory account as a worker sees it: every question goes to the broker, which keeps
// the account for all sessions of the slice.
#pragma once

#include <functional>
#include <mutex>

#include "worker/session.h"

namespace gpupool::worker {

class ChannelAccount : public MemoryAccount {
 public:
  explicit ChannelAccount(int channel) : channel_(channel) {}

  bool charge(uint64_t bytes) override;  // also false when the broker is gone
  void refund(uint64_t bytes) override;
  State query() override;
  bool bear(uint64_t bytes) override;
  void refund_borne(uint64_t bytes) override;
  bool charge_host(uint64_t bytes) override;
  void refund_host(uint64_t bytes) override;
  void tell_busy(uint32_t permille) override;

  // Called with the slice's size whenever it has changed.
  std::function<void(uint64_t limit_bytes)> on_limit;

 private:
  bool ask(uint32_t kind, uint64_t bytes, bool* granted);
  bool granted(uint32_t kind, uint64_t bytes);

  std::mutex mutex_;  // one question at a time: the answers carry no number
  const int channel_;
  State last_;
};

}  // namespace gpupool::worker
