// Where clients knock: the listening sockets, and connections until they have proven that they
// have a lease's key. Whatever a stranger does here costs only his own connection.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "broker/fd.h"
#include "broker/loop.h"
#include "broker/reserve.h"
#include "wire/handshake.h"

namespace gpupool::broker {

class Region;

constexpr uint32_t kUnknownUid = 0xffffffff;

struct Peer {
  std::string carrier;         // "unix", "tcp", "virtio-serial", "vsock" or "relay"
  uint32_t uid = kUnknownUid;  // unix: from the kernel
  uint32_t pid = 0;            // unix: from the kernel
  std::string address;         // tcp: the other side's, without its port; relay: its host's name
  std::vector<std::string> hosts = {};  // relay: all names in its certificate
  // relay: told what its session has of the device, and how busy it keeps that.
  std::function<void(uint64_t bytes, uint32_t busy_permille)> on_usage = {};
};

// A socket or a port that stands for one lease: whoever is let in needs no key, and names no lease.
struct Entrance {
  wire::Uuid lease{};
  std::function<bool(const Peer&, std::string* why)> admits;  // none: everybody
  std::shared_ptr<Region> region;                             // that who comes can see, too
};

class Door;

// A connection that has proven itself and waits for an answer.
class Connection {
 public:
  Connection(Fd fd, Peer peer, wire::ServerHandshake::FindKey find_key)
      : fd_(std::move(fd)), peer_(std::move(peer)), handshake_(std::move(find_key)) {}
  Connection(Fd fd, Peer peer, const Entrance& entrance)
      : fd_(std::move(fd)),
        peer_(std::move(peer)),
        handshake_(entrance.lease),
        stands_for_(entrance.lease),
        region_(entrance.region) {}

  const wire::ServerHandshake& handshake() const { return handshake_; }
  const Peer& peer() const { return peer_; }
  const std::shared_ptr<Region>& region() const { return region_; }
  bool gone() const { return !fd_; }  // it was closed, by either side

 private:
  friend class Door;
  Fd fd_;
  Peer peer_;
  wire::ServerHandshake handshake_;
  std::optional<wire::Uuid> stands_for_;  // the lease that it needs no key for
  std::shared_ptr<Region> region_;
  EventLoop::TimerId timer_ = 0;
  size_t discarded_ = 0;
};

class Door {
 public:
  using Guest = std::shared_ptr<Connection>;
  struct Callbacks {
    wire::ServerHandshake::FindKey find_key;
    std::function<void(const Guest&)> on_proven;
    std::function<std::string()> who_holds_most;  // descriptors, for the log
  };
  Door(EventLoop& loop, Callbacks callbacks);
  ~Door();

  // `carrier`: "unix" or "tcp". Takes a listening socket and returns its number for close();
  // stop_tcp() ends the TCP ones.
  int listen(Fd listener, const std::string& carrier, std::shared_ptr<Entrance> entrance = nullptr);
  void close(int listener);
  void stop_tcp();
  void set_max_half_open(size_t count) { max_half_open_ = count; }
  // Takes a connection that was not accepted here.
  void admit(Fd fd, Peer peer, const Entrance* entrance);

  // Sends kWelcome, with an offer and its descriptor, and gives up the socket, which stands right
  // behind the proof. None: the client has gone.
  Fd welcome(const Guest& guest, const wire::Uuid& session, uint32_t epoch, uint64_t credit,
             const std::vector<wire::DeviceSnapshot>& devices, const wire::CarrierOffer& offer = {},
             const wire::RegionOffer& region = {}, int offered_fd = -1);
  // Sends kWelcome and one frame more, and closes the connection.
  void answer(const Guest& guest, const std::vector<wire::DeviceSnapshot>& devices,
              const std::string& frame);
  // `logs`: false where the caller counts for the log.
  void refuse(const Guest& guest, wire::RefusalCode code, const std::string& sentence,
              bool logs = true);

 private:
  struct Listener {
    Fd fd;
    std::string carrier;
    std::shared_ptr<Entrance> entrance;
  };

  void on_knock(Listener& listener);
  void accepted(Fd fd, const Listener& listener);
  void make_room(const Peer& newcomer);
  void on_event(const Guest& guest, uint32_t events);
  void read(const Guest& guest);
  bool flush(const Guest& guest, int fd_to_pass = -1);
  void linger(const Guest& guest);
  void discard(const Guest& guest);
  void drop(const Guest& guest);

  EventLoop& loop_;
  Callbacks callbacks_;
  std::list<Listener> listeners_;
  std::list<Guest> guests_;  // the oldest first
  size_t max_half_open_ = 128;
  Reserve reserve_;
};

}  // namespace gpupool::broker
