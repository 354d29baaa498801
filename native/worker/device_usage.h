// What this process holds of its device by NVML's account, which every driver brings along.
#pragma once

#include <memory>
#include <string>

#include "worker/session.h"

namespace gpupool::worker {

// `uuid` empty: the first device. Null and a sentence in `why`: NVML is not there, or does not tell
// the memory of processes (in a pid namespace of its own, on some MIG devices).
std::unique_ptr<DeviceUsage> open_device_usage(const std::string& driver_directory,
                                               const std::string& uuid, std::string* why);

}  // namespace gpupool::worker
