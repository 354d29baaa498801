// How the broker's children begin, workers and relays alike.
#pragma once

#include <getopt.h>
#include <sys/types.h>

#include <initializer_list>
#include <string>
#include <vector>

namespace gpupool::worker {

// What each of them is told.
struct StartOptions {
  pid_t broker = 0;
  std::string user, cgroup_parent;
  bool seccomp = true;
};

// For getopt_long(): the options for these, and a program's own, which have other letters.
std::vector<option> with_start_options(std::initializer_list<option> own);
// False: the letter is another option's.
bool take_option(int letter, const char* value, StartOptions* options);
// Ends the process, unless it was started by a broker with all that it needs.
void check_start(const StartOptions& options, bool arguments_left);
[[noreturn]] void usage_error(const char* sentence);

// Its death with the broker's, and its cgroup. False: `why`.
bool confine(const StartOptions& options, std::string* why);

}  // namespace gpupool::worker
