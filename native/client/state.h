// What the client knows of the process's CUDA state: devices, contexts, threads and the tables of
// objects. Everything here lives as long as the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "api/cuda_abi.h"
#include "client/channel.h"
#include "client/handles.h"
#include "client/host_calls.h"
#include "client/memory.h"
#include "wire/control.h"

namespace gpupool::client {

struct Context;
struct Device;
struct Module;
struct Library;

struct Object {
  uint64_t handle = 0;  // as the program sees it; set by the table
  wire::Handle wire;    // as the worker sees it; set by the table
  Context* context = nullptr;
};

struct Context : Object {
  Device* device = nullptr;
  bool primary = false;
  unsigned flags = 0;
  unsigned api_version = 3020;
  uint64_t id = 0;
  std::atomic<bool> active{false};  // false: destroyed, or a primary context that nobody retains
  std::atomic<int> sticky{0};       // CUresult after an execution error
  std::atomic<int> refused{0};      // CUresult of a refused command that was not told yet
  CUfunc_cache cache_config = CU_FUNC_CACHE_PREFER_NONE;
  CUsharedconfig shared_config = CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE;

  uint32_t wire_id() const { return wire.index; }
};

struct Stream : Object {
  unsigned flags = 0;
  int priority = 0;
  uint64_t id = 0;
  bool per_thread = false;  // made for CU_STREAM_PER_THREAD
};

struct Event : Object {
  unsigned flags = 0;
};

struct Device final : ChannelEvents {
  int ordinal = 0;             // as the program sees it
  uint32_t lease_ordinal = 0;  // of the slice in the lease
  wire::DeviceSnapshot snapshot{};
  uint64_t arena_base = 0, arena_bytes = 0;

  std::mutex lock;  // connecting, the primary context
  std::atomic<Channel*> channel{nullptr};
  bool connect_failed = false;
  Context* primary = nullptr;
  unsigned primary_count = 0;
  unsigned primary_flags = 0;
  // Its driver refused machine code that was made for it: it takes PTX only.
  std::atomic<bool> ptx_only{false};

  int attribute(int which) const { return snapshot.attributes[which]; }
  bool next_arena();  // gives the arena back and reserves another one; false: none is left

  void sticky_error(uint32_t context, CUresult error) override;
  void refused_command(uint32_t context, CUresult error, uint16_t operation) override;
  void printf_output(const char* text, size_t bytes) override;
  void host_function_called(uint32_t context, const wire::HostFunctionCall& call) override;

  HostCalls host_calls;
  void error_output(const char* text, size_t bytes) override;
};

// Per-thread state; freed by the thread's end, never by a destructor of the library.
struct ThreadState {
  uint32_t index = 0;
  bool in_host_function = false;  // CUDA may not be called
  std::vector<Context*> stack;
  std::map<uint64_t, Stream*> per_thread_streams;  // by handle of the context
};

struct LinkState;
struct Link : Object {
  std::shared_ptr<LinkState> state;
};

struct Function;

struct Tables {
  Table<Context, Kind::kContext> contexts;
  Table<Stream, Kind::kStream> streams;
  Table<Event, Kind::kEvent> events;
  Table<Link, Kind::kLink> links;
};

class Process {
 public:
  // The process's state; made at the first call of any entry point.
  static Process& get();

  CUresult init(unsigned flags);
  // CUDA_ERROR_NOT_INITIALIZED, or what cuInit failed with.
  CUresult check() const { return static_cast<CUresult>(state_.load(std::memory_order_acquire)); }

  const std::vector<std::unique_ptr<Device>>& devices() const { return devices_; }
  Device* device(CUdevice ordinal) const {
    if (ordinal < 0 || static_cast<size_t>(ordinal) >= devices_.size()) return nullptr;
    return devices_[static_cast<size_t>(ordinal)].get();
  }
  // The device's data connection; opened at the first call.
  CUresult channel(Device& device, Channel** channel);
  int driver_version() const { return driver_version_; }

  Tables tables;
  Ranges ranges;  // device and host allocations

 private:
  Process();
  static void after_fork_in_child();
  CUresult connect();
  CUresult connect_device(Device& device);
  void choose_visible(std::vector<wire::DeviceSnapshot> all);

  std::mutex lock_;
  std::atomic<int> state_{CUDA_ERROR_NOT_INITIALIZED};
  std::vector<std::unique_ptr<Device>> devices_;
  int driver_version_ = 0;
  struct Session;
  std::unique_ptr<Session> session_;
};

ThreadState& thread_state();

// The calling thread's current context, null: none.
inline Context* current_context() {
  ThreadState& state = thread_state();
  return state.stack.empty() ? nullptr : state.stack.back();
}

Context* find_context(CUcontext context);
// A context is usable: initialised, current, not destroyed, without a sticky error.
CUresult enter(Context** context);
// The same for a given context (CUDA's rule: null means the current one).
CUresult check_context(const Context* context);
Channel& channel_of(const Context* context);

// A synchronising call's result: what was refused meanwhile is told here, a sticky error stays.
CUresult settle(Context* context, CUresult result);
bool is_sticky(CUresult error);

// Resolves a stream argument (null, legacy, per-thread or a handle) in the current context.
// legacy: {1, 0} on the wire.
CUresult resolve_stream(Context* context, CUstream stream, wire::Handle* on_wire,
                        Stream** object = nullptr);
CUresult resolve_event(CUevent event, Event** object);

// Objects of a context die with it.
void drop_objects_of(Context* context);
void drop_modules_of(Context* context);  // client/modules.cc

constexpr wire::Handle kLegacyStream{1, 0};

using wire::Operation;
inline uint16_t op(Operation operation) { return static_cast<uint16_t>(operation); }

}  // namespace gpupool::client
