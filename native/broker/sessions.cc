#include "broker/sessions.h"

#include <errno.h>
#include <sodium.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "broker/log.h"

namespace gpupool::broker {
namespace {

constexpr int64_t kUsageReportMs = 200;
constexpr size_t kMaxWorkersPerSessionDevice = 4;  // of which all but one are about to end
constexpr size_t kMaxWaiting = 1024;
// Of one lease: enough for a job whose processes all start at once.
constexpr uint32_t kSessionsAtOnce = 512, kSessionsPerSecond = 100;
constexpr uint32_t kWorkersAtOnce = 1024, kWorkersPerSecond = 100;
constexpr int64_t kHurryToldMs = 10 * 1000;
// Descriptors of a worker: channel, pidfd, output, log, ring; and those of one that is about to be.
constexpr size_t kWorkerDescriptors = 5;
constexpr size_t kUserShare = 4;  // one user gets a quarter of the descriptors

size_t descriptors_of(const Session& session) {
  return 1 + kWorkerDescriptors * (session.workers.size() + session.pending);
}

std::string bytes_of(const wire::Uuid& uuid) {
  return std::string(reinterpret_cast<const char*>(uuid.data()), uuid.size());
}

wire::Uuid random_uuid() {
  wire::Uuid uuid;
  randombytes_buf(uuid.data(), uuid.size());
  uuid[6] = static_cast<uint8_t>((uuid[6] & 0x0f) | 0x40);  // RFC 9562: version 4
  uuid[8] = static_cast<uint8_t>((uuid[8] & 0x3f) | 0x80);
  return uuid;
}

// A protobuf string must be UTF-8, and people will see it.
std::string printable(const char* text) {
  std::string result;
  for (; *text != '\0'; text++) {
    result += *text >= 0x20 && *text < 0x7f ? *text : '?';
  }
  return result;
}

const std::string& worker_for(const SliceSpec& slice) {
  return slice.relay != nullptr ? kNearRelay : slice.gpu;
}

}  // namespace

SessionTable::SessionTable(EventLoop& loop, Door& door, LeaseTable& leases, DeviceTable& devices,
                           WorkerPool& workers, EventLog& events)
    : loop_(loop),
      door_(door),
      leases_(leases),
      devices_(devices),
      workers_(workers),
      events_(events) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) descriptors_ = limit.rlim_cur;
}

SessionTable::~SessionTable() {
  for (auto& [id, session] : sessions_) {
    if (session.control) loop_.forget(session.control.get());
  }
  for (auto& [fd, parting] : parting_) loop_.forget(fd);
}

Session* SessionTable::find(const wire::Uuid& id) {
  auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : &found->second;
}

uint32_t SessionTable::count(const wire::Uuid& lease) const {
  return static_cast<uint32_t>(std::count_if(sessions_.begin(), sessions_.end(), [&](auto& entry) {
    return entry.second.lease == lease;
  }));
}

std::string SessionTable::Holder::text() const {
  if (user) return "user " + std::to_string(*user);
  return address.empty() ? "nobody known" : "address " + address;
}

SessionTable::Holder SessionTable::holder_of(std::optional<uint32_t> user, const Peer& peer) {
  if (!user && peer.uid != kUnknownUid) user = peer.uid;
  return {user, user ? "" : peer.address};
}

bool SessionTable::may_hold(const Holder& holder, size_t more, std::string* why) const {
  if (holder.user ? *holder.user == 0 || *holder.user == geteuid() : holder.address.empty()) {
    return true;
  }
  size_t held = 0;
  for (const auto& [id, session] : sessions_) {
    if (holder_of(session.user, session.peer) == holder) held += descriptors_of(session);
  }
  if (held + more <= descriptors_ / kUserShare) return true;
  *why = "the programs of " + holder.text() + " hold " + std::to_string(held) +
         " of the broker's " + std::to_string(descriptors_) + " file descriptors, and one " +
         (holder.user ? "user" : "address") + " may hold " +
         std::to_string(descriptors_ / kUserShare) + " at most";
  return false;
}

