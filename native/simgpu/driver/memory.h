// The memory of the simulated cards as this process sees it: device allocations, virtual-memory
// mappings and host memory known to CUDA, in one table of exact ranges. A device address is an
// address of the process; pages come into being when they are touched.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "simgpu/machine/card_state.h"

namespace gpupool::simgpu {

class Context;

constexpr uint64_t kGranule = 2u << 20;  // physical memory comes in pieces of 2 MiB
constexpr uint32_t kEveryDevice = 0xFFFFFFFF;

enum class RangeKind {
  kDevice,      // cuMemAlloc and relatives
  kManaged,     // cuMemAllocManaged
  kHost,        // cuMemHostAlloc
  kRegistered,  // cuMemHostRegister
  kMapped,      // cuMemMap
  kModule,      // a program's variables, heap and the like
};

struct Allocation {
  uint64_t begin = 0, end = 0;
  RangeKind kind = RangeKind::kDevice;
  Context* context = nullptr;
  int device = 0;
  uint64_t id = 0;  // CU_POINTER_ATTRIBUTE_BUFFER_ID
  unsigned flags = 0;
  uint32_t readers = 0, writers = 0;  // by device, one bit each
  uint64_t pool = 0;                  // handle of the memory pool it came from
  bool on_device() const {
    return kind == RangeKind::kDevice || kind == RangeKind::kMapped || kind == RangeKind::kModule;
  }
};

// Every range of addresses that a device may access, and every span that the driver keeps.
class AddressTable {
 public:
  void insert(Allocation allocation);  // gives it its id where it has none
  std::optional<Allocation> erase(uint64_t begin);
  std::optional<Allocation> find(uint64_t address) const;
  // The same, but neighbouring mappings with the same rights count as one range.
  std::optional<Allocation> find_joined(uint64_t address) const;
  // True when all of [address, address + bytes) is known.
  bool covers(uint64_t address, uint64_t bytes) const;
  std::vector<Allocation> of_context(const Context* context) const;
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }

  void add_span(uint64_t begin, uint64_t bytes);
  void remove_span(uint64_t begin);
  // True when the driver keeps this address, whether or not anything is there now.
  bool in_span(uint64_t address) const;

 private:
  mutable std::shared_mutex mutex_;
  std::map<uint64_t, Allocation> ranges_;
  std::map<uint64_t, uint64_t> spans_;  // begin, end
  std::atomic<uint64_t> generation_{1};
  uint64_t next_id_ = 1;
};

AddressTable& addresses();

// cuMemAlloc's memory on one card, charged in granules: small pieces share a granule.
class DeviceHeap {
 public:
  DeviceHeap(int device, CardState* card) : device_(device), card_(card) {}
  // 0: the card's memory is used up. Fresh granules are zero.
  uint64_t allocate(uint64_t bytes, uint64_t alignment, RangeKind kind, Context* context,
                    uint64_t pool = 0);
  bool release(uint64_t address);  // false: no such allocation of this heap

 private:
  struct Block {
    uint64_t base = 0;
    uint64_t bump = 0;  // offset of the first byte never given out
    uint32_t live = 0;
    std::deque<std::pair<uint64_t, uint64_t>> freed;  // offset, bytes; oldest first
  };
  uint64_t from_blocks(uint64_t bytes, uint64_t alignment);
  uint64_t new_span(uint64_t bytes);  // charged and mapped; 0: out of memory
  void drop_span(uint64_t base, uint64_t bytes);
  bool release_small(uint64_t address);

  const int device_;
  CardState* const card_;
  std::mutex mutex_;
  std::map<uint64_t, Block> blocks_;
  std::map<uint64_t, uint64_t> small_;                    // address, bytes taken from its block
  std::map<uint64_t, uint64_t> large_;                    // address, bytes charged
  std::deque<std::pair<uint64_t, uint64_t>> quarantine_;  // freed spans, not given out again yet
};

// Physical memory of one card for the virtual-memory functions: pieces of one sparse memory file.
class PhysicalStore {
 public:
  explicit PhysicalStore(CardState* card) : card_(card) {}
  bool allocate(uint64_t bytes, uint64_t* offset);  // false: out of memory
  void release(uint64_t offset, uint64_t bytes);
  int fd() const { return fd_; }

 private:
  CardState* const card_;
  std::mutex mutex_;
  int fd_ = -1;
  uint64_t end_ = 0;
  std::map<uint64_t, uint64_t> free_;  // offset, bytes
};

struct PhysicalMemory {
  int device = 0;
  uint64_t bytes = 0, offset = 0;
  PhysicalStore* store = nullptr;
  uint32_t handle_types = 0;
  bool host = false;  // CU_MEM_LOCATION_TYPE_HOST*: not charged to a card
  std::atomic<uint32_t> references{1};
  ~PhysicalMemory();
};

// Reserved addresses and what is mapped there.
class VirtualMemory {
 public:
  struct Mapping {
    uint64_t begin = 0, bytes = 0, offset = 0;
    std::shared_ptr<PhysicalMemory> physical;
    std::map<int, unsigned> access;  // by device: CUmemAccess_flags
  };
  uint64_t reserve(uint64_t bytes, uint64_t alignment, uint64_t hint);  // 0: no room
  bool unreserve(uint64_t begin, uint64_t bytes);
  enum class Result { kOk, kInvalid, kAlreadyMapped, kFailed };
  Result map(uint64_t begin, uint64_t bytes, uint64_t offset, std::shared_ptr<PhysicalMemory> what);
  Result unmap(uint64_t begin, uint64_t bytes);
  Result set_access(uint64_t begin, uint64_t bytes, int device, unsigned flags);
  std::optional<unsigned> access(uint64_t address, int device) const;
  std::shared_ptr<PhysicalMemory> physical(uint64_t address) const;
  std::optional<std::pair<uint64_t, uint64_t>> reservation(uint64_t address) const;

 private:
  std::vector<Mapping*> within(uint64_t begin, uint64_t bytes);  // empty unless it covers all
  void apply(Mapping& mapping);
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> reserved_;  // begin, bytes
  std::map<uint64_t, Mapping> mappings_;
};

VirtualMemory& virtual_memory();

// Host memory that CUDA gave out (cuMemHostAlloc): ordinary pages, usable by every device.
uint64_t allocate_host(uint64_t bytes, unsigned flags, Context* context);  // 0: no memory
void free_host(const Allocation& allocation);

}  // namespace gpupool::simgpu
