// Memory that a program maps by itself (cuMemAddressReserve, cuMemCreate, cuMemMap): its addresses
// lie in the arena, and its physical memory is charged like any other.
#pragma once

#include <cstdint>
#include <map>

#include "worker/driver_table.h"
#include "worker/memory.h"
#include "worker/tables.h"

namespace gpupool::worker {

class VirtualMemory {
 public:
  VirtualMemory(const DriverTable& driver, MemoryAccount& account, Memory& memory)
      : driver_(driver), account_(account), memory_(memory) {}

  CUresult reserve(uint64_t bytes, uint64_t alignment, uint64_t wanted, uint64_t* address);
  CUresult free(uint64_t address, uint64_t bytes);
  CUresult create(wire::Handle handle, uint64_t bytes);
  CUresult release(wire::Handle handle);
  CUresult map(uint64_t address, uint64_t bytes, uint64_t offset, wire::Handle handle);
  CUresult unmap(uint64_t address, uint64_t bytes);
  CUresult set_access(uint64_t address, uint64_t bytes, unsigned flags);

  // True if all of the range is mapped, piece by piece, and may be read and written.
  bool contains(uint64_t address, uint64_t bytes) const;
  // Gives everything back.
  void close();

 private:
  struct Physical {
    CUmemGenericAllocationHandle driver = 0;
    uint64_t bytes = 0;
    int mappings = 0;
    bool released = false;  // lives until the last mapping ends
  };
  struct Mapping {
    uint64_t bytes = 0;
    uint32_t physical = 0;  // key in physical_
    bool accessible = false;
  };

  bool whole_units(uint64_t value) const { return value % memory_.granularity() == 0; }
  // All mappings that begin in the range, if they fill it exactly.
  bool covered(uint64_t address, uint64_t bytes) const;
  void drop_if_unused(uint32_t key);

  const DriverTable& driver_;
  MemoryAccount& account_;
  Memory& memory_;
  std::map<uint64_t, uint64_t> reservations_;  // address, bytes
  std::map<uint64_t, Mapping> mappings_;       // by address
  std::map<uint32_t, Physical> physical_;      // by a number of our own: a handle may be reused
  Table<uint32_t> handles_;                    // to keys of physical_
  uint32_t next_key_ = 1;
};

}  // namespace gpupool::worker
