// Functions of the program that streams call, and copies whose source is read when the stream gets
// there. A thread of the library's own calls and answers them, one after the other; while any is
// outstanding it also reads what comes from the worker if nobody else does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>

#include "api/cuda_abi.h"
#include "wire/messages.h"

namespace gpupool::client {

struct Context;

class HostCalls {
 public:
  // Each returns the number under which the worker asks for it; waits while very many are
  // outstanding.
  uint32_t add_function(Context* context, CUhostFn function, void* data);
  uint32_t add_callback(Context* context, CUstream stream, CUstreamCallback callback, void* data);
  uint32_t add_source(Context* context, const void* from, uint64_t bytes);

  // Of all devices together: functions that were not called yet or have not returned.
  static bool any_outstanding() { return outstanding_.load(std::memory_order_acquire) != 0; }

  // What the worker says; by the thread that reads.
  void called(uint32_t context, const wire::HostFunctionCall& call);
  // After an execution error: what is left is not called, but for callbacks that get the error.
  void context_failed(const Context* context);

 private:
  struct Item {
    Context* context = nullptr;
    CUhostFn function = nullptr;
    CUstreamCallback callback = nullptr;
    CUstream stream = nullptr;
    void* data = nullptr;
    const void* source = nullptr;
    uint64_t bytes = 0;
    bool called = false;
    CUresult status = CUDA_SUCCESS;
  };
  uint32_t add(const Item& item);
  void serve();
  void drop(std::map<uint32_t, Item>::iterator item);  // with lock_ held

  static std::atomic<uint64_t> outstanding_;

  std::mutex lock_;
  std::condition_variable changed_;
  std::map<uint32_t, Item> items_;
  std::deque<uint32_t> ready_;
  std::atomic<bool> has_ready_{false};
  uint32_t next_ = 1;
  bool started_ = false;
};

}  // namespace gpupool::client
