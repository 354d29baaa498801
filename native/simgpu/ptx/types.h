// Names of the AST's enumerations: text to value and back.
#pragma once

#include <optional>
#include <string_view>

#include "simgpu/ptx/ast.h"

namespace gpupool::simgpu::ptx {

Op op_of(std::string_view text);         // kUnknown if there is no such opcode
Mod mod_of(std::string_view text);       // without the dot
Type type_named(std::string_view text);  // without the dot; kNone
Space space_named(std::string_view text);

struct SpecialName {
  SpecialRegister reg;
  bool vector;
};
std::optional<SpecialName> special_named(std::string_view text);

}  // namespace gpupool::simgpu::ptx
