// Functions: attributes, parameters, occupancy.
#include <algorithm>

#include "simgpu/driver/function.h"

namespace gpupool::simgpu {

CUresult function_attribute(int* value, int attribute, const KernelInfo& info,
                            const DeviceModel& model, int dynamic, int carveout) {
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = threads_for_registers(info, model);
      if (info.max_threads_per_block) *value = std::min(*value, int(info.max_threads_per_block));
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = int(info.static_shared_bytes);
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
      *value = int(info.constant_bytes);
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
      *value = int(info.local_bytes);
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = int(info.registers);
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
      *value = info.ptx_version;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *value = info.binary_version ? info.binary_version : 10 * model.cc_major + model.cc_minor;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = dynamic >= 0
                   ? dynamic
                   : std::max(0, int(model.shared_per_block) - int(info.static_shared_bytes));
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      *value = carveout;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      *value = 0;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult check_function_attribute(int attribute, int value, const KernelInfo& info,
                                  const DeviceModel& model) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      return value >= 0 &&
                     uint64_t(value) + info.static_shared_bytes <= model.shared_per_block_optin
                 ? CUDA_SUCCESS
                 : CUDA_ERROR_INVALID_VALUE;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      return value >= -1 && value <= 100 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
      return CUDA_ERROR_NOT_SUPPORTED;  // needs 9.0
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult parameter_info(const KernelInfo& info, size_t index, size_t* offset, size_t* size) {
  if (!offset || index >= info.parameters.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = info.parameters[index].offset;
  if (size) *size = info.parameters[index].bytes;
  return CUDA_SUCCESS;
}

namespace {

CUresult find(CUfunction handle, std::shared_ptr<Function>* function, const KernelInfo** info) {
  GPUPOOL_CURRENT(context);
  GPUPOOL_TRY(find_function(handle, context, function));
  return (*function)->info(info);
}

CUresult active_blocks(int* blocks, CUfunction handle, int block_size, size_t dynamic) {
  std::shared_ptr<Function> function;
  const KernelInfo* info;
  GPUPOOL_TRY(find(handle, &function, &info));
  if (!blocks || block_size <= 0) return CUDA_ERROR_INVALID_VALUE;
  const DeviceModel& model = function->context->device->gpu.model;
  if (block_size > model.max_threads_per_block ||
      dynamic + info->static_shared_bytes > model.shared_per_sm) {
    *blocks = 0;
    return CUDA_SUCCESS;
  }
  *blocks = blocks_per_multiprocessor(*info, model, block_size, dynamic);
  return CUDA_SUCCESS;
}

CUresult best_block(int* min_grid, int* block, CUfunction handle, CUoccupancyB2DSize dynamic_of,
                    size_t dynamic, int limit) {
  std::shared_ptr<Function> function;
  const KernelInfo* info;
  GPUPOOL_TRY(find(handle, &function, &info));
  if (!min_grid || !block || limit < 0) return CUDA_ERROR_INVALID_VALUE;
  const DeviceModel& model = function->context->device->gpu.model;
  int most =
      info->max_threads_per_block ? int(info->max_threads_per_block) : model.max_threads_per_block;
  if (limit && limit < most) most = limit;
  int best_threads = 0, best_size = 0, best_blocks = 0;
  for (int size = (most + 31) / 32 * 32; size > 0; size -= 32) {
    const int threads = std::min(size, most);
    const size_t shared = dynamic_of ? dynamic_of(threads) : dynamic;
    const int blocks = blocks_per_multiprocessor(*info, model, threads, shared);
    if (blocks * threads > best_threads) {
      best_threads = blocks * threads;
      best_size = threads;
      best_blocks = blocks;
    }
    if (best_threads == model.max_threads_per_sm) break;
  }
  *block = best_size;
  *min_grid = best_blocks * model.multiprocessors;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace gpupool::simgpu

using namespace gpupool::simgpu;

GPUPOOL_API cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  std::shared_ptr<Function> function;
  const KernelInfo* info;
  GPUPOOL_TRY(find(handle, &function, &info));
  return function_attribute(value, int(attribute), *info, function->context->device->gpu.model,
                            function->max_dynamic_shared, function->carveout);
}

GPUPOOL_API cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  std::shared_ptr<Function> function;
  const KernelInfo* info;
  GPUPOOL_TRY(find(handle, &function, &info));
  GPUPOOL_TRY(
      check_function_attribute(int(attribute), value, *info, function->context->device->gpu.model));
  if (auto kernel = kernel_handles().get(handle)) {  // a CUkernel: for all contexts of the device
    std::lock_guard lock(kernel->mutex);
    kernel->attributes[function->context->device->ordinal][int(attribute)] = value;
  }
  if (int(attribute) == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    function->max_dynamic_shared = value;
  if (int(attribute) == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT)
    function->carveout = value;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Function> function;
  GPUPOOL_TRY(find_function(handle, context, &function));
  if (unsigned(config) > 3) return CUDA_ERROR_INVALID_VALUE;
  function->cache_config = config;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuFuncSetSharedMemConfig(CUfunction handle, CUsharedconfig config) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Function> function;
  GPUPOOL_TRY(find_function(handle, context, &function));
  return unsigned(config) <= 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Deprecated since the launch takes both; still called by pycuda before each launch.
GPUPOOL_API cuFuncSetBlockShape(CUfunction handle, int x, int y, int z) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Function> function;
  GPUPOOL_TRY(find_function(handle, context, &function));
  return x > 0 && y > 0 && z > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

GPUPOOL_API cuFuncSetSharedSize(CUfunction handle, unsigned int) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Function> function;
  return find_function(handle, context, &function);
}

GPUPOOL_API cuFuncGetModule(CUmodule* out, CUfunction handle) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Function> function;
  GPUPOOL_TRY(find_function(handle, context, &function));
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = reinterpret_cast<CUmodule>(function->module);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuFuncGetName(const char** name, CUfunction handle) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Function> function;
  GPUPOOL_TRY(find_function(handle, context, &function));
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  *name = function->name.c_str();
  return CUDA_SUCCESS;
}

GPUPOOL_API cuFuncGetParamInfo(CUfunction handle, size_t index, size_t* offset, size_t* size) {
  std::shared_ptr<Function> function;
  const KernelInfo* info;
  GPUPOOL_TRY(find(handle, &function, &info));
  return parameter_info(*info, index, offset, size);
}

GPUPOOL_API cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction handle) {
  GPUPOOL_CURRENT(context);
  std::shared_ptr<Function> function;
  GPUPOOL_TRY(find_function(handle, context, &function));
  if (!state) return CUDA_ERROR_INVALID_VALUE;
  *state = CU_FUNCTION_LOADING_STATE_LOADED;
  return CUDA_SUCCESS;
}

GPUPOOL_API cuFuncLoad(CUfunction handle) {
  std::shared_ptr<Function> function;
  const KernelInfo* info;
  return find(handle, &function, &info);
}

GPUPOOL_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction handle,
                                                        int block_size, size_t dynamic) {
  return active_blocks(blocks, handle, block_size, dynamic);
}

GPUPOOL_API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction handle,
                                                                 int block_size, size_t dynamic,
                                                                 unsigned int flags) {
  if (flags & ~1u) return CUDA_ERROR_INVALID_VALUE;
  return active_blocks(blocks, handle, block_size, dynamic);
}

