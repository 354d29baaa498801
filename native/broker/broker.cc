#include "broker/broker.h"

#include <signal.h>
#include <sodium.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>

#include <algorithm>

#include "broker/log.h"
#include "broker/sockets.h"

#ifndef GPUPOOL_VERSION
#define GPUPOOL_VERSION "0.1.0"
#endif

namespace gpupool::broker {
namespace {

constexpr size_t kMaxPushBytes = 128 << 20;
constexpr size_t kAnswerBytes = 32 * 1024;  // of state in one packet

std::string bytes_of(const wire::Uuid& uuid) {
  return std::string(reinterpret_cast<const char*>(uuid.data()), uuid.size());
}

bool take_uuid(const std::string& bytes, wire::Uuid* uuid) {
  if (bytes.size() != uuid->size()) return false;
  memcpy(uuid->data(), bytes.data(), uuid->size());
  return true;
}

}  // namespace

Broker::Broker(const BrokerOptions& options)
    : options_(options),
      lock_(lock_run_directory(options.run_dir)),
      leases_(loop_,
              [this](const wire::Uuid& lease, const std::string& why, bool event) {
                sessions_.on_lease_end(lease, why);
                status_.on_lease_end(lease);
                if (!event) return;
                log(LogLevel::kInfo, "lease " + wire::format_uuid(lease) + " ends: " + why);
                Event ended;
                ended.mutable_lease_ended()->set_lease(bytes_of(lease));
                ended.mutable_lease_ended()->set_why(why);
                events_.add(std::move(ended));
              }),
      workers_(loop_, options.worker, options.run_dir,
               {[this](const Worker& worker, const WorkerExit& exit) {
                  sessions_.on_worker_end(worker, exit);
                },
                [this](const Worker& worker) { sessions_.on_worker_usage(worker); },
                [this](const Worker& worker) { sessions_.on_ring_declined(worker); }}),
      devices_(
          loop_, workers_,
          [this](const std::string& gpu, const Device& device) { report_device(gpu, device); }),
      door_(loop_, {[this](const wire::Uuid& id) -> std::optional<wire::LeaseKey> {
                      const LeaseEntry* lease = leases_.find(id);
                      if (lease == nullptr) return std::nullopt;
                      return lease->key;
                    },
                    [this](const Door::Guest& guest) {
                      if (!is_its_hosts(guest)) return;
                      const uint16_t purpose = guest->handshake().hello().purpose;
                      if (purpose == static_cast<uint16_t>(wire::ConnectionPurpose::kStatus)) {
                        status_.on_proven(guest);
                      } else {
                        sessions_.on_proven(guest);
                      }
                    },
                    [this] { return sessions_.who_holds_most(); }}),
      sessions_(loop_, door_, leases_, devices_, workers_, events_),
      status_(door_, leases_, devices_, sessions_),
      slice_sockets_(door_, options.run_dir),
      ports_(loop_, door_, leases_, devices_),
      relays_(loop_, door_, workers_),
      control_(
          loop_, listen_unix(options.run_dir + "/broker.sock", SOCK_SEQPACKET, 0600),
          {[this] { on_connect(); }, [this] { events_.connect({}); },
           [this](const ToBroker& message) { on_message(message); }, [this] { events_.flush(); }}) {
  instance_.resize(16);
  randombytes_buf(instance_.data(), instance_.size());
  door_.listen(listen_unix(options.run_dir + "/session.sock", SOCK_STREAM, 0666), "unix");
  watch_signals();
}

Broker::~Broker() {
  unlink((options_.run_dir + "/session.sock").c_str());
  unlink((options_.run_dir + "/broker.sock").c_str());
}

void Broker::watch_signals() {
  sigset_t wanted;
  sigemptyset(&wanted);
  sigaddset(&wanted, SIGTERM);
  sigaddset(&wanted, SIGINT);
  sigprocmask(SIG_BLOCK, &wanted, nullptr);
  signals_.reset(signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  loop_.watch(signals_.get(), EPOLLIN, [this](uint32_t) {
    signalfd_siginfo info;
    if (read(signals_.get(), &info, sizeof info) == sizeof info) {
      log(LogLevel::kInfo, std::string("ends: ") + strsignal(static_cast<int>(info.ssi_signo)));
      loop_.stop();
    }
  });
}

void Broker::run() {
  log(LogLevel::kInfo, "gpupool-broker " GPUPOOL_VERSION " serves " + options_.run_dir);
  loop_.run();
  events_.connect({});
  workers_.end_all();
}

// ---- gpupoold ---------------------------------------------------------------------------------

void Broker::on_connect() {
  collecting_.Clear();
  collecting_bytes_ = 0;
  connection_generation_ = 0;
  FromBroker message;
  Hello* hello = message.mutable_hello();
  hello->set_version(GPUPOOL_VERSION);
  hello->set_pid(static_cast<uint32_t>(getpid()));
  hello->set_instance(instance_);
  hello->set_generation(generation_);
  hello->set_events_lost(events_.lost());
  control_.send(message);
  events_.connect([this](const Event& event) {
    FromBroker message;
    *message.mutable_event() = event;
    return control_.send_event(message);
  });
}

void Broker::answer(uint64_t request, Code code, const std::string& sentence) {
  if (code != OK) log(LogLevel::kWarning, "gpupoold's request is refused: " + sentence);
  if (request == 0) return;
  FromBroker message;
  message.mutable_answer()->set_request(request);
  message.mutable_answer()->set_code(code);
  if (code != OK) message.mutable_answer()->set_sentence(sentence);
  control_.send(message);
}

void Broker::on_message(const ToBroker& message) {
  const uint64_t request = message.request();
  wire::Uuid id;
  std::string why;
  switch (message.what_case()) {
    case ToBroker::kPush:
      return on_push(request, message.push());
    case ToBroker::kQuery:
      return answer_query(request);
    case ToBroker::kKillSession:
      if (!take_uuid(message.kill_session().session(), &id)) {
        return answer(request, INVALID, "a session's id has 16 bytes");
      }
      why = message.kill_session().why();
      return sessions_.kill(id, why.empty() ? "by the operator" : why)
                 ? answer(request, OK, "")
                 : answer(request, NOT_FOUND, "there is no session " + wire::format_uuid(id));
    case ToBroker::kResizeSlice: {
      if (!take_uuid(message.resize_slice().slice(), &id)) {
        return answer(request, INVALID, "a slice's id has 16 bytes");
      }
      const Code code = leases_.resize(id, message.resize_slice().memory_bytes(),
                                       message.resize_slice().compute_percent(), &why);
      return answer(request, code, why);
    }
    case ToBroker::kProbeDevices:
      devices_.probe_all();
      return answer(request, OK, "");
    case ToBroker::WHAT_NOT_SET:
      return answer(request, INVALID, "the request is empty, or of a later version");
  }
}

void Broker::on_push(uint64_t request, const Push& push) {
  collecting_bytes_ += push.ByteSizeLong();
  if (collecting_bytes_ > kMaxPushBytes) {
    collecting_.Clear();
    collecting_bytes_ = 0;
    return answer(request, INVALID, "the pushed state is over 128 MiB");
  }
  if (collecting_.generation() != 0 && collecting_.generation() != push.generation()) {
    collecting_.Clear();  // the rest of that one will not come
    collecting_bytes_ = push.ByteSizeLong();
  }
  // Settings are in the first packet, and merging appends the lists.
  collecting_.MergeFrom(push);
  if (push.more()) return;
  Push whole;
  whole.Swap(&collecting_);
  collecting_bytes_ = 0;
  apply(request, whole);
}

void Broker::apply(uint64_t request, const Push& push) {
  std::string why;
  auto desired = check_push(push, &why);
  if (!desired) return answer(request, INVALID, "the pushed state is refused: " + why);
  if (desired->generation < connection_generation_) {
    return answer(request, CONFLICT,
                  "generation " + std::to_string(desired->generation) + " is older than " +
                      std::to_string(connection_generation_));
  }
  connection_generation_ = generation_ = desired->generation;
  const Settings& settings = desired->settings;
  FromBroker message;
  Answer* answer = message.mutable_answer();
  Applied* applied = answer->mutable_applied();
  applied->set_generation(generation_);

  door_.set_max_half_open(settings.max_half_open() != 0 ? settings.max_half_open() : 128);
  sessions_.set_default_limit(
      settings.max_sessions_per_lease() != 0 ? settings.max_sessions_per_lease() : 256);
  status_.set_driver_version(settings.driver_version());
  workers_.configure(settings);
  leases_.apply(*desired, applied);
  slice_sockets_.apply(leases_.leases(), applied);
  devices_.configure(desired->gpus, workers_.driver_identity());
  std::vector<std::string> usable;
  for (const auto& [gpu, device] : devices_.devices()) {
    if (device.status == Device::Status::kReady) usable.push_back(gpu);
  }
  workers_.keep_warm(std::move(usable));
  ports_.apply(settings.regions());
  ports_.listen(settings.vsock_port());
  sessions_.set_interruption(settings.relay().interruption_ms());
  relays_.configure(settings.relay(), applied);
  listen_tcp(settings.tcp_listen(), applied);

  if (request == 0) return;
  answer->set_request(request);
  control_.send(message);
}

// A lease that another host has is for the relay of that host alone, and no other lease for any.
bool Broker::is_its_hosts(const Door::Guest& guest) {
  const wire::Uuid id = guest->handshake().lease();
  const LeaseEntry* lease = leases_.find(id);
  const Peer& peer = guest->peer();
  const bool relayed = peer.carrier == "relay";
  if (lease == nullptr || (!relayed && lease->peer.empty())) return true;
  if (relayed && !lease->peer.empty() &&
      std::find(peer.hosts.begin(), peer.hosts.end(), lease->peer) != peer.hosts.end()) {
    return true;
  }
  door_.refuse(guest, wire::RefusalCode::kUnknownLease,
               "lease " + wire::format_uuid(id) + " is not for " +
                   (relayed ? peer.address : std::string("programs of this host")));
  return false;
}

void Broker::listen_tcp(const std::string& address, Applied* applied) {
  if (address != tcp_listen_ || !tcp_error_.empty()) {
    door_.stop_tcp();
    tcp_address_.clear();
    tcp_error_.clear();
    tcp_listen_ = address;
    if (!address.empty()) {
      Fd listener = broker::listen_tcp(address, "tcp_listen", true, &tcp_address_, &tcp_error_);
      if (listener) {
        door_.listen(std::move(listener), "tcp");
      } else {
        log(LogLevel::kWarning, tcp_error_);
      }
    }
  }
  applied->set_tcp_address(tcp_address_);
  applied->set_tcp_error(tcp_error_);
}

void Broker::report_device(const std::string& gpu, const Device& device) {
  Event event;
  describe_device(gpu, device, event.mutable_device_probed()->mutable_device());
  events_.add(std::move(event));
  std::vector<std::string> usable;
  for (const auto& [name, entry] : devices_.devices()) {
    if (entry.status == Device::Status::kReady) usable.push_back(name);
  }
  workers_.keep_warm(std::move(usable));
  ports_.tell();
  sessions_.on_device_change();
  status_.on_device_change();
}

void Broker::answer_query(uint64_t request) {
  FromBroker message;
  Answer* answer = message.mutable_answer();
  answer->set_request(request);
  State* state = answer->mutable_state();
  state->set_generation(generation_);
  state->set_tcp_address(tcp_address_);
  size_t bytes = 0;
  // Sends what has gathered when the next entry would not fit.
  const auto make_room = [&](size_t next) {
    if (bytes + next > kAnswerBytes && bytes != 0) {
      answer->set_more(true);
      control_.send(message);
      answer->set_more(false);
      state->Clear();
      state->set_generation(generation_);
      bytes = 0;
    }
    bytes += next;
  };
  std::vector<SessionState> sessions;
  sessions_.describe(&sessions);
  for (SessionState& session : sessions) {
    make_room(session.ByteSizeLong() + 8);
    state->add_sessions()->Swap(&session);
  }
  for (const auto& [id, lease] : leases_.leases()) {
    const uint32_t count = sessions_.count(id);
    for (const SliceSpec& slice : lease.slices) {
      SliceState entry;
      entry.set_id(bytes_of(slice.id));
      entry.set_memory_bytes(slice.account->limit());
      entry.set_used_bytes(slice.account->used());
      entry.set_sessions(count);
      make_room(entry.ByteSizeLong() + 8);
      state->add_slices()->Swap(&entry);
    }
  }
  for (const auto& [gpu, device] : devices_.devices()) {
    DeviceState entry;
    describe_device(gpu, device, &entry);
    entry.set_warm_workers(workers_.warm_count(gpu));
    make_room(entry.ByteSizeLong() + 8);
    state->add_devices()->Swap(&entry);
  }
  for (const auto& [id, why] : leases_.ended()) {
    make_room(id.size() + 8);
    state->add_ended_leases(bytes_of(id));
  }
  control_.send(message);
}

}  // namespace gpupool::broker
