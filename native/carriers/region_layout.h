// How the region of a virtual machine is divided: a page that gpupoold writes, room for the guest
// to measure its speed in, then slots of one ring each. Both sides of a slot are told where it
// lies; only the host divides.
#pragma once

#include <cstddef>
#include <cstdint>

#include "carriers/ring_layout.h"

namespace gpupool::carriers {

// The first page (gpupoold/guests/region.py), as far as others need it.
struct RegionHeader {
  uint8_t magic[8];
  uint64_t epoch;  // which boot of the guest
  uint8_t lease[16];
  uint8_t owner[16];
  uint32_t state;  // kRegionLive, or another: the lease has ended
  uint32_t offset;
  uint64_t bytes;  // of the region
};
static_assert(sizeof(RegionHeader) == 64);
constexpr uint8_t kRegionMagic[8] = {'G', 'P', 'P', 'R', 'E', 'G', 'N', '1'};
constexpr uint32_t kRegionLive = 1;

constexpr uint64_t kRegionScratch = 4096;            // here the guest measures
constexpr uint64_t kRegionFirstSlot = 64 * 1024;     // and here the slots begin
constexpr uint32_t kRegionCommandBytes = 64 * 1024;  // of a slot's command rings
constexpr size_t kRegionLeastSlots = 4;

struct RegionCut {
  RingLayout layout;
  size_t count = 0;
  uint64_t offset(size_t slot) const { return kRegionFirstSlot + slot * layout.region_bytes(); }
};

// The largest bulk rings, up to those of a local session, with which some programs find a slot
// each. None: the region is too small.
constexpr RegionCut cut_region(uint64_t bytes) {
  RegionCut cut;
  cut.layout.command_bytes = kRegionCommandBytes;
  if (bytes < kRegionFirstSlot) return cut;
  for (uint32_t bulk = 4 << 20; bulk >= 64 << 10; bulk /= 2) {
    cut.layout.bulk_bytes = bulk;
    cut.count = static_cast<size_t>((bytes - kRegionFirstSlot) / cut.layout.region_bytes());
    if (cut.count >= kRegionLeastSlots) break;
  }
  return cut;
}

}  // namespace gpupool::carriers
