#include "broker/slice_sockets.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <stdexcept>
#include <vector>

#include "broker/log.h"
#include "broker/sockets.h"

namespace gpupool::broker {
namespace {

constexpr char kInner[] = "socket";
constexpr char kSocket[] = "session.sock";
constexpr int kDirectory = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

[[noreturn]] void fail(const std::string& path, int error) {
  throw std::runtime_error(path + ": " + strerror(error));
}

// Makes it, or takes the one that is there if it is the broker's, or the owner's; then it has this
// owner and mode. `at`: a directory in which nobody but these two can make a name.
Fd take_directory(int at, const char* name, const std::string& path, uid_t owner, mode_t mode) {
  if (mkdirat(at, name, 0700) != 0 && errno != EEXIST) fail(path, errno);
  Fd directory(openat(at, name, kDirectory));
  struct stat status;
  if (!directory || fstat(directory.get(), &status) != 0) fail(path, errno);
  if (status.st_uid != owner && status.st_uid != geteuid()) {
    throw std::runtime_error(path + " belongs to user " + std::to_string(status.st_uid));
  }
  if (status.st_uid != owner && fchown(directory.get(), owner, static_cast<gid_t>(-1)) != 0) {
    fail("cannot give " + path + " to user " + std::to_string(owner), errno);
  }
  if ((status.st_mode & 07777) != mode && fchmod(directory.get(), mode) != 0) fail(path, errno);
  return directory;
}

// Only what the broker itself makes there; anything else keeps the directory, which is the owner's.
void remove_tree(int at, const std::string& name) {
  if (const Fd outer(openat(at, name.c_str(), kDirectory)); outer) {
    if (const Fd inner(openat(outer.get(), kInner, kDirectory)); inner) {
      unlinkat(inner.get(), kSocket, 0);
    }
    unlinkat(outer.get(), kInner, AT_REMOVEDIR);
  }
  if (unlinkat(at, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT) {
    log_limited("the directory of a slice's socket, " + name + ", stays: " + strerror(errno));
  }
}

bool admits(const Peer& peer, uint32_t owner, const DirectoryPlace& place, std::string* why) {
  if (peer.uid == owner || peer.uid == 0 || is_shown(peer.pid, place)) return true;
  *why = "this slice belongs to user " + std::to_string(owner) + ", not to user " +
         std::to_string(static_cast<int32_t>(peer.uid));
  return false;
}

}  // namespace

SliceSockets::SliceSockets(Door& door, const std::string& run_dir)
    : door_(door), directory_(run_dir + "/slices") {}

SliceSockets::~SliceSockets() {
  for (auto& [name, socket] : sockets_) close(socket);
}

void SliceSockets::close(const Socket& socket) {
  door_.close(socket.listener);
  unlinkat(socket.directory.get(), kSocket, 0);
}

void SliceSockets::open(const LeaseEntry& lease) {
  const std::string path = directory_ + "/" + lease.socket;
  const Fd all = take_directory(AT_FDCWD, directory_.c_str(), directory_, geteuid(), 0711);
  const Fd outer = take_directory(all.get(), lease.socket.c_str(), path, lease.owner, 0700);
  Socket socket;
  socket.owner = lease.owner;
  // The owner may put another directory here, in which he could exchange the socket's file for
  // anything: only the broker's own is taken.
  socket.directory = take_directory(outer.get(), kInner, path + "/" + kInner, geteuid(), 0755);
  const DirectoryPlace place = place_of(socket.directory.get());
  socket.entrance = std::make_shared<Entrance>();
  socket.entrance->lease = lease.id;
  socket.entrance->admits = [owner = lease.owner, place](const Peer& peer, std::string* why) {
    return admits(peer, owner, place, why);
  };
  Fd listener = listen_in(socket.directory.get(), kSocket, path, 0666);
  socket.listener = door_.listen(std::move(listener), "unix", socket.entrance);
  sockets_[lease.socket] = std::move(socket);
}

void SliceSockets::apply(const std::map<wire::Uuid, LeaseEntry>& leases, Applied* applied) {
  std::map<std::string, const LeaseEntry*> wanted;
  for (const auto& [id, lease] : leases) {
    if (!lease.socket.empty()) wanted[lease.socket] = &lease;
  }
  std::erase_if(sockets_, [&](auto& entry) {
    auto& [name, socket] = entry;
    const auto found = wanted.find(name);
    if (found != wanted.end() && found->second->owner == socket.owner) return false;
    close(socket);
    return true;
  });
  remove_others(wanted);
  for (const auto& [name, lease] : wanted) {
    if (const auto found = sockets_.find(name); found != sockets_.end()) {
      found->second.entrance->lease = lease->id;
      continue;
    }
    try {
      open(*lease);
    } catch (const std::runtime_error& error) {
      const std::string sentence = std::string("no socket for containers: ") + error.what();
      log(LogLevel::kWarning, "lease " + wire::format_uuid(lease->id) + ": " + sentence);
      Refused* refused = applied->add_refused();
      refused->set_id(lease->slices.front().id.data(), lease->slices.front().id.size());
      refused->set_sentence(sentence);
    }
  }
}

// Also what an earlier broker left; not what containers of wanted ones look into.
void SliceSockets::remove_others(const std::map<std::string, const LeaseEntry*>& wanted) {
  Fd all(::open(directory_.c_str(), kDirectory));
  if (!all) return;
  DIR* listing = fdopendir(dup(all.get()));
  if (listing == nullptr) return;
  std::vector<std::string> names;
  while (const dirent* entry = readdir(listing)) names.emplace_back(entry->d_name);
  closedir(listing);
  for (const std::string& name : names) {
    if (name == "." || name == ".." || wanted.contains(name)) continue;
    remove_tree(all.get(), name);
  }
}

}  // namespace gpupool::broker
