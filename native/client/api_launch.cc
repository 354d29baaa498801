// Launches and occupancy. A launch is checked here and appended to the batch: this is the path on
// which a microsecond matters.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>

#include <algorithm>

#include "api/cuda_abi.h"
#include "client/log.h"
#include "client/modules.h"
#include "frontdoor/runtime_caller.h"
#include "graphs/capture.h"

using namespace gpupool;          // NOLINT: a file of entry points
using namespace gpupool::client;  // NOLINT

#define ENTER()                                         \
  Context* context;                                     \
  if (const CUresult e_ = enter(&context)) [[unlikely]] \
    return e_;
#define REQUIRE(condition)       \
  if (!(condition)) [[unlikely]] \
    return CUDA_ERROR_INVALID_VALUE;

namespace {

struct Config {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes = 0;
  CUstream stream = nullptr;
  uint32_t flags = 0;
  unsigned cluster[3] = {0, 0, 0};
};

CUresult check_shape(const Context* context, const Function* function, const Config& config) {
  if (!(function->attribute_mask & (1u << CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK))) {
    log(Level::kError,
        "the driver refuses the kernel %s; what it says is in the log of the GPU's host",
        function->name.c_str());
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const int* device = context->device->snapshot.attributes;
  const uint64_t threads =
      static_cast<uint64_t>(config.block[0]) * config.block[1] * config.block[2];
  for (int i = 0; i < 3; i++) {
    if (config.grid[i] == 0 || config.block[i] == 0 ||
        config.grid[i] > static_cast<unsigned>(device[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i]) ||
        config.block[i] > static_cast<unsigned>(device[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i])) {
      return frontdoor::kInvalidConfiguration;
    }
  }
  if (threads > static_cast<uint64_t>(device[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK])) {
    return frontdoor::kInvalidConfiguration;
  }
  if (function->required_threads[0] != 0) {
    for (int i = 0; i < 3; i++) {
      REQUIRE(config.block[i] == std::max(1u, function->required_threads[i]));
    }
  }
  REQUIRE(function->max_threads == 0 || threads <= function->max_threads);
  if (threads >
      static_cast<uint64_t>(function->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK])) {
    // Too many for the registers, or more than the kernel's launch bounds.
    const uint64_t registers =
        threads * static_cast<uint64_t>(function->attributes[CU_FUNC_ATTRIBUTE_NUM_REGS]);
    return registers > static_cast<uint64_t>(device[CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK])
               ? CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
               : CUDA_ERROR_INVALID_VALUE;
  }
  // Without opt-in a block has the device's default less what the kernel declares itself.
  uint64_t room = 0;
  if (function->attribute_mask & (1u << CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)) {
    room = static_cast<uint64_t>(
        function->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES]);
  } else {
    room = static_cast<uint64_t>(device[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK] -
                                 function->attributes[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES]);
  }
  REQUIRE(config.shared_bytes <= room);
  return CUDA_SUCCESS;
}

