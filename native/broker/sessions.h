// The sessions: opened on a proven control connection, given workers on data connections, ended
// with the control connection, by command, or with their lease.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "broker/devices.h"
#include "broker/door.h"
#include "broker/events.h"
#include "broker/leases.h"
#include "broker/token_bucket.h"
#include "broker/workers.h"

namespace gpupool::broker {

constexpr uint64_t kInitialCredit = 8
                                    << 20;  // bytes that a client may send before the first credit

struct Session {
  wire::Uuid id{}, lease{};
  uint32_t epoch = 0;
  Peer peer;
  uint32_t told_pid = 0;  // what the client says of itself: its pid where it runs
  std::string program;
  int64_t opened_unix_ns = 0;
  Fd control;
  bool ended = false;                        // waits for its last worker to be reaped
  bool client_left = false;                  // that is why, unless there was a fault
  std::string why;                           // it ended
  std::string fault;                         // the first that one of its workers told
  std::vector<pid_t> workers;                // alive
  std::map<uint32_t, pid_t> current;         // by ordinal: the worker that a client talks to
  uint32_t pending = 0;                      // data connections that wait for a worker
  std::optional<uint32_t> user;              // whose lease it is of
  std::pair<uint64_t, uint32_t> told_usage;  // bytes, busy: to the relay that it comes by
  // By ordinal: what the client's process may have mapped, as long as it lives.
  std::map<uint32_t, std::shared_ptr<Ring>> slots;
};

class SessionTable {
 public:
  SessionTable(EventLoop& loop, Door& door, LeaseTable& leases, DeviceTable& devices,
               WorkerPool& workers, EventLog& events);
  ~SessionTable();

  void set_default_limit(uint32_t sessions_per_lease) { default_limit_ = sessions_per_lease; }
  // For how long a connection to another host may be interrupted.
  void set_interruption(uint32_t ms) { interruption_ms_ = ms != 0 ? ms : kDefaultInterruptionMs; }

  void on_proven(const Door::Guest& guest);
  void on_device_change();  // some that waited for a snapshot can go on
  void on_worker_end(const Worker& worker, const WorkerExit& exit);
  void on_worker_usage(const Worker& worker);
  void on_ring_declined(const Worker& worker);
  void on_lease_end(const wire::Uuid& lease, const std::string& why);
  bool kill(const wire::Uuid& session, const std::string& why);  // false: there is none

  void describe(std::vector<SessionState>* states) const;
  // What the processes of a lease use, device by device.
  struct Use {
    uint32_t pid, told_pid, device;
    uint64_t bytes;
    uint32_t busy_permille;
    std::string program;
  };
  std::vector<Use> uses(const wire::Uuid& lease) const;
  uint32_t count(const wire::Uuid& lease) const;
  // "user 1000 holds most: 900 of 1024"; empty: nobody holds any.
  std::string who_holds_most() const;

 private:
  void open_session(const Door::Guest& guest);
  void open_device(const Door::Guest& guest);
  worker::RelayPayload relay_payload(const RelaySpec& spec, const Session& session) const;
  std::shared_ptr<Ring> ring_for(const Connection& guest, Session& session, uint32_t device,
                                 const std::shared_ptr<SliceAccount>& account);
  void start_device(const Door::Guest& guest, Worker* worker, const std::string& why);
  void on_control(const wire::Uuid& id, uint32_t events);
  void end(Session& session, wire::RefusalCode code, const std::string& why);
  void part(Session& session);
  void forget_if_over(const wire::Uuid& id);
  // Whether a lease may open one more now. False: the guest is refused.
  bool in_time(const Door::Guest& guest, const wire::Uuid& lease, bool session);
  void tell_hurry(const wire::Uuid& lease);
  // Whose descriptors a session's are: its lease's user; where that has none, who connected.
  struct Holder {
    std::optional<uint32_t> user;
    std::string address;
    auto operator<=>(const Holder&) const = default;
    std::string text() const;
  };
  static Holder holder_of(std::optional<uint32_t> user, const Peer& peer);
  // Whether he may have so many descriptors more; root and the broker's own user may.
  bool may_hold(const Holder& holder, size_t more, std::string* why) const;
  void wait(const Door::Guest& guest, const wire::Uuid& lease, uint32_t limit);
  Session* find(const wire::Uuid& id);
  SessionState state_of(const Session& session) const;
  void tell_relays(const wire::Uuid& slice);
  void report_usage(const wire::Uuid& slice);

  EventLoop& loop_;
  Door& door_;
  LeaseTable& leases_;
  DeviceTable& devices_;
  WorkerPool& workers_;
  EventLog& events_;
  uint32_t default_limit_ = 256;
  uint32_t interruption_ms_ = kDefaultInterruptionMs;
  size_t descriptors_ = 0;  // that the broker may have
  std::map<wire::Uuid, Session> sessions_;
  std::map<pid_t, Worker*> by_pid_;  // assigned workers
  std::list<Door::Guest> waiting_;   // for snapshots
  // Of sessions that have ended while their client lives on: it may still write to its slots.
  struct Parting {
    Fd control;
    std::map<uint32_t, std::shared_ptr<Ring>> slots;
  };
  std::map<int, Parting> parting_;  // by descriptor
  struct Usage {
    std::shared_ptr<SliceAccount> account;
    EventLoop::TimerId timer = 0;
    uint64_t reported = 0;
  };
  std::map<wire::Uuid, Usage> usage_;
  // By lease: how fast it opens what.
  struct Pace {
    TokenBucket sessions, workers;
    uint64_t refused = 0;  // since the log told
    EventLoop::TimerId timer = 0;
  };
  std::map<wire::Uuid, Pace> paces_;
};

}  // namespace gpupool::broker
