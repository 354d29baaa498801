#include "broker/leases.h"

#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>

#include <algorithm>
#include <set>

#include "broker/log.h"
#include "broker/loop.h"

namespace gpupool::broker {
namespace {

constexpr size_t kMaxAddress = 280;
constexpr size_t kMaxLeases = 100000;
constexpr int kMaxSlicesPerLease = 64;
constexpr uint32_t kNobody = 0xffffffff;  // means "as it is" to chown
constexpr uint64_t kMaxRegionBytes = 1ull << 40;
constexpr size_t kMaxUnixPath = 107;  // sun_path without its NUL

bool take(const std::string& bytes, uint8_t* out, size_t size) {
  if (bytes.size() != size) return false;
  memcpy(out, bytes.data(), size);
  return true;
}

// It becomes the name of a directory.
bool is_socket_name(const std::string& name) {
  return !name.empty() && name.size() <= 64 && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-';
  });
}

// Field 22 of /proc/PID/stat; 0: no such process. The command's name may hold anything, so the
// fields are counted from the last parenthesis.
uint64_t start_time_of(uint32_t pid) {
  Fd file(open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return 0;
  char text[1024];
  const ssize_t got = read(file.get(), text, sizeof text - 1);
  if (got <= 0) return 0;
  text[got] = '\0';
  const char* at = strrchr(text, ')');
  for (int field = 2; at != nullptr && field < 22; field++) at = strchr(at + 1, ' ');
  return at == nullptr ? 0 : strtoull(at + 1, nullptr, 10);
}

bool is_host_name(const std::string& name) {
  return !name.empty() && name.size() < 256 &&
         std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 127; });
}

bool check_relay(const Relay& relay, const std::string& name, SliceSpec* out, std::string* why) {
  auto spec = std::make_shared<RelaySpec>();
  spec->peer = relay.peer();
  spec->address = relay.address();
  if (!is_host_name(spec->peer) || spec->address.empty() || spec->address.size() > kMaxAddress) {
    return *why = name + ": the host that it is on has no name or address", false;
  }
  if (!take(relay.lease(), spec->lease.data(), spec->lease.size()) ||
      !take(relay.key(), spec->key.data(), spec->key.size())) {
    return *why = name + ": there is no lease of the host that it is on", false;
  }
  if (relay.snapshot().size() != sizeof spec->snapshot) {
    return *why = name + ": the host that it is on tells of its device what this one does not know",
           false;
  }
  memcpy(&spec->snapshot, relay.snapshot().data(), sizeof spec->snapshot);
  spec->snapshot.name[sizeof spec->snapshot.name - 1] = '\0';
  out->relay = std::move(spec);
  return true;
}

bool check_slice(const Slice& slice, const std::set<std::string>& gpus, bool has_relays,
                 SliceSpec* out, std::string* why) {
  if (!take(slice.id(), out->id.data(), out->id.size())) {
    return *why = "a slice's id is not 16 bytes", false;
  }
  const std::string name = "slice " + wire::format_uuid(out->id);
  if (slice.has_relay()) {
    if (!has_relays) {
      return *why = name + " is on another host, and no certificate is set up", false;
    }
    if (!check_relay(slice.relay(), name, out, why)) return false;
  } else if (!slice.has_worker()) {
    return *why = name + " says neither worker nor relay", false;
  } else if (!gpus.contains(slice.gpu_uuid())) {
    return *why = name + ": GPU " + slice.gpu_uuid() + " is not among the GPUs of the push", false;
  }
  if (slice.memory_bytes() == 0) return *why = name + " has no memory", false;
  if (slice.compute_percent() > 100) return *why = name + " has more than 100 % of compute", false;
  if (slice.pci_bus() > 255 || slice.pci_device() > 31) {
    return *why = name + " has no valid PCI address", false;
  }
  out->name = slice.name();
  out->gpu = slice.gpu_uuid();
  out->pci_domain = slice.pci_domain();
  out->pci_bus = slice.pci_bus();
  out->pci_device = slice.pci_device();
  out->memory_bytes = slice.memory_bytes();
  out->compute_percent = slice.compute_percent();
  out->mode = slice.mode();
  out->priority = slice.priority();
  return true;
}

bool is_region(const RegionSpec& region) {
  return region.path.starts_with('/') && region.path.size() < 4096 && region.inode != 0 &&
         region.bytes % 4096 == 0 && region.bytes > 0 && region.bytes <= kMaxRegionBytes;
}

}  // namespace

