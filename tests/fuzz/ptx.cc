// PTX from anywhere: the client's scan, the linker, the decoder, and the kernels themselves, which
// run with small limits. Any outcome is fine but a crash, a hang, or a text whose variables take
// more device memory than the scan says, for that is what a tenant is charged.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "frontdoor/ptx_scan.h"
#include "simgpu/exec/engine.h"
#include "simgpu/ptx/builtins.h"

namespace gpupool::simgpu {
namespace {

constexpr size_t kMaxText = 256 * 1024;
constexpr int kMaxKernels = 4;  // of a text, are run
constexpr uint64_t kInstructions = 200'000;
constexpr auto kTime = std::chrono::milliseconds(200);
constexpr uint64_t kMemory = 64 << 20;
constexpr uint64_t kUnit = 512;  // in which variables are charged
constexpr uint32_t kBuffer = 4096;

// Memory of a small card; what the sanitizer allocates shows each access beyond a range.
class CardMemory : public MemorySpace {
 public:
  ~CardMemory() override {
    for (const auto& [begin, range] : ranges_) free(reinterpret_cast<void*>(begin));
  }
  std::optional<MemoryRange> find(uint64_t address) const override {
    std::lock_guard lock(mutex_);
    auto at = ranges_.upper_bound(address);
    if (at == ranges_.begin()) return std::nullopt;
    --at;
    return address < at->second.end ? std::optional(at->second) : std::nullopt;
  }
  uint64_t generation() const override {
    std::lock_guard lock(mutex_);
    return generation_;
  }
  uint64_t allocate(uint64_t bytes, uint64_t alignment) override {
    std::lock_guard lock(mutex_);
    if (bytes > kMemory || used_ > kMemory - bytes) return 0;
    void* at = nullptr;
    if (posix_memalign(&at, std::max<uint64_t>(alignment, 256), bytes) != 0) return 0;
    memset(at, 0, bytes);
    const auto begin = reinterpret_cast<uint64_t>(at);
    ranges_[begin] = {begin, begin + bytes, true};
    used_ += bytes;
    return begin;
  }
  void release(uint64_t address) override {
    std::lock_guard lock(mutex_);
    auto at = ranges_.find(address);
    if (at == ranges_.end()) abort();  // released twice
    used_ -= at->second.end - at->second.begin;
    ranges_.erase(at);
    ++generation_;
    free(reinterpret_cast<void*>(address));
  }
  // In the units in which variables are charged.
  uint64_t charged() const {
    std::lock_guard lock(mutex_);
    uint64_t sum = 0;
    for (const auto& [begin, range] : ranges_)
      sum += (range.end - range.begin + kUnit - 1) / kUnit * kUnit;
    return sum;
  }

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, MemoryRange> ranges_;
  uint64_t used_ = 0;
  uint64_t generation_ = 0;
};

// As a launch of the driver: what it would refuse is not run.
bool launchable(const KernelInfo& info, const DeviceModel& device, const Launch& launch) {
  const uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
  if (threads > info.max_threads_per_block) return false;
  if (launch.dynamic_shared_bytes + uint64_t{info.static_shared_bytes} > device.shared_per_block)
    return false;
  return blocks_per_multiprocessor(info, device, static_cast<int>(threads),
                                   launch.dynamic_shared_bytes) > 0;
}

void run(const std::shared_ptr<Program>& program, int kernel, const KernelInfo& info,
         const DeviceModel& device, CardMemory& memory, ptx::DeviceHeap& heap, uint64_t buffer) {
  Launch launch;
  launch.program = program;
  launch.kernel = kernel;
  launch.grid[0] = 2;
  launch.block[0] = 40;  // a whole warp and a part of one
  for (int i = 0; i < 3; ++i)
    if (info.required_block[0] != 0) launch.block[i] = std::max(1u, info.required_block[i]);
  if (uint64_t{launch.block[0]} * launch.block[1] > 1024 ||
      uint64_t{launch.block[0]} * launch.block[1] * launch.block[2] > 1024) {
    return;
  }
  launch.dynamic_shared_bytes = 1024;
  launch.cooperative = kernel % 2 == 1;
  launch.instruction_limit = kInstructions;
  if (!launchable(info, device, launch)) return;
  // Pointers and small numbers, as programs pass them.
  launch.parameters.resize(info.parameter_bytes);
  uint32_t number = 64;
  for (const ParameterInfo& p : info.parameters) {
    const uint64_t value = p.bytes == 8 ? buffer + number % 8 * 256 : number;
    if (uint64_t{p.offset} + p.bytes > launch.parameters.size()) abort();
    memcpy(launch.parameters.data() + p.offset, &value, std::min<size_t>(p.bytes, sizeof value));
    number = number * 3 / 4;
  }
  const auto end = std::chrono::steady_clock::now() + kTime;
  LaunchHooks hooks;
  hooks.checkpoint = [end] { return std::chrono::steady_clock::now() < end; };
  hooks.heap = &heap;
  size_t printed = 0;
  hooks.print = [&printed](std::string_view text) { printed += text.size(); };
  LaunchCounters counters;
  (void)run_launch(launch, device, memory, hooks, &counters);
}

void load_and_run(std::string_view text, const DeviceModel& device) {
  auto memory = std::make_shared<CardMemory>();
  frontdoor::ProgramInfo scanned;
  std::string why;
  const bool understood = frontdoor::scan_ptx(text, &scanned, &why);
  LoadResult loaded = load_program({{"fuzz", std::string(text), 0}}, device, memory);
  if (!loaded.program) {
    if (loaded.status == LoadStatus::kOk) abort();
    return;
  }
  if (understood && memory->charged() > scanned.variable_bytes) {
    fprintf(stderr, "variables of %llu bytes, charged are %llu\n",
            static_cast<unsigned long long>(memory->charged()),
            static_cast<unsigned long long>(scanned.variable_bytes));
    abort();
  }
  const uint64_t buffer = memory->allocate(kBuffer, 256);
  ptx::DeviceHeap heap(memory);
  const int kernels = std::min(loaded.program->kernel_count(), kMaxKernels);
  for (int k = 0; k < kernels; ++k) {
    const KernelInfo* info = loaded.program->kernel(k, &why);
    if (info == nullptr) continue;
    if (understood) {
      // A launch that the client checked has the parameters that the driver reads.
      const frontdoor::KernelLayout* layout = scanned.kernel(info->name);
      if (layout == nullptr || layout->parameter_bytes < info->parameter_bytes) {
        fprintf(stderr, "the parameters of %s\n", info->name.c_str());
        abort();
      }
    }
    run(loaded.program, k, *info, device, *memory, heap, buffer);
  }
  for (const std::string& name : loaded.program->global_names()) (void)loaded.program->global(name);
}

}  // namespace
}  // namespace gpupool::simgpu

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  setenv("GPUPOOL_SIMGPU_THREADS", "1", 1);  // every run of an input is the same
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gpupool::simgpu;
  if (size > kMaxText) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  static const DeviceModel device;
  load_and_run(text, device);
  return 0;
}
