#include "guest/helper.h"

#include <errno.h>
#include <grp.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <system_error>

#include "broker/log.h"
#include "broker/sockets.h"
#include "broker/vsock.h"
#include "wire/handshake.h"

namespace gpupool::guest {
namespace {

using broker::log;
using broker::LogLevel;
using Json = nlohmann::json;

constexpr int64_t kTickMs = 500;
constexpr int kAcceptsAtOnce = 16;

// What a client makes of it: the sentence, and no device.
void refuse(int fd, const std::string& why) {
  const std::string frame = wire::refusal_frame(wire::RefusalCode::kInternal, why, 0, 0);
  send(fd, frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

Helper::Helper(const HelperOptions& options)
    : options_(options), port_(options.port), region_(options.region, options.region_speed) {
  if (mkdir(options_.run_dir.c_str(), 0755) != 0 && errno != EEXIST) {
    throw broker::StartError(broker::kExitDisk,
                             "cannot make " + options_.run_dir + ": " + strerror(errno));
  }
  const std::string path = options_.run_dir + kSocketName;
  programs_ = broker::listen_unix(path, SOCK_STREAM, 0660);
  if (const group* found = getgrnam(options_.group.c_str())) {
    if (chown(path.c_str(), static_cast<uid_t>(-1), found->gr_gid) != 0) {
      log(LogLevel::kWarning,
          path + " cannot be given to the group " + options_.group + ": " + strerror(errno));
    }
  } else {
    log(LogLevel::kNotice, "there is no group " + options_.group + ": only root can use " + path);
  }
  questions_ = broker::listen_unix(options_.run_dir + kStatusName, SOCK_STREAM, 0666);
  loop_.watch(programs_.get(), EPOLLIN, [this](uint32_t) { on_program(); });
  loop_.watch(questions_.get(), EPOLLIN, [this](uint32_t) { on_question(); });
  watch_signals();
}

Helper::~Helper() {
  unlink((options_.run_dir + kSocketName).c_str());
  unlink((options_.run_dir + kStatusName).c_str());
}

void Helper::watch_signals() {
  sigset_t wanted;
  sigemptyset(&wanted);
  sigaddset(&wanted, SIGTERM);
  sigaddset(&wanted, SIGINT);
  sigprocmask(SIG_BLOCK, &wanted, nullptr);
  signals_.reset(signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  loop_.watch(signals_.get(), EPOLLIN, [this](uint32_t) { loop_.stop(); });
}

void Helper::run() {
  tick();
  loop_.run();
  if (mux_) mux_->end_channels("the guest's helper was stopped");
  end_mux();
}

// ---- The port -----------------------------------------------------------------------------------

void Helper::enter(State state, const std::string& why) {
  if (state == state_ && why == why_) return;
  state_ = state;
  why_ = why;
  log(state == State::kUp ? LogLevel::kInfo : LogLevel::kNotice, sentence());
}

void Helper::look_again() {
  if (timer_ != 0) return;
  timer_ = loop_.after(kTickMs, [this] {
    timer_ = 0;
    tick();
  });
}

// Looks after what nothing tells of: a port that is plugged in, a host that comes back.
void Helper::tick() {
  if (mux_ && mux_->up()) {
    // By vsock, the port may come later, and is to be kept open, too.
    if (vsock_) port_.look(), look_again();
    return;
  }
  look_again();
  if (mux_) return mux_->ask_again();
  // The port is kept open all the time: by that the host sees that somebody carries the sessions.
  const Port::State port = port_.look();
  if (options_.vsock_port != 0) vsock_ = broker::connect_to_host(options_.vsock_port);
  if (vsock_) {
    if (start_mux(vsock_.get())) enter(State::kNoAnswer, {});
    return;
  }
  switch (port) {
    case Port::State::kAbsent:
      return enter(State::kNoPort, {});
    case Port::State::kFailed:
      return enter(State::kPortFailed, port_.problem());
    case Port::State::kNoHost:
      return enter(State::kNoHost, {});
    case Port::State::kReady:
      break;
  }
  if (start_mux(port_.fd())) enter(State::kNoAnswer, {});
}

bool Helper::start_mux(int fd) {
  try {
    mux_ = std::make_unique<carriers::Mux>(carriers::Mux::Side::kGuest, fd, *this);
  } catch (const std::system_error& error) {
    enter(State::kPortFailed, error.what());
    return false;
  }
  if (loop_.watch(mux_->fd(), EPOLLIN, [this](uint32_t) { run_mux(); })) return true;
  const int error = errno;
  mux_.reset();
  enter(State::kPortFailed, strerror(error));
  return false;
}

void Helper::run_mux() {
  if (mux_->run()) return;
  end_mux();
  if (vsock_) {
    vsock_.reset();
  } else {
    port_.hung_up();
  }
  enter(State::kNoHost, {});
  look_again();
}

void Helper::end_mux() {
  if (!mux_) return;
  loop_.forget(mux_->fd());
  mux_.reset();
  info_.clear();
}

int Helper::on_open(std::string* why) { return *why = "a guest opens channels", -1; }

void Helper::on_up() {
  look_at_region(true);
  enter(State::kUp, {});
}

void Helper::on_down(const std::string& why, bool fault) {
  info_.clear();
  log(LogLevel::kWarning, "all connections to the host end: " + (fault ? "it sent " + why : why));
  enter(State::kNoAnswer, {});
  look_again();
}

void Helper::on_refused(const std::string& why) { enter(State::kRefused, why); }

void Helper::on_close(int fd, bool accepted, const std::string& why) {
  if (accepted) return;
  refuse(fd, why);
  broker::log_limited("the host refused a connection: " + why);
}

void Helper::on_info(std::string_view json) { info_ = json; }

// ---- Programs -----------------------------------------------------------------------------------

void Helper::on_program() {
  for (int i = 0; i < kAcceptsAtOnce; i++) {
    Fd fd(accept4(programs_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) return;
    std::string why;
    look_at_region(false);
    if (state_ != State::kUp) {
      refuse(fd.get(), sentence());
    } else if (mux_->open(fd.get(), &why)) {
      fd.release();
    } else {
      refuse(fd.get(), why);
    }
  }
}

// ---- The region -------------------------------------------------------------------------------

void Helper::look_at_region(bool now) {
  const std::string before = region_sentence();
  region_.look(now);
  if (const std::string after = region_sentence(); after != before) {
    log(region_.state() == Region::State::kUsable ? LogLevel::kInfo : LogLevel::kNotice, after);
  }
}

std::string Helper::region_sentence() const {
  const std::string speed = "reads " + std::to_string(region_.read_speed()) + " MiB/s, writes " +
                            std::to_string(region_.write_speed()) + " MiB/s";
  switch (region_.state()) {
    case Region::State::kAbsent:
      return "there is no memory that is shared with the host";
    case Region::State::kFailed:
      return "the memory that is shared with the host cannot be used: " + region_.path() + ": " +
             region_.problem();
    case Region::State::kSlow:
      return "the memory that is shared with the host is too slow to be used: " + speed +
             ", and not " + std::to_string(region_.least()) + " (" + region_.path() + ")";
    case Region::State::kUsable:
      break;
  }
  return "there is memory that is shared with the host: " + speed + " (" + region_.path() + ")";
}

// ---- Status -------------------------------------------------------------------------------------

std::string Helper::sentence() const {
  const std::string& port = port_.path();
  switch (state_) {
    case State::kNoPort:
      return "no GPU: there is no port " + port +
             ": this virtual machine has no slice, or its host has not attached the port";
    case State::kPortFailed:
      return "no GPU: the port " + port + " cannot be used: " + why_;
    case State::kNoHost:
      return "no GPU: the port " + port + " is there, but the host does not serve it";
    case State::kNoAnswer:
      return "no GPU: the host has not answered at the port " + port + " yet";
    case State::kRefused:
      return "no GPU: the host refused: " + why_;
    case State::kUp:
      break;
  }
  return "the host serves this virtual machine";
}

std::string Helper::describe() const {
  static constexpr const char* kNames[] = {"no-port",   "port-failed", "no-host",
                                           "no-answer", "refused",     "ok"};
  Json status{{"state", kNames[static_cast<size_t>(state_)]},
              {"sentence", sentence()},
              {"port", port_.path()},
              {"carrier", mux_ == nullptr ? ""
                          : vsock_        ? "vsock"
                                          : "virtio-serial"},
              {"connections", mux_ ? mux_->channels() : 0},
              {"slices", Json::array()}};
  static constexpr const char* kRegionNames[] = {"absent", "failed", "slow", "usable"};
  Json& region = status["region"];
  region = {{"state", kRegionNames[static_cast<size_t>(region_.state())]},
            {"sentence", region_sentence()}};
  if (region_.state() == Region::State::kSlow || region_.state() == Region::State::kUsable) {
    region["path"] = region_.path();
    region["bytes"] = region_.bytes();
    region["read_mib_per_second"] = region_.read_speed();
    region["write_mib_per_second"] = region_.write_speed();
  }
  const Json info = Json::parse(info_, nullptr, false);
  if (info.is_object() && info.contains("slices") && info["slices"].is_array()) {
    status["slices"] = info["slices"];
  }
  return status.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void Helper::on_question() {
  const Fd fd(accept4(questions_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd) return;
  const std::string text = describe();
  send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace gpupool::guest
