// A socket of each lease that belongs to a user: run_dir/slices/NAME/socket/session.sock. The
// socket stands for the lease: no key is needed there, so that a container gets a directory and no
// secret.
//
// All of it is the broker's, since root's container runtime mounts `socket` by its path: nobody
// else can exchange or add anything there. The lease's user alone passes through NAME, by an access
// control list; below it everybody may connect, since the processes of a container, which sees
// `socket` alone, may have any user id. Whoever comes through is the user, root, or in a mount
// namespace that the user or root gave this directory to: a stranger who could pass would mount it
// in a namespace of his own.
//
// The directories stay when the broker ends: containers that run find the next broker's socket.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "broker/door.h"
#include "broker/leases.h"
#include "broker/mounts.h"

namespace gpupool::broker {

class SliceSockets {
 public:
  SliceSockets(Door& door, const std::string& run_dir);
  ~SliceSockets();

  // Makes the sockets that the leases ask for and removes all others. What cannot be made goes into
  // `applied`, and is tried again at the next push.
  void apply(const std::map<wire::Uuid, LeaseEntry>& leases, Applied* applied);

 private:
  struct Socket {
    int listener = -1;  // the door's
    uint32_t owner = 0;
    Fd directory;
    std::shared_ptr<Entrance> entrance;
  };

  Fd open_all() const;                 // throws std::runtime_error
  void open(const LeaseEntry& lease);  // throws std::runtime_error
  void close(const Socket& socket);
  void remove_others(const std::map<std::string, const LeaseEntry*>& wanted);

  Door& door_;
  const std::string directory_;
  std::map<std::string, Socket> sockets_;
};

}  // namespace gpupool::broker
