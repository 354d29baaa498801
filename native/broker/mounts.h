// Which directories a process was shown by a bind mount. A mount namespace gets a mount only from
// somebody who may enter the directory himself, so in a container such a mount is a permission that
// counts for every user inside, whatever the container's user ids are on the host.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gpupool::broker {

// The place of a directory, independent of mount points: its file system, and its path in that.
struct DirectoryPlace {
  std::string device;  // major:minor as in mountinfo
  std::string path;

  bool known() const { return !device.empty(); }
};

// Of an open directory of this process; not known where /proc does not tell.
DirectoryPlace place_of(int directory);

// Whether the text of /proc/PID/mountinfo has a mount of exactly this directory.
bool has_mount(std::string_view mountinfo, const DirectoryPlace& place);

// Whether the process sees a mount of exactly this directory; no, where that cannot be told.
bool is_shown(uint32_t pid, const DirectoryPlace& place);

}  // namespace gpupool::broker
