#include "broker/workers.h"

#include <errno.h>
#include <signal.h>
#include <sodium.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "broker/log.h"

namespace gpupool::broker {
namespace {

constexpr int64_t kDefaultGraceMs = 200;
constexpr int kMessagesAtOnce = 64;      // of one worker; then the loop looks after the others
constexpr int64_t kRefillDelayMs = 30;   // so that a new worker does not slow the one just taken
constexpr int64_t kFirstRetryMs = 1000;  // after a worker did not start; doubled each time
constexpr int64_t kLastRetryMs = 60000;

std::string identity_of_driver(const std::string& directory) {
  if (directory.empty()) return "system";
  const std::string path = directory + "/libcuda.so.1";
  struct stat status;
  if (stat(path.c_str(), &status) != 0) return path + " missing";
  return path + " " + std::to_string(status.st_dev) + " " + std::to_string(status.st_ino) + " " +
         std::to_string(status.st_mtim.tv_sec) + "." + std::to_string(status.st_mtim.tv_nsec);
}

// A broker that was killed leaves its workers' cgroups. One that is in use is not removed.
void remove_stale_cgroups(const std::string& parent) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(parent, error)) {
    if (entry.path().filename().string().starts_with("worker-")) rmdir(entry.path().c_str());
  }
}

std::string describe(const WorkerExit& exit, const std::string& last_word) {
  std::string text;
  if (exit.signal != 0) {
    text = std::string("ended by signal ") + std::to_string(exit.signal) + " (" +
           strsignal(exit.signal) + ")";
  } else {
    text = "exited with status " + std::to_string(exit.status);
  }
  return last_word.empty() ? text : last_word;
}

}  // namespace

WorkerPool::WorkerPool(EventLoop& loop, std::string executable, std::string run_dir,
                       Callbacks callbacks)
    : loop_(loop),
      executable_(std::move(executable)),
      logs_(run_dir + "/log"),
      callbacks_(std::move(callbacks)) {}

WorkerPool::~WorkerPool() { end_all(); }

void WorkerPool::configure(const Settings& settings) {
  if (settings.cgroup_parent() != settings_.cgroup_parent()) {
    remove_stale_cgroups(settings.cgroup_parent());
  }
  settings_ = settings;
  driver_identity_ = identity_of_driver(settings.driver_directory());
  std::string identity =
      driver_identity_ + "|" + settings.worker_user() + "|" + settings.cgroup_parent() + "|" +
      (settings.warm_context() ? "context" : "") + (settings.no_seccomp() ? "|open" : "");
  for (const auto& [name, value] : std::map<std::string, std::string>(
           settings.worker_environment().begin(), settings.worker_environment().end())) {
    identity += "|" + name + "=" + value;
  }
  if (geteuid() != 0 && !settings.worker_user().empty() && !noticed_user_) {
    noticed_user_ = true;
    log(LogLevel::kNotice,
        "the broker is not root: workers run as its own user, not as " + settings.worker_user());
  }
  if (settings.no_seccomp()) {
    log(LogLevel::kWarning, "no_seccomp is set: workers may make any system call");
  }
  if (identity == identity_) return;
  identity_ = identity;
  epoch_++;
  failed_until_.clear();
  failures_.clear();
  for (auto& worker : workers_) {
    // One that somebody waits for starts again with the new settings, when it has ended.
    if (!worker->probe && !worker->claim && worker->state <= Worker::State::kWarm) end(*worker);
  }
}

void WorkerPool::keep_warm(std::vector<std::string> gpus) {
  warm_gpus_ = std::move(gpus);
  const std::set<std::string> wanted(warm_gpus_.begin(), warm_gpus_.end());
  for (auto& worker : workers_) {
    if (!worker->probe && !worker->claim && worker->state <= Worker::State::kWarm &&
        !wanted.contains(worker->gpu)) {
      end(*worker);
    }
  }
  refill();
}

void WorkerPool::refill_soon(int64_t ms) {
  const int64_t due = steady_ms() + ms;
  if (refill_timer_ != 0 && refill_due_ <= due) return;
  loop_.cancel(refill_timer_);
  refill_due_ = due;
  refill_timer_ = loop_.after(ms, [this] {
    refill_timer_ = 0;
    refill();
  });
}

