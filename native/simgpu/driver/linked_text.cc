#include "simgpu/driver/linked_text.h"

#include <algorithm>
#include <charconv>
#include <iterator>

namespace gpupool::simgpu {
namespace {

// A line of its own in front of each part of a linked program: "//@gpupool-part BYTES REGISTERS
// NAME".
constexpr std::string_view kLinked = "// gpupool linked program\n";
constexpr std::string_view kPart = "//@gpupool-part ";

}  // namespace

std::string join_parts(const std::vector<SourceText>& parts) {
  std::string text(kLinked);
  for (const SourceText& part : parts) {
    std::string name = part.name;
    std::replace_if(name.begin(), name.end(), [](char c) { return c == '\n' || c == '\0'; }, '_');
    text += std::string(kPart) + std::to_string(part.ptx.size()) + " " +
            std::to_string(part.max_registers) + " " + name + "\n" + part.ptx + "\n";
  }
  return text;
}

bool split_parts(std::string_view text, std::vector<SourceText>* parts) {
  if (!text.starts_with(kLinked)) return false;
  text.remove_prefix(kLinked.size());
  std::vector<SourceText> found;  // all or none: a text is not read in two ways
  while (text.starts_with(kPart)) {
    text.remove_prefix(kPart.size());
    size_t bytes = 0;
    size_t line = text.find('\n');
    if (line == std::string_view::npos) return false;
    uint32_t registers = 0;
    const char* last = text.data() + line;
    auto [middle, error] = std::from_chars(text.data(), last, bytes);
    if (error != std::errc() || middle == last || *middle != ' ') return false;
    auto [end, second_error] = std::from_chars(middle + 1, last, registers);
    if (second_error != std::errc() || end == last || *end != ' ' ||
        bytes > text.size() - line - 1) {
      return false;
    }
    found.push_back(
        {std::string(end + 1, last), std::string(text.substr(line + 1, bytes)), registers});
    text.remove_prefix(line + 1 + bytes);
    if (text.starts_with('\n')) text.remove_prefix(1);
  }
  const bool ended = text.find_first_not_of('\0') == std::string_view::npos;
  if (found.empty() || !ended) return false;
  parts->insert(parts->end(), std::make_move_iterator(found.begin()),
                std::make_move_iterator(found.end()));
  return true;
}

}  // namespace gpupool::simgpu
