// What cuLinkComplete makes in the place of a cubin: text that holds the linked parts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "simgpu/exec/engine.h"

namespace gpupool::simgpu {

std::string join_parts(const std::vector<SourceText>& parts);

// Appends the parts. False: it is no such text, or broken; then nothing is appended.
bool split_parts(std::string_view text, std::vector<SourceText>* parts);

}  // namespace gpupool::simgpu
