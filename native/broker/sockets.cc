#include "broker/sockets.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cstdlib>

namespace gpupool::broker {
namespace {

constexpr int kBacklog = 512;

ExitStatus status_of(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EROFS:
    case EIO:
    case EACCES:
    case EPERM:
    case ENOENT:
    case ENOTDIR:
      return kExitDisk;
    default:
      return kExitSocket;
  }
}

std::string advice(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return ": make room there";
    case EMFILE:
    case ENFILE:
      return ": raise the limit of open files (LimitNOFILE, ulimit -n)";
    default:
      return "";
  }
}

[[noreturn]] void fail(const std::string& what, int error) {
  throw StartError(status_of(error), what + ": " + strerror(error) + advice(error));
}

void make_directory(const std::string& path) {
  if (mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) fail("cannot make " + path, errno);
  // Whoever owns it can replace the sockets in it.
  struct stat link, status;
  if (lstat(path.c_str(), &link) != 0 || stat(path.c_str(), &status) != 0) fail(path, errno);
  if (!S_ISDIR(status.st_mode)) fail(path, ENOTDIR);
  for (const struct stat& one : {link, status}) {
    if (one.st_uid == 0 || one.st_uid == geteuid()) continue;
    throw StartError(kExitSocket, path + " belongs to user " + std::to_string(one.st_uid) +
                                      ": give it to the user that runs gpupool-broker, or name "
                                      "another directory");
  }
  if ((status.st_mode & S_IWOTH) != 0) {
    throw StartError(kExitSocket, path + " can be written by everybody: chmod 755 it");
  }
}

// Somebody answers there.
bool is_alive(const sockaddr_un& address, int type) {
  Fd probe(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe) fail("cannot make a socket", errno);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  if (connect(probe.get(), generic, sizeof address) == 0) return true;
  return errno == EAGAIN || errno == EPROTOTYPE;  // a full backlog; a live socket of another type
}

// `path` is what the address is called in errors.
Fd listen_at(const sockaddr_un& address, const std::string& path, int type, unsigned mode) {
  Fd listener(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener) fail("cannot make a socket", errno);
  // Nobody can connect before the mode is right: bind makes the file, listen opens it.
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    fail("cannot bind " + path, errno);
  }
  if (chmod(address.sun_path, mode) != 0) fail("cannot set the mode of " + path, errno);
  if (listen(listener.get(), kBacklog) != 0) fail("cannot listen on " + path, errno);
  return listener;
}

}  // namespace

Fd lock_run_directory(const std::string& run_dir) {
  make_directory(run_dir);
  const std::string path = run_dir + "/broker.lock";
  Fd lock(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock) fail("cannot make " + path, errno);
  // Whoever may read it may lock it, and no broker would start; an earlier release's has 0644.
  if (fchmod(lock.get(), 0600) != 0) fail("cannot set the mode of " + path, errno);
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) fail("cannot lock " + path, errno);
    char owner[32] = {};
    const ssize_t got = pread(lock.get(), owner, sizeof owner - 1, 0);
    throw StartError(kExitSocket, "another gpupool-broker (pid " +
                                      std::string(got > 0 ? strtok(owner, "\n") : "unknown") +
                                      ") already serves " + run_dir);
  }
  const std::string pid = std::to_string(getpid()) + "\n";
  if (ftruncate(lock.get(), 0) != 0 ||
      pwrite(lock.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    fail("cannot write " + path, errno);
  }
  return lock;
}

Fd listen_unix(const std::string& path, int type, unsigned mode) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    throw StartError(kExitUsage, "the socket path " + path +
                                     " is too long: choose a run directory "
                                     "with a shorter name (a socket's path has at most 107 bytes)");
  }
  memcpy(address.sun_path, path.c_str(), path.size());
  struct stat status;
  if (lstat(path.c_str(), &status) == 0) {
    if (!S_ISSOCK(status.st_mode)) {
      throw StartError(kExitSocket, path + " exists and is not a socket: remove it");
    }
    if (is_alive(address, type)) {
      throw StartError(kExitSocket, "another process already listens on " + path);
    }
    if (unlink(path.c_str()) != 0) fail("cannot remove the stale socket " + path, errno);
  }
  return listen_at(address, path, type, mode);
}

Fd listen_in(int directory, const char* name, const std::string& path, unsigned mode) {
  // Through /proc the path is short and leads to this very directory, wherever it is.
  const std::string at = "/proc/self/fd/" + std::to_string(directory) + "/" + name;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, at.c_str(), std::min(at.size(), sizeof address.sun_path - 1));
  if (unlinkat(directory, name, 0) != 0 && errno != ENOENT) {
    fail("cannot remove the stale socket in " + path, errno);
  }
  return listen_at(address, path + "/" + name, SOCK_STREAM, mode);
}

Fd listen_tcp(const std::string& address, const std::string& option, bool loopback_only,
              std::string* bound, std::string* why) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) {
    *why = option + " " + address + " is not HOST:PORT";
    return {};
  }
  std::string host = address.substr(0, colon);
  char* end = nullptr;
  const std::string port_text = address.substr(colon + 1);
  const unsigned long port = strtoul(port_text.c_str(), &end, 10);
  if (port_text.empty() || *end != '\0' || port > 65535) {
    *why = option + " " + address + ": the port is not a number up to 65535";
    return {};
  }
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  if (host == "localhost") host = "127.0.0.1";
  sockaddr_storage storage{};
  socklen_t bytes = 0;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&storage);
  bool loopback = false, known = false;
  if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
    bytes = sizeof *v4;
    known = true;
    loopback = ntohl(v4->sin_addr.s_addr) >> 24 == 127;
  } else if (inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
    bytes = sizeof *v6;
    known = true;
    loopback = IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
  }
  if (!known) {
    *why = option + " " + address + " does not begin with a numeric address";
    return {};
  }
  if (loopback_only && !loopback) {
    *why = option + " " + address +
           " is not a loopback address: plain TCP is served on 127.0.0.0/8 and ::1 only";
    return {};
  }
  Fd listener(socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (!listener || setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(listener.get(), reinterpret_cast<sockaddr*>(&storage), bytes) != 0 ||
      listen(listener.get(), kBacklog) != 0 ||
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&storage), &bytes) != 0) {
    *why = "cannot listen on " + address + ": " + strerror(errno) + advice(errno);
    return {};
  }
  const unsigned real_port = ntohs(storage.ss_family == AF_INET ? v4->sin_port : v6->sin6_port);
  *bound =
      (storage.ss_family == AF_INET ? host : "[" + host + "]") + ":" + std::to_string(real_port);
  return listener;
}

bool peer_of(int fd, uint32_t* uid, uint32_t* pid) {
  ucred credentials{};
  socklen_t bytes = sizeof credentials;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) return false;
  if (credentials.uid == static_cast<uid_t>(-1)) return false;  // not a unix socket
  *uid = credentials.uid;
  *pid = static_cast<uint32_t>(credentials.pid);
  return true;
}

std::string address_of(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  char text[INET6_ADDRSTRLEN];
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "?";
  const void* bytes =
      address.ss_family == AF_INET6
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in6*>(&address)->sin6_addr)
          : &reinterpret_cast<const sockaddr_in*>(&address)->sin_addr;
  return inet_ntop(address.ss_family, bytes, text, sizeof text) != nullptr ? text : "?";
}

}  // namespace gpupool::broker
