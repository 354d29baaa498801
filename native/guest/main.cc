// gpupool-guest: the helper of a virtual machine, and what it knows.
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <charconv>
#include <new>
#include <string>
#include <system_error>

#include "broker/sockets.h"
#include "guest/helper.h"
#include "guest/status.h"

namespace {

using namespace gpupool::guest;

constexpr char kUsage[] =
    "usage: gpupool-guest status [--json] [--run-dir DIR]\n"
    "       gpupool-guest run [--port PATH] [--run-dir DIR] [--group NAME] [--region PATH]\n"
    "                         [--region-speed MIB] [--vsock-port N]\n"
    "\n"
    "status: says in one sentence whether this virtual machine has a GPU, or why not.\n"
    "run: the helper, a service: carries the connections of programs to the host.\n"
    "\n"
    "  --json          all that the helper knows\n"
    "  --port PATH     the port (default: /dev/virtio-ports/org.gpupool.0)\n"
    "  --run-dir DIR   where the sockets lie (default: /run/gpupool)\n"
    "  --group NAME    who may use the GPU (default: gpupool)\n"
    "  --vsock-port N  of the host, tried first where there is a vsock device (default: 26480, "
    "with\n"
    "                  --port 0: not)\n"
    "  --region PATH   the memory that is shared with the host (default: is looked for)\n"
    "  --region-speed MIB\n"
    "                  what it has to move in a second to be used (default: 100)\n"
    "  --help          this text\n"
    "\n"
    "exit status of status: 0 a GPU, 3 no port, 4 the host does not serve the port, 5 the host\n"
    "refused, 6 the helper is not running, 7 the user may not use it; 2 usage\n";

[[noreturn]] void usage_error(const std::string& sentence) {
  fprintf(stderr, "gpupool-guest: %s\n%s", sentence.c_str(), kUsage);
  exit(gpupool::broker::kExitUsage);
}

bool take_number(const char* text, uint64_t* number) {
  const char* end = text + strlen(text);
  const auto result = std::from_chars(text, end, *number);
  return result.ec == std::errc() && result.ptr == end;
}

int run_helper(const HelperOptions& options) {
  signal(SIGPIPE, SIG_IGN);
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  try {
    Helper helper(options);
    helper.run();
    return 0;
  } catch (const gpupool::broker::StartError& error) {
    fprintf(stderr, "gpupool-guest: %s\n", error.what());
    return error.status;
  } catch (const std::system_error& error) {
    fprintf(stderr, "gpupool-guest: %s\n", error.what());
  } catch (const std::bad_alloc&) {
    fprintf(stderr, "gpupool-guest: out of memory\n");
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  static const option options[] = {{"json", no_argument, nullptr, 'j'},
                                   {"port", required_argument, nullptr, 'p'},
                                   {"run-dir", required_argument, nullptr, 'r'},
                                   {"group", required_argument, nullptr, 'g'},
                                   {"region", required_argument, nullptr, 'm'},
                                   {"help", no_argument, nullptr, 'h'},
                                   {"vsock-port", required_argument, nullptr, 'v'},
                                   {"region-speed", required_argument, nullptr, 's'},
                                   {nullptr, 0, nullptr, 0}};
  HelperOptions chosen;
  uint64_t vsock_port = UINT64_MAX;
  bool json = false;
  int option;
  while ((option = getopt_long(argc, argv, "", options, nullptr)) != -1) {
    switch (option) {
      case 'j':
        json = true;
        break;
      case 'p':
        chosen.port = optarg;
        break;
      case 'r':
        chosen.run_dir = optarg;
        break;
      case 'g':
        chosen.group = optarg;
        break;
      case 'm':
        chosen.region = optarg;
        break;
      case 'v':
        if (!take_number(optarg, &vsock_port) || vsock_port > UINT32_MAX) {
          usage_error("--vsock-port is a number");
        }
        break;
      case 's':
        if (!take_number(optarg, &chosen.region_speed)) usage_error("--region-speed is a number");
        break;
      case 'h':
        fputs(kUsage, stdout);
        return 0;
      default:
        usage_error("an option is not known or lacks its value");
    }
  }
  if (vsock_port != UINT64_MAX) {
    chosen.vsock_port = static_cast<uint32_t>(vsock_port);
  } else if (chosen.port != gpupool::guest::kPort) {
    chosen.vsock_port = 0;
  }
  if (optind + 1 != argc) usage_error("run or status?");
  if (strcmp(argv[optind], "status") == 0) return print_status(chosen.run_dir, json);
  if (strcmp(argv[optind], "run") == 0) return run_helper(chosen);
  usage_error(std::string("unknown command ") + argv[optind]);
}
