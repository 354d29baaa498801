#include "simgpu/ptx/ast.h"

namespace gpupool::simgpu::ptx {

std::string FunctionBody::statement(const Instruction& i, size_t limit) const {
  std::string out;
  for (size_t at = i.text_begin; at < text.size() && out.size() < limit; ++at) {
    const char c = text[at];
    if (c == ';') return out + ";";
    const bool blank = static_cast<unsigned char>(c) <= ' ';
    if (blank && (out.empty() || out.back() == ' ')) continue;
    out += blank ? ' ' : c;
  }
  return out + "...";
}

std::string FunctionBody::register_name(uint32_t index) const {
  for (const RegisterRange& r : register_ranges) {
    if (index < r.first || index >= r.first + r.count) continue;
    std::string name(r.name);
    if (r.numbered) return name + std::to_string(index - r.first);
    if (r.count > 1) name += std::string(".") + "xyzw0123"[(index - r.first) & 7];
    return name;
  }
  return "register " + std::to_string(index);
}

}  // namespace gpupool::simgpu::ptx