void WorkerPool::refill() {
  const int64_t now = steady_ms();
  for (const std::string& gpu : warm_gpus_) {
    if (auto found = failed_until_.find(gpu); found != failed_until_.end() && found->second > now) {
      refill_soon(found->second - now);
      continue;
    }
    uint32_t have = 0;
    std::vector<Worker*> spare;
    for (auto& worker : workers_) {
      if (worker->probe || worker->claim || worker->gpu != gpu || worker->epoch != epoch_ ||
          worker->state > Worker::State::kWarm) {
        continue;
      }
      if (++have > settings_.warm_workers()) spare.push_back(worker.get());
    }
    for (Worker* worker : spare) end(*worker);
    for (; have < settings_.warm_workers(); have++) {
      std::string why;
      if (start(gpu, false, &why) == nullptr) {
        log_limited("no warm worker for GPU " + gpu + ": " + why);
        refill_soon(kFirstRetryMs);
        break;
      }
    }
  }
}

uint32_t WorkerPool::warm_count(const std::string& gpu) const {
  return static_cast<uint32_t>(
      std::count_if(workers_.begin(), workers_.end(), [&](const auto& worker) {
        return worker->gpu == gpu && worker->state == Worker::State::kWarm;
      }));
}

void WorkerPool::acquire(const std::string& gpu, Acquired acquired) {
  Worker* starting = nullptr;
  for (auto& worker : workers_) {
    if (worker->probe || worker->claim || worker->gpu != gpu || worker->epoch != epoch_) continue;
    if (worker->state == Worker::State::kWarm) {
      worker->state = Worker::State::kAssigned;
      refill_soon(kRefillDelayMs);
      return acquired(worker.get(), "");
    }
    if (worker->state == Worker::State::kStarting && starting == nullptr) starting = worker.get();
  }
  std::string why;
  if (starting == nullptr) starting = start(gpu, false, &why);
  if (starting == nullptr) return acquired(nullptr, why);
  starting->claim = std::move(acquired);
  refill_soon(kRefillDelayMs);
}

void WorkerPool::put_back(Worker& worker) {
  if (worker.state != Worker::State::kAssigned) return;
  worker.state = Worker::State::kWarm;
  const bool wanted =
      std::find(warm_gpus_.begin(), warm_gpus_.end(), worker.gpu) != warm_gpus_.end();
  if (!wanted || worker.epoch != epoch_) return end(worker);
  refill_soon(0);  // which ends one too many
}

bool WorkerPool::assign(Worker& worker, const Worker::Owner& owner, worker::AssignPayload& payload,
                        int client_fd, std::shared_ptr<Ring> ring,
                        const worker::RelayPayload* relay) {
  worker.owner = owner;
  worker.assigned = true;
  std::vector<int> fds = {client_fd};
  if (has_spin_page()) {
    payload.spinners = settings_.spinners();
    fds.push_back(spin_page_.get());
  }
  if (ring != nullptr) {
    payload.ring_command_bytes = ring->layout().command_bytes;
    payload.ring_bulk_bytes = ring->layout().bulk_bytes;
    payload.ring_offset = ring->place().offset;
    payload.ring_file_bytes = ring->place().file_bytes;
    fds.push_back(ring->fd());
  }
  worker.log->begin(wire::format_uuid(owner.session), owner.lease);
  std::string bytes(reinterpret_cast<const char*>(&payload), sizeof payload);
  if (relay != nullptr) bytes.append(reinterpret_cast<const char*>(relay), sizeof *relay);
  const bool sent = worker::send_message(worker.channel.get(), worker::MessageKind::kAssign, 0,
                                         bytes, fds, 0, 0, false);
  if (relay != nullptr) sodium_memzero(bytes.data(), bytes.size());
  if (sent) {
    if (ring != nullptr) ring->handed_over();
    worker.ring = std::move(ring);
    return true;
  }
  distrust(worker, "it does not take its session");
  return false;
}

bool WorkerPool::assign_far(Worker& worker, int fd, FarEvents events) {
  worker.assigned = true;
  worker.far = std::make_unique<FarEvents>(std::move(events));
  worker::FarPayload payload{settings_.relay().interruption_ms(), settings_.spinners()};
  if (payload.interruption_ms == 0) payload.interruption_ms = kDefaultInterruptionMs;
  std::vector<int> fds = {fd};
  if (has_spin_page()) fds.push_back(spin_page_.get());
  const std::string_view bytes(reinterpret_cast<const char*>(&payload), sizeof payload);
  if (worker::send_message(worker.channel.get(), worker::MessageKind::kFarAssign, 0, bytes, fds, 0,
                           0, false)) {
    return true;
  }
  distrust(worker, "it does not take its connection");
  return false;
}

