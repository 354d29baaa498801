// A kernel's launch, checked and ready to run.
#pragma once

#include <memory>

#include "simgpu/driver/module.h"

namespace gpupool::simgpu {

struct Shape {
  uint32_t grid[3], block[3];
  uint32_t shared;
  CUstream stream = nullptr;
  bool cooperative = false;
};

// All but the parameters. What CUDA reports at the call.
CUresult prepare_launch(const std::shared_ptr<Function>& function, const Shape& shape,
                        std::shared_ptr<Launch>* launch);

}  // namespace gpupool::simgpu
