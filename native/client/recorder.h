// Records the frames that this process sends to its workers, for replay (GPUPOOL_RECORD=file).
#pragma once

#include <cstdint>

#include "carriers/carrier.h"

namespace gpupool::client {

// The file: the text "GPUPOOLREC1\n", then for every frame u32 body bytes, u32 bulk segments, their
// u32 sizes, the body and the bulk data. One file holds the frames of one data connection: only
// the first connection of a process is recorded.
void record_frame(const void* body, uint32_t body_bytes, const carriers::Part* bulk,
                  int bulk_count);

}  // namespace gpupool::client
