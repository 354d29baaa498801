// Programs that stand in for machine code, in the mode for tests of how large applications start
// up (MachineDescription::empty_kernels): they have the same kernels, parameters and variables, and
// their kernels do nothing.
#pragma once

#include <string>

#include "frontdoor/program_info.h"

namespace gpupool::simgpu {

// PTX with the program's kernels, all empty, and its variables. Names that PTX can't have are left
// out.
std::string stand_in(const frontdoor::ProgramInfo& program);

}  // namespace gpupool::simgpu
