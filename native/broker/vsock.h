// Sockets between a host and its virtual machines (AF_VSOCK). The kernel vouches for the context
// id (CID) of whoever connects.
#pragma once

#include <cstdint>
#include <string>

#include "broker/fd.h"

namespace gpupool::broker {

struct VsockPeer {
  uint32_t cid = 0, port = 0;
};

// Ports below need a right (CAP_NET_BIND_SERVICE) in the machine that they are of.
constexpr uint32_t kPrivilegedVsockPorts = 1024;

// A socket that listens for virtual machines of this host; none: `why`.
Fd listen_vsock(uint32_t port, std::string* why);
// The next connection; none: nobody is there.
Fd accept_vsock(int listener, VsockPeer* peer);

// In a virtual machine: a connection to its host from a privileged port, or none.
Fd connect_to_host(uint32_t port);

}  // namespace gpupool::broker
