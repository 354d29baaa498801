// Parses a text's declarations; bodies of functions are only delimited.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "simgpu/ptx/ast.h"
#include "simgpu/ptx/lexer.h"

namespace gpupool::simgpu::ptx {

constexpr uint64_t kMaxVariableBytes = uint64_t{1} << 40;

// Throws ParseError. `text` may end in NULs.
std::unique_ptr<Unit> parse_unit(std::string file, std::string text);

// What follows a state space: ".align 4 .b8 a[4] = {1, 2}, b;" including the semicolon.
void parse_variables(Lexer& lexer, Space space, Linkage linkage,
                     std::vector<VariableDeclaration>* out);

// What follows "=": fills image and symbols. Returns the number of elements given.
uint64_t parse_initialiser(Lexer& lexer, VariableDeclaration* variable);

// "(.param .b32 a, ...)"; an absent list is an empty one. Offsets are filled.
std::vector<Parameter> parse_parameters(Lexer& lexer);

// What follows ".callprototype", semicolon included.
Prototype parse_prototype(Lexer& lexer);

}  // namespace gpupool::simgpu::ptx
