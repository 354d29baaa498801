// What the generated entry points (client/plain.cc) use.
#pragma once

#include <cstring>
#include <type_traits>

#include "client/modules.h"
#include "client/state.h"
#include "graphs/capture.h"
#include "wire/extent.h"

namespace gpupool::client {

using wire::extent;

struct PlainCall {
  Context* context = nullptr;

  CUresult enter() { return client::enter(&context); }

  // All of it in one allocation of the current context's device.
  CUresult device_range(CUdeviceptr address, uint64_t bytes) const {
    if (bytes == 0) return CUDA_SUCCESS;
    Context* owner = nullptr;
    if (!Process::get().ranges.device_range(address, bytes, &owner) ||
        owner->device != context->device) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
  }
};

template <typename T>
uint64_t widen(T value) {
  if constexpr (std::is_signed_v<T> || std::is_enum_v<T>) {
    return static_cast<uint64_t>(static_cast<int64_t>(value));
  } else {
    return static_cast<uint64_t>(value);
  }
}

template <typename T>
void take(wire::Decoder& decoder, T* to) {
  if constexpr (std::is_floating_point_v<T>) {
    *to = static_cast<T>(decoder.real());
  } else {
    *to = decoder.narrow<T>();
  }
}

}  // namespace gpupool::client
