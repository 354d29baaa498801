// Functions of the program that the driver calls in stream order: each call is passed on to the
// client, and the stream goes on when the client says that the function has returned. Copies whose
// source the client reads only then work in the same way: the answer brings the data.
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
#include <unordered_map>
#include <vector>

#include "worker/driver_table.h"

namespace gpupool::worker {

class HostFunctions {
 public:
  static constexpr size_t kMost = 1u << 16;  // that may be outstanding in one session

  // Where an answer's data go, in this order.
  struct Place {
    uint8_t* data;
    uint64_t bytes;
  };
  struct Call {
    HostFunctions* owner = nullptr;
    uint32_t number = 0;   // the client's
    uint32_t context = 0;  // wire id
    CUcontext driver_context = nullptr;
    std::vector<Place> places;
    bool answered = false;
  };

  // Tells the client to call a function; from a thread of our own, since the driver's may not call
  // the driver.
  using Tell = std::function<void(uint32_t context, CUcontext driver_context, uint32_t number,
                                  CUresult status)>;
  explicit HostFunctions(Tell tell) : tell_(std::move(tell)) {}
  ~HostFunctions();
  HostFunctions(const HostFunctions&) = delete;
  HostFunctions& operator=(const HostFunctions&) = delete;

  // A call to hand to the driver, with one of the functions below. Null: the number is in use, or
  // too many are outstanding.
  Call* add(uint32_t number, uint32_t context, CUcontext driver_context, std::vector<Place> places);
  // For a call that the driver has refused.
  void remove(Call* call);
  static void enter(void* call);                                                // CUhostFn
  static void enter_with_status(CUstream stream, CUresult status, void* call);  // CUstreamCallback

  // The client's answer; unknown numbers are of calls that were given up. False, with a sentence:
  // the data do not fit.
  bool answer(uint32_t number, const uint8_t* data, uint64_t bytes, std::string* why);

  bool outstanding() const { return count_.load(std::memory_order_acquire) != 0; }
  // Nobody will answer any more: calls return at once.
  void close();
  // The context's work is over: what the driver has not called it never will.
  void drop_context(uint32_t context);

 private:
  void run(Call* call, CUresult status);
  void tell_all();

  const Tell tell_;
  std::mutex lock_;
  std::condition_variable answered_, entered_;
  struct Told {
    uint32_t number, context;
    CUcontext driver_context;
    CUresult status;
  };
  std::deque<Told> to_tell_;
  std::thread teller_;
  std::unordered_map<uint32_t, std::unique_ptr<Call>> calls_;
  std::vector<std::unique_ptr<Call>> dropped_;  // a driver in trouble may still have them
  std::atomic<size_t> count_{0};
  bool closed_ = false;
};

}  // namespace gpupool::worker
