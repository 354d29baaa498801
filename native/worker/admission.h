// What the driver gets of the device code that a tenant sends: PTX as text that ends where it says,
// and files all of whose offsets lie in them. A driver trusts the pointer and the sizes that it is
// given, so nothing else is handed on: no wrapper (it holds pointers), no container.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "api/cuda_abi.h"

namespace gpupool::worker {

struct Code {
  std::vector<uint8_t> bytes;
  bool ptx = false;  // text; its NUL is among the bytes
  // Device memory for its variables, at least. Not known of PTX that the scan does not understand:
  // `why` has the line.
  bool variables_known = false;
  uint64_t variable_bytes = 0;
  std::string why;  // one sentence, also when it is refused
};

// A module's image. CUDA_ERROR_INVALID_IMAGE: it is neither PTX nor a sound cubin.
CUresult admit_image(std::vector<uint8_t> bytes, Code* code);

// One way to add an input to a link, as the driver takes it.
struct LinkInput {
  CUjitInputType type;
  std::vector<uint8_t> bytes;
};

// What a link's input may be added as, the best first: of a fat binary its code for this device.
// `take` is asked before memory of the host is taken for what is unpacked; if it says no, it is
// CUDA_ERROR_OUT_OF_MEMORY.
CUresult admit_link_input(CUjitInputType type, std::vector<uint8_t> bytes, int major, int minor,
                          const std::function<bool(uint64_t bytes)>& take,
                          std::vector<LinkInput>* inputs);

}  // namespace gpupool::worker
