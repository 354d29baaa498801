// Launches, and questions about clusters, which have the shape of one.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>

#include "worker/session_state.h"

namespace gpupool::worker {
namespace {

using wire::Operation;

bool plain(const wire::Launch& body) {
  return body.flags == 0 && (body.cluster[0] | body.cluster[1] | body.cluster[2]) == 0;
}

// cuLaunchConfig with what is more than cuLaunchKernel can say.
struct Extended {
  CUlaunchAttribute attributes[2];
  CUlaunchConfig config{};

  Extended(const wire::Launch& body, CUstream stream) {
    memset(static_cast<void*>(attributes), 0, sizeof attributes);
    config.gridDimX = body.grid[0];
    config.gridDimY = body.grid[1];
    config.gridDimZ = body.grid[2];
    config.blockDimX = body.block[0];
    config.blockDimY = body.block[1];
    config.blockDimZ = body.block[2];
    config.sharedMemBytes = body.shared_bytes;
    config.hStream = stream;
    config.attrs = attributes;
    unsigned count = 0;
    if (body.flags & wire::kLaunchCooperative) {
      attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
      attributes[count++].value.cooperative = 1;
    }
    if (body.cluster[0] != 0) {
      attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attributes[count].value.clusterDim.x = body.cluster[0];
      attributes[count].value.clusterDim.y = body.cluster[1];
      attributes[count++].value.clusterDim.z = body.cluster[2];
    }
    config.numAttrs = count;
  }
};

bool launch(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::Launch>();
  if (body.parameter_bytes > wire::kMaxParameterBytes) return session.malformed(command);
  const std::string_view parameters = decoder.raw(body.parameter_bytes);
  if (!decoder.finished()) return session.malformed(command);
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  Function* function = session.function(body.function);
  Stream* stream = session.stream(context, body.stream);
  if (function == nullptr || stream == nullptr || function->context != context->id) {
    return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  }
  if ((body.flags & ~wire::kLaunchCooperative) != 0) {
    return session.answer(command, CUDA_ERROR_NOT_SUPPORTED);
  }
  const char* data = parameters.data();
  size_t bytes = parameters.size();
  static constexpr size_t kRoom = wire::kMaxParameterBytes + 4;
  alignas(16) uint8_t padded[kRoom];
  if (bytes < function->parameter_bytes) {
    return session.answer(command, CUDA_ERROR_INVALID_VALUE);
  }
  if (!function->parameters_known) {
    // The driver takes as many bytes as the kernel has parameters, however few came.
    memcpy(padded, data, bytes);
    memset(padded + bytes, 0, kRoom - bytes);
    data = reinterpret_cast<const char*>(padded);
  }
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, const_cast<char*>(data),
                   CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  void** passed = bytes == 0 ? nullptr : extra;
  if (function->prints) context->printing = true;
  const DriverTable& driver = session.driver();
  session.launches.fetch_add(1, std::memory_order_relaxed);
  const CUresult result = session.submit(context, stream, [&]() -> CUresult {
    if (plain(body)) [[likely]] {
      return driver.cuLaunchKernel(function->driver, body.grid[0], body.grid[1], body.grid[2],
                                   body.block[0], body.block[1], body.block[2], body.shared_bytes,
                                   stream->driver, nullptr, passed);
    }
    if (driver.cuLaunchKernelEx == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    const Extended extended(body, stream->driver);
    return driver.cuLaunchKernelEx(&extended.config, function->driver, nullptr, passed);
  });
  if (!function->launched) [[unlikely]] {
    // Stacks and heaps are taken at a kernel's first launch, which may have failed.
    function->launched = result == CUDA_SUCCESS;
    std::string why;
    if (!session.account().settle_or_end(&why)) return session.refuse(why);
  }
  return session.answer(command, result);
}

bool cluster_question(SessionState& session, const Command& command) {
  wire::Decoder decoder = command.body;
  const auto body = decoder.get<wire::Launch>();
  if (!decoder.finished() || !command.wants_reply()) return session.malformed(command);
  Context* context = session.context(command);
  if (context == nullptr) return session.answer(command, CUDA_ERROR_INVALID_CONTEXT);
  Function* function = session.function(body.function);
  Stream* stream = session.stream(context, body.stream);
  if (function == nullptr || stream == nullptr) {
    return session.answer(command, CUDA_ERROR_INVALID_HANDLE);
  }
  const bool clusters =
      static_cast<Operation>(command.operation) == Operation::kOccupancyMaxActiveClusters;
  const auto ask = clusters ? session.driver().cuOccupancyMaxActiveClusters
                            : session.driver().cuOccupancyMaxPotentialClusterSize;
  if (ask == nullptr) return session.answer(command, CUDA_ERROR_NOT_SUPPORTED);
  const Extended extended(body, stream->driver);
  int value = 0;
  const CUresult result =
      session.query(context, [&] { return ask(&value, function->driver, &extended.config); });
  const auto word = static_cast<uint64_t>(static_cast<int64_t>(value));
  return session.answer(command, result, &word, sizeof word);
}

}  // namespace

bool execute_launch(SessionState& session, const Command& command) {
  if (static_cast<Operation>(command.operation) == Operation::kLaunchKernel) {
    return launch(session, command);
  }
  return cluster_question(session, command);
}

}  // namespace gpupool::worker
