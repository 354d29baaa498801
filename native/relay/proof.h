// That a connection which is to go on comes from the relay that began.
#pragma once

#include <cstdint>

#include "relay/protocol.h"

namespace gpupool::relay {

// Fills in the proof; `secret`: of the link's first connection.
void prove(Preamble& preamble, const uint8_t (&secret)[32]);
bool proves(const Preamble& preamble, const uint8_t (&secret)[32]);

}  // namespace gpupool::relay
