// Directories in which nobody but the broker makes, removes or exchanges a name, whatever is found
// in their place: an earlier release gave some of them to users, who could leave anything there.
//
// Nothing here follows a symbolic link. All throw std::runtime_error with a sentence.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>

#include "broker/fd.h"

namespace gpupool::broker {

// Opens `name` in the open directory `at`, made if missing, taken from whoever has it, with this
// mode and no access control list, unless `passes` is another user: then this user, who gets an
// entry in the list, and the broker's pass through it, and nobody else, whatever the mode. `at`
// must be the broker's; `path` is the new one's for errors.
Fd own_directory(int at, const char* name, const std::string& path, mode_t mode,
                 std::optional<uid_t> passes = std::nullopt);

// Removes all entries of the open directory, which must be the broker's, but those to keep; all or
// nothing is expected there, so an entry that cannot be removed throws.
void remove_entries(int directory, const std::string& path,
                    const std::function<bool(const std::string&, const struct stat&)>& keep);

}  // namespace gpupool::broker
