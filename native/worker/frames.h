// Where a session's frames come from. Normally the session's thread reads them itself. While
// functions of the program are to be called, that thread may have to wait for the device, the
// device for a function, and the function's end is told by a frame: then a deputy reads ahead,
// takes the answers that the device waits for out at once, and queues all the rest.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "carriers/carrier.h"
#include "wire/frame_io.h"

namespace gpupool::worker {

class Frames {
 public:
  using Result = wire::FrameReader::Result;

  // What the deputy asks; called by its thread.
  class Deputy {
   public:
    virtual ~Deputy() = default;
    // True if the deputy is still needed.
    virtual bool needed() = 0;
    // Bytes that the client may have sent.
    virtual uint64_t granted() = 0;
    // Looks at a frame; true: it is dealt with, nobody else sees it. A sentence in `why` ends the
    // session.
    virtual bool take_ahead(const wire::FrameHeader& header, const uint8_t* body,
                            const std::vector<uint8_t>& bulk, std::string* why) = 0;
    // Bytes of a frame that was dealt with may be sent again.
    virtual void took_ahead(uint64_t bytes) = 0;
    // Nothing more comes.
    virtual void closed() = 0;
  };

  Frames(carriers::Carrier& carrier, uint32_t epoch, Deputy& deputy)
      : carrier_(carrier), reader_(carrier, epoch), deputy_(deputy) {}
  ~Frames();
  Frames(const Frames&) = delete;
  Frames& operator=(const Frames&) = delete;

  // The rest is for the session's thread, as with FrameReader.
  Result next(bool may_wait);
  // Until there may be a frame, at most that long.
  void wait(int64_t timeout_us);
  const wire::FrameHeader& header() const { return in_memory_ ? item_.header : reader_.header(); }
  const uint32_t* segments() const { return in_memory_ ? item_.segments : reader_.segments(); }
  const uint8_t* body() const { return in_memory_ ? item_.body.data() : reader_.body(); }
  const std::string& reason() const { return in_memory_ ? item_.reason : reader_.reason(); }
  uint64_t bulk_left() const {
    return in_memory_ ? item_.bulk.size() - bulk_taken_ : reader_.bulk_left();
  }
  bool read_bulk(void* to, uint64_t bytes);  // false: the client has gone
  // The next bulk bytes where they lie in the carrier; null: they do not, or not in one piece.
  const uint8_t* lend_bulk(uint64_t bytes, uint64_t* end) {
    return in_memory_ ? nullptr : reader_.lend_bulk(bytes, end);
  }
  // Waits until so many are there; false: they never will be, or lie somewhere else.
  bool wait_for_bulk(uint64_t bytes) { return !in_memory_ && reader_.wait_for_bulk(bytes); }
  uint64_t sequence() const { return in_memory_ ? item_.header.sequence : reader_.sequence(); }
  // Bytes of all frames up to this one, its bulk as it is read, without those dealt with ahead.
  uint64_t received() const {
    return in_memory_ ? item_.received - bulk_left() : reader_.received() - ahead_;
  }

  // From now on the deputy reads. The present frame is moved into memory; `*at` points into its
  // body and is moved along. False: the client has gone.
  bool delegate(const uint8_t** at);

 private:
  struct Item {
    Result result = Result::kBlocked;
    wire::FrameHeader header{};
    uint32_t segments[wire::kMaxBulkSegments] = {};
    std::vector<uint8_t> body, bulk;
    uint64_t received = 0;
    std::string reason;
  };

  void serve();
  bool read_one();  // false: there is nothing to read now
  void push(Item item);

  carriers::Carrier& carrier_;
  wire::FrameReader reader_;  // the deputy's while active_, else the session's
  uint64_t ahead_ = 0;        // bytes dealt with ahead; goes with reader_
  Deputy& deputy_;

  // Of the session's thread:
  bool in_memory_ = false;
  Item item_;
  size_t bulk_taken_ = 0;

  std::mutex lock_;
  std::condition_variable arrived_, wanted_;
  std::deque<Item> queue_;
  bool active_ = false;
  bool ended_ = false;  // the last frame was read, or something that is none
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace gpupool::worker