std::string SessionTable::who_holds_most() const {
  std::map<Holder, size_t> held;
  for (const auto& [id, session] : sessions_) {
    held[holder_of(session.user, session.peer)] += descriptors_of(session);
  }
  const auto most = std::max_element(held.begin(), held.end(),
                                     [](auto& a, auto& b) { return a.second < b.second; });
  if (most == held.end()) return "";
  return most->first.text() + " holds most: " + std::to_string(most->second) + " of " +
         std::to_string(descriptors_);
}

void SessionTable::on_proven(const Door::Guest& guest) {
  if (static_cast<wire::ConnectionPurpose>(guest->handshake().hello().purpose) ==
      wire::ConnectionPurpose::kSession) {
    // Here and not where it goes on after a wait, so that it counts once.
    const wire::Uuid lease = guest->handshake().lease();
    if (leases_.find(lease) == nullptr || in_time(guest, lease, true)) open_session(guest);
  } else {
    open_device(guest);
  }
}

bool SessionTable::in_time(const Door::Guest& guest, const wire::Uuid& lease, bool session) {
  Pace& pace = paces_
                   .try_emplace(lease, Pace{{kSessionsAtOnce, kSessionsPerSecond},
                                            {kWorkersAtOnce, kWorkersPerSecond}})
                   .first->second;
  if ((session ? pace.sessions : pace.workers).take(steady_ms())) return true;
  pace.refused++;
  if (pace.timer == 0) tell_hurry(lease);
  door_.refuse(
      guest, wire::RefusalCode::kLimit,
      "lease " + wire::format_uuid(lease) + " opens " +
          (session ? "sessions" : "connections to its devices") +
          " too fast: " + std::to_string(session ? kSessionsPerSecond : kWorkersPerSecond) +
          " a second are allowed, after " +
          std::to_string(session ? kSessionsAtOnce : kWorkersAtOnce) + " at once; try again later",
      false);
  return false;
}

// At once, then as a number for as long as it goes on.
void SessionTable::tell_hurry(const wire::Uuid& lease) {
  Pace& pace = paces_.at(lease);
  pace.timer = 0;
  if (pace.refused == 0) return;
  log(LogLevel::kWarning, "lease " + wire::format_uuid(lease) +
                              " opens sessions or connections to devices too fast: " +
                              std::to_string(pace.refused) + " refused");
  pace.refused = 0;
  pace.timer = loop_.after(kHurryToldMs, [this, lease] { tell_hurry(lease); });
}

// ---- Sessions ---------------------------------------------------------------------------------

void SessionTable::open_session(const Door::Guest& guest) {
  using wire::RefusalCode;
  const wire::Uuid lease_id = guest->handshake().lease();
  const LeaseEntry* lease = leases_.find(lease_id);
  if (lease == nullptr) {
    return door_.refuse(guest, RefusalCode::kUnknownLease,
                        "lease " + wire::format_uuid(lease_id) + " has ended");
  }
  const uint32_t limit = lease->max_sessions != 0 ? lease->max_sessions : default_limit_;
  if (count(lease_id) >= limit) {
    return door_.refuse(guest, RefusalCode::kLimit,
                        "lease " + wire::format_uuid(lease_id) + " already has " +
                            std::to_string(limit) + " sessions, the most that are allowed");
  }
  std::vector<wire::DeviceSnapshot> snapshots;
  std::string why;
  if (!may_hold(holder_of(lease->user, guest->peer()), 1, &why))
    return door_.refuse(guest, RefusalCode::kLimit, why);
  switch (devices_.snapshots(*lease, &snapshots, &why)) {
    case Device::Status::kReady:
      break;
    case Device::Status::kFailed:
      return door_.refuse(guest, RefusalCode::kNoWorker, why);
    case Device::Status::kProbing:
      return wait(guest, lease_id, limit);
  }

  const wire::Uuid id = random_uuid();
  Session session;
  session.id = id;
  session.lease = lease_id;
  session.user = lease->user;
  do {
    session.epoch = randombytes_random();
  } while (session.epoch == 0);  // 0 is the handshake's
  session.peer = guest->peer();
  session.told_pid = guest->handshake().hello().pid;
  if (session.peer.pid == 0) session.peer.pid = session.told_pid;
  session.program = printable(guest->handshake().hello().program);
  session.opened_unix_ns = unix_ns();
  session.control = door_.welcome(guest, id, session.epoch, kInitialCredit, snapshots);
  if (!session.control) return;
  const int fd = session.control.get();
  if (!loop_.watch(fd, EPOLLIN | EPOLLRDHUP,
                   [this, id](uint32_t events) { on_control(id, events); })) {
    return;  // the client sees its connection closed
  }
  Event event;
  *event.mutable_session_opened()->mutable_session() = state_of(session);
  sessions_.emplace(id, std::move(session));
  events_.add(std::move(event));
}

