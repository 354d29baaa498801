// The desired state that gpupoold pushed: leases with their slices and accounts. Checks a push as
// a whole before anything of it takes effect.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "broker.pb.h"
#include "broker/account.h"
#include "broker/fd.h"
#include "wire/handshake.h"

namespace gpupool::broker {

class EventLoop;

// Where a slice of another host is, and what gives this one a right to it there.
struct RelaySpec {
  std::string peer;     // the host's name in its certificate
  std::string address;  // of its relays' door
  wire::Uuid lease{};
  wire::LeaseKey key{};
  wire::DeviceSnapshot snapshot{};
};

struct SliceSpec {
  wire::Uuid id{};
  std::string name;
  std::string gpu;  // UUID in CUDA's words
  uint32_t pci_domain = 0, pci_bus = 0, pci_device = 0;
  uint64_t memory_bytes = 0;  // as pushed; the account's limit is what is in force
  uint32_t compute_percent = 0;
  Mode mode = HARD;
  int32_t priority = 0;
  std::shared_ptr<RelaySpec> relay;  // null: it is of this host
  std::shared_ptr<SliceAccount> account;
};

struct RegionSpec {
  std::string path;  // empty: none
  uint64_t inode = 0, bytes = 0;
  bool operator==(const RegionSpec&) const = default;
};

struct LeaseEntry {
  wire::Uuid id{};
  wire::LeaseKey key{};
  std::string consumer;
  std::vector<SliceSpec> slices;
  uint32_t process_pid = 0;  // 0: bound to none
  uint64_t process_start = 0;
  uint32_t max_sessions = 0;
  std::string socket;            // name of its own socket; empty: none
  uint32_t owner = 0;            // whose socket that is
  std::optional<uint32_t> user;  // whose lease it is
  std::string port;              // path of a virtual machine's port; empty: none
  uint32_t vsock_cid = 0;        // of a virtual machine; 0: none
  RegionSpec region;             // that it shares with the host
  std::string peer;              // host whose relay alone may use it; empty: none
  Fd pidfd;
};

struct DesiredState {
  uint64_t generation = 0;
  Settings settings;
  std::vector<std::string> gpus;
  std::vector<LeaseEntry> leases;
};

// nullopt: `why` says what is wrong; nothing of the push is to be used.
std::optional<DesiredState> check_push(const Push& push, std::string* why);

class LeaseTable {
 public:
  // Called when a lease is no more: removed, or its process ended.
  using OnEnd = std::function<void(const wire::Uuid& lease, const std::string& why, bool event)>;
  LeaseTable(EventLoop& loop, OnEnd on_end);
  ~LeaseTable();

  // Takes over the leases of `desired`. What could not be done as pushed goes into `applied`.
  void apply(DesiredState& desired, Applied* applied);
  // NOT_FOUND, CONFLICT with a sentence, or OK.
  Code resize(const wire::Uuid& slice, uint64_t memory_bytes, uint32_t percent, std::string* why);

  const LeaseEntry* find(const wire::Uuid& id) const;
  const std::map<wire::Uuid, LeaseEntry>& leases() const { return leases_; }
  const std::map<wire::Uuid, std::string>& ended() const { return ended_; }

 private:
  void bind_process(LeaseEntry& lease);
  void end(const wire::Uuid& id, const std::string& why, bool event);

  EventLoop& loop_;
  OnEnd on_end_;
  std::map<wire::Uuid, LeaseEntry> leases_;
  // Ended with their process, and still in the desired state: gpupoold has not taken note yet.
  std::map<wire::Uuid, std::string> ended_;
  std::map<std::pair<wire::Uuid, std::string>, std::weak_ptr<SliceAccount>>
      accounts_;  // slice, GPU
};

}  // namespace gpupool::broker
