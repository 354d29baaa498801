// Attributes of streams: hints, kept for those who ask.
#include <map>

#include "simgpu/driver/context.h"

using namespace gpupool::simgpu;

namespace {

struct Attributes {
  CUaccessPolicyWindow window{};
  CUsynchronizationPolicy policy = CU_SYNC_POLICY_AUTO;
  CUlaunchMemSyncDomainMap domains{0, 1};
  CUlaunchMemSyncDomain domain = CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT;
};

struct Registry {
  std::mutex mutex;
  std::map<uint64_t, Attributes> streams;  // by the stream's id, which is never used again
};

Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

CUresult find(CUstream handle, std::shared_ptr<Stream>* stream) {
  GPUPOOL_CURRENT(context);
  return find_stream(handle, context, stream);
}

}  // namespace

GPUPOOL_API cuStreamSetAttribute(CUstream handle, CUstreamAttrID attribute,
                                 const CUstreamAttrValue* value) {
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(find(handle, &stream));
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(registry().mutex);
  Attributes& own = registry().streams[stream->id];
  switch (int(attribute)) {
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      if (!(value->accessPolicyWindow.hitRatio >= 0 && value->accessPolicyWindow.hitRatio <= 1))
        return CUDA_ERROR_INVALID_VALUE;
      own.window = value->accessPolicyWindow;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      if (int(value->syncPolicy) < CU_SYNC_POLICY_AUTO ||
          int(value->syncPolicy) > CU_SYNC_POLICY_BLOCKING_SYNC) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      own.policy = value->syncPolicy;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      own.domains = value->memSyncDomainMap;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      if (unsigned(value->memSyncDomain) > CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE)
        return CUDA_ERROR_INVALID_VALUE;
      own.domain = value->memSyncDomain;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;  // a stream's priority is fixed when it is made
  }
}

GPUPOOL_API cuStreamGetAttribute(CUstream handle, CUstreamAttrID attribute,
                                 CUstreamAttrValue* value) {
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(find(handle, &stream));
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(registry().mutex);
  const Attributes& own = registry().streams[stream->id];
  switch (int(attribute)) {
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      value->accessPolicyWindow = own.window;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      value->syncPolicy = own.policy;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      value->priority = stream->priority;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      value->memSyncDomainMap = own.domains;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      value->memSyncDomain = own.domain;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

GPUPOOL_API cuStreamCopyAttributes(CUstream target_handle, CUstream source_handle) {
  std::shared_ptr<Stream> target, source;
  GPUPOOL_TRY(find(target_handle, &target));
  GPUPOOL_TRY(find(source_handle, &source));
  std::lock_guard lock(registry().mutex);
  const Attributes copied = registry().streams[source->id];
  registry().streams[target->id] = copied;
  return CUDA_SUCCESS;
}
