#include "broker/vsock.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

// After <sys/socket.h>, which it needs.
#include <linux/vm_sockets.h>

namespace gpupool::broker {
namespace {

constexpr char kHostDevice[] = "/dev/vhost-vsock", kGuestDevice[] = "/dev/vsock";
constexpr int kBacklog = 64;
constexpr timeval kConnectTime{0, 300'000};  // a host that is there answers at once
constexpr uint32_t kFirstPort = 700;         // of those that are tried for one's own end

sockaddr_vm address_of(uint32_t cid, uint32_t port) {
  sockaddr_vm address{};
  address.svm_family = AF_VSOCK;
  address.svm_cid = cid;
  address.svm_port = port;
  return address;
}

// Whether this is a virtual machine that can reach its host so.
bool has_host() {
  const Fd device(open(kGuestDevice, O_RDONLY | O_CLOEXEC));
  uint32_t cid = VMADDR_CID_ANY;
  return device && ioctl(device.get(), IOCTL_VM_SOCKETS_GET_LOCAL_CID, &cid) == 0 &&
         cid > VMADDR_CID_HOST && cid != VMADDR_CID_ANY;
}

}  // namespace

Fd listen_vsock(uint32_t port, std::string* why) {
  // Without it the kernel has the sockets, and nobody who could come.
  if (access(kHostDevice, F_OK) != 0) {
    *why = std::string(kHostDevice) + " is not there (modprobe vhost_vsock)";
    return {};
  }
  Fd fd(socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const sockaddr_vm address = address_of(VMADDR_CID_ANY, port);
  if (!fd || bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(fd.get(), kBacklog) != 0) {
    *why = "port " + std::to_string(port) + ": " + strerror(errno);
    return {};
  }
  return fd;
}

Fd accept_vsock(int listener, VsockPeer* peer) {
  sockaddr_vm address{};
  socklen_t bytes = sizeof address;
  Fd fd(accept4(listener, reinterpret_cast<sockaddr*>(&address), &bytes,
                SOCK_CLOEXEC | SOCK_NONBLOCK));
  *peer = {address.svm_cid, address.svm_port};
  return fd;
}

Fd connect_to_host(uint32_t port) {
  if (!has_host()) return {};
  Fd fd(socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return {};
  uint32_t own = kFirstPort;
  for (sockaddr_vm address = address_of(VMADDR_CID_ANY, own);
       bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0;
       address.svm_port = own) {
    if (errno != EADDRINUSE || ++own == kPrivilegedVsockPorts) return {};
  }
  setsockopt(fd.get(), AF_VSOCK, SO_VM_SOCKETS_CONNECT_TIMEOUT, &kConnectTime, sizeof kConnectTime);
  const sockaddr_vm host = address_of(VMADDR_CID_HOST, port);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&host), sizeof host) != 0) return {};
  return fd;
}

}  // namespace gpupool::broker
