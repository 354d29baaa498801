#include "simgpu/driver/context.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <unordered_map>

#include "frontdoor/hooks.h"
#include "graphs/arrays.h"
#include "graphs/capture.h"

namespace gpupool::simgpu {
namespace {

std::atomic<uint64_t> next_id{1};

constexpr size_t kMaxStackBytes = 512 << 10;  // of local memory that a thread may have
constexpr size_t kMinPrintfBytes = 4096;
constexpr size_t kMaxSyncDepth = 24;  // of grids launched from the device

CUresult code_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::kIllegalAddress:
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    case FaultKind::kMisalignedAddress:
      return CUDA_ERROR_MISALIGNED_ADDRESS;
    case FaultKind::kInvalidAddressSpace:
      return CUDA_ERROR_INVALID_ADDRESS_SPACE;
    case FaultKind::kInvalidPc:
      return CUDA_ERROR_INVALID_PC;
    case FaultKind::kAssert:
      return CUDA_ERROR_ASSERT;
    case FaultKind::kTimeout:
      return CUDA_ERROR_LAUNCH_TIMEOUT;
    case FaultKind::kIllegalInstruction:
      return CUDA_ERROR_ILLEGAL_INSTRUCTION;
    case FaultKind::kNotSupported:
      return CUDA_ERROR_NOT_SUPPORTED;
    case FaultKind::kCancelled:
      return CUDA_SUCCESS;
    case FaultKind::kLaunchFailed:
      break;
  }
  return CUDA_ERROR_LAUNCH_FAILED;
}

// In the way of compute-sanitizer, which people know; before it, what the program itself says.
void report(const Fault& fault, CUresult code, int device) {
  std::string text;
  char line[512];
  auto add = [&](auto... values) {
    snprintf(line, sizeof line, values...);
    text += line;
  };
  if (!fault.message.empty()) text = fault.message + "\n";
  const char* access = fault.is_store ? "write" : "read";
  if (fault.kind == FaultKind::kIllegalAddress) {
    add("========= Invalid %s of size %u bytes (error %d)\n", access, fault.access_bytes,
        int(code));
  } else if (fault.kind == FaultKind::kMisalignedAddress) {
    add("========= Misaligned %s of size %u bytes (error %d)\n", access, fault.access_bytes,
        int(code));
  } else {
    add("========= Kernel stopped with error %d\n", int(code));
  }
  const std::string name = ptx::readable_name(fault.kernel);
  text += "=========     at kernel " + name;
  text += (name == fault.kernel ? "" : " (" + fault.kernel + ")") + "\n";
  add("=========     by thread (%u,%u,%u) in block (%u,%u,%u) on device %d\n", fault.thread[0],
      fault.thread[1], fault.thread[2], fault.block[0], fault.block[1], fault.block[2], device);
  if (fault.kind == FaultKind::kIllegalAddress || fault.kind == FaultKind::kMisalignedAddress) {
    add("=========     Address 0x%llx", static_cast<unsigned long long>(fault.address));
    if (fault.kind == FaultKind::kMisalignedAddress) {
      text += " is misaligned\n";
    } else if (auto range = addresses().find(fault.address)) {
      add(" is not accessible there: it lies in an allocation of %llu bytes at 0x%llx\n",
          static_cast<unsigned long long>(range->end - range->begin),
          static_cast<unsigned long long>(range->begin));
    } else {
      text += " is out of bounds\n";
    }
  }
  if (!fault.what.empty()) text += "=========     " + fault.what + "\n";
  ssize_t ignored = write(STDERR_FILENO, text.data(), text.size());
  (void)ignored;
}

// The streams that threads have of their own, by context and the context's epoch.
struct ThreadStreams {
  std::unordered_map<Context*, std::shared_ptr<Stream>>* streams = nullptr;
  ~ThreadStreams() {
    if (!streams) return;
    for (auto& [context, stream] : *streams) context->retire(stream);
    delete streams;
    streams = nullptr;
  }
};

}  // namespace

CUresult Device::join() { return card->join() ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM; }

