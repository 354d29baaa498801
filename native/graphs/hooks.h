// What the graphs need from the library that they are linked into (a client, or the simulated
// GPU's driver), and what they offer to it. They know streams, events and kernels by handle only.
#pragma once

#include <memory>

#include "graphs/graph.h"

namespace gpupool::graphs {

struct StreamInfo {
  uint64_t key = 0;  // the same for every handle of one stream
  CUcontext context = nullptr;
  bool legacy = false;    // the legacy default stream
  bool blocking = false;  // ordered with the legacy default stream
};

// ---- To be defined by the library ---------------------------------------------------------------

CUresult initialised();
CUresult current(CUcontext* context);  // usable: not destroyed, without a sticky error
CUresult find_stream(CUstream stream, StreamInfo* info);
CUresult find_event(CUevent event);
CUresult find_device(CUdevice device);
// `context`: where the kernel is to run, null: the current one.
CUresult find_kernel(CUfunction function, CUcontext context, KernelLayout* layout);
// What a launch, copy or memset would be refused for.
CUresult check(const KernelWork& work);
CUresult check(const MemcpyWork& work);
CUresult check(const MemsetWork& work);
bool is_device_memory(CUdeviceptr address);
CUresult allocate_memory(CUdevice device, size_t bytes, CUdeviceptr* address);
void release_memory(CUdevice device, CUdeviceptr address);

// What a library makes of a plan. Calls come one at a time.
class Executable {
 public:
  virtual ~Executable() = default;
  virtual CUresult launch(CUstream stream) = 0;
  virtual CUresult upload(CUstream stream) = 0;
  // Work or enablement of these nodes has changed, for the launches to come.
  virtual CUresult update(const std::vector<uint32_t>& changed) = 0;
};
// The plan outlives the executable. `error_node`: index of the node that is the reason.
CUresult make_executable(CUcontext context, const Plan* plan, std::unique_ptr<Executable>* out,
                         int* error_node);

}  // namespace gpupool::graphs
