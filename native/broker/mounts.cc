#include "broker/mounts.h"

#include <fcntl.h>
#include <limits.h>

#include <array>
#include <charconv>
#include <optional>

#include "broker/fd.h"

namespace gpupool::broker {
namespace {

// A user can fill the table of a namespace of his own; containers have some dozens of mounts.
constexpr size_t kMaxTable = 1 << 20;

// nullopt: it cannot be read, or is too long to be looked through between two events.
std::optional<std::string> read_file(const std::string& path) {
  const Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return std::nullopt;
  std::string text;
  std::array<char, 16384> chunk;
  for (;;) {
    const ssize_t got = read(file.get(), chunk.data(), chunk.size());
    if (got < 0) return std::nullopt;
    if (got == 0) return text;
    text.append(chunk.data(), static_cast<size_t>(got));
    if (text.size() > kMaxTable) return std::nullopt;
  }
}

struct Mount {
  std::string_view id, device;
  std::string root, point;
};

// Blanks, line ends and backslashes are written as a backslash and three octal digits.
std::string unescape(std::string_view text) {
  std::string result;
  for (size_t i = 0; i < text.size(); i++) {
    unsigned code = 0;
    if (text[i] == '\\' && i + 3 < text.size() &&
        std::from_chars(&text[i + 1], &text[i + 1] + 3, code, 8).ptr == &text[i + 1] + 3) {
      result += static_cast<char>(code);
      i += 3;
    } else {
      result += text[i];
    }
  }
  return result;
}

// "ID PARENT MAJOR:MINOR ROOT POINT …"
std::optional<Mount> parse_line(std::string_view line) {
  std::array<std::string_view, 5> fields;
  for (std::string_view& field : fields) {
    const size_t end = line.find(' ');
    if (end == 0 || end == line.npos) return std::nullopt;
    field = line.substr(0, end);
    line.remove_prefix(end + 1);
  }
  return Mount{fields[0], fields[2], unescape(fields[3]), unescape(fields[4])};
}

// Calls `look` for each mount until it returns true; whether it did.
template <typename Look>
bool any_mount(std::string_view table, Look look) {
  while (!table.empty()) {
    const size_t end = table.find('\n');
    const auto mount = parse_line(table.substr(0, end));
    if (mount && look(*mount)) return true;
    table.remove_prefix(end == table.npos ? table.size() : end + 1);
  }
  return false;
}

}  // namespace

DirectoryPlace place_of(int directory) {
  const std::string number = std::to_string(directory);
  char resolved[PATH_MAX];
  const ssize_t length =
      readlink(("/proc/self/fd/" + number).c_str(), resolved, sizeof resolved - 1);
  const auto info = read_file("/proc/self/fdinfo/" + number);
  const auto table = read_file("/proc/self/mountinfo");
  if (length <= 0 || !info || !table) return {};
  const std::string path(resolved, static_cast<size_t>(length));
  constexpr std::string_view kLabel = "mnt_id:\t";
  const size_t at = info->find(kLabel);
  if (at == info->npos) return {};
  const size_t begin = at + kLabel.size();
  const std::string id = info->substr(begin, info->find('\n', begin) - begin);
  DirectoryPlace place;
  any_mount(*table, [&](const Mount& mount) {
    if (mount.id != id) return false;
    const std::string point = mount.point == "/" ? "" : mount.point;
    if (path.compare(0, point.size(), point) != 0) return true;
    place.device = mount.device;
    place.path = (mount.root == "/" ? "" : mount.root) + path.substr(point.size());
    return true;
  });
  return place;
}

bool has_mount(std::string_view mountinfo, const DirectoryPlace& place) {
  return any_mount(mountinfo, [&](const Mount& mount) {
    return mount.device == place.device && mount.root == place.path;
  });
}

bool is_shown(uint32_t pid, const DirectoryPlace& place) {
  if (pid == 0 || !place.known()) return false;
  const auto table = read_file("/proc/" + std::to_string(pid) + "/mountinfo");
  return table && has_mount(*table, place);
}

}  // namespace gpupool::broker
