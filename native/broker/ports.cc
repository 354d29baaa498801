#include "broker/ports.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "broker/log.h"
#include "broker/regions.h"
#include "carriers/mux.h"

namespace gpupool::broker {
namespace {

constexpr int64_t kRetryMs = 300;
constexpr int64_t kFarewellMs = 200;  // for a lease that has ended: time to tell its programs
constexpr size_t kMaxProblem = 200;

}  // namespace

class PortTable::Port final : public carriers::MuxOwner {
 public:
  Port(PortTable& table, const wire::Uuid& lease, std::string path)
      : path(std::move(path)), table_(table), lease_(lease) {
    entrance_.lease = lease;
    connect();
  }
  ~Port() override {
    table_.loop_.cancel(timer_);
    hang_up();
  }

  void tell(std::string info) {
    info_ = std::move(info);
    if (mux_) mux_->set_info(info_);
  }

  // Sessions keep what they have of another one.
  void use_region(const RegionSpec& spec) {
    auto& region = entrance_.region;
    if (region != nullptr && region->spec() == spec) return;
    region.reset();
    if (spec.path.empty()) return;
    std::string why;
    region = Region::open(spec, &why);
    if (region != nullptr) return;
    log_limited(name() + ": the region " + spec.path + " is not used: " + why);
  }

  // The lease is no more: what it still has to say to its programs is sent, then `over` is called.
  void end(std::function<void()> over) {
    if (ending_) return;
    ending_ = true;
    table_.loop_.cancel(timer_);
    timer_ = table_.loop_.after(mux_ ? kFarewellMs : 0, [this, over = std::move(over)] {
      timer_ = 0;
      over();
    });
  }
  bool ending() const { return ending_; }

  const std::string path;

  // ---- MuxOwner ----
  int on_open(std::string* why) override {
    if (ending_) return *why = "the lease has ended", -1;
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) {
      log_limited(name() + ": a connection is refused: " + strerror(errno));
      return *why = "the host has no room for another connection", -1;
    }
    Peer peer;
    peer.carrier = "virtio-serial";
    table_.door_.admit(Fd(fds[1]), std::move(peer), &entrance_);
    return fds[0];
  }
  void on_up() override { log_limited(name() + ": the guest is there"); }
  void on_down(const std::string& why, bool fault) override {
    log_limited(name() + ": all connections end: " + (fault ? "the guest sent " : "") + why);
  }
  void on_refused(const std::string& why) override { log_limited(name() + ": " + why); }

 private:
  std::string name() const { return "port of lease " + wire::format_uuid(lease_); }

  void connect() {
    const std::string problem = try_connect();
    if (problem == problem_ && !problem.empty()) return retry();
    problem_ = problem;
    if (problem.empty()) return;
    log_limited(name() + ": " + path + ": " + problem);
    retry();
  }

  std::string try_connect() {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    fd_.reset(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd_) return strerror(errno);
    if (::connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      const int error = errno;
      fd_.reset();
      return strerror(error);
    }
    try {
      mux_ = std::make_unique<carriers::Mux>(carriers::Mux::Side::kHost, fd_.get(), *this);
    } catch (const std::system_error& error) {
      fd_.reset();
      return error.what();
    }
    if (!table_.loop_.watch(mux_->fd(), EPOLLIN, [this](uint32_t) { run(); })) {
      hang_up();
      return "it cannot be watched";
    }
    mux_->set_info(info_);
    return {};
  }

  void run() {
    if (mux_->run()) return;
    log_limited(name() + ": the port hung up");
    hang_up();
    if (!ending_) retry();
  }

  void retry() {
    timer_ = table_.loop_.after(kRetryMs, [this] {
      timer_ = 0;
      connect();
    });
  }

  // The channels' sockets are closed, which ends what was at their other ends.
  void hang_up() {
    if (mux_) table_.loop_.forget(mux_->fd());
    mux_.reset();
    fd_.reset();
  }

  PortTable& table_;
  const wire::Uuid lease_;
  Entrance entrance_;
  Fd fd_;
  std::unique_ptr<carriers::Mux> mux_;
  EventLoop::TimerId timer_ = 0;
  bool ending_ = false;
  std::string problem_, info_;
};

PortTable::PortTable(EventLoop& loop, Door& door, LeaseTable& leases, DeviceTable& devices)
    : loop_(loop), door_(door), leases_(leases), devices_(devices) {}

PortTable::~PortTable() = default;

void PortTable::apply(bool regions) {
  std::map<std::string, wire::Uuid> wanted;
  for (const auto& [id, lease] : leases_.leases()) {
    if (!lease.port.empty()) wanted[lease.port] = id;
  }
  // A path that goes to another lease is free at once: QEMU serves one connection at a time.
  std::erase_if(ports_, [&](const auto& entry) {
    const auto& [id, port] = entry;
    auto other = wanted.find(port->path);
    const LeaseEntry* lease = leases_.find(id);
    return (other != wanted.end() && other->second != id) ||
           (lease != nullptr && lease->port != port->path) || (lease != nullptr && port->ending());
  });
  for (auto& [id, port] : ports_) {
    if (leases_.find(id) == nullptr) port->end([this, lease = id] { ports_.erase(lease); });
  }
  for (const auto& [path, id] : wanted) {
    if (!ports_.contains(id)) ports_[id] = std::make_unique<Port>(*this, id, path);
    ports_[id]->use_region(regions ? leases_.find(id)->region : RegionSpec{});
  }
  tell();
}

void PortTable::tell() {
  for (auto& [id, port] : ports_) {
    if (const LeaseEntry* lease = leases_.find(id)) port->tell(describe(*lease));
  }
}

std::string PortTable::describe(const LeaseEntry& lease) const {
  nlohmann::json slices = nlohmann::json::array();
  size_t bytes = 0;
  for (const SliceSpec& slice : lease.slices) {
    nlohmann::json entry{{"name", slice.name},
                         {"memory_mib", slice.memory_bytes >> 20},
                         {"compute_percent", slice.compute_percent}};
    const Device* device = devices_.find(slice.gpu);
    if (device == nullptr) {
      entry["problem"] = "its GPU is not there";
    } else if (device->status == Device::Status::kFailed) {
      entry["problem"] = device->why.substr(0, kMaxProblem);
    }
    bytes += entry.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).size() + 1;
    if (bytes > carriers::kMuxMaxInfo - 64) break;
    slices.push_back(std::move(entry));
  }
  return nlohmann::json{{"slices", std::move(slices)}}.dump(
      -1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace gpupool::broker
