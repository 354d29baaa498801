// The data connection of one device: batches commands, sends them, and takes in replies and events.
//
// Commands are encoded straight into the batch under one lock, which is the session's order. There
// is no reader thread: of the threads that wait for a reply one reads for all.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "api/cuda_abi.h"
#include "carriers/carrier.h"
#include "carriers/patience.h"
#include "wire/codec.h"
#include "wire/frame_io.h"
#include "wire/messages.h"

namespace gpupool::client {

// A call that waits for its reply; lives on the caller's stack.
struct PendingCall {
  // Filled in by the caller:
  uint8_t* bulk_to = nullptr;   // where the reply's bulk data go
  uint64_t bulk_room = 0;       // more than this is a broken reply
  bool bulk_to_vector = false;  // bulk data of unknown size go to `bulk` instead, up to bulk_room

  // Filled in by whoever reads:
  std::atomic<bool> done{false};
  CUresult status = CUDA_ERROR_UNKNOWN;
  uint64_t bulk_bytes = 0;  // that came
  std::vector<uint8_t> body;
  std::vector<uint8_t> bulk;

  uint64_t number = 0;
  PendingCall* next = nullptr;

  // For a call that nobody waits for: takes it over when it is done, and ends its life.
  void (*landed)(PendingCall* call) = nullptr;

  wire::Decoder decoder() const { return wire::Decoder(body.data(), body.size()); }
};

// What a channel tells its device; called by the thread that reads.
class ChannelEvents {
 public:
  virtual ~ChannelEvents() = default;
  virtual void sticky_error(uint32_t context, CUresult error) = 0;
  virtual void refused_command(uint32_t context, CUresult error, uint16_t operation) = 0;
  virtual void printf_output(const char* text, size_t bytes) = 0;
  virtual void host_function_called(uint32_t context, const wire::HostFunctionCall& call) = 0;
  virtual void error_output(const char* text, size_t bytes) = 0;
};

class Channel {
 public:
  static constexpr size_t kBatchBytes = 48 * 1024;  // then a batch is sent in any case
  static constexpr size_t kMaxCommandBytes = 96 * 1024;

  Channel(std::unique_ptr<carriers::Carrier> carrier, uint32_t epoch, uint64_t initial_credit,
          ChannelEvents& events);
  ~Channel() = delete;  // lives as long as the process: calls of atexit handlers must work

  // Room for one command of `body_bytes` (multiple of 8) in the batch: the batch is locked until
  // the Post is gone.
  class Post {
   public:
    Post(Channel& channel, uint16_t operation, uint32_t context, size_t body_bytes)
        : Post(channel, operation, context, body_bytes, 0, 0, 0) {}
    ~Post() {
      if (locked_) channel_.finish_post();
    }
    Post(const Post&) = delete;
    Post& operator=(const Post&) = delete;
    uint8_t* at() const { return at_; }
    wire::Encoder encoder() const { return wire::Encoder(at_); }

   private:
    friend class Channel;
    Post(Channel& channel, uint16_t operation, uint32_t context, size_t body_bytes, uint8_t flags,
         uint8_t bulk_count, uint64_t call)
        : channel_(channel) {
      channel_.lock_.lock();
      at_ = channel_.begin_command(operation, context, body_bytes, flags, bulk_count, call);
    }
    Channel& channel_;
    uint8_t* at_;
    bool locked_ = true;
  };

  // Sends a command and waits for its reply. `fill(Encoder&)` writes exactly `body_bytes`.
  template <typename Fill>
  CUresult call(uint16_t operation, uint32_t context, size_t body_bytes, Fill&& fill,
                PendingCall* pending, const carriers::Part* bulk = nullptr, int bulk_count = 0) {
    register_call(pending);
    {
      Post post(*this, operation, context, body_bytes, wire::kWantsReply,
                static_cast<uint8_t>(bulk_count), pending->number);
      wire::Encoder encoder = post.encoder();
      fill(encoder);
      post.locked_ = false;
      send_batch(bulk, bulk_count);
      lock_.unlock();
    }
    return wait(pending);
  }

