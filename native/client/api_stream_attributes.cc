// Attributes of streams. They are hints of how caches and waiting threads should behave: kept for
// those who ask, and of no effect on results.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include <string.h>

#include "api/cuda_abi.h"
#include "client/state.h"

using namespace gpupool;          // NOLINT: a file of entry points
using namespace gpupool::client;  // NOLINT

#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;

namespace {

struct Attributes {
  CUaccessPolicyWindow window{};
  CUsynchronizationPolicy policy = CU_SYNC_POLICY_AUTO;
  CUlaunchMemSyncDomainMap domains{0, 1};
  CUlaunchMemSyncDomain domain = CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT;
};

struct Registry {
  std::mutex lock;
  std::map<uint64_t, Attributes> streams;  // by handle; a default stream by its context's
};

Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

// With the registry's lock held.
Attributes& attributes_of(const Context* context, const Stream* stream) {
  constexpr size_t kTidy = 1024;
  auto& all = registry().streams;
  if (all.size() > kTidy) {
    auto& tables = Process::get().tables;
    std::erase_if(all, [&](const auto& entry) {
      return tables.streams.find(entry.first) == nullptr &&
             tables.contexts.find(entry.first) == nullptr;
    });
  }
  return all[stream != nullptr ? stream->handle : context->handle];
}

CUresult find(CUstream handle, Context** context, Stream** stream) {
  if (const CUresult e = enter(context)) return e;
  wire::Handle on_wire;
  return resolve_stream(*context, handle, &on_wire, stream);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuStreamSetAttribute(CUstream handle, CUstreamAttrID attribute,
                              const CUstreamAttrValue* value) {
  Context* context;
  Stream* stream;
  if (const CUresult e = find(handle, &context, &stream)) return e;
  REQUIRE(value != nullptr);
  std::lock_guard guard(registry().lock);
  Attributes& own = attributes_of(context, stream);
  switch (attribute) {
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      REQUIRE(value->accessPolicyWindow.hitRatio >= 0 && value->accessPolicyWindow.hitRatio <= 1);
      own.window = value->accessPolicyWindow;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      REQUIRE(value->syncPolicy >= CU_SYNC_POLICY_AUTO &&
              value->syncPolicy <= CU_SYNC_POLICY_BLOCKING_SYNC);
      own.policy = value->syncPolicy;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      own.domains = value->memSyncDomainMap;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      REQUIRE(value->memSyncDomain == CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT ||
              value->memSyncDomain == CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE);
      own.domain = value->memSyncDomain;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;  // a stream's priority is fixed when it is made
  }
}

CUresult cuStreamGetAttribute(CUstream handle, CUstreamAttrID attribute, CUstreamAttrValue* value) {
  Context* context;
  Stream* stream;
  if (const CUresult e = find(handle, &context, &stream)) return e;
  REQUIRE(value != nullptr);
  std::lock_guard guard(registry().lock);
  const Attributes& own = attributes_of(context, stream);
  switch (attribute) {
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      value->accessPolicyWindow = own.window;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      value->syncPolicy = own.policy;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      value->priority = stream != nullptr ? stream->priority : 0;
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

CUresult cuStreamCopyAttributes(CUstream to, CUstream from) {
  Context* context;
  Stream *target, *source;
  if (const CUresult e = find(to, &context, &target)) return e;
  if (const CUresult e = find(from, &context, &source)) return e;
  std::lock_guard guard(registry().lock);
  const Attributes copied = attributes_of(context, source);
  attributes_of(context, target) = copied;
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
