// Tables of the live objects behind CUDA's handles, so that a wrong handle is an error and an
// object lives on while somebody still uses it.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gpupool::simgpu {

template <class T>
class HandleTable {
 public:
  template <class Handle>
  Handle add(std::shared_ptr<T> object) {
    std::unique_lock lock(mutex_);
    const void* key = object.get();
    objects_[key] = std::move(object);
    return reinterpret_cast<Handle>(const_cast<void*>(key));
  }
  std::shared_ptr<T> get(const void* handle) const {
    std::shared_lock lock(mutex_);
    auto at = objects_.find(handle);
    return at == objects_.end() ? nullptr : at->second;
  }
  std::shared_ptr<T> take(const void* handle) {
    std::unique_lock lock(mutex_);
    auto at = objects_.find(handle);
    if (at == objects_.end()) return nullptr;
    auto object = std::move(at->second);
    objects_.erase(at);
    return object;
  }
  template <class Condition>
  std::vector<std::shared_ptr<T>> take_if(Condition condition) {
    std::vector<std::shared_ptr<T>> taken;
    std::unique_lock lock(mutex_);
    for (auto at = objects_.begin(); at != objects_.end();) {
      if (condition(*at->second)) {
        taken.push_back(std::move(at->second));
        at = objects_.erase(at);
      } else {
        ++at;
      }
    }
    return taken;
  }
  template <class Action>
  void for_each(Action action) const {
    std::shared_lock lock(mutex_);
    for (const auto& [key, object] : objects_) action(*object);
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<T>> objects_;
};

}  // namespace gpupool::simgpu