std::optional<MemoryRange> ContextMemory::find(uint64_t address) const {
  auto range = addresses().find_joined(address);
  if (!range) return std::nullopt;
  const uint32_t mine = 1u << context_->device->ordinal;
  const uint32_t reach = mine | context_->peers.load(std::memory_order_relaxed);
  // A mapping says itself which devices may use it; other memory follows peer access.
  const uint32_t mask = range->kind == RangeKind::kMapped ? mine : reach;
  if (!(range->readers & mask)) return std::nullopt;
  return MemoryRange{range->begin, range->end, (range->writers & mask) != 0};
}

uint64_t ContextMemory::generation() const { return addresses().generation(); }

uint64_t ContextMemory::allocate(uint64_t bytes, uint64_t alignment) {
  return context_->device->heap->allocate(bytes, alignment, RangeKind::kModule, context_);
}

void ContextMemory::release(uint64_t address) { context_->device->heap->release(address); }

Context::Context(Device* device, bool primary, unsigned flags)
    : device(device),
      primary(primary),
      id(next_id++),
      flags(flags),
      memory(std::make_shared<ContextMemory>(this)),
      turn(device->card.get(), uint32_t(id)) {}

CUresult Context::activate() {
  GPUPOOL_TRY(device->join());
  if (device->gpu.context_bytes && !device->card->charge(device->gpu.context_bytes)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  device->card->add_contexts(1);
  for (auto& limit : limits_) limit = 0;
  limits_[CU_LIMIT_STACK_SIZE] = 1024;
  limits_[CU_LIMIT_PRINTF_FIFO_SIZE] = PrintfBuffer::kDefaultBytes;
  limits_[CU_LIMIT_MALLOC_HEAP_SIZE] = MallocHeap::kDefaultBytes;
  limits_[CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = 2;
  limits_[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
  limits_[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
  cache_config = shared_config = 0;
  peers = 0;
  fault = 0;
  ending = false;
  ++epoch;
  legacy_ = std::make_shared<Stream>(this, 0, 0, next_id++);
  legacy_->epoch = epoch;
  active = true;
  return CUDA_SUCCESS;
}

void Context::deactivate() {
  frontdoor::forget_context(handle_of(this));
  graphs::forget_context(handle_of(this));
  graphs::forget_arrays(handle_of(this));
  ending = true;
  active = false;
  wait_idle();
  flush_output();
  {
    std::lock_guard lock(limits_mutex_);
    prints_ = false;
    printf_buffer_.reset();
    malloc_heap_.reset();
  }
  unload_modules(this);
  auto streams = driver().streams.take_if([&](Stream& s) { return s.context == this; });
  auto events = driver().events.take_if([&](Event& e) { return e.context == this; });
  {
    std::lock_guard lock(order_mutex_);
    if (legacy_) legacy_->close();
    for (auto& stream : streams_) stream->close();
    streams_.clear();
    legacy_.reset();
  }
  for (const Allocation& allocation : addresses().of_context(this)) {
    if (allocation.kind == RangeKind::kRegistered) {
      addresses().erase(allocation.begin);
    } else if (allocation.kind == RangeKind::kHost) {
      free_host(allocation);
    } else {
      device->heap->release(allocation.begin);
    }
  }
  device->card->add_contexts(-1);
  if (device->gpu.context_bytes) device->card->uncharge(device->gpu.context_bytes);
}

std::shared_ptr<Stream> Context::legacy_stream() {
  std::lock_guard lock(order_mutex_);
  return legacy_;
}

std::shared_ptr<Stream> Context::new_stream(unsigned stream_flags, int priority) {
  auto stream = std::make_shared<Stream>(this, stream_flags, priority, next_id++);
  stream->epoch = epoch;
  std::lock_guard lock(order_mutex_);
  // Streams that were destroyed with work in them leave when that is done.
  std::erase_if(streams_, [](const auto& s) { return s.use_count() == 1 && s->idle(); });
  streams_.push_back(stream);
  return stream;
}

void Context::retire(const std::shared_ptr<Stream>& stream) {
  stream->close();
  std::lock_guard lock(order_mutex_);
  if (stream->idle()) std::erase(streams_, stream);
}

std::shared_ptr<Stream> Context::thread_stream() {
  static thread_local ThreadStreams mine;
  if (!mine.streams) mine.streams = new std::unordered_map<Context*, std::shared_ptr<Stream>>;
  auto& stream = (*mine.streams)[this];
  if (!stream || stream->epoch != epoch) stream = new_stream(0, 0);
  return stream;
}

std::vector<Dependency> Context::order(const Stream& stream) {
  std::vector<Dependency> list;
  if (&stream == legacy_.get()) {
    for (const auto& other : streams_) {
      if (other->is_blocking() && !other->idle()) list.push_back({other, other->last()});
    }
  } else if (stream.is_blocking() && legacy_ && !legacy_->idle()) {
    list.push_back({legacy_, legacy_->last()});
  }
  return list;
}

uint64_t Context::submit(const std::shared_ptr<Stream>& stream, Stream::Work work,
                         bool calls_program) {
  std::lock_guard lock(order_mutex_);
  return stream->submit(order(*stream), std::move(work), nullptr, calls_program);
}

void Context::submit_short(const std::shared_ptr<Stream>& stream, const Stream::Work& work,
                           const Stream::Point& point) {
  std::unique_lock lock(order_mutex_);
  auto dependencies = order(*stream);
  if (dependencies.empty() && stream->run_now([&] { lock.unlock(); }, work, point)) return;
  stream->submit(std::move(dependencies), work, point);
}

CUresult Context::perform(const std::shared_ptr<Stream>& stream, const Stream::Work& work) {
  std::unique_lock lock(order_mutex_);
  auto dependencies = order(*stream);
  if (!dependencies.empty() || !stream->run_now([&] { lock.unlock(); }, work)) {
    uint64_t number = stream->submit(std::move(dependencies), work);
    lock.unlock();
    stream->wait(number);
  }
  flush_output();
  return status();
}

bool Context::idle() {
  std::lock_guard lock(order_mutex_);
  if (legacy_ && !legacy_->idle()) return false;
  return std::all_of(streams_.begin(), streams_.end(), [](const auto& s) { return s->idle(); });
}

void Context::wait_idle() {
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> all;
  {
    std::lock_guard lock(order_mutex_);
    if (legacy_ && !legacy_->idle()) all.emplace_back(legacy_, legacy_->last());
    for (const auto& stream : streams_) {
      if (!stream->idle()) all.emplace_back(stream, stream->last());
    }
  }
  for (auto& [stream, number] : all) stream->wait(number);
}

CUresult Context::synchronize() {
  wait_idle();
  flush_output();
  return status();
}

void Context::run(const Launch& launch) {
  if (status() != CUDA_SUCCESS || ending) return;
  auto cancelled = [this] { return ending.load(std::memory_order_relaxed); };
  if (!turn.enter(cancelled)) return;
  LaunchHooks hooks;
  const auto limit = std::chrono::milliseconds(driver().machine.kernel_time_limit_ms);
  auto deadline = std::chrono::steady_clock::now() + limit;
  bool late = false;
  hooks.checkpoint = [&] {
    if (ending.load(std::memory_order_relaxed)) return false;
    const auto before = std::chrono::steady_clock::now();
    late = limit.count() && before > deadline;
    if (late) return false;
    turn.pass_on(cancelled);
    if (limit.count()) deadline += std::chrono::steady_clock::now() - before;
    return !ending.load(std::memory_order_relaxed);
  };
  std::shared_ptr<PrintfBuffer> output;
  std::shared_ptr<MallocHeap> heap;
  {
    std::lock_guard lock(limits_mutex_);
    output = printf_buffer_;
    heap = malloc_heap_;
  }
  if (output) hooks.print = [&](std::string_view text) { output->put(text); };
  hooks.heap = heap.get();
  auto fault_found = run_launch(launch, device->gpu.model, *memory, hooks, nullptr);
  turn.leave();
  if (!fault_found) return;
  if (late) {
    fault_found->kind = FaultKind::kTimeout;
    fault_found->what = "the kernel ran longer than the machine allows";
  }
  if (fault_found->kind == FaultKind::kCancelled) return;
  CUresult code = code_of(fault_found->kind);
  report(*fault_found, code, device->ordinal);
  set_fault(code);
}

CUresult Context::set_limit(CUlimit limit, size_t value) {
  const bool ampere = device->gpu.model.cc_major >= 8;
  std::lock_guard lock(limits_mutex_);
  switch (int(limit)) {
    case CU_LIMIT_STACK_SIZE:
      if (value > kMaxStackBytes) return CUDA_ERROR_INVALID_VALUE;
      value = (value + 15) / 16 * 16;
      break;
    case CU_LIMIT_PRINTF_FIFO_SIZE:
      if (printf_buffer_) return CUDA_ERROR_INVALID_VALUE;  // it is in use
      value = std::max(value, kMinPrintfBytes);
      break;
    case CU_LIMIT_MALLOC_HEAP_SIZE:
      if (malloc_heap_) return CUDA_ERROR_INVALID_VALUE;
      break;
    case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH:
      value = std::min(value, kMaxSyncDepth);
      break;
    case CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT:
      break;
    case CU_LIMIT_MAX_L2_FETCH_GRANULARITY:
      if (value > 128) return CUDA_ERROR_INVALID_VALUE;
      break;
    case CU_LIMIT_PERSISTING_L2_CACHE_SIZE:
      if (!ampere) return CUDA_ERROR_UNSUPPORTED_LIMIT;
      break;
    case CU_LIMIT_SHMEM_SIZE:  // of contexts that share with a graphics client
    case CU_LIMIT_CIG_ENABLED:
    case CU_LIMIT_CIG_SHMEM_FALLBACK_ENABLED:
      return CUDA_ERROR_UNSUPPORTED_LIMIT;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  limits_[size_t(limit)] = value;
  return CUDA_SUCCESS;
}

CUresult Context::get_limit(CUlimit limit, size_t* value) {
  if (int(limit) < 0 || int(limit) >= int(CU_LIMIT_MAX)) return CUDA_ERROR_INVALID_VALUE;
  if (limit == CU_LIMIT_PERSISTING_L2_CACHE_SIZE && device->gpu.model.cc_major < 8)
    return CUDA_ERROR_UNSUPPORTED_LIMIT;
  *value = limits_[size_t(limit)];
  return CUDA_SUCCESS;
}

CUresult Context::prepare_for(bool prints, bool allocates) {
  flush_output();
  if (!prints && !allocates) return CUDA_SUCCESS;
  std::lock_guard lock(limits_mutex_);
  if (prints && !printf_buffer_) {
    auto made = std::make_shared<PrintfBuffer>(memory, limits_[CU_LIMIT_PRINTF_FIFO_SIZE]);
    if (!made->reserved()) return CUDA_ERROR_OUT_OF_MEMORY;
    printf_buffer_ = std::move(made);
    prints_ = true;
  }
  if (allocates && !malloc_heap_) {
    auto made = std::make_shared<MallocHeap>(memory, limits_[CU_LIMIT_MALLOC_HEAP_SIZE]);
    if (!made->reserve()) return CUDA_ERROR_OUT_OF_MEMORY;
    malloc_heap_ = std::move(made);
  }
  return CUDA_SUCCESS;
}

void Context::flush_output() {
  if (!prints_.load(std::memory_order_acquire)) return;
  std::shared_ptr<PrintfBuffer> buffer;
  {
    std::lock_guard lock(limits_mutex_);
    buffer = printf_buffer_;
  }
  if (!buffer) return;
  bool first = true;
  buffer->drain([&](std::string_view text) {
    if (first) fflush(stdout);  // what the program printed before comes first, also into a pipe
    first = false;
    while (!text.empty()) {
      ssize_t written = write(STDOUT_FILENO, text.data(), text.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) break;
      text.remove_prefix(size_t(written));
    }
  });
}

}  // namespace gpupool::simgpu
