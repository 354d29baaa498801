#include "worker/start.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "worker/channel.h"
#include "worker/confine.h"

namespace gpupool::worker {

std::vector<option> with_start_options(std::initializer_list<option> own) {
  std::vector<option> options = {{"broker-pid", required_argument, nullptr, 'b'},
                                 {"user", required_argument, nullptr, 'u'},
                                 {"cgroup-parent", required_argument, nullptr, 'c'},
                                 {"no-seccomp", no_argument, nullptr, 'n'}};
  options.insert(options.end(), own);
  options.push_back({nullptr, 0, nullptr, 0});
  return options;
}

bool take_option(int letter, const char* value, StartOptions* options) {
  switch (letter) {
    case 'b':
      options->broker = static_cast<pid_t>(atol(value));
      return true;
    case 'u':
      options->user = value;
      return true;
    case 'c':
      options->cgroup_parent = value;
      return true;
    case 'n':
      options->seccomp = false;
      return true;
    default:
      return false;
  }
}

void usage_error(const char* sentence) {
  fprintf(stderr, "%s: %s (this program is started by gpupool-broker)\n",
          program_invocation_short_name, sentence);
  exit(2);
}

void check_start(const StartOptions& options, bool arguments_left) {
  if (options.broker <= 0 || arguments_left) usage_error("wrong arguments");
  int type = 0;
  socklen_t bytes = sizeof type;
  if (getsockopt(kChannelFd, SOL_SOCKET, SO_TYPE, &type, &bytes) != 0 || type != SOCK_SEQPACKET) {
    usage_error("descriptor 3 is no channel to a broker");
  }
}

bool confine(const StartOptions& options, std::string* why) {
  if (!confine_process(options.broker, why)) return false;
  std::string without;
  if (!options.cgroup_parent.empty() && !enter_cgroup(options.cgroup_parent, &without)) {
    fprintf(stderr, "no cgroup for this process: %s\n", without.c_str());
  }
  return true;
}

}  // namespace gpupool::worker