// For the driver. Not more of a lease than it may have sessions, a quarter of all of one user, and
// only those who are still there.
void SessionTable::wait(const Door::Guest& guest, const wire::Uuid& lease, uint32_t limit) {
  std::erase_if(waiting_, [](const Door::Guest& other) { return other->gone(); });
  const auto holder = [this](const Connection& one) {
    const LeaseEntry* entry = leases_.find(one.handshake().lease());
    return holder_of(entry != nullptr ? entry->user : std::nullopt, one.peer());
  };
  size_t of_lease = 0, of_holder = 0;
  for (const Door::Guest& other : waiting_) {
    if (other->handshake().lease() == lease) of_lease++;
    if (holder(*other) == holder(*guest)) of_holder++;
  }
  if (waiting_.size() >= kMaxWaiting || of_lease >= limit ||
      of_holder >= kMaxWaiting / kUserShare) {
    return door_.refuse(guest, wire::RefusalCode::kLimit, "too many clients wait for the driver");
  }
  waiting_.push_back(guest);
}

void SessionTable::on_device_change() {
  std::list<Door::Guest> waiting;
  waiting.swap(waiting_);
  for (const Door::Guest& guest : waiting) {
    if (!guest->gone()) open_session(guest);  // which may put it back
  }
}

// Nothing is defined for the control connection after the handshake, but that it stays open.
void SessionTable::on_control(const wire::Uuid& id, uint32_t) {
  Session* session = find(id);
  if (session == nullptr || !session->control) return;
  char byte;
  const ssize_t got = recv(session->control.get(), &byte, 1, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got > 0) {
    return end(*session, wire::RefusalCode::kBadFrame,
               "the client sent something unknown on the control connection");
  }
  session->slots.clear();  // nobody is there any more who could use them
  session->client_left = true;
  end(*session, wire::RefusalCode::kInternal, "the client closed the connection");
}

void SessionTable::end(Session& session, wire::RefusalCode code, const std::string& why) {
  if (session.ended) return;
  session.ended = true;
  session.why = why;
  const std::string frame = wire::refusal_frame(code, why, session.epoch, 1);
  send(session.control.get(), frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  loop_.forget(session.control.get());
  part(session);
  session.control.reset();
  for (pid_t pid : session.workers) {
    // The pool is asked to end what it has handed out.
    workers_.end(*by_pid_.at(pid));
  }
  forget_if_over(session.id);
}

// The client's process may be in the middle of writing to its slot: nobody else gets that before it
// has closed the control connection, which it does with its end.
void SessionTable::part(Session& session) {
  // A ring of its own is nobody else's, and a client could keep any number of them so.
  std::erase_if(session.slots, [](auto& entry) { return entry.second->fd_is_offered(); });
  if (session.slots.empty()) return;
  // Where the lease has ended the region may be unplugged soon.
  for (auto& [device, slot] : session.slots) slot->revoke();
  const int fd = session.control.get();
  shutdown(fd, SHUT_WR);
  const bool watched = loop_.watch(fd, EPOLLIN | EPOLLRDHUP, [this, fd](uint32_t) {
    char bytes[256];
    const ssize_t got = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR))) return;
    loop_.forget(fd);
    parting_.erase(fd);
  });
  if (!watched) return;
  parting_[fd] = {std::move(session.control), std::move(session.slots)};
  session.slots.clear();
}