bool WorkerPool::has_spin_page() {
  std::string why;
  if (!spin_page_) spin_page_ = make_spin_page(&why);
  if (!spin_page_) log_limited("sessions get no ring and do not spin: " + why);
  return static_cast<bool>(spin_page_);
}

std::shared_ptr<Ring> WorkerPool::make_ring(uint32_t epoch, std::shared_ptr<SliceAccount> account) {
  if (!settings_.rings() || !has_spin_page()) return nullptr;
  std::string why;
  auto ring = make_memfd_ring(epoch, std::move(account), &why);
  if (ring == nullptr) log_limited("a session gets no ring: " + why);
  return ring;
}

std::shared_ptr<Ring> WorkerPool::take_slot(Region& region, uint32_t epoch) {
  if (!settings_.regions() || !has_spin_page()) return nullptr;
  std::string why;
  auto ring = region.take(epoch, &why);
  if (ring == nullptr) log_limited("no ring in the region " + region.spec().path + ": " + why);
  return ring;
}

void WorkerPool::probe(const std::string& gpu, Probed probed) {
  std::string why;
  Worker* worker = start(gpu, true, &why);
  if (worker == nullptr) return probed(nullptr, why);
  worker->on_snapshot = std::move(probed);
}

// ---- Start ------------------------------------------------------------------------------------

Worker* WorkerPool::start(const std::string& gpu, bool probe, std::string* why) {
  auto owned = std::make_unique<Worker>();
  Worker* worker = owned.get();
  worker->gpu = gpu;
  worker->probe = probe;
  worker->epoch = epoch_;
  if (!spawn(*worker, why)) return nullptr;
  workers_.push_back(std::move(owned));
  loop_.watch(worker->pidfd.get(), EPOLLIN, [this, worker](uint32_t) { on_exit(*worker); });
  loop_.watch(worker->channel.get(), EPOLLIN, [this, worker](uint32_t) { on_channel(*worker); });
  return worker;
}

// ---- What workers say -------------------------------------------------------------------------

void WorkerPool::on_channel(Worker& worker) {
  for (int i = 0; i < kMessagesAtOnce && worker.channel; i++) {
    worker::Message message;
    switch (worker::receive_message(worker.channel.get(), &message, false)) {
      case worker::ReceiveStatus::kNothing:
        return;
      case worker::ReceiveStatus::kClosed:
        loop_.forget(worker.channel.get());
        worker.channel.reset();
        // A worker without a channel can neither charge nor be told anything. It may be on its way
        // out: the grace time is for that.
        if (worker.state != Worker::State::kEnding && worker.kill_timer == 0) {
          worker.kill_timer = loop_.after(kDefaultGraceMs, [this, w = &worker] {
            w->kill_timer = 0;
            kill(*w, SIGKILL);
          });
        }
        return;
      case worker::ReceiveStatus::kMessage:
        if (!message.fds.empty()) {
          for (int fd : message.fds) close(fd);
          return distrust(worker, "it sent a descriptor");
        }
        on_message(worker, message);
    }
  }
}

