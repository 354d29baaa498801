#include "broker/ports.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "broker/log.h"
#include "broker/regions.h"
#include "broker/vsock.h"
#include "carriers/mux.h"

namespace gpupool::broker {
namespace {

constexpr int64_t kRetryMs = 300;
constexpr int64_t kFarewellMs = 200;  // for a lease that has ended: time to tell its programs
constexpr size_t kMaxProblem = 200;
constexpr int kAcceptsAtOnce = 16;

}  // namespace

class PortTable::Port final : public carriers::MuxOwner {
 public:
  // A port that QEMU has at this path, or comes to have.
  Port(PortTable& table, const wire::Uuid& lease, std::string path)
      : path(std::move(path)), carrier_("virtio-serial"), table_(table), lease_(lease) {
    entrance_.lease = lease;
    connect();
  }
  // A machine's own connection. `over` is called when it has hung up.
  Port(PortTable& table, const wire::Uuid& lease, Fd fd, uint32_t cid, std::function<void()> over)
      : cid(cid),
        carrier_("vsock"),
        table_(table),
        lease_(lease),
        over_(std::move(over)),
        fd_(std::move(fd)) {
    entrance_.lease = lease;
    if (const std::string problem = serve(); !problem.empty()) {
      log_limited(name() + ": " + problem);
      hang_up();
      retry();
    }
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
    region = table_.region_of(spec, &why);
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

  const std::string path;  // empty: it comes by vsock
  const uint32_t cid = 0;  // of the machine, if it does

  // ---- MuxOwner ----
  int on_open(std::string* why) override {
    if (ending_) return *why = "the lease has ended", -1;
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) {
      log_limited(name() + ": a connection is refused: " + strerror(errno));
      return *why = "the host has no room for another connection", -1;
    }
    Peer peer;
    peer.carrier = carrier_;
    table_.door_.admit(Fd(fds[1]), std::move(peer), &entrance_);
    return fds[0];
  }
  void on_up() override { log_limited(name() + ": the guest is there"); }
  void on_down(const std::string& why, bool fault) override {
    log_limited(name() + ": all connections end: " + (fault ? "the guest sent " : "") + why);
  }
  void on_refused(const std::string& why) override { log_limited(name() + ": " + why); }

 private:
  std::string name() const {
    return (path.empty() ? "vsock of lease " : "port of lease ") + wire::format_uuid(lease_);
  }

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
    return serve();
  }

  std::string serve() {
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
    timer_ = table_.loop_.after(path.empty() ? 0 : kRetryMs, [this] {
      timer_ = 0;
      if (!path.empty()) return connect();
      const auto over = over_;  // ends this, too
      over();
    });
  }

  // The channels' sockets are closed, which ends what was at their other ends.
  void hang_up() {
    if (mux_) table_.loop_.forget(mux_->fd());
    mux_.reset();
    fd_.reset();
  }

  const char* const carrier_;
  PortTable& table_;
  const wire::Uuid lease_;
  const std::function<void()> over_;
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
  std::erase_if(vsocks_, [&](const auto& entry) {
    const LeaseEntry* lease = leases_.find(entry.first);
    return lease != nullptr && (lease->vsock_cid != entry.second->cid || entry.second->ending());
  });
  for (auto* table : {&ports_, &vsocks_}) {
    for (auto& [id, port] : *table) {
      if (leases_.find(id) == nullptr) port->end([table, lease = id] { table->erase(lease); });
    }
  }
  for (const auto& [path, id] : wanted) {
    if (!ports_.contains(id)) ports_[id] = std::make_unique<Port>(*this, id, path);
  }
  regions_ = regions;
  for (auto* table : {&ports_, &vsocks_}) {
    for (auto& [id, port] : *table) {
      const LeaseEntry* lease = leases_.find(id);
      if (lease != nullptr) port->use_region(regions ? lease->region : RegionSpec{});
    }
  }
  tell();
}

// One that sessions still have slots of is found again: which slots are free is known there alone.
std::shared_ptr<Region> PortTable::region_of(const RegionSpec& spec, std::string* why) {
  std::erase_if(region_table_, [](const auto& entry) { return entry.second.expired(); });
  auto& known = region_table_[{spec.path, spec.inode, spec.bytes}];
  auto region = known.lock();
  if (region == nullptr) known = region = Region::open(spec, why);
  return region;
}

// ---- vsock --------------------------------------------------------------------------------------

void PortTable::listen(uint32_t vsock_port) {
  if (vsock_port == vsock_port_) return;
  if (vsock_listener_) loop_.forget(vsock_listener_.get());
  vsock_listener_.reset();
  vsock_port_ = vsock_port;
  if (vsock_port == 0) return;
  std::string why;
  vsock_listener_ = listen_vsock(vsock_port, &why);
  if (!vsock_listener_) {
    log(LogLevel::kInfo, "virtual machines cannot come by vsock: " + why);
    return;
  }
  loop_.watch(vsock_listener_.get(), EPOLLIN, [this](uint32_t) { on_knock(); });
}

void PortTable::on_knock() {
  for (int i = 0; i < kAcceptsAtOnce; i++) {
    VsockPeer peer;
    Fd fd = accept_vsock(vsock_listener_.get(), &peer);
    if (!fd) {
      if (reserve_.turn_away(vsock_listener_.get(), errno)) {
        log_limited("a virtual machine is turned away: no file descriptor is left");
      }
      return;
    }
    come(std::move(fd), peer.cid, peer.port);
  }
}

void PortTable::come(Fd fd, uint32_t cid, uint32_t port) {
  const std::string who = "vsock cid " + std::to_string(cid);
  if (port >= kPrivilegedVsockPorts) {
    return log_limited(who + " is turned away: it came from an unprivileged port");
  }
  const auto& leases = leases_.leases();
  const auto lease = std::find_if(leases.begin(), leases.end(),
                                  [&](const auto& entry) { return entry.second.vsock_cid == cid; });
  if (cid == 0 || lease == leases.end()) {
    return log_limited(who + " is turned away: it has no lease");
  }
  // Its QEMU may have ended just now, and the CID be another machine's already.
  pollfd qemu{lease->second.pidfd.get(), POLLIN, 0};
  if (lease->second.pidfd && poll(&qemu, 1, 0) != 0) {
    return log_limited(who + " is turned away: the machine of its lease has ended");
  }
  const wire::Uuid id = lease->first;
  // A second connection takes the place of the first: the helper that had that one has gone.
  vsocks_.erase(id);
  auto& added = vsocks_[id] =
      std::make_unique<Port>(*this, id, std::move(fd), cid, [this, id] { vsocks_.erase(id); });
  added->use_region(regions_ ? lease->second.region : RegionSpec{});
  added->tell(describe(lease->second));
}

void PortTable::tell() {
  for (auto* table : {&ports_, &vsocks_}) {
    for (auto& [id, port] : *table) {
      if (const LeaseEntry* lease = leases_.find(id)) port->tell(describe(*lease));
    }
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
    if (slice.relay != nullptr) {
      // Of another host: its own broker knows.
    } else if (device == nullptr) {
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