// A grid whose blocks wait for each other must fit on the device at once.
CUresult check_cooperative(Context* context, Function* function, const Config& config) {
  int per_multiprocessor = 0;
  const CUresult result = cuOccupancyMaxActiveBlocksPerMultiprocessor(
      &per_multiprocessor, reinterpret_cast<CUfunction>(function->handle),
      static_cast<int>(config.block[0] * config.block[1] * config.block[2]), config.shared_bytes);
  if (result != CUDA_SUCCESS) return result;
  const uint64_t blocks = static_cast<uint64_t>(config.grid[0]) * config.grid[1] * config.grid[2];
  const auto limit =
      static_cast<uint64_t>(per_multiprocessor) *
      static_cast<uint64_t>(context->device->attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
  return blocks > limit ? CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE : CUDA_SUCCESS;
}

// The block of parameters that a program passes by `extra`.
CUresult from_extra(void** extra, const void** buffer, size_t* bytes) {
  bool have_buffer = false, have_size = false;
  for (int i = 0; i < 16 && extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
    if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      *buffer = extra[i + 1];
      have_buffer = true;
    } else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE) {
      REQUIRE(extra[i + 1] != nullptr);
      *bytes = *static_cast<const size_t*>(extra[i + 1]);
      have_size = true;
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  REQUIRE(have_buffer && have_size && (*buffer != nullptr || *bytes == 0));
  return CUDA_SUCCESS;
}

CUresult launch(Context* context, CUfunction handle, const Config& config, void** parameters,
                void** extra, const CUlaunchConfig* full = nullptr) {
  if (graphs::capturing()) [[unlikely]] {
    CUlaunchAttribute cooperative{};
    cooperative.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    cooperative.value.cooperative = 1;
    const bool has_one = full == nullptr && (config.flags & wire::kLaunchCooperative) != 0;
    GPUPOOL_CAPTURE(capture_launch(config.stream, handle, config.grid, config.block,
                                   config.shared_bytes,
                                   full != nullptr ? full->attrs : &cooperative,
                                   full != nullptr ? full->numAttrs
                                   : has_one       ? 1u
                                                   : 0u,
                                   parameters, extra, &capture_result));
  }
  Function* function;
  CUresult result = function_in(context, handle, &function);
  if (result != CUDA_SUCCESS) [[unlikely]]
    return result;
  result = check_shape(context, function, config);
  if (result != CUDA_SUCCESS) [[unlikely]]
    return result;
  wire::Handle stream;
  result = resolve_stream(context, config.stream, &stream);
  if (result != CUDA_SUCCESS) [[unlikely]]
    return result;
  if (config.flags & wire::kLaunchCooperative) {
    result = check_cooperative(context, function, config);
    if (result != CUDA_SUCCESS) return result;
  }

  const void* block = nullptr;
  size_t block_bytes = function->parameter_bytes;
  if (extra != nullptr) {
    REQUIRE(parameters == nullptr);
    result = from_extra(extra, &block, &block_bytes);
    if (result != CUDA_SUCCESS) return result;
    REQUIRE(block_bytes <= wire::kMaxParameterBytes);
    if (function->layout_known) {
      REQUIRE(block_bytes >= function->parameter_bytes);
      block_bytes = function->parameter_bytes;  // padding at the end is not the kernel's
    }
  } else if (!function->layout_known) {
    log(Level::kError,
        "the parameters of %s are not known: neither its image nor the driver says "
        "where they lie",
        function->name.c_str());
    return CUDA_ERROR_NOT_SUPPORTED;
  } else if (!function->parameters.empty()) {
    REQUIRE(parameters != nullptr);
  }

  const size_t padded = wire::align8(block_bytes);
  Channel::Post post(channel_of(context), op(Operation::kLaunchKernel), context->wire_id(),
                     sizeof(wire::Launch) + padded);
  auto* body = reinterpret_cast<wire::Launch*>(post.at());
  *body = wire::Launch{function->wire,
                       stream,
                       {config.grid[0], config.grid[1], config.grid[2]},
                       {config.block[0], config.block[1], config.block[2]},
                       config.shared_bytes,
                       config.flags,
                       {config.cluster[0], config.cluster[1], config.cluster[2]},
                       static_cast<uint32_t>(block_bytes)};
  uint8_t* to = post.at() + sizeof(wire::Launch);
  if (block != nullptr) {
    if (padded != 0) memset(to + padded - 8, 0, 8);
    memcpy(to, block, block_bytes);
    return CUDA_SUCCESS;
  }
  memset(to, 0, padded);  // gaps between parameters
  const auto* layout = function->parameters.data();
  const size_t count = function->parameters.size();
  for (size_t i = 0; i < count; i++) {
    if (layout[i].bytes == 8) {
      memcpy(to + layout[i].offset, parameters[i], 8);
    } else if (layout[i].bytes == 4) {
      memcpy(to + layout[i].offset, parameters[i], 4);
    } else {
      memcpy(to + layout[i].offset, parameters[i], layout[i].bytes);
    }
  }
  return CUDA_SUCCESS;
}

CUresult take_attributes(const Context* context, const CUlaunchConfig* from, Config* config) {
  REQUIRE(from->numAttrs == 0 || from->attrs != nullptr);
  for (unsigned i = 0; i < from->numAttrs; i++) {
    const CUlaunchAttribute& attribute = from->attrs[i];
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        if (attribute.value.cooperative != 0) config->flags |= wire::kLaunchCooperative;
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        config->cluster[0] = attribute.value.clusterDim.x;
        config->cluster[1] = attribute.value.clusterDim.y;
        config->cluster[2] = attribute.value.clusterDim.z;
        if (const CUresult e = check_cluster(context, config->grid, config->cluster)) return e;
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
      case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
        return CUDA_ERROR_NOT_SUPPORTED;
      default:  // hints: a launch without them is right, if perhaps later
        REQUIRE(static_cast<unsigned>(attribute.id) < CU_LAUNCH_ATTRIBUTE_MAX);
        break;
    }
  }
  return CUDA_SUCCESS;
}

