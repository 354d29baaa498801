// Attributes of streams.
#define GPUPOOL_CUDA_ABI_EXACT 1
#include "api/cuda_abi.h"
#include "client/state.h"
#include "frontdoor/stream_attributes.h"

using namespace gpupool;          // NOLINT: a file of entry points
using namespace gpupool::client;  // NOLINT

#define REQUIRE(condition) \
  if (!(condition)) return CUDA_ERROR_INVALID_VALUE;

namespace {

using frontdoor::StreamAttributes;

struct Registry {
  std::mutex lock;
  std::map<uint64_t, StreamAttributes> streams;  // by handle; a default stream by its context's
};

Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

// With the registry's lock held.
StreamAttributes& attributes_of(const Context* context, const Stream* stream) {
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
  return attributes_of(context, stream).set(attribute, *value);
}

CUresult cuStreamGetAttribute(CUstream handle, CUstreamAttrID attribute, CUstreamAttrValue* value) {
  Context* context;
  Stream* stream;
  if (const CUresult e = find(handle, &context, &stream)) return e;
  REQUIRE(value != nullptr);
  std::lock_guard guard(registry().lock);
  const int priority = stream != nullptr ? stream->priority : 0;
  return attributes_of(context, stream).get(attribute, priority, value);
}

CUresult cuStreamCopyAttributes(CUstream to, CUstream from) {
  Context* context;
  Stream *target, *source;
  if (const CUresult e = find(to, &context, &target)) return e;
  if (const CUresult e = find(from, &context, &source)) return e;
  std::lock_guard guard(registry().lock);
  const StreamAttributes copied = attributes_of(context, source);
  attributes_of(context, target) = copied;
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
