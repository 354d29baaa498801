// What the device's built-in functions need besides execution: printf's formatting, the heap behind
// the device's malloc, the text of a failed assertion.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "simgpu/exec/engine.h"

namespace gpupool::simgpu::ptx {

// Copies `bytes` from a device address; false: the range isn't readable.
using ReadDevice = std::function<bool(uint64_t address, void* to, uint64_t bytes)>;

struct PrintfResult {
  std::string text;
  int arguments = 0;   // what the device's printf returns; -1: format isn't readable
  bool fault = false;  // format or arguments aren't readable
  uint64_t fault_address = 0;
};

// Formats one vprintf call. The arguments lie packed at `arguments`, each at its natural alignment
// of 4 or 8 bytes (smaller integers promoted to 4, floats to double); %s is a device address.
// Unknown conversions are printed as they are. Widths, precisions and strings are bounded.
PrintfResult format_printf(uint64_t format, uint64_t arguments, const ReadDevice& read);

// A NUL-terminated string of at most `limit` bytes; false: not readable.
bool read_string(uint64_t address, size_t limit, const ReadDevice& read, std::string* out);

// What people call the function: demangled, where its name is a mangled one.
std::string readable_name(const std::string& name);

// The line that the driver prints for a failed device assertion.
std::string assert_message(const ReadDevice& read, uint64_t message, uint64_t file, uint32_t line,
                           uint64_t function, const uint32_t block[3], const uint32_t thread[3]);

// The heap of the device's malloc: one arena of the MemorySpace. Thread-safe.
class DeviceHeap {
 public:
  static constexpr uint64_t kDefaultBytes = 8 * 1024 * 1024;  // CU_LIMIT_MALLOC_HEAP_SIZE

  DeviceHeap(std::shared_ptr<MemorySpace> memory, uint64_t capacity_bytes = kDefaultBytes);
  ~DeviceHeap();
  DeviceHeap(const DeviceHeap&) = delete;
  DeviceHeap& operator=(const DeviceHeap&) = delete;

  // Takes the arena now rather than at the first allocation; false: out of memory.
  bool reserve();
  uint64_t allocate(uint64_t bytes);  // 16-byte aligned; 0: full, as CUDA's malloc
  bool free(uint64_t address);        // 0 is ignored; false: not a live block of this heap
  uint64_t used_bytes() const;

 private:
  std::shared_ptr<MemorySpace> memory_;
  const uint64_t capacity_;
  mutable std::mutex mutex_;
  uint64_t arena_ = 0;
  std::map<uint64_t, uint64_t> blocks_;              // address -> bytes
  std::map<uint64_t, uint64_t> holes_;               // address -> bytes
  std::multimap<uint64_t, uint64_t> holes_by_size_;  // bytes -> address
  uint64_t used_ = 0;

  bool reserve_locked();
  void add_hole(uint64_t begin, uint64_t bytes);
  void remove_hole(std::map<uint64_t, uint64_t>::iterator hole);
};

// The buffer between the device's printf and the host: a ring in device memory, in which new output
// overwrites the oldest. What a program writes over it by mistake comes out as text and does no
// other harm. Thread-safe.
class PrintfBuffer {
 public:
  static constexpr uint64_t kDefaultBytes = 1 << 20;  // CU_LIMIT_PRINTF_FIFO_SIZE

  PrintfBuffer(std::shared_ptr<MemorySpace> memory, uint64_t bytes);
  ~PrintfBuffer();
  PrintfBuffer(const PrintfBuffer&) = delete;
  PrintfBuffer& operator=(const PrintfBuffer&) = delete;

  bool reserved() const { return ring_ != nullptr; }  // false: out of memory
  void put(std::string_view text);                    // of one call
  // Empties it, in pieces.
  void drain(const std::function<void(std::string_view)>& write);

 private:
  static constexpr uint64_t kHeader = sizeof(uint32_t);  // the length, before each text
  void copy_in(uint64_t at, const void* from, uint64_t bytes);
  void copy_out(uint64_t at, void* to, uint64_t bytes) const;
  uint64_t drop_header();  // of the oldest entry; returns the length of its text

  std::shared_ptr<MemorySpace> memory_;
  const uint64_t bytes_;
  std::mutex mutex_;
  char* ring_ = nullptr;
  uint64_t begin_ = 0, used_ = 0;
};

}  // namespace gpupool::simgpu::ptx
