// What the generated dispatch (worker/plain.cc) uses.
#pragma once

#include <type_traits>

#include "wire/extent.h"
#include "worker/session_state.h"

namespace gpupool::worker {

using wire::extent;

template <typename T>
T get(wire::Decoder& decoder) {
  if constexpr (std::is_enum_v<T>) {
    return static_cast<T>(decoder.narrow<int32_t>());
  } else {
    return decoder.narrow<T>();
  }
}

template <typename T>
void put(wire::Encoder& encoder, T value) {
  if constexpr (std::is_floating_point_v<T>) {
    encoder.real(value);
  } else {
    encoder.scalar(static_cast<uint64_t>(static_cast<int64_t>(value)));
  }
}

// False: the session has to end.
bool execute_plain(SessionState& session, const Command& command);

}  // namespace gpupool::worker
