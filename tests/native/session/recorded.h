// What the recorded program does to memory, for it and for the replay.
#pragma once

#include <cstdint>

namespace gpupool::test {

constexpr uint32_t kRecordedBytes = 20000;

constexpr char kRecordedPtx[] =
    ".version 6.5\n.target sm_75\n.address_size 64\n"
    ".visible .entry nothing(.param .u64 p, .param .u32 n)\n{\n ret;\n}\n";

constexpr uint32_t recorded_value(uint32_t index) { return index * 2654435761u + 12345; }

// Word `index` after the copies and the memset.
constexpr uint32_t recorded_result(uint32_t index) {
  if (index >= 10 && index < 13) return index - 10 + 7;
  if (index >= 100 && index < 125) return 0xabcdef01;
  return recorded_value(index);
}

}  // namespace gpupool::test
