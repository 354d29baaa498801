// The handlers for newer processors are the baseline's: see native/simgpu/exec/CMakeLists.txt.
#include "simgpu/exec/fast_set.h"
#include "simgpu/exec/handler_set.h"

namespace gpupool::simgpu::exec {

const HandlerSet& v3_handlers() { return baseline_handlers(); }
const FastSet& v3_fast() { return baseline_fast(); }

}  // namespace gpupool::simgpu::exec