CUresult occupancy_of(int* blocks, CUfunction handle, int block_size, size_t shared_bytes,
                      unsigned flags) {
  ENTER();
  REQUIRE(blocks != nullptr && block_size > 0 && flags <= 1);
  Function* function;
  if (const CUresult e = function_in(context, handle, &function)) return e;
  const auto key = std::make_pair(block_size | static_cast<int>(flags << 30),
                                  static_cast<uint64_t>(shared_bytes));
  {
    std::lock_guard guard(function->lock);
    const auto found = function->occupancy.find(key);
    if (found != function->occupancy.end()) {
      *blocks = found->second;
      return CUDA_SUCCESS;
    }
  }
  PendingCall call;
  const CUresult result = channel_of(context).call(
      op(Operation::kOccupancyMaxActiveBlocksPerMultiprocessorWithFlags), context->wire_id(), 32,
      [&](wire::Encoder& encoder) {
        encoder.handle(function->wire);
        encoder.scalar(static_cast<uint64_t>(block_size));
        encoder.scalar(shared_bytes);
        encoder.scalar(flags);
      },
      &call);
  if (result != CUDA_SUCCESS) return settle(context, result);
  wire::Decoder decoder = call.decoder();
  *blocks = decoder.narrow<int>();
  if (!decoder.ok()) return CUDA_ERROR_UNKNOWN;
  std::lock_guard guard(function->lock);
  if (function->occupancy.size() < 256) function->occupancy[key] = *blocks;
  return CUDA_SUCCESS;
}

CUresult cluster_question(Operation operation, int* out, CUfunction handle,
                          const CUlaunchConfig* from) {
  ENTER();
  REQUIRE(out != nullptr && from != nullptr);
  Function* function;
  if (const CUresult e = function_in(context, handle, &function)) return e;
  Config config{{from->gridDimX, from->gridDimY, from->gridDimZ},
                {from->blockDimX, from->blockDimY, from->blockDimZ},
                from->sharedMemBytes};
  if (const CUresult e = take_attributes(context, from, &config)) return e;
  wire::Handle stream;
  if (const CUresult e = resolve_stream(context, from->hStream, &stream)) return e;
  const wire::Launch body{function->wire,
                          stream,
                          {config.grid[0], config.grid[1], config.grid[2]},
                          {config.block[0], config.block[1], config.block[2]},
                          config.shared_bytes,
                          config.flags,
                          {config.cluster[0], config.cluster[1], config.cluster[2]},
                          0};
  PendingCall call;
  const CUresult result = channel_of(context).call(
      op(operation), context->wire_id(), sizeof body,
      [&](wire::Encoder& encoder) { encoder.put(body); }, &call);
  if (result != CUDA_SUCCESS) return settle(context, result);
  wire::Decoder decoder = call.decoder();
  *out = decoder.narrow<int>();
  return decoder.ok() ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

}  // namespace

CUresult client::check_cluster(const Context* context, const unsigned (&grid)[3],
                               const unsigned (&cluster)[3]) {
  uint64_t blocks = 1;
  for (int axis = 0; axis < 3; axis++) {
    REQUIRE(cluster[axis] != 0 && grid[axis] % cluster[axis] == 0);
    blocks *= std::min(cluster[axis], 65536u);
  }
  // Cards before compute capability 9.0 have none.
  REQUIRE(blocks == 1 || context->device->attribute(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH) != 0);
  return CUDA_SUCCESS;
}