void SessionTable::forget_if_over(const wire::Uuid& id) {
  Session* session = find(id);
  if (session == nullptr || !session->ended || !session->workers.empty()) return;
  Event event;
  SessionEnded* ended = event.mutable_session_ended();
  ended->set_session(bytes_of(session->id));
  ended->set_lease(bytes_of(session->lease));
  ended->set_why(session->client_left && !session->fault.empty() ? session->fault : session->why);
  sessions_.erase(id);
  events_.add(std::move(event));
}

void SessionTable::on_lease_end(const wire::Uuid& lease, const std::string& why) {
  if (auto pace = paces_.find(lease); pace != paces_.end()) {
    loop_.cancel(pace->second.timer);
    paces_.erase(pace);
  }
  std::vector<wire::Uuid> concerned;
  for (auto& [id, session] : sessions_) {
    if (session.lease == lease) concerned.push_back(id);
  }
  for (const wire::Uuid& id : concerned) {
    if (Session* session = find(id)) end(*session, wire::RefusalCode::kUnknownLease, why);
  }
}

bool SessionTable::kill(const wire::Uuid& id, const std::string& why) {
  Session* session = find(id);
  if (session == nullptr || session->ended) return false;
  log(LogLevel::kInfo, "session " + wire::format_uuid(id) + " is killed: " + why);
  end(*session, wire::RefusalCode::kInternal, "killed: " + why);
  return true;
}

// ---- Data connections and workers -------------------------------------------------------------

void SessionTable::open_device(const Door::Guest& guest) {
  using wire::RefusalCode;
  const auto& handshake = guest->handshake();
  Session* session = find(handshake.session());
  const LeaseEntry* lease = leases_.find(handshake.lease());
  if (lease == nullptr || session == nullptr || session->ended || session->lease != lease->id) {
    return door_.refuse(guest, RefusalCode::kUnknownLease,
                        "session " + wire::format_uuid(handshake.session()) +
                            " does not exist under this lease, or has ended");
  }
  if (!in_time(guest, lease->id, false)) return;
  const uint32_t device = handshake.hello().device;
  if (device >= lease->slices.size()) {
    return door_.refuse(guest, RefusalCode::kBadFrame,
                        "the lease has no device " + std::to_string(device));
  }
  const size_t most = lease->slices.size() * kMaxWorkersPerSessionDevice;
  if (session->workers.size() + session->pending >= most) {
    return door_.refuse(guest, RefusalCode::kLimit, "the session has too many workers");
  }
  std::string why;
  if (!may_hold(holder_of(lease->user, session->peer), kWorkerDescriptors, &why)) {
    return door_.refuse(guest, RefusalCode::kLimit, why);
  }
  // A client that connects again is done with the worker before.
  if (auto found = session->current.find(device); found != session->current.end()) {
    workers_.end(*by_pid_.at(found->second));
    session->current.erase(found);
  }
  session->pending++;
  workers_.acquire(
      worker_for(lease->slices[device]),
      [this, guest](Worker* worker, const std::string& why) { start_device(guest, worker, why); });
}

worker::RelayPayload SessionTable::relay_payload(const RelaySpec& spec,
                                                 const Session& session) const {
  worker::RelayPayload payload{};
  spec.peer.copy(payload.peer, sizeof payload.peer - 1);
  spec.address.copy(payload.address, sizeof payload.address - 1);
  std::copy(spec.lease.begin(), spec.lease.end(), payload.lease);
  std::copy(spec.key.begin(), spec.key.end(), payload.key);
  payload.interruption_ms = interruption_ms_;
  payload.pid = session.peer.pid;
  session.program.copy(payload.program, sizeof payload.program - 1);
  return payload;
}

