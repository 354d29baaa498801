// What is known of a kernel, shared by functions, kernels of libraries, and the launch.
#pragma once

#include "simgpu/driver/module.h"

namespace gpupool::simgpu {

// `dynamic` and `carveout`: what the program has set, -1: nothing.
CUresult function_attribute(int* value, int attribute, const KernelInfo& info,
                            const DeviceModel& model, int dynamic, int carveout);
// Whether the program may set this attribute to this value.
CUresult check_function_attribute(int attribute, int value, const KernelInfo& info,
                                  const DeviceModel& model);
CUresult parameter_info(const KernelInfo& info, size_t index, size_t* offset, size_t* size);

}  // namespace gpupool::simgpu