std::optional<DesiredState> check_push(const Push& push, std::string* why) {
  DesiredState state;
  state.generation = push.generation();
  if (state.generation == 0) return *why = "the generation is 0", std::nullopt;
  state.settings = push.settings();
  std::set<std::string> gpus;
  for (const Gpu& gpu : push.gpus()) {
    if (gpu.uuid().size() > 80) return *why = "a GPU's UUID is too long", std::nullopt;
    if (gpus.insert(gpu.uuid()).second) state.gpus.push_back(gpu.uuid());
  }
  if (static_cast<size_t>(push.leases_size()) > kMaxLeases) {
    return *why = "more than 100000 leases", std::nullopt;
  }
  std::set<wire::Uuid> lease_ids, slice_ids;
  std::set<std::string> sockets;
  std::set<std::string> ports;
  std::set<uint32_t> cids;
  for (const auto& pushed : push.leases()) {
    LeaseEntry lease;
    if (!take(pushed.id(), lease.id.data(), lease.id.size())) {
      return *why = "a lease's id is not 16 bytes", std::nullopt;
    }
    const std::string name = "lease " + wire::format_uuid(lease.id);
    if (!take(pushed.key(), lease.key.data(), lease.key.size())) {
      return *why = name + ": the key is not 32 bytes", std::nullopt;
    }
    if (!lease_ids.insert(lease.id).second) return *why = name + " is there twice", std::nullopt;
    if (pushed.slices_size() == 0 || pushed.slices_size() > kMaxSlicesPerLease) {
      return *why = name + " needs 1 to 64 slices", std::nullopt;
    }
    for (const Slice& slice : pushed.slices()) {
      SliceSpec spec;
      if (!check_slice(slice, gpus, state.settings.has_relay(), &spec, why))
        return *why = name + ": " + *why, std::nullopt;
      if (!slice_ids.insert(spec.id).second) {
        return *why = "slice " + wire::format_uuid(spec.id) + " is there twice", std::nullopt;
      }
      lease.slices.push_back(std::move(spec));
    }
    lease.consumer = pushed.consumer();
    lease.max_sessions = pushed.max_sessions();
    lease.port = pushed.port();
    if (pushed.has_uid()) lease.user = pushed.uid();
    lease.peer = pushed.peer();
    if (!lease.peer.empty() && !is_host_name(lease.peer)) {
      return *why = name + ": the name of its host is none", std::nullopt;
    }
    if (!lease.port.empty()) {
      if (lease.port[0] != '/' || lease.port.size() > kMaxUnixPath) {
        return *why = name + ": its port is not an absolute path of at most 107 bytes",
               std::nullopt;
      }
      if (!ports.insert(lease.port).second) {
        return *why = "port " + lease.port + " is there twice", std::nullopt;
      }
    }
    lease.vsock_cid = pushed.vsock_cid();
    // Up to 2 they are the host's own processes.
    if (lease.vsock_cid != 0 && lease.vsock_cid <= 2) {
      return *why = name + ": vsock cid " + std::to_string(lease.vsock_cid) +
                    " is no virtual machine's",
             std::nullopt;
    }
    if (lease.vsock_cid != 0 && !cids.insert(lease.vsock_cid).second) {
      return *why = "vsock cid " + std::to_string(lease.vsock_cid) + " is there twice",
             std::nullopt;
    }
    if (pushed.has_region()) {
      lease.region = {pushed.region().path(), pushed.region().inode(), pushed.region().bytes()};
      if (!is_region(lease.region)) return *why = name + ": its region is impossible", std::nullopt;
    }
    if (pushed.has_process()) {
      if (pushed.process().pid() == 0) return *why = name + ": process 0", std::nullopt;
      lease.process_pid = pushed.process().pid();
      lease.process_start = pushed.process().start_time();
    }
    if (pushed.has_socket()) {
      lease.socket = pushed.socket().name();
      lease.owner = pushed.socket().uid();
      if (!is_socket_name(lease.socket) || !sockets.insert(lease.socket).second) {
        return *why = name + ": its socket has no name of its own", std::nullopt;
      }
      if (lease.owner == kNobody) return *why = name + ": its socket's user", std::nullopt;
    }
    state.leases.push_back(std::move(lease));
  }
  return state;
}

LeaseTable::LeaseTable(EventLoop& loop, OnEnd on_end) : loop_(loop), on_end_(std::move(on_end)) {}

LeaseTable::~LeaseTable() {
  for (auto& [id, lease] : leases_) sodium_memzero(lease.key.data(), lease.key.size());
}

const LeaseEntry* LeaseTable::find(const wire::Uuid& id) const {
  auto found = leases_.find(id);
  return found == leases_.end() ? nullptr : &found->second;
}

void LeaseTable::end(const wire::Uuid& id, const std::string& why, bool event) {
  auto found = leases_.find(id);
  if (found == leases_.end()) return;
  if (found->second.pidfd) loop_.forget(found->second.pidfd.get());
  // Out of the table first: a session that opens while this one's end is handled is refused.
  LeaseEntry lease = std::move(found->second);
  leases_.erase(found);
  on_end_(id, why, event);
  sodium_memzero(lease.key.data(), lease.key.size());
}