GPUPOOL_API cuOccupancyMaxPotentialBlockSize(int* min_grid, int* block, CUfunction handle,
                                             CUoccupancyB2DSize dynamic_of, size_t dynamic,
                                             int limit) {
  return best_block(min_grid, block, handle, dynamic_of, dynamic, limit);
}

GPUPOOL_API cuOccupancyMaxPotentialBlockSizeWithFlags(int* min_grid, int* block, CUfunction handle,
                                                      CUoccupancyB2DSize dynamic_of, size_t dynamic,
                                                      int limit, unsigned int flags) {
  if (flags & ~1u) return CUDA_ERROR_INVALID_VALUE;
  return best_block(min_grid, block, handle, dynamic_of, dynamic, limit);
}

GPUPOOL_API cuOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, CUfunction handle, int blocks,
                                                    int block_size) {
  std::shared_ptr<Function> function;
  const KernelInfo* info;
  GPUPOOL_TRY(find(handle, &function, &info));
  const DeviceModel& model = function->context->device->gpu.model;
  if (!bytes || blocks <= 0 || block_size <= 0 ||
      blocks > blocks_per_multiprocessor(*info, model, block_size, 0)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // The largest amount with which that many blocks still fit.
  size_t low = 0, high = size_t(function->dynamic_limit(*info));
  while (low < high) {
    size_t middle = (low + high + 1) / 2;
    if (blocks_per_multiprocessor(*info, model, block_size, middle) >= blocks) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  *bytes = low;
  return CUDA_SUCCESS;
}
