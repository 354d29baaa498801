// The ranges of memory that a process has allocated: on devices, and pinned on the host. Copies are
// checked against it, and pointer attributes come from it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <shared_mutex>

#include "api/cuda_abi.h"

namespace gpupool::client {

struct Context;

struct Range {
  enum class Type { kDevice, kGlobal, kPool, kMapped, kPinnedHost, kRegisteredHost };
  uint64_t base = 0;
  uint64_t bytes = 0;
  Type type = Type::kDevice;
  Context* context = nullptr;
  unsigned flags = 0;      // of the allocation
  uint64_t buffer_id = 0;  // CU_POINTER_ATTRIBUTE_BUFFER_ID
  bool sync_memops = false;
  CUmemoryPool pool = nullptr;  // of which it is an allocation

  bool on_device() const { return type <= Type::kMapped; }
};

class Ranges {
 public:
  // False: it overlaps with another one.
  bool add(Range range);
  // Removes the range that begins at `base` if it is of such a type.
  std::optional<Range> remove(uint64_t base, Range::Type type);
  std::optional<Range> find(uint64_t address) const;
  // True if [address, address + bytes) lies in one allocation on a device, or in memory that the
  // program has mapped, piece by piece.
  bool device_range(uint64_t address, uint64_t bytes, Context** owner = nullptr) const;
  bool overlaps(uint64_t address, uint64_t bytes) const;
  bool set_sync_memops(uint64_t address, bool value);
  void drop_context(const Context* context);

 private:
  mutable std::shared_mutex lock_;
  std::map<uint64_t, Range> ranges_;
  uint64_t next_id_ = 1;
};

}  // namespace gpupool::client
