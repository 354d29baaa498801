#include "broker/slice_sockets.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include <stdexcept>

#include "broker/log.h"
#include "broker/own_directory.h"
#include "broker/sockets.h"

namespace gpupool::broker {
namespace {

constexpr char kInner[] = "socket";
constexpr char kSocket[] = "session.sock";

bool is_own_directory(const struct stat& status) {
  return S_ISDIR(status.st_mode) && status.st_uid == geteuid();
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

// Of nobody but the broker: in one that somebody else made, names would not be safe.
Fd SliceSockets::open_all() const {
  struct stat status;
  if (lstat(directory_.c_str(), &status) == 0 && !is_own_directory(status)) {
    throw std::runtime_error(directory_ + " is not a directory of the broker's user: remove it");
  }
  return own_directory(AT_FDCWD, directory_.c_str(), directory_, 0711);
}

void SliceSockets::open(const LeaseEntry& lease) {
  const std::string path = directory_ + "/" + lease.socket;
  const Fd outer = own_directory(open_all().get(), lease.socket.c_str(), path, 0700, lease.owner);
  remove_entries(outer.get(), path, [](const std::string& name, const struct stat& status) {
    return name == kInner && is_own_directory(status);
  });
  const std::string inner = path + "/" + kInner;
  Socket socket;
  socket.owner = lease.owner;
  socket.directory = own_directory(outer.get(), kInner, inner, 0755);
  remove_entries(socket.directory.get(), inner,
                 [](const std::string& name, const struct stat&) { return name == kSocket; });
  const DirectoryPlace place = place_of(socket.directory.get());
  socket.entrance = std::make_shared<Entrance>();
  socket.entrance->lease = lease.id;
  socket.entrance->admits = [owner = lease.owner, place](const Peer& peer, std::string* why) {
    return admits(peer, owner, place, why);
  };
  Fd listener = listen_in(socket.directory.get(), kSocket, inner, 0666);
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
  if (struct stat status; lstat(directory_.c_str(), &status) != 0 && errno == ENOENT) return;
  try {
    remove_entries(open_all().get(), directory_,
                   [&](const std::string& name, const struct stat& status) {
                     return wanted.contains(name) || !S_ISDIR(status.st_mode);
                   });
  } catch (const std::runtime_error& error) {
    log_limited(std::string("directories of slices that are no more stay: ") + error.what());
  }
}

}  // namespace gpupool::broker
