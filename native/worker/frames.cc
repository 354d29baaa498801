#include "worker/frames.h"

#include <string.h>

namespace gpupool::worker {

namespace {
constexpr int64_t kLookUs = 1000;  // how soon a deputy notices that nobody needs it any more
}

Frames::~Frames() {
  {
    std::lock_guard guard(lock_);
    stopping_ = true;
  }
  wanted_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Frames::Result Frames::next(bool may_wait) {
  std::unique_lock guard(lock_);
  for (;;) {
    if (!queue_.empty()) {
      item_ = std::move(queue_.front());
      queue_.pop_front();
      in_memory_ = true;
      bulk_taken_ = 0;
      return item_.result;
    }
    if (!active_) break;
    if (!may_wait) return Result::kBlocked;
    arrived_.wait(guard);
  }
  guard.unlock();
  in_memory_ = false;
  item_ = {};
  return reader_.next(may_wait);
}

void Frames::wait(int64_t timeout_us) {
  {
    std::unique_lock guard(lock_);
    if (active_ || !queue_.empty()) {
      arrived_.wait_for(guard, std::chrono::microseconds(timeout_us),
                        [this] { return !queue_.empty() || !active_; });
      return;
    }
  }
  carrier_.wait(carriers::kReadable, timeout_us);
}

bool Frames::read_bulk(void* to, uint64_t bytes) {
  auto* at = static_cast<uint8_t*>(to);
  if (in_memory_) {
    if (bytes > bulk_left()) return false;
    memcpy(at, item_.bulk.data() + bulk_taken_, bytes);
    bulk_taken_ += bytes;
    return true;
  }
  while (bytes > 0) {
    const carriers::Moved moved = reader_.read_bulk(at, bytes, true);
    if (moved.status != carriers::Status::kOk) return false;
    at += moved.bytes;
    bytes -= moved.bytes;
  }
  return true;
}

bool Frames::delegate(const uint8_t** at) {
  std::unique_lock guard(lock_);
  if (active_ || ended_) return true;
  if (!in_memory_) {
    Item item;
    item.result = Result::kFrame;
    item.header = reader_.header();
    memcpy(item.segments, reader_.segments(), sizeof item.segments);
    item.body.assign(reader_.body(), reader_.body() + item.header.body_bytes);
    const size_t offset = static_cast<size_t>(*at - reader_.body());
    item.bulk.resize(reader_.bulk_left());
    if (!item.bulk.empty() && !read_bulk(item.bulk.data(), item.bulk.size())) return false;
    item.received = reader_.received() - ahead_;
    item_ = std::move(item);
    bulk_taken_ = 0;
    in_memory_ = true;
    *at = item_.body.data() + offset;
  }
  active_ = true;
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  wanted_.notify_all();
  return true;
}

void Frames::push(Item item) {
  {
    std::lock_guard guard(lock_);
    queue_.push_back(std::move(item));
  }
  arrived_.notify_all();
}

bool Frames::read_one() {
  Item item;
  item.result = reader_.next(false);
  if (item.result == Result::kBlocked) return false;
  if (item.result == Result::kFrame) {
    item.header = reader_.header();
    item.body.assign(reader_.body(), reader_.body() + item.header.body_bytes);
    memcpy(item.segments, reader_.segments(), sizeof item.segments);
    if (reader_.received() + reader_.bulk_left() > deputy_.granted()) {
      item.result = Result::kBad;
      item.reason = "more was sent than was granted";
    } else {
      item.bulk.resize(reader_.bulk_left());
      size_t done = 0;
      while (done < item.bulk.size()) {
        const carriers::Moved moved =
            reader_.read_bulk(item.bulk.data() + done, item.bulk.size() - done, true);
        if (moved.status != carriers::Status::kOk) {
          item.result = Result::kClosed;
          break;
        }
        done += moved.bytes;
      }
    }
  }
  if (item.result == Result::kFrame) {
    std::string why;
    const uint64_t bytes = wire::FrameWriter::frame_bytes(item.header.body_bytes,
                                                          item.header.bulk_count, item.bulk.size());
    if (deputy_.take_ahead(item.header, item.body.data(), item.bulk, &why)) {
      ahead_ += bytes;
      deputy_.took_ahead(bytes);
      return true;
    }
    if (!why.empty()) {
      item.result = Result::kBad;
      item.reason = why;
    }
    item.received = reader_.received() - ahead_;
  } else if (item.reason.empty()) {
    item.reason = reader_.reason();
  }
  const bool last = item.result != Result::kFrame;
  if (last) deputy_.closed();
  push(std::move(item));
  if (last) {
    std::lock_guard guard(lock_);
    ended_ = true;
  }
  return true;
}

void Frames::serve() {
  std::unique_lock guard(lock_);
  for (;;) {
    wanted_.wait(guard, [this] { return active_ || stopping_; });
    if (stopping_) return;
    guard.unlock();
    const bool read = read_one();
    if (!read) carrier_.wait(carriers::kReadable, kLookUs);
    guard.lock();
    if (stopping_) return;
    // At the end of the frames the session's thread finds that in the queue.
    if (ended_ || (!read && !deputy_.needed())) {
      active_ = false;
      arrived_.notify_all();
    }
  }
}

}  // namespace gpupool::worker
