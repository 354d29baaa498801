// What a program says of a node, checked and taken over; and the way back.
#pragma once

#include "frontdoor/runtime_caller.h"
#include "graphs/hooks.h"

namespace gpupool::graphs {

template <typename Parameters>
CUresult read_kernel(const Parameters* from, KernelWork* work) {
  if (from == nullptr) return CUDA_ERROR_INVALID_VALUE;
  work->function = from->func;
  if constexpr (!std::is_same_v<Parameters, CUDA_KERNEL_NODE_PARAMS_v1>) {
    work->kernel = from->kern;
    work->context = from->ctx;
    if (from->func != nullptr && from->kern != nullptr) return CUDA_ERROR_INVALID_VALUE;
  }
  if (work->callee() == nullptr) return CUDA_ERROR_INVALID_VALUE;
  work->grid[0] = from->gridDimX;
  work->grid[1] = from->gridDimY;
  work->grid[2] = from->gridDimZ;
  work->block[0] = from->blockDimX;
  work->block[1] = from->blockDimY;
  work->block[2] = from->blockDimZ;
  work->shared_bytes = from->sharedMemBytes;
  KernelLayout layout;
  if (const CUresult e = find_kernel(work->callee(), work->context, &layout)) return e;
  if (const CUresult e = gather(layout, from->kernelParams, from->extra, work)) return e;
  const CUresult result = check(*work);
  return result == frontdoor::kInvalidConfiguration ? CUDA_ERROR_INVALID_VALUE : result;
}
CUresult read_copy(const CUDA_MEMCPY3D* from, CUcontext context, MemcpyWork* work);
CUresult read_fill(const CUDA_MEMSET_NODE_PARAMS* from, CUcontext context, MemsetWork* work);
CUresult read_host(CUhostFn function, void* data, HostWork* work);
// Of a node of any type that cuGraphAddNode takes, except those that need the graph: a child, and
// memory. `out` is left alone for those.
CUresult read_any(const CUgraphNodeParams& from, WorkPointer* out);

CUresult read_allocation(CUDA_MEM_ALLOC_NODE_PARAMS* parameters, AllocWork* work);

}  // namespace gpupool::graphs
