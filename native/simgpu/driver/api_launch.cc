// Launches: what CUDA reports at the call is checked here, then the launch goes into its stream.
#include <string.h>

#include "frontdoor/runtime_caller.h"
#include "graphs/capture.h"
#include "simgpu/driver/function.h"
#include "simgpu/driver/launches.h"

using namespace gpupool::simgpu;
using gpupool::frontdoor::kInvalidConfiguration;
using gpupool::frontdoor::result_for_caller;

namespace {

CUresult gather_parameters(const KernelInfo& info, void** parameters, void** extra,
                           std::vector<uint8_t>* buffer) {
  buffer->assign(info.parameter_bytes, 0);
  if (parameters && extra) return CUDA_ERROR_INVALID_VALUE;
  if (info.parameters.empty()) return CUDA_SUCCESS;
  if (parameters) {
    for (size_t i = 0; i < info.parameters.size(); ++i) {
      if (!parameters[i]) return CUDA_ERROR_INVALID_VALUE;
      memcpy(buffer->data() + info.parameters[i].offset, parameters[i], info.parameters[i].bytes);
    }
    return CUDA_SUCCESS;
  }
  if (!extra) return CUDA_ERROR_INVALID_VALUE;
  const void* data = nullptr;
  size_t size = 0;
  for (int i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
    if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      data = extra[i + 1];
    } else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE && extra[i + 1]) {
      size = *static_cast<const size_t*>(extra[i + 1]);
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  const ParameterInfo& last = info.parameters.back();
  if (!data || size < last.offset + last.bytes) return CUDA_ERROR_INVALID_VALUE;
  memcpy(buffer->data(), data, std::min<size_t>(size, buffer->size()));
  return CUDA_SUCCESS;
}

CUresult check_shape(const Shape& s, const Function& function, const KernelInfo& info,
                     const DeviceModel& model) {
  for (int i = 0; i < 3; ++i) {
    if (!s.grid[i] || !s.block[i]) return kInvalidConfiguration;
  }
  if (s.grid[0] > 2147483647u || s.grid[1] > 65535 || s.grid[2] > 65535)
    return kInvalidConfiguration;
  if (s.block[0] > 1024 || s.block[1] > 1024 || s.block[2] > 64) return kInvalidConfiguration;
  const uint64_t threads = uint64_t(s.block[0]) * s.block[1] * s.block[2];
  if (threads > uint64_t(model.max_threads_per_block)) return kInvalidConfiguration;
  if (info.max_threads_per_block && threads > info.max_threads_per_block)
    return CUDA_ERROR_INVALID_VALUE;
  if (info.required_block[0]) {
    for (int i = 0; i < 3; ++i) {
      if (s.block[i] != std::max(1u, info.required_block[i])) return CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (s.shared > unsigned(function.dynamic_limit(info))) return CUDA_ERROR_INVALID_VALUE;
  const int resident = blocks_per_multiprocessor(info, model, int(threads), s.shared);
  if (resident <= 0) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  if (s.cooperative) {
    const uint64_t blocks = uint64_t(s.grid[0]) * s.grid[1] * s.grid[2];
    if (blocks > uint64_t(resident) * model.multiprocessors)
      return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  }
  return CUDA_SUCCESS;
}

CUresult launch(CUfunction handle, const Shape& s, void** parameters, void** extra,
                const CUlaunchConfig* config = nullptr) {
  GPUPOOL_CURRENT(context);
  if (gpupool::graphs::capturing()) [[unlikely]] {
    std::vector<CUlaunchAttribute> attributes;
    if (config) attributes.assign(config->attrs, config->attrs + config->numAttrs);
    if (!config && s.cooperative) {
      attributes.resize(1);
      attributes[0].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
      attributes[0].value.cooperative = 1;
    }
    CUresult result;
    if (gpupool::graphs::capture_launch(s.stream, handle, s.grid, s.block, s.shared,
                                        attributes.data(), unsigned(attributes.size()), parameters,
                                        extra, &result)) {
      return result;
    }
  }
  std::shared_ptr<Function> function;
  GPUPOOL_TRY(find_function(handle, context, &function));
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(find_stream(s.stream, context, &stream));
  if (function->context != context || stream->context != context) return CUDA_ERROR_INVALID_HANDLE;
  std::shared_ptr<Launch> what;
  GPUPOOL_TRY(prepare_launch(function, s, &what));
  const KernelInfo* info;
  GPUPOOL_TRY(function->info(&info));
  GPUPOOL_TRY(gather_parameters(*info, parameters, extra, &what->parameters));
  GPUPOOL_TRY(context->prepare_for(info->prints, info->allocates));
  context->submit(stream, [context, what] { context->run(*what); });
  return CUDA_SUCCESS;
}

}  // namespace

CUresult gpupool::simgpu::prepare_launch(const std::shared_ptr<Function>& function, const Shape& s,
                                         std::shared_ptr<Launch>* launch) {
  Context* context = function->context;
  const KernelInfo* info;
  GPUPOOL_TRY(function->info(&info));
  GPUPOOL_TRY(check_shape(s, *function, *info, context->device->gpu.model));
  auto what = std::make_shared<Launch>();
  what->program = function->program;
  what->kernel = function->index;
  for (int i = 0; i < 3; ++i) what->grid[i] = s.grid[i], what->block[i] = s.block[i];
  what->dynamic_shared_bytes = s.shared;
  what->cooperative = s.cooperative;
  what->stack_bytes_per_thread = context->stack_bytes();
  what->instruction_limit = driver().machine.kernel_instruction_limit;
  *launch = std::move(what);
  return CUDA_SUCCESS;
}

GPUPOOL_API cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,
                           unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
                           CUstream stream, void** parameters, void** extra) {
  return result_for_caller(
      launch(f, {{gx, gy, gz}, {bx, by, bz}, shared, stream}, parameters, extra),
      __builtin_return_address(0));
}

GPUPOOL_API cuLaunchCooperativeKernel(CUfunction f, unsigned int gx, unsigned int gy,
                                      unsigned int gz, unsigned int bx, unsigned int by,
                                      unsigned int bz, unsigned int shared, CUstream stream,
                                      void** parameters) {
  return result_for_caller(
      launch(f, {{gx, gy, gz}, {bx, by, bz}, shared, stream, true}, parameters, nullptr),
      __builtin_return_address(0));
}

GPUPOOL_API cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** parameters,
                             void** extra) {
  if (!config || (config->numAttrs && !config->attrs)) {
    return driver_status() ? driver_status() : CUDA_ERROR_INVALID_VALUE;
  }
  Shape s{{config->gridDimX, config->gridDimY, config->gridDimZ},
          {config->blockDimX, config->blockDimY, config->blockDimZ},
          config->sharedMemBytes,
          config->hStream};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    switch (int(attribute.id)) {
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        s.cooperative = attribute.value.cooperative != 0;
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        // Clusters need compute capability 9.0.
        if (attribute.value.clusterDim.x > 1 || attribute.value.clusterDim.y > 1 ||
            attribute.value.clusterDim.z > 1) {
          return CUDA_ERROR_INVALID_VALUE;
        }
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
      case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
        return CUDA_ERROR_NOT_SUPPORTED;
      default:  // hints: cache policies, priorities, domains
        if (int(attribute.id) < 0 || int(attribute.id) >= int(CU_LAUNCH_ATTRIBUTE_MAX)) {
          return CUDA_ERROR_INVALID_VALUE;
        }
    }
  }
  return result_for_caller(launch(f, s, parameters, extra, config), __builtin_return_address(0));
}
