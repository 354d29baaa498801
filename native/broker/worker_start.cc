// How a worker's or a relay's process starts: what it is told, and what it gets of the broker.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "broker/workers.h"

extern char** environ;

namespace gpupool::broker {
namespace {

constexpr uint64_t kDefaultLogBytes = 1 << 20;

bool is_relay(const std::string& gpu) { return gpu == kNearRelay || gpu == kFarRelay; }

}  // namespace

std::vector<std::string> WorkerPool::environment(const std::string& gpu) const {
  std::map<std::string, std::string> variables = {
      {"PATH", "/usr/bin:/bin"},
      {"LANG", "C.UTF-8"},
      // A cache of compiled kernels would be shared by tenants.
      {"CUDA_CACHE_DISABLE", "1"},
  };
  if (!gpu.empty()) variables["CUDA_VISIBLE_DEVICES"] = gpu;
  for (char** entry = environ; *entry != nullptr; entry++) {
    const std::string_view text = *entry;
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, equals);
    if (name.starts_with("GPUPOOL_SIMGPU_") || name.starts_with("GPUPOOL_QUIET_") ||
        name.starts_with("GPUPOOL_WORKER_") || name.ends_with("SAN_OPTIONS")) {
      variables[std::string(name)] = std::string(text.substr(equals + 1));
    }
  }
  for (const auto& [name, value] : settings_.worker_environment()) variables[name] = value;
  std::vector<std::string> result;
  for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
  return result;
}

std::vector<std::string> WorkerPool::arguments(const Worker& worker) const {
  std::vector<std::string> result = {
      executable_,
      "--broker-pid=" + std::to_string(getpid()),
      "--user=" + settings_.worker_user(),
      "--cgroup-parent=" + settings_.cgroup_parent(),
  };
  if (settings_.no_seccomp()) result.push_back("--no-seccomp");
  if (is_relay(worker.gpu)) {
    const RelaySettings& relay = settings_.relay();
    result.front() = executable_.substr(0, executable_.rfind('/') + 1) + "gpupool-relay";
    result.push_back("--certificate=" + relay.certificate_file());
    result.push_back("--key=" + relay.key_file());
    result.push_back("--authorities=" + relay.ca_file());
    if (worker.gpu == kFarRelay) result.push_back("--far");
    return result;
  }
  result.push_back("--gpu=" + worker.gpu);
  result.push_back("--driver-directory=" + settings_.driver_directory());
  if (worker.probe) result.push_back("--probe");
  if (settings_.warm_context() && !worker.probe) result.push_back("--warm-context");
  return result;
}

bool WorkerPool::spawn(Worker& worker, std::string* why) {
  const auto failed = [why](const char* what, int error) {
    *why = std::string("a worker could not be started: ") + what + ": " + strerror(error);
    return false;
  };
  int channel[2], output[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, channel) != 0) {
    return failed("socketpair", errno);
  }
  worker.channel.reset(channel[0]);
  Fd worker_channel(channel[1]);
  if (pipe2(output, O_CLOEXEC) != 0) return failed("pipe2", errno);
  Fd log_in(output[0]);
  Fd log_out(output[1]);
  fcntl(log_in.get(), F_SETFL, O_NONBLOCK);

  std::vector<std::string> arguments = this->arguments(worker);
  const std::string executable = arguments.front();
  const bool relay = is_relay(worker.gpu);
  std::vector<std::string> variables = environment(relay ? "" : worker.gpu);
  std::vector<char*> argv, envp;
  for (auto& argument : arguments) argv.push_back(argument.data());
  for (auto& variable : variables) envp.push_back(variable.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, log_out.get(), 1);
  posix_spawn_file_actions_adddup2(&actions, log_out.get(), 2);
  posix_spawn_file_actions_adddup2(&actions, worker_channel.get(), worker::kChannelFd);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  // A group of its own: Ctrl-C at the broker's terminal is the broker's business.
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  const int error =
      posix_spawn(&worker.pid, executable.c_str(), &actions, &attributes, argv.data(), envp.data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return failed(executable.c_str(), error);

  worker.pidfd.reset(static_cast<int>(syscall(SYS_pidfd_open, worker.pid, 0)));
  if (!worker.pidfd) {
    const int reason = errno;
    ::kill(worker.pid, SIGKILL);
    waitpid(worker.pid, nullptr, 0);
    return failed("pidfd_open", reason);
  }
  const uint64_t limit = settings_.worker_log_bytes();
  worker.log = std::make_unique<WorkerLog>(loop_, std::move(log_in), logs_,
                                           limit != 0 ? limit : kDefaultLogBytes);
  return true;
}

}  // namespace gpupool::broker
