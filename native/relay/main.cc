// gpupool-relay: started by the broker only, with a channel to it on descriptor 3. Forwards one
// session's device connection between the hosts of its client and of its GPU.
#include <getopt.h>
#include <signal.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "relay/relay.h"
#include "worker/channel.h"
#include "worker/confine.h"

namespace {

using namespace gpupool;
using worker::kChannelFd;
using worker::MessageKind;

struct Options {
  pid_t broker = 0;
  std::string user, cgroup_parent;
  relay::TlsFiles files;
  bool far = false, seccomp = true;
};

[[noreturn]] void usage_error(const char* sentence) {
  fprintf(stderr, "gpupool-relay: %s (this program is started by gpupool-broker)\n", sentence);
  exit(2);
}

Options parse(int argc, char** argv) {
  static const option options[] = {{"broker-pid", required_argument, nullptr, 'b'},
                                   {"user", required_argument, nullptr, 'u'},
                                   {"cgroup-parent", required_argument, nullptr, 'g'},
                                   {"certificate", required_argument, nullptr, 'c'},
                                   {"key", required_argument, nullptr, 'k'},
                                   {"authorities", required_argument, nullptr, 'a'},
                                   {"far", no_argument, nullptr, 'f'},
                                   {"no-seccomp", no_argument, nullptr, 'n'},
                                   {nullptr, 0, nullptr, 0}};
  Options result;
  int option;
  while ((option = getopt_long(argc, argv, "", options, nullptr)) != -1) {
    switch (option) {
      case 'b':
        result.broker = static_cast<pid_t>(atol(optarg));
        break;
      case 'u':
        result.user = optarg;
        break;
      case 'g':
        result.cgroup_parent = optarg;
        break;
      case 'c':
        result.files.certificate = optarg;
        break;
      case 'k':
        result.files.key = optarg;
        break;
      case 'a':
        result.files.authorities = optarg;
        break;
      case 'f':
        result.far = true;
        break;
      case 'n':
        result.seccomp = false;
        break;
      default:
        usage_error("an option is not known or lacks its value");
    }
  }
  if (result.broker <= 0 || optind != argc) usage_error("wrong arguments");
  int type = 0;
  socklen_t bytes = sizeof type;
  if (getsockopt(kChannelFd, SOL_SOCKET, SO_TYPE, &type, &bytes) != 0 || type != SOCK_SEQPACKET) {
    usage_error("descriptor 3 is no channel to a broker");
  }
  return result;
}

[[noreturn]] void give_up(const std::string& why) {
  fprintf(stderr, "%s\n", why.c_str());
  worker::send_message(kChannelFd, MessageKind::kReady, 0, why);
  _exit(3);
}

}  // namespace

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const Options options = parse(argc, argv);
  std::string why;
  if (sodium_init() < 0) give_up("libsodium cannot be used");
  if (!worker::confine_process(options.broker, &why)) give_up(why);
  if (!options.cgroup_parent.empty() && !worker::enter_cgroup(options.cgroup_parent, &why)) {
    fprintf(stderr, "no cgroup for this relay: %s\n", why.c_str());
  }
  // The key may be root's alone.
  const auto tls = relay::TlsContext::load(
      options.files, options.far ? relay::Role::kServer : relay::Role::kClient, &why);
  if (tls == nullptr) give_up(why);
  if (!worker::drop_privileges(options.user, &why)) give_up(why);
  if (options.seccomp && !worker::deny_system_calls(&why)) give_up(why);
  // For all threads: one of them waits for these.
  sigset_t blocked;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  sigaddset(&blocked, SIGUSR1);
  if (!worker::send_message(kChannelFd, MessageKind::kReady, 1)) _exit(0);
  worker::Message message;
  if (worker::receive_message(kChannelFd, &message, true) != worker::ReceiveStatus::kMessage) {
    _exit(0);  // the broker is gone, or has no need of this relay
  }
  const auto wanted = options.far ? MessageKind::kFarAssign : MessageKind::kAssign;
  if (message.header.kind != static_cast<uint32_t>(wanted)) {
    fprintf(stderr, "the broker sent something else than an assignment\n");
    _exit(1);
  }
  sigprocmask(SIG_BLOCK, &blocked, nullptr);
  const relay::Outcome outcome =
      options.far ? relay::serve_far(*tls, message) : relay::serve_near(*tls, message);
  if (outcome.fault) fprintf(stderr, "%s\n", outcome.sentence.c_str());
  worker::send_message(kChannelFd, MessageKind::kEnded, outcome.fault ? 1 : 0, outcome.sentence);
  fflush(nullptr);
  _exit(outcome.fault ? 4 : 0);
}
