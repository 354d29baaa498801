#include "frontdoor/context_storage.h"

#include <functional>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "frontdoor/hooks.h"

namespace gpupool::frontdoor {
namespace {

struct Key {
  CUcontext context;
  void* key;
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  size_t operator()(const Key& k) const {
    return std::hash<void*>()(k.context) * 31 + std::hash<void*>()(k.key);
  }
};

struct Value {
  void* value;
  StorageDestructor destructor;
};

struct Storage {
  std::shared_mutex mutex;
  std::unordered_map<Key, Value, KeyHash> values;
};

// Never destroyed: clients still call from their exit handlers.
Storage& storage() {
  static Storage* const instance = new Storage;
  return *instance;
}

bool resolve(CUcontext* context) {
  if (*context != nullptr) return true;
  return cuCtxGetCurrent(context) == CUDA_SUCCESS && *context != nullptr;
}

}  // namespace

CUresult storage_put(CUcontext context, void* key, void* value, StorageDestructor destructor) {
  if (!resolve(&context)) return CUDA_ERROR_INVALID_CONTEXT;
  Storage& s = storage();
  std::unique_lock lock(s.mutex);
  s.values[{context, key}] = {value, destructor};
  return CUDA_SUCCESS;
}

CUresult storage_delete(CUcontext context, void* key) {
  if (!resolve(&context)) return CUDA_ERROR_INVALID_CONTEXT;
  Storage& s = storage();
  std::unique_lock lock(s.mutex);
  return s.values.erase({context, key}) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult storage_get(void** value, CUcontext context, void* key) {
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!resolve(&context)) return CUDA_ERROR_INVALID_HANDLE;
  Storage& s = storage();
  std::shared_lock lock(s.mutex);
  auto found = s.values.find({context, key});
  if (found == s.values.end()) return CUDA_ERROR_INVALID_HANDLE;
  *value = found->second.value;
  return CUDA_SUCCESS;
}

void forget_context(CUcontext context) {
  std::vector<std::pair<Key, Value>> ended;
  {
    Storage& s = storage();
    std::unique_lock lock(s.mutex);
    for (auto it = s.values.begin(); it != s.values.end();) {
      if (it->first.context == context) {
        ended.emplace_back(it->first, it->second);
        it = s.values.erase(it);
      } else {
        ++it;
      }
    }
  }
  // Without the lock: a destructor may use the storage.
  for (auto& [key, value] : ended) {
    if (value.destructor != nullptr) value.destructor(key.context, key.key, value.value);
  }
}

}  // namespace gpupool::frontdoor