void WorkerPool::on_message(Worker& worker, worker::Message& message) {
  using Kind = worker::MessageKind;
  const auto kind = static_cast<Kind>(message.header.kind);
  const uint64_t value = message.header.value;
  if (kind == Kind::kReady && worker.state == Worker::State::kStarting && !worker.probe) {
    return ready(worker, value == 1, message.payload);
  }
  if (kind == Kind::kSnapshot && worker.probe && worker.on_snapshot) {
    auto probed = std::move(worker.on_snapshot);
    worker.on_snapshot = nullptr;
    worker.expected_end = true;
    wire::DeviceSnapshot snapshot;
    if (value == 1 && message.payload.size() == sizeof snapshot) {
      memcpy(&snapshot, message.payload.data(), sizeof snapshot);
      return probed(&snapshot, "");
    }
    return probed(nullptr, message.payload);
  }
  if (!worker.assigned) {
    // An unexpected word of a worker that was told to end is no surprise.
    if (worker.state != Worker::State::kEnding) distrust(worker, "it sent a message too early");
    return;
  }
  if (kind == Kind::kEnded) {
    worker.last_word = message.payload;
    worker.complained = value != 0;
    worker.expected_end = worker.expected_end || value == 0;
    return;
  }
  if (worker.far != nullptr) return worker.far->on_message(message);
  SliceAccount& account = *worker.owner.account;
  if (kind == Kind::kUsage && worker.gpu == kNearRelay) {
    // The other host enforces it; this one tells.
    account.close(worker.charge);
    account.charge(worker.charge, std::min(value, account.limit() - account.used()));
    worker.busy_permille = static_cast<uint32_t>(std::min<uint64_t>(message.header.used, 1000));
    callbacks_.on_usage(worker);
  } else if (kind == Kind::kCarrier && worker.ring != nullptr) {
    worker.ring_taken = value == 1;
    if (!worker.ring_taken) {
      callbacks_.on_declined(worker);
      worker.ring.reset();
    }
  } else if (kind == Kind::kRefund) {
    if (account.refund(worker.charge, value) != value) {
      return distrust(worker, "it gave back more memory than it had");
    }
    callbacks_.on_usage(worker);
  } else if (kind == Kind::kRefundHost) {
    if (account.host.refund(worker.host_charge, value) != value) {
      return distrust(worker, "it gave back more of the host's memory than it had");
    }
  } else if (kind == Kind::kRefundBorne) {
    if (account.borne.refund(worker.borne, value) != value) {
      return distrust(worker, "it gave back more than was borne for it");
    }
  } else if (kind == Kind::kBusy) {
    worker.busy_permille = static_cast<uint32_t>(std::min<uint64_t>(value, 1000));
    callbacks_.on_usage(worker);
  } else if (kind == Kind::kChargeHost || kind == Kind::kBear) {
    const bool granted = kind == Kind::kBear ? account.borne.charge(worker.borne, value)
                                             : account.host.charge(worker.host_charge, value);
    if (!worker::send_message(worker.channel.get(), Kind::kAccount, granted ? 1 : 0, {}, {},
                              account.limit(), account.used(), false)) {
      return distrust(worker, "it does not read its answers");
    }
  } else if (kind == Kind::kCharge || kind == Kind::kQuery) {
    const bool granted = kind == Kind::kQuery || account.charge(worker.charge, value);
    if (!worker::send_message(worker.channel.get(), Kind::kAccount, granted ? 1 : 0, {}, {},
                              account.limit(), account.used(), false)) {
      return distrust(worker, "it does not read its answers");
    }
    if (kind == Kind::kCharge && granted) callbacks_.on_usage(worker);
  } else {
    distrust(worker, "it sent message " + std::to_string(message.header.kind));
  }
}

void WorkerPool::ready(Worker& worker, bool ok, const std::string& why) {
  auto claim = std::move(worker.claim);
  worker.claim = nullptr;
  if (ok) {
    failures_.erase(worker.gpu);
    failed_until_.erase(worker.gpu);
    worker.state = claim ? Worker::State::kAssigned : Worker::State::kWarm;
    if (claim) claim(&worker, "");
    return;
  }
  const int failures = std::min(failures_[worker.gpu]++, 6);
  failed_until_[worker.gpu] = steady_ms() + std::min(kFirstRetryMs << failures, kLastRetryMs);
  log_limited("a worker for GPU " + worker.gpu + " did not start: " + why);
  worker.expected_end = true;
  end(worker);
  if (claim) claim(nullptr, why);
}

// ---- End --------------------------------------------------------------------------------------

void WorkerPool::kill(Worker& worker, int signal) {
  if (worker.pidfd) syscall(SYS_pidfd_send_signal, worker.pidfd.get(), signal, nullptr, 0);
}

void WorkerPool::end(Worker& worker) {
  if (worker.state == Worker::State::kEnding) return;
  worker.expected_end = true;
  worker.state = Worker::State::kEnding;
  if (!worker.assigned) return kill(worker, SIGKILL);  // it has nothing to put in order
  kill(worker, SIGTERM);
  loop_.cancel(worker.kill_timer);
  const int64_t grace =
      settings_.kill_grace_ms() != 0 ? settings_.kill_grace_ms() : kDefaultGraceMs;
  worker.kill_timer = loop_.after(grace, [this, w = &worker] {
    w->kill_timer = 0;
    kill(*w, SIGKILL);
  });
}