CUresult client::check_launch(Context* context, Function* function, const LaunchShape& shape) {
  const Config config{{shape.grid[0], shape.grid[1], shape.grid[2]},
                      {shape.block[0], shape.block[1], shape.block[2]},
                      shape.shared_bytes};
  if (const CUresult e = check_shape(context, function, config)) return e;
  return shape.cooperative ? check_cooperative(context, function, config) : CUDA_SUCCESS;
}

#pragma GCC visibility push(default)
extern "C" {

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                        unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                        unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                        void** parameters, void** extra) {
  ENTER();
  const Config config{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream};
  return frontdoor::result_for_caller(launch(context, function, config, parameters, extra),
                                      __builtin_return_address(0));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* from, CUfunction function, void** parameters,
                          void** extra) {
  ENTER();
  REQUIRE(from != nullptr);
  Config config{{from->gridDimX, from->gridDimY, from->gridDimZ},
                {from->blockDimX, from->blockDimY, from->blockDimZ},
                from->sharedMemBytes,
                from->hStream};
  if (const CUresult e = take_attributes(context, from, &config)) return e;
  return frontdoor::result_for_caller(launch(context, function, config, parameters, extra, from),
                                      __builtin_return_address(0));
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                   unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                   unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                   void** parameters) {
  ENTER();
  const Config config{{grid_x, grid_y, grid_z},
                      {block_x, block_y, block_z},
                      shared_bytes,
                      stream,
                      wire::kLaunchCooperative};
  return frontdoor::result_for_caller(launch(context, function, config, parameters, nullptr),
                                      __builtin_return_address(0));
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function,
                                                     int block_size, size_t shared_bytes) {
  return occupancy_of(blocks, function, block_size, shared_bytes, 0);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function,
                                                              int block_size, size_t shared_bytes,
                                                              unsigned int flags) {
  return occupancy_of(blocks, function, block_size, shared_bytes, flags);
}

CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int* min_grid, int* block_size,
                                                   CUfunction handle,
                                                   CUoccupancyB2DSize shared_of_block,
                                                   size_t shared_bytes, int limit,
                                                   unsigned int flags) {
  ENTER();
  REQUIRE(min_grid != nullptr && block_size != nullptr);
  Function* function;
  if (const CUresult e = function_in(context, handle, &function)) return e;
  const int warp = context->device->attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
  int most = std::min(context->device->attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
                      function->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK]);
  if (limit > 0) most = std::min(most, limit);
  const int multiprocessors = context->device->attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  const int most_threads =
      context->device->attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
  int best_threads = 0, best_block = 0, best_blocks = 0;
  // The largest block that keeps the most threads on a multiprocessor.
  for (int size = (most + warp - 1) / warp * warp; size > 0; size -= warp) {
    const int tried = std::min(size, most);
    const size_t shared = shared_of_block != nullptr ? shared_of_block(tried) : shared_bytes;
    int blocks;
    if (const CUresult e = occupancy_of(&blocks, handle, tried, shared, flags)) return e;
    if (blocks * tried > best_threads) {
      best_threads = blocks * tried;
      best_block = tried;
      best_blocks = blocks;
    }
    if (best_threads == most_threads) break;
  }
  *block_size = best_block;
  *min_grid = best_blocks * multiprocessors;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialBlockSize(int* min_grid, int* block_size, CUfunction function,
                                          CUoccupancyB2DSize shared_of_block, size_t shared_bytes,
                                          int limit) {
  return cuOccupancyMaxPotentialBlockSizeWithFlags(min_grid, block_size, function, shared_of_block,
                                                   shared_bytes, limit, 0);
}

CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction function,
                                      const CUlaunchConfig* config) {
  return cluster_question(Operation::kOccupancyMaxActiveClusters, clusters, function, config);
}

CUresult cuOccupancyMaxPotentialClusterSize(int* size, CUfunction function,
                                            const CUlaunchConfig* config) {
  return cluster_question(Operation::kOccupancyMaxPotentialClusterSize, size, function, config);
}

}  // extern "C"
#pragma GCC visibility pop
