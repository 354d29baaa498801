// gpupool-broker: one per host, started by systemd or by hand.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "broker/broker.h"
#include "broker/log.h"
#include "broker/sockets.h"

namespace {

using namespace gpupool::broker;

constexpr char kUsage[] =
    "usage: gpupool-broker --run-dir DIR [--worker PATH]\n"
    "\n"
    "Serves the GPUs of this host to the clients of gpupool. Everything else it learns from\n"
    "gpupoold, which connects to DIR/broker.sock.\n"
    "\n"
    "  --run-dir DIR   where the sockets and the workers' logs lie; made if missing\n"
    "  --worker PATH   the worker program (default: gpupool-worker beside this program)\n"
    "  --help          this text\n"
    "\n"
    "exit status: 0 after SIGTERM, 2 usage, 4 disk or run directory, 5 socket\n";

[[noreturn]] void usage_error(const std::string& sentence) {
  fprintf(stderr, "gpupool-broker: %s\n%s", sentence.c_str(), kUsage);
  exit(kExitUsage);
}

BrokerOptions parse(int argc, char** argv) {
  static const option options[] = {{"run-dir", required_argument, nullptr, 'r'},
                                   {"worker", required_argument, nullptr, 'w'},
                                   {"help", no_argument, nullptr, 'h'},
                                   {nullptr, 0, nullptr, 0}};
  BrokerOptions result;
  int option;
  while ((option = getopt_long(argc, argv, "", options, nullptr)) != -1) {
    switch (option) {
      case 'r':
        result.run_dir = optarg;
        break;
      case 'w':
        result.worker = optarg;
        break;
      case 'h':
        fputs(kUsage, stdout);
        exit(0);
      default:
        usage_error("an option is not known or lacks its value");
    }
  }
  if (optind != argc) usage_error(std::string("unknown argument ") + argv[optind]);
  if (result.run_dir.empty()) usage_error("--run-dir is missing");
  std::error_code error;
  result.run_dir = std::filesystem::absolute(result.run_dir, error).lexically_normal();
  if (result.worker.empty()) {
    result.worker =
        std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "gpupool-worker";
  }
  if (access(result.worker.c_str(), X_OK) != 0) {
    usage_error("the worker program " + result.worker + " cannot be run: " + strerror(errno));
  }
  return result;
}

// Every client, worker and log takes descriptors.
void raise_descriptor_limit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

void open_standard_descriptors() {
  int fd;
  do {
    fd = open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd >= 0) close(fd);
}

// sd_notify(3): systemd waits for this with Type=notify.
void tell_systemd(const char* state) {
  const char* path = getenv("NOTIFY_SOCKET");
  sockaddr_un address{};
  if (path == nullptr || strlen(path) >= sizeof address.sun_path) return;
  address.sun_family = AF_UNIX;
  strcpy(address.sun_path, path);
  if (path[0] == '@') address.sun_path[0] = '\0';
  const Fd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd) return;
  sendto(fd.get(), state, strlen(state), MSG_NOSIGNAL, reinterpret_cast<sockaddr*>(&address),
         static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + strlen(path)));
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_descriptors();
  signal(SIGPIPE, SIG_IGN);
  const BrokerOptions options = parse(argc, argv);
  raise_descriptor_limit();
  if (sodium_init() < 0) {
    fprintf(stderr, "gpupool-broker: libsodium could not be initialised\n");
    return 1;
  }
  try {
    Broker broker(options);
    tell_systemd("READY=1");
    broker.run();
    tell_systemd("STOPPING=1");
    return 0;
  } catch (const StartError& error) {
    fprintf(stderr, "gpupool-broker: %s\n", error.what());
    return error.status;
  } catch (const std::system_error& error) {
    fprintf(stderr, "gpupool-broker: %s\n", error.what());
    return error.code().value() == EMFILE || error.code().value() == ENFILE ? kExitSocket : 1;
  } catch (const std::bad_alloc&) {
    fprintf(stderr, "gpupool-broker: out of memory\n");
    return 1;
  }
}
