// A session's device memory: physical memory from the virtual-memory API, mapped into the arena of
// addresses that client and worker agreed on, charged to the slice before it is created. Large
// allocations have physical memory of their own; small ones share granules.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "worker/driver_table.h"
#include "worker/session.h"

namespace gpupool::worker {

class Memory {
 public:
  Memory(const DriverTable& driver, MemoryAccount& account) : driver_(driver), account_(account) {}

  // Gives the arena back: after the last allocation and context.
  void close();
  // Reserves the arena; false: these addresses are not free here.
  bool reserve(int device, uint64_t base, uint64_t bytes);
  bool reserved() const { return arena_bytes_ != 0; }
  uint64_t arena_base() const { return arena_base_; }
  uint64_t arena_bytes() const { return arena_bytes_; }

  // CUDA_ERROR_OUT_OF_MEMORY: over the slice's limit, or no physical memory.
  CUresult allocate(uint64_t bytes, uint32_t context, uint64_t* address);
  // The allocation's end as far as the client is concerned: it is no valid range any more. Its
  // memory goes back with release(), when no work that was submitted before can touch it.
  bool forget(uint64_t address);
  void release(uint64_t address);
  std::vector<uint64_t> of_context(uint32_t context) const;
  void trim() { drop_spare(); }  // gives back what is only kept for later

  // Addresses of the arena without memory, for programs that map by themselves. `wanted` 0:
  // anywhere.
  bool reserve_range(uint64_t bytes, uint64_t alignment, uint64_t wanted, uint64_t* base);
  void free_range(uint64_t base, uint64_t bytes) { give_addresses(base, bytes); }
  uint64_t granularity() const { return granularity_; }
  int device() const { return device_; }

  // True if [address, address + bytes) lies in one live allocation or in a module's variable.
  bool contains(uint64_t address, uint64_t bytes) const;
  void add_global(uint64_t address, uint64_t bytes, uint32_t module);
  void drop_globals(uint32_t module);

 private:
  struct Mapping {  // physical memory, mapped
    uint64_t base = 0, bytes = 0;
    CUmemGenericAllocationHandle handle = 0;
  };
  struct Block {  // a mapping that small allocations share
    Mapping mapping;
    std::map<uint64_t, uint64_t> free;  // offset, bytes
    uint64_t used = 0;
  };
  struct Allocation {
    uint64_t bytes = 0;  // asked for
    uint64_t taken = 0;  // of the block; of a mapping of its own: all of it
    uint32_t context = 0;
    bool live = true;    // false: forgotten
    uint64_t block = 0;  // base of the block; 0: a mapping of its own
    Mapping mapping;
  };

  CUresult map(uint64_t bytes, Mapping* mapping);
  void unmap(const Mapping& mapping);
  CUresult allocate_small(uint64_t bytes, Allocation* allocation, uint64_t* address);
  bool take_addresses(uint64_t bytes, uint64_t* base);
  void give_addresses(uint64_t base, uint64_t bytes);
  void drop_spare();

  const DriverTable& driver_;
  MemoryAccount& account_;
  int device_ = 0;
  uint64_t arena_base_ = 0, arena_bytes_ = 0;
  uint64_t granularity_ = 2 * 1024 * 1024;
  std::map<uint64_t, uint64_t> free_;  // addresses of the arena: base, bytes
  std::map<uint64_t, Allocation> allocations_;
  std::map<uint64_t, std::unique_ptr<Block>> blocks_;
  uint64_t spare_ = 0;  // an empty block that is kept for the next small allocation; 0: none
  struct Global {
    uint64_t bytes;
    uint32_t module;
  };
  std::map<uint64_t, Global> globals_;
};

}  // namespace gpupool::worker
