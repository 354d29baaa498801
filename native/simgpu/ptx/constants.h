// Constant expressions of PTX: integers of 64 bits with C's operators, and floating-point literals.
#pragma once

#include <cstdint>

#include "simgpu/ptx/lexer.h"

namespace gpupool::simgpu::ptx {

struct Constant {
  enum class Kind : uint8_t { kInteger, kFloat32, kFloat64 } kind = Kind::kInteger;
  bool is_unsigned = false;
  uint64_t bits = 0;  // kFloat32: 32 bits
};

bool starts_constant(const Token& token);
// A whole expression, "?:" included.
Constant parse_constant(Lexer& lexer);
// An integer expression whose value must lie in [low, high].
int64_t parse_integer(Lexer& lexer, int64_t low, int64_t high, const char* what);
// Any number of "+ term" and "- term"; the sum.
int64_t parse_offset(Lexer& lexer);

}  // namespace gpupool::simgpu::ptx
