// A stream: work executed one after the other, by a thread of the stream's own or by the thread
// that waits for it. Order between streams is given as dependencies on earlier work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace gpupool::simgpu {

class Context;
class Stream;

uint64_t now_ns();  // CLOCK_MONOTONIC

// What a recorded event stands for. Done points never become undone.
class RecordPoint {
 public:
  void complete();
  void wait() { done_.wait(false); }
  bool done() const { return done_.load(std::memory_order_acquire); }
  uint64_t time_ns() const { return time_; }

 private:
  uint64_t time_ = 0;
  std::atomic<bool> done_{false};
};

struct Dependency {
  std::shared_ptr<Stream> stream;
  uint64_t number;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  using Work = std::function<void()>;
  using Point = std::shared_ptr<RecordPoint>;
  Stream(Context* context, unsigned flags, int priority, uint64_t id)
      : context(context), flags(flags), priority(priority), id(id) {}

  Context* const context;
  const unsigned flags;
  const int priority;
  const uint64_t id;
  uint64_t epoch = 0;                                // of the context, when the stream was made
  bool is_blocking() const { return !(flags & 1); }  // CU_STREAM_NON_BLOCKING

  // `point`, if there is one, is complete when the work is done, and so is the stream up to it.
  // Functions of the program's run on the stream's thread only (`calls_program`).
  uint64_t submit(std::vector<Dependency> dependencies, Work work, Point point = nullptr,
                  bool calls_program = false);
  // Runs the work on the calling thread if nothing is in front of it; false: it was not run.
  // `unlock` is called once the work's place in the order is taken, before it runs.
  bool run_now(const std::function<void()>& unlock, const Work& work, const Point& point = nullptr);
  void wait(uint64_t number);
  void wait_all() { wait(last()); }
  bool idle() const {
    return completed_.load(std::memory_order_acquire) == submitted_.load(std::memory_order_acquire);
  }
  uint64_t last() const { return submitted_.load(std::memory_order_acquire); }
  bool finished(uint64_t number) const {
    return completed_.load(std::memory_order_acquire) >= number;
  }
  void close();  // no more work comes: the thread ends when the present work is done

 private:
  struct Item {
    std::vector<Dependency> dependencies;
    Work work;
    Point point;
    bool calls_program = false;
  };
  void serve();
  void finish(const Point& point);
  void execute_one(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable has_work_, progress_;
  std::deque<Item> queue_;
  std::atomic<uint64_t> submitted_{0}, completed_{0};
  bool executing_ = false, thread_ = false, thread_idle_ = false, closed_ = false;
};

}  // namespace gpupool::simgpu
