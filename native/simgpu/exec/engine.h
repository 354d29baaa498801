// The PTX engine as the simulated driver sees it. The engine knows nothing of contexts, streams or
// processes: it is given memory, linked programs and launches, and it runs a launch to its end.
//
// A device address is an address of the process, so copying is memcpy; every access of a program is
// checked against the ranges that MemorySpace knows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gpupool::simgpu {

namespace ptx {
class DeviceHeap;
}

struct MemoryRange {
  uint64_t begin = 0;
  uint64_t end = 0;  // one past the last byte
  bool writable = true;
};

// Implemented by the driver, called by the engine from any thread.
class MemorySpace {
 public:
  virtual ~MemorySpace() = default;
  // The allocation that holds `address`, if any.
  virtual std::optional<MemoryRange> find(uint64_t address) const = 0;
  // Changes whenever a range ends or loses a right: cached ranges of an older value are void.
  virtual uint64_t generation() const = 0;
  // Memory for a program's variables, heap and the like; zeroed. 0: out of memory.
  virtual uint64_t allocate(uint64_t bytes, uint64_t alignment) = 0;
  virtual void release(uint64_t address) = 0;
};

// What the simulated card is able to do; from the machine description.
struct DeviceModel {
  int cc_major = 8, cc_minor = 0;
  int multiprocessors = 108;
  int max_threads_per_block = 1024;
  int max_threads_per_sm = 2048;
  int max_blocks_per_sm = 32;
  uint32_t shared_per_block = 48 * 1024;  // without opt-in
  uint32_t shared_per_block_optin = 163 * 1024;
  uint32_t shared_per_sm = 164 * 1024;
  uint32_t registers_per_sm = 65536;
  uint32_t clock_khz = 1410000;
};

struct ParameterInfo {
  uint32_t offset = 0, bytes = 0, alignment = 0;
};

struct KernelInfo {
  std::string name;
  std::vector<ParameterInfo> parameters;
  uint32_t parameter_bytes = 0;
  uint32_t static_shared_bytes = 0;
  uint32_t local_bytes = 0;
  uint32_t constant_bytes = 0;
  uint32_t registers = 0;                  // an estimate from the real liveness, at least 1
  uint32_t max_threads_per_block = 0;      // .maxntid / .reqntid, else the device's
  uint32_t required_block[3] = {0, 0, 0};  // .reqntid, 0: none
  int ptx_version = 0;                     // 10 * major + minor of .target's architecture: 80
  int binary_version = 0;
  // It, or a function that it may call, uses the device's printf, or malloc and free.
  bool prints = false, allocates = false;
};

struct GlobalInfo {
  uint64_t address = 0, bytes = 0;
  bool constant = false, managed = false;
};

enum class LoadStatus {
  kOk,
  kInvalidPtx,
  kUnsupportedPtxVersion,
  kUnresolvedSymbol,
  kOutOfMemory,
  kNoKernelImage
};

// Several PTX texts linked into one program, with its variables allocated and initialised.
class Program {
 public:
  virtual ~Program() = default;
  // nullptr when the program has no such kernel. Index order is the order of the source.
  virtual int kernel_index(std::string_view name) const = 0;  // -1: none
  virtual int kernel_count() const = 0;
  // Known without decoding; "" when the program can't tell (then kernel() does).
  virtual std::string kernel_name(int /*index*/) const { return ""; }
  // Decodes the kernel if that was not done before. nullptr: it uses something that the engine
  // refuses; `why` then says which instruction of which function.
  virtual const KernelInfo* kernel(int index, std::string* why) = 0;
  virtual std::optional<GlobalInfo> global(std::string_view name) const = 0;
  virtual std::vector<std::string> global_names() const = 0;
};

struct SourceText {
  std::string name;  // for messages
  std::string ptx;
  uint32_t max_registers = 0;  // more are not reported for its kernels; 0: no limit
};

struct LoadResult {
  LoadStatus status = LoadStatus::kOk;
  std::string log;  // what a JIT's error log would say: file, line, sentence
  std::shared_ptr<Program> program;
};

LoadResult load_program(const std::vector<SourceText>& sources, const DeviceModel& device,
                        std::shared_ptr<MemorySpace> memory);

// Joins texts without allocating anything: for cuLink*. Unresolved symbols are an error.
LoadStatus check_link(const std::vector<SourceText>& sources, const DeviceModel& device,
                      std::string* log);

enum class FaultKind {
  kIllegalAddress,       // 700
  kMisalignedAddress,    // 716
  kInvalidAddressSpace,  // 717
  kInvalidPc,            // 718
  kLaunchFailed,         // 719: trap, stack overflow, deadlock
  kAssert,               // 710
  kTimeout,              // 702
  kIllegalInstruction,   // 715
  kNotSupported,         // 801: found at run time
  kCancelled,            // the caller's hook asked to stop
};

struct Fault {
  FaultKind kind;
  std::string kernel;
  uint32_t block[3] = {0, 0, 0};
  uint32_t thread[3] = {0, 0, 0};
  uint64_t address = 0;
  uint32_t access_bytes = 0;
  bool is_store = false;
  std::string what;     // one sentence, with the PTX line
  std::string message;  // of a failed assertion: the line that CUDA prints for it
};

struct Launch {
  std::shared_ptr<Program> program;
  int kernel = 0;
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t dynamic_shared_bytes = 0;
  bool cooperative = false;         // all blocks resident at once; grid synchronisation allowed
  std::vector<uint8_t> parameters;  // laid out as KernelInfo::parameters says
  uint64_t stack_bytes_per_thread = 1024;
  uint64_t instruction_limit = 0;  // thread instructions; 0: none
};

struct LaunchCounters {
  uint64_t thread_instructions = 0, warp_instructions = 0, blocks = 0;
};

struct LaunchHooks {
  // Called about every 100 microseconds of running, by one of the engine's threads, and while a
  // kernel only waits. The driver takes turns with other contexts here; false cancels the launch.
  std::function<bool()> checkpoint;
  // Formatted output of the device's printf, in the order of the calls of one block.
  std::function<void(std::string_view)> print;
  ptx::DeviceHeap* heap = nullptr;  // of the device's malloc; null: it gives NULL
};

// Runs the launch on the calling thread and the engine's pool; returns when it ended.
// Launches may run at the same time. No fault: the launch succeeded.
std::optional<Fault> run_launch(const Launch& launch, const DeviceModel& device,
                                MemorySpace& memory, const LaunchHooks& hooks,
                                LaunchCounters* counters);

// The largest block that the registers of a multiprocessor allow.
int threads_for_registers(const KernelInfo& kernel, const DeviceModel& device);

// Blocks of this shape that fit on one multiprocessor (occupancy).
int blocks_per_multiprocessor(const KernelInfo& kernel, const DeviceModel& device,
                              int threads_per_block, uint64_t dynamic_shared_bytes);

}  // namespace gpupool::simgpu
