#include "worker/books.h"

#include <malloc.h>

#include <algorithm>

namespace gpupool::worker {
namespace {

constexpr uint64_t kMib = 1 << 20;
constexpr uint64_t kGranule = 2 * kMib;    // in which drivers take memory
constexpr uint64_t kHostFree = 32 * kMib;  // every session's, without being charged
constexpr uint64_t kHostStep = 16 * kMib;  // in which the host's memory is charged

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

bool Books::charge(uint64_t bytes) {
  std::lock_guard guard(lock_);
  if (!slice_.charge(bytes)) return false;
  charged_ += bytes;
  return true;
}

void Books::refund(uint64_t bytes) {
  std::lock_guard guard(lock_);
  charged_ -= std::min(bytes, charged_);
  slice_.refund(bytes);
}

void Books::open() {
  std::lock_guard guard(lock_);
  if (opened_) return;
  opened_ = true;
  if (usage_ == nullptr) return;
  report_busy_locked();
  const uint64_t used = usage_->bytes().value_or(0);
  own_ = used - std::min(used, round_up(charged_, kGranule));
}

bool Books::report_busy() {
  std::lock_guard guard(lock_);
  return usage_ != nullptr && report_busy_locked();
}

bool Books::report_busy_locked() {
  const std::optional<uint32_t> permille = usage_->busy_permille();
  if (permille && permille != told_busy_) {
    slice_.tell_busy(*permille);
    told_busy_ = permille;
  }
  return permille.value_or(0) != 0;
}

bool Books::settle_locked(uint64_t* missing) {
  *missing = 0;
  if (usage_ == nullptr || !opened_) return true;
  const auto used = usage_->bytes();
  if (!used) return true;
  const uint64_t expected = own_ + round_up(charged_, kGranule);
  const uint64_t beyond = *used > expected ? *used - expected : 0;
  if (beyond < beyond_ + borne_) give_back(beyond_ + borne_ - beyond);
  // What was borne is charged as soon as there is room.
  if (borne_ > 0 && slice_.charge(borne_)) {
    beyond_ += borne_;
    slice_.refund_borne(borne_);
    borne_ = 0;
  }
  const uint64_t more = beyond - beyond_ - borne_;
  if (more == 0) return true;
  if (!slice_.charge(more)) {
    *missing = more;
    return false;
  }
  beyond_ += more;
  return true;
}

void Books::give_back(uint64_t bytes) {
  const uint64_t borne = std::min(bytes, borne_);
  if (borne > 0) slice_.refund_borne(borne);
  borne_ -= borne;
  if (bytes > borne) slice_.refund(bytes - borne);
  beyond_ -= bytes - borne;
}

bool Books::settle() {
  std::lock_guard guard(lock_);
  uint64_t missing;
  return settle_locked(&missing);
}

bool Books::settle_or_end(std::string* why) {
  std::lock_guard guard(lock_);
  uint64_t missing;
  if (settle_locked(&missing)) return true;
  if (slice_.bear(missing)) {
    borne_ += missing;
    return true;
  }
  *why = "the driver holds " + std::to_string(missing / kMib) +
         " MiB more for this program than its slice has room for";
  return false;
}

uint64_t Books::heap() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

bool Books::cover_host() {
  const uint64_t held = std::max(held_, measured_);
  const uint64_t wanted = held <= kHostFree ? 0 : round_up(held - kHostFree, kHostStep);
  if (wanted > host_charged_) {
    if (!slice_.charge_host(wanted - host_charged_)) return false;
    host_charged_ = wanted;
  } else if (wanted + 2 * kHostStep <= host_charged_) {
    slice_.refund_host(host_charged_ - wanted);
    host_charged_ = wanted;
  }
  return true;
}

bool Books::charge_host(uint64_t bytes) {
  std::lock_guard guard(lock_);
  held_ += bytes;
  measured_ += bytes;
  if (cover_host()) return true;
  held_ -= bytes;
  measured_ -= bytes;
  return false;
}

void Books::refund_host(uint64_t bytes) {
  std::lock_guard guard(lock_);
  held_ -= std::min(bytes, held_);
  measured_ -= std::min(bytes, measured_);
  cover_host();
}

bool Books::settle_host(std::string* why) {
  std::lock_guard guard(lock_);
  const uint64_t now = heap();
  measured_ = now - std::min(now, heap_at_start_);
  if (cover_host()) return true;
  *why = "the session takes " + std::to_string(measured_ / kMib) +
         " MiB of the host's memory, more than its slice is allowed";
  return false;
}

}  // namespace gpupool::worker
