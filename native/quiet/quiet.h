// The driver that does nothing: host memory is device memory, and a launch returns at once. With it
// remoting can be measured alone. It checks what costs nothing and logs nothing.
//
// GPUPOOL_QUIET_DEVICES (1), GPUPOOL_QUIET_MEMORY_MIB (16384) and GPUPOOL_QUIET_COMPUTE_CAPABILITY
// (8.0) describe its devices.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "api/cuda_abi.h"
#include "frontdoor/program_info.h"
#include "frontdoor/visible_devices.h"

#define GPUPOOL_API extern "C" __attribute__((visibility("default"))) CUresult

namespace gpupool::quiet {

struct Device {
  int index = 0;  // among all devices of the machine
  frontdoor::DeviceUuid uuid{};
  uint64_t memory_bytes = 0;
  int major = 0, minor = 0;
  CUctx_st* primary = nullptr;
};

struct Machine {
  std::atomic<bool> initialised{false};
  std::vector<Device> devices;  // as the program sees them
};

// The machine; it never ends, because clients call from their exit handlers.
Machine& machine();

// The calling thread's current context; nullptr: none.
CUcontext current_context();

// What an address belongs to.
enum class MemoryKind { kDevice, kHost, kRegistered, kMapped };
struct Allocation {
  uint64_t begin = 0, bytes = 0;
  MemoryKind kind = MemoryKind::kDevice;
  CUcontext context = nullptr;
  uint64_t id = 0;
};

CUresult allocate(uint64_t bytes, MemoryKind kind, CUcontext context, uint64_t* address);
CUresult release(uint64_t address, MemoryKind kind);
void release_all(CUcontext context);
// False: no allocation holds the address.
bool find_allocation(uint64_t address, Allocation* found);
uint64_t memory_in_use();
// Bytes of the physical allocations that virtual_memory.cc made.
void charge_physical(int64_t bytes);
void note_mapping(uint64_t begin, uint64_t bytes, CUcontext context);
void forget_mapping(uint64_t begin);

// Releases the modules of a context that ends.
void release_modules(CUcontext context);

}  // namespace gpupool::quiet

// What CUDA's handles point to. The magic tells a handle from most other pointers.
struct CUctx_st {
  static constexpr uint32_t kMagic = 0x43545851;
  uint32_t magic = kMagic;
  int device = 0;
  unsigned flags = 0;
  bool primary = false;
  int retained = 0;
  unsigned long long id = 0;
  // By CUlimit: stack, printf's buffer, heap. Others are not supported.
  size_t limits[3] = {1024, 1 << 20, 8 << 20};
};

struct CUstream_st {
  static constexpr uint32_t kMagic = 0x53545851;
  uint32_t magic = kMagic;
  unsigned flags = 0;
  int priority = 0;
  CUcontext context = nullptr;
  unsigned long long id = 0;
};

struct CUevent_st {
  static constexpr uint32_t kMagic = 0x45565851;
  uint32_t magic = kMagic;
  unsigned flags = 0;
  bool recorded = false;
  int64_t nanoseconds = 0;
};

struct CUfunc_st {
  static constexpr uint32_t kMagic = 0x464E5851;
  uint32_t magic = kMagic;
  const gpupool::frontdoor::KernelLayout* layout = nullptr;
  CUmod_st* module = nullptr;
};

// A module; a library is a module that belongs to no context, and a kernel is its function.
struct CUmod_st {
  static constexpr uint32_t kMagic = 0x4D4F5851;
  uint32_t magic = kMagic;
  CUcontext context = nullptr;
  gpupool::frontdoor::ProgramInfo info;
  std::map<std::string, CUfunc_st, std::less<>> functions;
  std::map<std::string, std::pair<uint64_t, uint64_t>, std::less<>> globals;  // address, bytes
  std::mutex mutex;
};

template <typename Handle>
bool is_valid(Handle handle) {
  return handle != nullptr && handle->magic == std::remove_pointer_t<Handle>::kMagic;
}