void SessionTable::start_device(const Door::Guest& guest, Worker* worker, const std::string& why) {
  using wire::RefusalCode;
  const auto& handshake = guest->handshake();
  const uint32_t device = handshake.hello().device;
  Session* session = find(handshake.session());
  if (session != nullptr) session->pending--;
  const LeaseEntry* lease = leases_.find(handshake.lease());
  // While the worker started the world went on.
  const bool wanted =
      session != nullptr && !session->ended && lease != nullptr && device < lease->slices.size();
  if (worker == nullptr) {
    return door_.refuse(guest, RefusalCode::kNoWorker, "no worker could be started: " + why);
  }
  if (!wanted || worker->gpu != worker_for(lease->slices[device])) {
    workers_.put_back(*worker);
    return door_.refuse(guest, RefusalCode::kUnknownLease, "the session has ended");
  }
  auto ring = ring_for(*guest, *session, device, lease->slices[device].account);
  const Fd client =
      ring == nullptr
          ? door_.welcome(guest, session->id, session->epoch, kInitialCredit, {})
          : door_.welcome(guest, session->id, session->epoch, kInitialCredit, {}, ring->offer(),
                          ring->region_offer(), ring->fd_is_offered() ? ring->fd() : -1);
  if (!client) return workers_.put_back(*worker);

  const SliceSpec& slice = lease->slices[device];
  Worker::Owner owner;
  owner.session = session->id;
  owner.lease = lease->id;
  owner.slice = slice.id;
  owner.device = device;
  owner.account = slice.account;
  worker::AssignPayload payload{};
  payload.epoch = session->epoch;
  payload.minor = handshake.minor();
  payload.initial_credit = kInitialCredit;
  payload.arena_base = handshake.hello().arena_base;
  payload.arena_bytes = handshake.hello().arena_bytes;
  payload.host_bytes = slice.account->host.limit();
  strncpy(payload.session, wire::format_uuid(session->id).c_str(), sizeof payload.session - 1);
  // Known before it is told: if it does not take its session, its end is handled like any other.
  session->workers.push_back(worker->pid);
  session->current[device] = worker->pid;
  by_pid_[worker->pid] = worker;
  worker::RelayPayload relay{};
  if (slice.relay != nullptr) relay = relay_payload(*slice.relay, *session);
  workers_.assign(*worker, owner, payload, client.get(), std::move(ring),
                  slice.relay != nullptr ? &relay : nullptr);
  sodium_memzero(&relay, sizeof relay);

  Event event;
  WorkerStarted* started = event.mutable_worker_started();
  started->set_session(bytes_of(owner.session));
  started->set_lease(bytes_of(owner.lease));
  started->set_slice(bytes_of(owner.slice));
  started->set_pid(static_cast<uint32_t>(worker->pid));
  events_.add(std::move(event));
}

std::shared_ptr<Ring> SessionTable::ring_for(const Connection& guest, Session& session,
                                             uint32_t device,
                                             const std::shared_ptr<SliceAccount>& account) {
  const auto& handshake = guest.handshake();
  session.slots.erase(device);  // a client that connects again is done with the one before
  std::shared_ptr<Ring> ring;
  const std::string& carrier = guest.peer().carrier;
  if ((carrier == "unix" || carrier == "relay") && handshake.accepts(wire::kAcceptsRing)) {
    ring = workers_.make_ring(session.epoch, account);
  } else if (guest.region() != nullptr && handshake.accepts(wire::kAcceptsRegion)) {
    ring = workers_.take_slot(*guest.region(), session.epoch);
  }
  if (ring != nullptr) session.slots[device] = ring;
  return ring;
}

void SessionTable::on_ring_declined(const Worker& worker) {
  Session* session = find(worker.owner.session);
  if (session == nullptr) return;
  auto slot = session->slots.find(worker.owner.device);
  if (slot != session->slots.end() && slot->second == worker.ring) session->slots.erase(slot);
}

void SessionTable::on_worker_end(const Worker& worker, const WorkerExit& exit) {
  by_pid_.erase(worker.pid);
  Event event;
  WorkerEnded* ended = event.mutable_worker_ended();
  ended->set_session(bytes_of(worker.owner.session));
  ended->set_lease(bytes_of(worker.owner.lease));
  ended->set_slice(bytes_of(worker.owner.slice));
  ended->set_pid(static_cast<uint32_t>(worker.pid));
  ended->set_expected(exit.expected);
  ended->set_exit_status(exit.status);
  ended->set_signal(exit.signal);
  ended->set_why(printable(exit.why.c_str()));
  events_.add(std::move(event));
  if (Session* session = find(worker.owner.session)) {
    if (exit.fault && session->fault.empty()) session->fault = printable(exit.why.c_str());
    std::erase(session->workers, worker.pid);
    std::erase_if(session->current, [&](auto& entry) { return entry.second == worker.pid; });
    forget_if_over(worker.owner.session);
  }
}

