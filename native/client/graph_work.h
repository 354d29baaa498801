// What the work of a graph's nodes is in terms of this client: its contexts and functions, and
// where the ends of a copy lie.
#pragma once

#include "client/modules.h"
#include "client/state.h"
#include "graphs/hooks.h"
#include "wire/graph_nodes.h"

namespace gpupool::graphs {

using namespace gpupool::client;  // NOLINT: the hooks stand between both

// The context of a handle; null: the current one.
CUresult context_for(CUcontext handle, Context** context);
CUresult function_of(const KernelWork& work, Function** function);

enum class Direction { kOnDevice, kToDevice, kFromDevice, kOnHost };
Direction direction_of(const CUDA_MEMCPY3D& copy);

// One end of a copy: where its first byte lies, bytes from row to row, rows from plane to plane.
struct End {
  uint64_t address, pitch, rows;
};
CUresult ends_of(const CUDA_MEMCPY3D& asked, End* to, End* from);

wire::GraphFill wire_fill(const MemsetWork& work);

}  // namespace gpupool::graphs
