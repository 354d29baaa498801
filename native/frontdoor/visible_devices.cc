#include "frontdoor/visible_devices.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <numeric>
#include <string>
#include <string_view>

namespace gpupool::frontdoor {
namespace {

// Lower-case hexadecimal digits without dashes; "" if there is anything else.
std::string hex_digits(std::string_view text) {
  std::string digits;
  for (char c : text) {
    if (c == '-') continue;
    if (!std::isxdigit(static_cast<unsigned char>(c))) return "";
    digits += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return digits;
}

std::string hex_digits(const DeviceUuid& uuid) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string digits;
  for (uint8_t byte : uuid) digits += kDigits[byte >> 4], digits += kDigits[byte & 15];
  return digits;
}

int find_device(std::string_view entry, const std::vector<DeviceUuid>& devices) {
  while (!entry.empty() && std::isspace(static_cast<unsigned char>(entry.front())))
    entry.remove_prefix(1);
  while (!entry.empty() && std::isspace(static_cast<unsigned char>(entry.back())))
    entry.remove_suffix(1);
  if (entry.starts_with("GPU-") || entry.starts_with("MIG-")) {
    const std::string prefix = hex_digits(entry.substr(4));
    if (prefix.empty()) return -1;
    int found = -1;
    for (size_t i = 0; i < devices.size(); ++i) {
      if (!hex_digits(devices[i]).starts_with(prefix)) continue;
      if (found >= 0) return -1;
      found = static_cast<int>(i);
    }
    return found;
  }
  int index = -1;
  auto [end, error] = std::from_chars(entry.data(), entry.data() + entry.size(), index);
  if (error != std::errc() || index < 0 || static_cast<size_t>(index) >= devices.size()) return -1;
  return index;
}

}  // namespace

std::vector<int> visible_devices(const char* value, const std::vector<DeviceUuid>& devices) {
  std::vector<int> visible;
  if (value == nullptr) {
    visible.resize(devices.size());
    std::iota(visible.begin(), visible.end(), 0);
    return visible;
  }
  std::string_view rest = value;
  for (;;) {
    const size_t comma = rest.find(',');
    const int device = find_device(rest.substr(0, comma), devices);
    if (device < 0 || std::find(visible.begin(), visible.end(), device) != visible.end()) break;
    visible.push_back(device);
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return visible;
}

}  // namespace gpupool::frontdoor
