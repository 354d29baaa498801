// Both directions between a session's carrier on this host and its link to the other one.
#pragma once

#include <functional>
#include <string>

#include "carriers/carrier.h"
#include "relay/link.h"

namespace gpupool::relay {

struct PairEnd {
  bool by_link = false;   // the link ended first; else the carrier
  bool fault = false;     // what came from the carrier was wrong
  std::string sentence;   // why
  bool between = true;    // the carrier has got whole frames only,
  uint64_t sequence = 0;  // this being the last one
};

struct PairEvents {
  // The carrier has ended in order: what the other host is told.
  std::function<std::string()> last_word;
  // The link has ended first: the last chance to write to the carrier.
  std::function<void(const PairEnd&)> on_link_end;
};

// Until one of them ends; then both do. SIGTERM, which has to be blocked, ends the carrier.
PairEnd run_pair(carriers::Carrier& carrier, uint32_t carrier_epoch, Link& link,
                 uint32_t link_epoch, const PairEvents& events);

}  // namespace gpupool::relay
