#include "client/memory.h"

#include <mutex>

namespace gpupool::client {

bool Ranges::add(Range range) {
  std::unique_lock guard(lock_);
  auto next = ranges_.upper_bound(range.base);
  if (next != ranges_.end() && next->first - range.base < range.bytes) return false;
  if (next != ranges_.begin()) {
    const Range& before = std::prev(next)->second;
    if (range.base - before.base < before.bytes) return false;
  }
  range.buffer_id = next_id_++;
  ranges_.emplace(range.base, range);
  return true;
}

std::optional<Range> Ranges::remove(uint64_t base, Range::Type type) {
  std::unique_lock guard(lock_);
  const auto found = ranges_.find(base);
  if (found == ranges_.end() || found->second.type != type) return std::nullopt;
  const Range range = found->second;
  ranges_.erase(found);
  return range;
}

std::optional<Range> Ranges::find(uint64_t address) const {
  std::shared_lock guard(lock_);
  auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) return std::nullopt;
  const Range& range = std::prev(next)->second;
  if (address - range.base >= range.bytes) return std::nullopt;
  return range;
}

bool Ranges::device_range(uint64_t address, uint64_t bytes, Context** owner) const {
  std::shared_lock guard(lock_);
  auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) return false;
  const Range& range = std::prev(next)->second;
  const uint64_t offset = address - range.base;
  if (!range.on_device() || offset >= range.bytes) return false;
  if (owner != nullptr) *owner = range.context;
  uint64_t there = range.bytes - offset;
  while (bytes > there && range.type == Range::Type::kMapped && next != ranges_.end() &&
         next->second.type == Range::Type::kMapped && next->first == address + there) {
    there += next->second.bytes;
    ++next;
  }
  return bytes <= there;
}

bool Ranges::overlaps(uint64_t address, uint64_t bytes) const {
  std::shared_lock guard(lock_);
  auto next = ranges_.upper_bound(address);
  if (next != ranges_.end() && next->first - address < bytes) return true;
  if (next == ranges_.begin()) return false;
  const Range& range = std::prev(next)->second;
  return address - range.base < range.bytes;
}

bool Ranges::set_sync_memops(uint64_t address, bool value) {
  std::unique_lock guard(lock_);
  auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) return false;
  Range& range = std::prev(next)->second;
  if (address - range.base >= range.bytes || !range.on_device()) return false;
  range.sync_memops = value;
  return true;
}

void Ranges::drop_context(const Context* context) {
  std::unique_lock guard(lock_);
  for (auto at = ranges_.begin(); at != ranges_.end();) {
    if (at->second.context == context && at->second.on_device() &&
        at->second.type != Range::Type::kMapped) {
      at = ranges_.erase(at);
    } else {
      ++at;
    }
  }
}

}  // namespace gpupool::client
