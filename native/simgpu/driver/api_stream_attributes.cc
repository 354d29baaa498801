// Attributes of streams.
#include <map>

#include "frontdoor/stream_attributes.h"
#include "simgpu/driver/context.h"

using namespace gpupool::simgpu;

namespace {

using gpupool::frontdoor::StreamAttributes;

struct Registry {
  std::mutex mutex;
  std::map<std::weak_ptr<Stream>, StreamAttributes, std::owner_less<>> streams;
};

Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

// With the registry's lock held.
StreamAttributes& attributes_of(const std::shared_ptr<Stream>& stream) {
  constexpr size_t kTidy = 1024;
  auto& all = registry().streams;
  if (all.size() > kTidy)
    std::erase_if(all, [](const auto& entry) { return entry.first.expired(); });
  return all[stream];
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
  return attributes_of(stream).set(attribute, *value);
}

GPUPOOL_API cuStreamGetAttribute(CUstream handle, CUstreamAttrID attribute,
                                 CUstreamAttrValue* value) {
  std::shared_ptr<Stream> stream;
  GPUPOOL_TRY(find(handle, &stream));
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(registry().mutex);
  return attributes_of(stream).get(attribute, stream->priority, value);
}

GPUPOOL_API cuStreamCopyAttributes(CUstream target_handle, CUstream source_handle) {
  std::shared_ptr<Stream> target, source;
  GPUPOOL_TRY(find(target_handle, &target));
  GPUPOOL_TRY(find(source_handle, &source));
  std::lock_guard lock(registry().mutex);
  const StreamAttributes copied = attributes_of(source);
  attributes_of(target) = copied;
  return CUDA_SUCCESS;
}
