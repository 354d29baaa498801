#include "worker/account.h"

#include <unistd.h>

#include "worker/channel.h"

namespace gpupool::worker {

bool ChannelAccount::ask(uint32_t kind, uint64_t bytes, bool* granted) {
  if (!send_message(channel_, static_cast<MessageKind>(kind), bytes)) return false;
  Message answer;
  if (receive_message(channel_, &answer, true) != ReceiveStatus::kMessage) return false;
  for (int fd : answer.fds) close(fd);
  if (answer.header.kind != static_cast<uint32_t>(MessageKind::kAccount)) return false;
  *granted = answer.header.value == 1;
  const bool changed = last_.limit_bytes != answer.header.limit;
  last_ = {answer.header.limit, answer.header.used};
  if (changed && on_limit) on_limit(last_.limit_bytes);
  return true;
}

bool ChannelAccount::granted(uint32_t kind, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  bool granted = false;
  return ask(kind, bytes, &granted) && granted;
}

bool ChannelAccount::charge(uint64_t bytes) {
  return granted(static_cast<uint32_t>(MessageKind::kCharge), bytes);
}

void ChannelAccount::refund(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  send_message(channel_, MessageKind::kRefund, bytes);
}

bool ChannelAccount::bear(uint64_t bytes) {
  return granted(static_cast<uint32_t>(MessageKind::kBear), bytes);
}

void ChannelAccount::refund_borne(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  send_message(channel_, MessageKind::kRefundBorne, bytes);
}

bool ChannelAccount::charge_host(uint64_t bytes) {
  return granted(static_cast<uint32_t>(MessageKind::kChargeHost), bytes);
}

void ChannelAccount::refund_host(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  send_message(channel_, MessageKind::kRefundHost, bytes);
}

void ChannelAccount::tell_busy(uint32_t permille) {
  std::lock_guard lock(mutex_);
  send_message(channel_, MessageKind::kBusy, permille);
}

MemoryAccount::State ChannelAccount::query() {
  std::lock_guard lock(mutex_);
  bool granted = false;
  ask(static_cast<uint32_t>(MessageKind::kQuery), 0, &granted);
  return last_;
}

}  // namespace gpupool::worker