void LeaseTable::bind_process(LeaseEntry& lease) {
  const wire::Uuid id = lease.id;
  const std::string process = "process " + std::to_string(lease.process_pid);
  const auto ended = [this, id](const std::string& why) {
    ended_[id] = why;
    end(id, why, true);
  };
  Fd pidfd(static_cast<int>(syscall(SYS_pidfd_open, lease.process_pid, 0)));
  // The start time is read after the descriptor is open: from then on the pid cannot be reused
  // without the descriptor telling.
  if (!pidfd || start_time_of(lease.process_pid) != lease.process_start) {
    return ended("its " + process + " has ended");
  }
  const bool watched = loop_.watch(
      pidfd.get(), EPOLLIN, [ended, process](uint32_t) { ended("its " + process + " ended"); });
  if (!watched) return ended("its " + process + " cannot be watched");
  lease.pidfd = std::move(pidfd);
}

void LeaseTable::apply(DesiredState& desired, Applied* applied) {
  std::map<wire::Uuid, LeaseEntry*> wanted;
  for (LeaseEntry& lease : desired.leases) wanted[lease.id] = &lease;
  const auto refuse = [applied](const wire::Uuid& id, std::string sentence) {
    Refused* refused = applied->add_refused();
    refused->set_id(id.data(), id.size());
    refused->set_sentence(std::move(sentence));
  };

  std::vector<std::pair<wire::Uuid, std::string>> gone;
  for (auto& [id, lease] : leases_) {
    auto found = wanted.find(id);
    if (found == wanted.end()) {
      gone.emplace_back(id, "the lease was removed");
      continue;
    }
    // Ordinals are positions: a program that runs would find another device under its number.
    const auto& now = found->second->slices;
    const bool same = std::equal(
        lease.slices.begin(), lease.slices.end(), now.begin(), now.end(),
        [](const SliceSpec& a, const SliceSpec& b) { return a.id == b.id && a.gpu == b.gpu; });
    if (!same) gone.emplace_back(id, "the lease's slices changed");
  }
  for (auto& [id, why] : gone) end(id, why, false);
  std::erase_if(ended_, [&](const auto& entry) { return !wanted.contains(entry.first); });

  for (auto& [id, lease] : wanted) {
    if (auto found = ended_.find(id); found != ended_.end()) {
      refuse(id, "the lease has ended: " + found->second);
      continue;
    }
    const uint64_t host_bytes = desired.settings.worker_host_memory_mib() << 20;
    for (SliceSpec& slice : lease->slices) {
      // A slice keeps its account, in whichever lease, until its last worker is gone; on another
      // GPU it is other memory.
      std::weak_ptr<SliceAccount>& kept = accounts_[{slice.id, slice.gpu}];
      slice.account = kept.lock();
      if (slice.account == nullptr) {
        slice.account = std::make_shared<SliceAccount>(slice.memory_bytes);
        kept = slice.account;
      } else if (!slice.account->resize(slice.memory_bytes)) {
        refuse(slice.id, "the slice keeps " + std::to_string(slice.account->limit()) +
                             " bytes: " + std::to_string(slice.account->used()) + " are in use");
      }
      // More than that in use: it stays until it is given back, and nothing is added to it.
      Ledger& host = slice.account->host;
      host.resize(std::max(host_bytes != 0 ? host_bytes : kDefaultHostBytes, host.used()));
    }
    auto existing = leases_.find(id);
    if (existing == leases_.end()) {
      LeaseEntry& added = leases_[id] = std::move(*lease);
      if (added.process_pid != 0) bind_process(added);
      continue;
    }
    LeaseEntry& kept = existing->second;
    kept.key = lease->key;
    kept.consumer = lease->consumer;
    kept.max_sessions = lease->max_sessions;
    kept.socket = lease->socket;
    kept.owner = lease->owner;
    kept.port = lease->port;
    kept.vsock_cid = lease->vsock_cid;
    kept.region = lease->region;
    kept.peer = lease->peer;
    kept.slices = std::move(lease->slices);
    if (kept.process_pid != lease->process_pid || kept.process_start != lease->process_start) {
      if (kept.pidfd) loop_.forget(kept.pidfd.get());
      kept.pidfd.reset();
      kept.process_pid = lease->process_pid;
      kept.process_start = lease->process_start;
      if (kept.process_pid != 0) bind_process(kept);
    }
  }
  std::erase_if(accounts_, [](const auto& entry) { return entry.second.expired(); });
}

Code LeaseTable::resize(const wire::Uuid& slice, uint64_t memory_bytes, uint32_t percent,
                        std::string* why) {
  for (auto& [id, lease] : leases_) {
    for (SliceSpec& spec : lease.slices) {
      if (spec.id != slice) continue;
      if (memory_bytes == 0 || percent > 100) {
        return *why = "a slice needs memory and at most 100 % of compute", INVALID;
      }
      if (!spec.account->resize(memory_bytes)) {
        *why = "slice " + wire::format_uuid(slice) + " has " +
               std::to_string(spec.account->used()) + " bytes in use, more than " +
               std::to_string(memory_bytes);
        return CONFLICT;
      }
      spec.memory_bytes = memory_bytes;
      if (percent != 0) spec.compute_percent = percent;
      return OK;
    }
  }
  return *why = "there is no slice " + wire::format_uuid(slice), NOT_FOUND;
}

}  // namespace gpupool::broker