// ---- Usage ------------------------------------------------------------------------------------

std::vector<SessionTable::Use> SessionTable::uses(const wire::Uuid& lease) const {
  std::vector<Use> uses;
  for (const auto& [id, session] : sessions_) {
    if (session.lease != lease || session.ended) continue;
    for (const auto& [device, pid] : session.current) {
      uses.push_back({session.peer.pid, session.told_pid, device, by_pid_.at(pid)->charge.bytes,
                      by_pid_.at(pid)->busy_permille, session.program});
    }
  }
  return uses;
}

void SessionTable::on_worker_usage(const Worker& worker) {
  Usage& usage = usage_[worker.owner.slice];
  usage.account = worker.owner.account;
  if (usage.account->used() == 0) {
    loop_.cancel(usage.timer);
    return report_usage(worker.owner.slice);
  }
  if (usage.timer != 0) return;
  usage.timer = loop_.after(kUsageReportMs, [this, slice = worker.owner.slice] {
    usage_[slice].timer = 0;
    report_usage(slice);
  });
}

// Of sessions that come from other hosts: their own brokers tell what a slice has in use.
void SessionTable::tell_relays(const wire::Uuid& slice) {
  for (auto& [id, session] : sessions_) {
    if (!session.peer.on_usage) continue;
    for (const auto& [device, pid] : session.current) {
      const Worker& worker = *by_pid_.at(pid);
      const std::pair<uint64_t, uint32_t> now(
          worker.charge.bytes,
          worker.busy_permille == wire::kNotMeasured ? 0 : worker.busy_permille);
      if (worker.owner.slice != slice || now == session.told_usage) continue;
      session.told_usage = now;
      session.peer.on_usage(now.first, now.second);
    }
  }
}

void SessionTable::report_usage(const wire::Uuid& slice) {
  auto found = usage_.find(slice);
  if (found == usage_.end()) return;
  Usage& usage = found->second;
  tell_relays(slice);
  const uint64_t used = usage.account->used();
  if (used != usage.reported) {
    usage.reported = used;
    Event event;
    SliceUsage* report = event.mutable_slice_usage();
    report->set_slice(bytes_of(slice));
    report->set_used_bytes(used);
    report->set_memory_bytes(usage.account->limit());
    events_.add(std::move(event));
  }
  // Nothing is remembered of a slice that is not in use; the account is then the lease's alone.
  if (used == 0 && usage.timer == 0) usage_.erase(found);
}

SessionState SessionTable::state_of(const Session& session) const {
  SessionState state;
  state.set_id(bytes_of(session.id));
  state.set_lease(bytes_of(session.lease));
  state.set_pid(session.peer.pid);
  state.set_uid(session.peer.uid);
  state.set_program(session.program);
  state.set_opened_unix_ns(session.opened_unix_ns);
  state.set_carrier(session.peer.carrier);
  for (pid_t pid : session.workers) {
    const Worker& worker = *by_pid_.at(pid);
    if (worker.ring_taken && session.peer.carrier != "relay")
      state.set_carrier(worker.ring->carrier());
    WorkerState* entry = state.add_workers();
    entry->set_pid(static_cast<uint32_t>(pid));
    entry->set_slice(bytes_of(worker.owner.slice));
    entry->set_memory_bytes(worker.charge.bytes);
    entry->set_device(worker.owner.device);
  }
  return state;
}

void SessionTable::describe(std::vector<SessionState>* states) const {
  for (const auto& [id, session] : sessions_) {
    if (!session.ended) states->push_back(state_of(session));
  }
}

}  // namespace gpupool::broker
