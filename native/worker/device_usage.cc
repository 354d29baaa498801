#include "worker/device_usage.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "nvml/nvml.h"

namespace gpupool::worker {
namespace {

using nvml::kInsufficientSize;
using nvml::kSuccess;

class NvmlUsage final : public DeviceUsage {
 public:
  bool open(const std::string& directory, const std::string& uuid, std::string* why) {
    const std::string path =
        directory.empty() ? "libnvidia-ml.so.1" : directory + "/libnvidia-ml.so.1";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return *why = dlerror(), false;
    const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    const auto by_uuid =
        reinterpret_cast<int (*)(const char*, void**)>(dlsym(library, "nvmlDeviceGetHandleByUUID"));
    const auto by_index = reinterpret_cast<int (*)(unsigned, void**)>(
        dlsym(library, "nvmlDeviceGetHandleByIndex_v2"));
    processes_ = reinterpret_cast<decltype(processes_)>(
        dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3"));
    if (init == nullptr || by_uuid == nullptr || by_index == nullptr || processes_ == nullptr) {
      return *why = path + " lacks functions", false;
    }
    if (int error = init()) return *why = path + ": error " + std::to_string(error), false;
    const int error = uuid.empty() ? by_index(0, &device_) : by_uuid(uuid.c_str(), &device_);
    if (error != kSuccess) return *why = path + " does not know the device", false;
    unsigned count = 0;
    const int asked = processes_(device_, &count, nullptr);
    if (asked != kSuccess && asked != kInsufficientSize) {
      return *why = path + " does not tell the memory of processes", false;
    }
    samples_ =
        reinterpret_cast<decltype(samples_)>(dlsym(library, "nvmlDeviceGetProcessUtilization"));
    return true;
  }

  // Of some seconds at most; a process that did nothing has no sample.
  std::optional<uint32_t> busy_permille() override {
    if (samples_ == nullptr) return std::nullopt;
    std::vector<nvml::ProcessSample> list(64);
    for (int attempt = 0; attempt < 4; attempt++) {
      auto count = static_cast<unsigned>(list.size());
      const int error = samples_(device_, list.data(), &count, seen_us_);
      if (error == kInsufficientSize) {
        list.resize(count + 16);
        continue;
      }
      if (error == nvml::kNotFound) return 0;
      if (error != kSuccess) return samples_ = nullptr, std::nullopt;
      const auto self = static_cast<unsigned>(getpid());
      const nvml::ProcessSample* latest = nullptr;
      for (unsigned i = 0; i < count && i < list.size(); i++) {
        seen_us_ = std::max(seen_us_, list[i].timestamp_us);
        if (list[i].pid != self) continue;
        if (latest == nullptr || latest->timestamp_us < list[i].timestamp_us) latest = &list[i];
      }
      return latest == nullptr ? 0 : std::min(latest->gpu, 100u) * 10;
    }
    return std::nullopt;
  }

  std::optional<uint64_t> bytes() override {
    for (int attempt = 0; attempt < 8; attempt++) {
      auto count = static_cast<unsigned>(list_.size());
      const int error = processes_(device_, &count, list_.data());
      if (error == kInsufficientSize) {
        list_.resize(count + 16);
        continue;
      }
      if (error != kSuccess) return std::nullopt;
      const auto self = static_cast<unsigned>(getpid());
      for (unsigned i = 0; i < count; i++) {
        if (list_[i].pid != self) continue;
        if (list_[i].used_bytes == ~0ull) return std::nullopt;
        return list_[i].used_bytes;
      }
      return std::nullopt;
    }
    return std::nullopt;
  }

 private:
  int (*processes_)(void*, unsigned*, nvml::ProcessInfoV2*) = nullptr;
  int (*samples_)(void*, nvml::ProcessSample*, unsigned*, unsigned long long) = nullptr;
  unsigned long long seen_us_ = 0;
  void* device_ = nullptr;
  std::vector<nvml::ProcessInfoV2> list_ = std::vector<nvml::ProcessInfoV2>(64);
};

}  // namespace

std::unique_ptr<DeviceUsage> open_device_usage(const std::string& driver_directory,
                                               const std::string& uuid, std::string* why) {
  auto usage = std::make_unique<NvmlUsage>();
  if (!usage->open(driver_directory, uuid, why)) return nullptr;
  return usage;
}

}  // namespace gpupool::worker
