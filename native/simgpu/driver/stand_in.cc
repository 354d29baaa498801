#include "simgpu/driver/stand_in.h"

#include <ctype.h>

#include <algorithm>
#include <set>

namespace gpupool::simgpu {
namespace {

constexpr uint32_t kLargestAlignment = 128;

bool is_identifier(const std::string& name) {
  auto follows = [](unsigned char c) { return isalnum(c) || c == '_' || c == '$'; };
  if (name.empty() || !std::all_of(name.begin(), name.end(), follows)) return false;
  if (isdigit(static_cast<unsigned char>(name[0]))) return false;
  return isalpha(static_cast<unsigned char>(name[0])) || name.size() > 1;
}

// The alignment with which a parameter comes to lie at its offset, behind those before it.
uint32_t alignment_at(uint32_t offset) {
  return offset == 0 ? kLargestAlignment : std::min(offset & -offset, kLargestAlignment);
}

std::string dimensions(const char* directive, const uint32_t (&values)[3]) {
  if (values[0] == 0) return "";
  std::string text = std::string(directive) + " ";
  for (int i = 0; i < 3; ++i)
    text += (i ? ", " : "") + std::to_string(std::max<uint32_t>(values[i], 1));
  return text + "\n";
}

std::string kernel_text(const frontdoor::KernelLayout& kernel) {
  std::string text = ".visible .entry " + kernel.name + "(";
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const auto& parameter = kernel.parameters[i];
    text += (i ? ",\n" : "\n") + std::string(".param .align ") +
            std::to_string(alignment_at(parameter.offset)) + " .b8 " + kernel.name + "_param_" +
            std::to_string(i) + "[" + std::to_string(std::max<uint32_t>(parameter.bytes, 1)) + "]";
  }
  text += ")\n";
  text += dimensions(".maxntid", kernel.max_threads);
  text += dimensions(".reqntid", kernel.required_threads);
  text += "{\n";
  if (kernel.static_shared_bytes) {
    text += ".reg .b64 %rd;\n.shared .align 16 .b8 held[" +
            std::to_string(kernel.static_shared_bytes) + "];\nmov.u64 %rd, held;\n";
  }
  return text + "ret;\n}\n";
}

}  // namespace

std::string stand_in(const frontdoor::ProgramInfo& program) {
  std::string text = ".version 7.0\n.target sm_70\n.address_size 64\n";
  std::set<std::string> names;
  for (const auto& global : program.globals) {
    if (!global.bytes || !is_identifier(global.name) || !names.insert(global.name).second) continue;
    text += ".visible .global .align 16 .b8 " + global.name + "[" + std::to_string(global.bytes) +
            "];\n";
  }
  for (const auto& kernel : program.kernels) {
    if (is_identifier(kernel.name) && names.insert(kernel.name).second) text += kernel_text(kernel);
  }
  return text;
}

}  // namespace gpupool::simgpu
