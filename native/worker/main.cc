// gpupool-worker: started by the broker only, with a channel to it on descriptor 3. Loads the
// driver, waits for a client's connection, serves it, and ends with it.
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "carriers/carrier.h"
#include "worker/account.h"
#include "worker/channel.h"
#include "worker/confine.h"
#include "worker/connection.h"
#include "worker/device_usage.h"
#include "worker/driver.h"
#include "worker/session.h"
#include "worker/start.h"
#include "worker/warm.h"

namespace {

using namespace gpupool;
using namespace gpupool::worker;

struct Options {
  StartOptions start;
  std::string gpu, driver_directory;
  bool probe = false, warm_context = false;
};

Options parse(int argc, char** argv) {
  const std::vector<option> options =
      with_start_options({{"gpu", required_argument, nullptr, 'g'},
                          {"driver-directory", required_argument, nullptr, 'd'},
                          {"probe", no_argument, nullptr, 'p'},
                          {"warm-context", no_argument, nullptr, 'w'}});
  Options result;
  int option;
  while ((option = getopt_long(argc, argv, "", options.data(), nullptr)) != -1) {
    if (take_option(option, optarg, &result.start)) continue;
    switch (option) {
      case 'g':
        result.gpu = optarg;
        break;
      case 'd':
        result.driver_directory = optarg;
        break;
      case 'p':
        result.probe = true;
        break;
      case 'w':
        result.warm_context = true;
        break;
      default:
        usage_error("an option is not known or lacks its value");
    }
  }
  check_start(result.start, optind != argc);
  return result;
}

// The first word to the broker is that this worker is of no use, and why.
[[noreturn]] void give_up(const Options& options, const std::string& why) {
  fprintf(stderr, "%s\n", why.c_str());
  send_message(kChannelFd, options.probe ? MessageKind::kSnapshot : MessageKind::kReady, 0, why);
  _exit(3);
}

// The session's device is the one that the broker named; without a name the driver's first.
int find_device(const Driver& driver, const Options& options) {
  if (driver.device_count() == 0) give_up(options, "the driver has no device");
  if (options.gpu.empty()) return 0;
  const int ordinal = driver.ordinal(options.gpu);
  if (ordinal < 0) give_up(options, "the driver has no device " + options.gpu);
  return ordinal;
}

Session* serving = nullptr;

void on_terminate(int) { serving->stop(); }

[[noreturn]] void serve(Driver& driver, int ordinal, DeviceUsage* usage, Message& message) {
  AssignPayload payload;
  if (message.header.kind != static_cast<uint32_t>(MessageKind::kAssign) || message.fds.empty() ||
      message.payload.size() != sizeof payload) {
    fprintf(stderr, "the broker sent something else than an assignment\n");
    _exit(1);
  }
  memcpy(&payload, message.payload.data(), sizeof payload);
  Assignment assignment;
  assignment.epoch = payload.epoch;
  assignment.minor = payload.minor;
  assignment.initial_credit = payload.initial_credit;
  assignment.device_ordinal = ordinal;
  assignment.arena_base = payload.arena_base;
  assignment.arena_bytes = payload.arena_bytes;
  assignment.usage = usage;

  ChannelAccount account(kChannelFd);
  const DataLimit limit(payload.host_bytes);
  account.on_limit = [&limit](uint64_t slice_bytes) { limit.allow(slice_bytes); };
  account.query();
  auto carrier = take_connection(payload, message.fds);
  if (carrier == nullptr) {
    static constexpr char kWhy[] = "the client did not say in time what its carrier is to be";
    fprintf(stderr, "%s\n", kWhy);
    send_message(kChannelFd, MessageKind::kEnded, 1, kWhy);
    _exit(4);
  }
  Session session(std::move(carrier), assignment, driver, account);
  serving = &session;
  struct sigaction action{};
  action.sa_handler = on_terminate;
  sigaction(SIGTERM, &action, nullptr);

  const SessionOutcome outcome = session.run();
  if (outcome.end != SessionEnd::kClientGone) fprintf(stderr, "%s\n", outcome.sentence.c_str());
  send_message(kChannelFd, MessageKind::kEnded, outcome.end == SessionEnd::kClientGone ? 0 : 1,
               outcome.sentence);
  fflush(nullptr);
  // Whatever the session held goes back to the driver with the process; destructors of a driver
  // that may be unusable are not run.
  _exit(outcome.end == SessionEnd::kClientGone ? 0 : 4);
}

}  // namespace

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const Options options = parse(argc, argv);
  std::string why;
  if (!confine(options.start, &why)) give_up(options, why);
  if (!drop_privileges(options.start.user, &why)) give_up(options, why);

  const auto driver = Driver::load(options.driver_directory, &why);
  if (driver == nullptr) give_up(options, why);
  const int ordinal = find_device(*driver, options);

  if (options.probe) {
    wire::DeviceSnapshot snapshot{};
    if (!take_snapshot(*driver, ordinal, &snapshot, &why)) give_up(options, why);
    send_message(kChannelFd, MessageKind::kSnapshot, 1,
                 {reinterpret_cast<const char*>(&snapshot), sizeof snapshot});
    _exit(0);
  }

  if (options.warm_context && !retain_primary_context(options.driver_directory, ordinal, &why)) {
    give_up(options, why);
  }
  std::string unknown;
  const auto usage = open_device_usage(options.driver_directory, options.gpu, &unknown);
  if (usage == nullptr) {
    fprintf(stderr, "memory that the driver takes by itself is not seen: %s\n", unknown.c_str());
  }
  if (options.start.seccomp && !deny_system_calls(&why)) give_up(options, why);
  if (!send_message(kChannelFd, MessageKind::kReady, 1)) _exit(0);

  Message message;
  if (receive_message(kChannelFd, &message, true) != ReceiveStatus::kMessage) {
    _exit(0);  // the broker is gone, or has no need of this worker
  }
  serve(*driver, ordinal, usage.get(), message);
}
