// CUDA_VISIBLE_DEVICES, which is the driver's to honour.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace gpupool::frontdoor {

using DeviceUuid = std::array<uint8_t, 16>;

// The devices, in the order in which the program is to see them, as indices into `devices`.
// `value`: the variable's value, nullptr if it is not set. An entry is an index or "GPU-" (or
// "MIG-") with the beginning of one device's UUID; the list ends before the first entry that names
// no device, is ambiguous, or repeats one.
std::vector<int> visible_devices(const char* value, const std::vector<DeviceUuid>& devices);

}  // namespace gpupool::frontdoor
