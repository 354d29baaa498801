// Devices and contexts of this process, and what belongs to them.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "simgpu/driver/cuda.h"
#include "simgpu/driver/handles.h"
#include "simgpu/driver/memory.h"
#include "simgpu/driver/stream.h"
#include "simgpu/exec/engine.h"
#include "simgpu/machine/card_state.h"
#include "simgpu/machine/description.h"
#include "simgpu/ptx/builtins.h"

namespace gpupool::simgpu {

class Context;
class Module;
using ptx::PrintfBuffer;
using MallocHeap = ptx::DeviceHeap;  // not to be taken for the DeviceHeap of cuMemAlloc

// This context's right to compute on its card: held while any of its launches runs, and given to
// other contexts that wait when the turn is over.
class Turn {
 public:
  Turn(CardState* card, uint32_t id) : card_(card), id_(id) {}
  bool enter(const std::function<bool()>& cancelled);  // false: cancelled
  void leave();
  void pass_on(const std::function<bool()>& cancelled);  // called while running

 private:
  bool take(std::unique_lock<std::mutex>& lock, const std::function<bool()>& cancelled);
  CardState* const card_;
  const uint32_t id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int running_ = 0;
  std::atomic<bool> held_{false};
  bool moving_ = false;
  uint64_t noted_ = 0;
};

struct Device {
  int ordinal = 0;
  GpuDescription gpu;
  std::unique_ptr<CardState> card;
  std::unique_ptr<DeviceHeap> heap;
  std::unique_ptr<PhysicalStore> physical;
  Context* primary = nullptr;  // always there; active while retained
  CUresult join();             // takes part in the card's accounts, once
};

// A context's view of the address table.
class ContextMemory : public MemorySpace {
 public:
  explicit ContextMemory(Context* context) : context_(context) {}
  std::optional<MemoryRange> find(uint64_t address) const override;
  uint64_t generation() const override;
  uint64_t allocate(uint64_t bytes, uint64_t alignment) override;
  void release(uint64_t address) override;

 private:
  Context* const context_;
};

struct Event {
  Context* context = nullptr;
  uint64_t epoch = 0;
  unsigned flags = 0;
  std::mutex mutex;
  std::shared_ptr<RecordPoint> last;  // null: never recorded
};

// Contexts are never freed: a handle of a destroyed one must still say so.
class Context {
 public:
  Context(Device* device, bool primary, unsigned flags);

  Device* const device;
  const bool primary;
  const uint64_t id;
  std::atomic<unsigned> flags;
  unsigned api_version = 3020;
  std::atomic<bool> active{false};
  std::atomic<uint64_t> epoch{0};   // grows with each activation
  std::atomic<int> fault{0};        // CUresult that stays until the context ends
  std::atomic<bool> ending{false};  // launches stop at their next checkpoint
  std::atomic<uint32_t> peers{0};   // devices whose memory kernels may access, one bit each
  int retained = 0;                 // primary: under the driver's mutex
  std::atomic<int> cache_config{0}, shared_config{0};
  std::shared_ptr<ContextMemory> memory;
  Turn turn;

  CUresult activate();
  void deactivate();  // ends the work, frees everything

  std::shared_ptr<Stream> legacy_stream();
  std::shared_ptr<Stream> thread_stream();
  std::shared_ptr<Stream> new_stream(unsigned flags, int priority);
  void retire(const std::shared_ptr<Stream>& stream);

  // Puts work into a stream, after what CUDA's rules for default streams put in front of it.
  uint64_t submit(const std::shared_ptr<Stream>& stream, Stream::Work work,
                  bool calls_program = false);
  // The same for short work that nobody waits long for: done at once when nothing is in front.
  void submit_short(const std::shared_ptr<Stream>& stream, const Stream::Work& work,
                    const Stream::Point& point = nullptr);
  void record(const std::shared_ptr<Stream>& stream, const Stream::Point& point) {
    submit_short(stream, [] {}, point);
  }
  // Submits and waits. Returns the context's fault, if any.
  CUresult perform(const std::shared_ptr<Stream>& stream, const Stream::Work& work);
  void wait_idle();
  CUresult synchronize();
  bool idle();

  CUresult set_limit(CUlimit limit, size_t value);
  CUresult get_limit(CUlimit limit, size_t* value);
  // Before a kernel is launched: output of earlier ones goes out, and what this one's printf and
  // malloc need is made, with the limits of now.
  CUresult prepare_for(bool prints, bool allocates);
  uint64_t stack_bytes() { return limits_[CU_LIMIT_STACK_SIZE]; }

  void run(const Launch& launch);
  void set_fault(CUresult code) {
    int none = 0;
    fault.compare_exchange_strong(none, code);
  }
  void flush_output();
  CUresult status() const { return CUresult(fault.load(std::memory_order_acquire)); }

 private:
  std::vector<Dependency> order(const Stream& stream);  // with order_mutex_ held
  std::mutex order_mutex_;
  std::shared_ptr<Stream> legacy_;
  std::vector<std::shared_ptr<Stream>> streams_;  // all others
  std::atomic<bool> prints_{false};               // there is a printf_buffer_
  std::mutex limits_mutex_;                       // what follows
  std::array<std::atomic<size_t>, CU_LIMIT_MAX> limits_{};
  std::shared_ptr<PrintfBuffer> printf_buffer_;  // null until a kernel that prints is launched
  std::shared_ptr<MallocHeap> malloc_heap_;      // null until one that calls malloc or free is
};

struct Driver {
  MachineDescription machine;
  std::vector<std::unique_ptr<Device>> devices;
  std::mutex mutex;  // context creation, primary reference counts
  HandleTable<Stream> streams;
  HandleTable<Event> events;
  std::mutex contexts_mutex;
  std::set<const Context*> contexts;  // every context ever made
};

// The driver of this process: CUDA_SUCCESS after cuInit, else the error that every call returns.
CUresult driver_status();
// Calls a function of the program's that a stream has reached: CUDA's calls in it are refused.
void call_host_function(const std::function<void()>& function);
Driver& driver();

CUresult find_device(CUdevice ordinal, Device** device);
Context* find_context(CUcontext handle);  // null: never a context
// The calling thread's current context, usable: initialised, not destroyed, without a fault.
CUresult current_context(Context** context);
Context* current_or_null();
void set_current(Context* context);  // replaces the top of the thread's stack
std::vector<Context*>& context_stack();

// A stream handle, with the null stream's meaning. `context` is the current one.
CUresult find_stream(CUstream handle, Context* context, std::shared_ptr<Stream>* stream);

// Modules of a context end with it (module.cc).
void unload_modules(Context* context);

inline CUcontext handle_of(Context* context) { return reinterpret_cast<CUcontext>(context); }

}  // namespace gpupool::simgpu

#define GPUPOOL_TRY(expression)                                                   \
  do {                                                                            \
    if (CUresult status_ = (expression); status_ != CUDA_SUCCESS) return status_; \
  } while (0)

#define GPUPOOL_CURRENT(name)                 \
  ::gpupool::simgpu::Context* name = nullptr; \
  GPUPOOL_TRY(::gpupool::simgpu::current_context(&name))
