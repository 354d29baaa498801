// Primary contexts, for the entry points and for the front door's export tables.
#pragma once

#include "client/state.h"

namespace gpupool::client {

// The device's primary context without retaining it: its handle is valid all the time. Null: out of
// handles.
Context* primary_context(Device* device);
CUresult retain_primary(Device* device, Context** out);

}  // namespace gpupool::client
