// gpupool-relay: started by the broker only, with a channel to it on descriptor 3. Forwards one
// session's device connection between the hosts of its client and of its GPU.
#include <getopt.h>
#include <signal.h>
#include <sodium.h>
#include <stdio.h>
#include <unistd.h>

#include <string>

#include "relay/relay.h"
#include "worker/channel.h"
#include "worker/confine.h"
#include "worker/start.h"

namespace {

using namespace gpupool;
using worker::kChannelFd;
using worker::MessageKind;

struct Options {
  worker::StartOptions start;
  relay::TlsFiles files;
  bool far = false;
};

Options parse(int argc, char** argv) {
  const std::vector<option> options =
      worker::with_start_options({{"certificate", required_argument, nullptr, 'C'},
                                  {"key", required_argument, nullptr, 'K'},
                                  {"authorities", required_argument, nullptr, 'A'},
                                  {"far", no_argument, nullptr, 'f'}});
  Options result;
  int option;
  while ((option = getopt_long(argc, argv, "", options.data(), nullptr)) != -1) {
    if (worker::take_option(option, optarg, &result.start)) continue;
    switch (option) {
      case 'C':
        result.files.certificate = optarg;
        break;
      case 'K':
        result.files.key = optarg;
        break;
      case 'A':
        result.files.authorities = optarg;
        break;
      case 'f':
        result.far = true;
        break;
      default:
        worker::usage_error("an option is not known or lacks its value");
    }
  }
  worker::check_start(result.start, optind != argc);
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
  if (!worker::confine(options.start, &why)) give_up(why);
  // The key may be root's alone.
  const auto tls = relay::TlsContext::load(
      options.files, options.far ? relay::Role::kServer : relay::Role::kClient, &why);
  if (tls == nullptr) give_up(why);
  if (!worker::drop_privileges(options.start.user, &why)) give_up(why);
  if (options.start.seccomp && !worker::deny_system_calls(&why)) give_up(why);
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
