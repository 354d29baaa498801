// A light scan of PTX text: kernels with their parameters' layout, variables of every scope with
// their size. It checks nothing else; what compiles the text does. A text of which it could be
// mistaken about a variable is not understood, since memory is charged by what it finds.
#pragma once

#include <string>
#include <string_view>

#include "frontdoor/program_info.h"

namespace gpupool::frontdoor {

struct PtxTarget {
  int version = 0;       // 10 * major + minor of .version
  int architecture = 0;  // of .target; 0: there is none
  bool exact = false;    // sm_90a: runs on this very compute capability only
};

// Reads no further than the first .target.
PtxTarget scan_ptx_target(std::string_view text);

// False, and in `why` the line and what is wrong with it: no PTX, or not understood.
bool scan_ptx(std::string_view text, ProgramInfo* info, std::string* why);

}  // namespace gpupool::frontdoor
