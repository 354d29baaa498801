// The region that a virtual machine shares with the host, cut into slots of one ring each
// (doc/rings.md). The guest may write to all of it at any time: nothing in it is read here. The
// broker does not map it either, it writes to the file, so that one that somebody made smaller is
// no danger to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "broker/fd.h"
#include "broker/leases.h"
#include "broker/rings.h"
#include "carriers/region_layout.h"

namespace gpupool::broker {

class Region : public std::enable_shared_from_this<Region> {
 public:
  // The very file that was made, regular, of the right size. Null: `why`.
  static std::shared_ptr<Region> open(const RegionSpec& spec, std::string* why);

  const RegionSpec& spec() const { return spec_; }
  size_t slots() const { return cut_.count; }
  size_t free_slots() const { return free_.size(); }

  // A slot that nobody has any more, ready for a session; null: `why`. It is given back when the
  // last one who may still use it has let go of it.
  std::shared_ptr<Ring> take(uint32_t epoch, std::string* why);

 private:
  class Slot;
  Region(const RegionSpec& spec, Fd fd, const carriers::RegionCut& cut);
  // Without an epoch: all zero, which ends whoever still looks at it.
  bool reset(size_t slot, uint32_t epoch);
  bool write(const void* data, size_t bytes, uint64_t at);
  // Looked at before every write: a file that was cut off is not made larger again.
  bool whole(std::string* why) const;

  const RegionSpec spec_;
  const Fd fd_;
  const carriers::RegionCut cut_;
  std::deque<size_t> free_;  // the longest unused first
};

}  // namespace gpupool::broker