void WorkerPool::distrust(Worker& worker, const std::string& what) {
  log_limited("worker " + std::to_string(worker.pid) + " is killed: " + what);
  if (worker.last_word.empty()) worker.last_word = "killed by the broker: " + what;
  worker.state = Worker::State::kEnding;
  kill(worker, SIGKILL);
}

void WorkerPool::on_exit(Worker& worker) {
  siginfo_t info{};
  // P_PIDFD: this very process, whatever has become of its number.
  if (waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(worker.pidfd.get()), &info,
             WEXITED | WNOHANG) != 0 ||
      info.si_pid == 0) {
    return;
  }
  if (worker.channel) on_channel(worker);  // its last word
  if (worker.ring != nullptr) worker.ring->mark_worker_dead();
  worker.log->drain();
  loop_.forget(worker.pidfd.get());
  if (worker.channel) loop_.forget(worker.channel.get());
  loop_.cancel(worker.kill_timer);
  if (!settings_.cgroup_parent().empty()) {
    rmdir((settings_.cgroup_parent() + "/worker-" + std::to_string(worker.pid)).c_str());
  }

  auto found = std::find_if(workers_.begin(), workers_.end(),
                            [&](const auto& entry) { return entry.get() == &worker; });
  std::unique_ptr<Worker> owned = std::move(*found);
  workers_.erase(found);

  WorkerExit exit;
  (info.si_code == CLD_EXITED ? exit.status : exit.signal) = info.si_status;
  exit.why = describe(exit, worker.last_word);
  const bool crashed = exit.signal != 0 && exit.signal != SIGTERM && exit.signal != SIGKILL;
  exit.fault = worker.complained || crashed;
  exit.expected = worker.expected_end && !exit.fault;
  if (worker.far != nullptr) {
    if (exit.fault) {
      log_limited("relay " + std::to_string(worker.pid) + " from another host: " + exit.why);
    }
    return worker.far->on_end(exit);
  }
  if (worker.assigned) {
    worker.owner.account->close(worker.charge);
    worker.owner.account->host.close(worker.host_charge);
    worker.owner.account->borne.close(worker.borne);
    if (!exit.expected) {
      log_limited("worker " + std::to_string(worker.pid) + " of session " +
                  wire::format_uuid(worker.owner.session) + ": " + exit.why);
    }
    callbacks_.on_usage(worker);
    callbacks_.on_end(worker, exit);
    return;
  }
  const std::string why = worker.log->early().empty()
                              ? "the worker " + exit.why
                              : "the worker " + exit.why + ": " + worker.log->early();
  if (worker.state == Worker::State::kStarting && !worker.probe) {
    ready(worker, false, why);
  } else if (worker.on_snapshot) {
    worker.on_snapshot(nullptr, why);
  } else if (worker.state == Worker::State::kAssigned || worker.state == Worker::State::kWarm) {
    log_limited("warm worker " + std::to_string(worker.pid) + " for GPU " + worker.gpu + ": " +
                why);
  }
  refill_soon(worker.expected_end ? kRefillDelayMs : kFirstRetryMs);
}

void WorkerPool::end_all() {
  loop_.cancel(refill_timer_);
  for (auto& worker : workers_) {
    loop_.forget(worker->pidfd.get());
    if (worker->channel) loop_.forget(worker->channel.get());
    loop_.cancel(worker->kill_timer);
    kill(*worker, worker->assigned ? SIGTERM : SIGKILL);
  }
  const int64_t deadline =
      steady_ms() + (settings_.kill_grace_ms() != 0 ? settings_.kill_grace_ms() : kDefaultGraceMs);
  for (auto& worker : workers_) {
    siginfo_t info{};
    while (waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(worker->pidfd.get()), &info,
                  WEXITED | WNOHANG) == 0 &&
           info.si_pid == 0) {
      const int64_t left = deadline - steady_ms();
      if (left <= 0) kill(*worker, SIGKILL);
      usleep(left <= 0 ? 1000 : 2000);
    }
    worker->log->drain();
    if (!settings_.cgroup_parent().empty()) {
      rmdir((settings_.cgroup_parent() + "/worker-" + std::to_string(worker->pid)).c_str());
    }
  }
  workers_.clear();
}

}  // namespace gpupool::broker