  // Sends a command with bulk data, which have left when this returns.
  template <typename Fill>
  void send_bulk(uint16_t operation, uint32_t context, size_t body_bytes, Fill&& fill,
                 const carriers::Part* bulk, int bulk_count) {
    Post post(*this, operation, context, body_bytes, 0, static_cast<uint8_t>(bulk_count), 0);
    wire::Encoder encoder = post.encoder();
    fill(encoder);
    post.locked_ = false;
    send_batch(bulk, bulk_count);
    lock_.unlock();
  }

  // Sends a command whose answer nobody waits for: `pending->landed` gets it. Until then the answer
  // is read in the background, if nobody else reads.
  template <typename Fill>
  void post_call(uint16_t operation, uint32_t context, size_t body_bytes, Fill&& fill,
                 PendingCall* pending) {
    in_background_.fetch_add(1, std::memory_order_relaxed);
    register_call(pending);
    Post post(*this, operation, context, body_bytes, wire::kWantsReply, 0, pending->number);
    wire::Encoder encoder = post.encoder();
    fill(encoder);
  }

  // For the thread that calls the program's functions. Waits, and reads if nobody else does, until
  // `until` is set, which an event does. False: the connection is lost.
  bool wait_for_event(const std::atomic<bool>& until);
  // Answers a call of one of the program's functions, ahead of everything that has not been sent:
  // the worker may take nothing else before it has this.
  void answer_call(uint32_t context, uint32_t number, const void* data, uint64_t bytes);
  // From now on other commands leave some credit for such answers.
  void keep_credit_for_answers() { reserve_.store(kAnswerReserve, std::memory_order_relaxed); }

  bool lost() const { return lost_.load(std::memory_order_relaxed); }
  void flush();
  // Whether threads that wait for an answer sleep at once (CU_CTX_SCHED_BLOCKING_SYNC).
  void set_blocking_sync(bool blocking) { patience_.forbid(blocking); }
  // In the child of a fork(): drops the connection. Takes no lock.
  void abandon() { carrier_->abandon(); }

 private:
  uint8_t* begin_command(uint16_t operation, uint32_t context, size_t body_bytes, uint8_t flags,
                         uint8_t bulk_count, uint64_t call);
  void finish_post();
  bool send_batch(const carriers::Part* bulk, int bulk_count);  // with lock_ held
  bool wait_for_credit(uint64_t total);
  bool wait_for_room();

  void register_call(PendingCall* call);
  CUresult wait(PendingCall* call);
  bool become_reader();
  void stop_reading();
  // By the reader. Takes in frames; with `until`, waits for that call. False: lost.
  bool read_frames(const std::atomic<bool>* until);
  wire::FrameReader::Result next_frame();  // waits for one
  bool take_frame();
  bool take_replies();
  bool take_events();
  bool read_bulk(uint8_t* to, uint64_t bytes);
  bool lose(const char* why);

  void flusher_loop();
  void wake_flusher();

  const std::unique_ptr<carriers::Carrier> carrier_;
  ChannelEvents& events_;
  std::atomic<bool> lost_{false};

  // A quarter of the least first credit, of which the worker tells at least half.
  static constexpr uint64_t kAnswerReserve = 2 * 1024 * 1024;

  std::mutex lock_;        // batch_: the order of the session
  std::mutex write_lock_;  // writer_; taken after lock_
  wire::FrameWriter writer_;
  std::atomic<uint64_t> reserve_{0};
  std::atomic<uint64_t> in_background_{0};
  std::unique_ptr<uint8_t[]> batch_;
  size_t batch_bytes_ = 0;
  uint64_t flushes_ = 0;
  std::atomic<bool> flusher_awake_{false};
  bool flusher_started_ = false;
  std::atomic<uint32_t> flusher_signal_{0};

  std::mutex reply_lock_;  // calls_, reading_, event_waiters_
  std::condition_variable replies_;
  PendingCall* calls_ = nullptr;
  bool reading_ = false;
  int event_waiters_ = 0;
  uint64_t next_call_ = 1;
  std::atomic<uint64_t> credit_;

  wire::FrameReader reader_;  // these two: of the thread that reads
  carriers::Patience patience_;
  std::atomic<uint64_t> taken_sequence_{0};
};

uint32_t thread_index();  // number of the calling thread on the wire, from 1

}  // namespace gpupool::client
