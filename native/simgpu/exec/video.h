// Video instructions: vadd, vset4, vmad and the like, each described by data.
#pragma once

#include <cstdint>

#include "simgpu/ptx/ast.h"

namespace gpupool::simgpu::exec {

struct VideoWork {
  ptx::Op operation = ptx::Op::kVadd;  // the scalar one, for SIMD forms too
  uint8_t lanes = 1;                   // 1, 2 or 4 parts of a word
  bool signed_d = false, signed_a = false, signed_b = false, saturate = false;
  ptx::Mod second = ptx::Mod::kUnknown;  // kAdd, kMin, kMax with c
  ptx::Mod compare = ptx::Mod::kUnknown;
  bool wrap = false;
  // Where operands lie in the 64 bits of {b, a}: bits of a part, and its number for each lane.
  uint8_t width_a = 32, width_b = 32;
  uint8_t index_a[4] = {0, 0, 0, 0}, index_b[4] = {1, 0, 0, 0};
  uint8_t mask = 0xf;       // lanes whose result is wanted; c has the others'
  uint8_t merge_width = 0;  // a scalar result that becomes a part of c; 0: the whole word
  uint8_t merge_index = 0;
  bool plus_one = false, negate_product = false, negate_c = false;  // vmad
  uint8_t scale = 0;                                                // vmad: bits shifted out
};

uint32_t run_video(const VideoWork& v, uint32_t a, uint32_t b, uint32_t c);

}  // namespace gpupool::simgpu::exec
