// The worker processes: a few kept warm per GPU, given to sessions, probes; started with a channel
// and reaped by pidfd.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "broker.pb.h"
#include "broker/account.h"
#include "broker/fd.h"
#include "broker/loop.h"
#include "broker/regions.h"
#include "broker/rings.h"
#include "broker/worker_log.h"
#include "wire/handshake.h"
#include "worker/channel.h"

namespace gpupool::broker {

// In place of a GPU: a relay for a session whose slice is on another host, and one for a session
// that comes from another host.
inline const std::string kNearRelay = "relay to another host";
inline const std::string kFarRelay = "relay from another host";
constexpr uint32_t kDefaultInterruptionMs = 10'000;

struct Worker;
struct WorkerExit;

// What a relay of another host's session says is for whoever looks after these.
struct FarEvents {
  std::function<void(worker::Message&)> on_message;
  std::function<void(const WorkerExit&)> on_end;
};

struct Worker {
  enum class State {
    kStarting,  // loads the driver
    kWarm,      // ready, nobody's
    kAssigned,  // has a session, or is about to get one
    kEnding,    // was told to end
  };

  // Whose it is, from the moment it is claimed.
  struct Owner {
    wire::Uuid session{}, lease{}, slice{};
    uint32_t device = 0;
    std::shared_ptr<SliceAccount> account;
  };

  pid_t pid = 0;
  Fd pidfd, channel;
  std::unique_ptr<WorkerLog> log;
  std::string gpu;
  uint64_t epoch = 0;  // of the pool's settings that it was started with
  State state = State::kStarting;
  bool probe = false;
  bool assigned = false;  // a connection was handed over
  Owner owner;
  std::unique_ptr<FarEvents> far;  // of a relay from another host
  Charge charge, host_charge, borne;
  uint32_t busy_permille = wire::kNotMeasured;  // as it says
  std::shared_ptr<Ring> ring;                   // that the client was offered, and has not declined
  bool ring_taken = false;
  bool expected_end = false;
  bool complained = false;  // the last word is of a fault
  std::string last_word;
  std::function<void(Worker*, const std::string& why)> claim;  // who waits for it to be ready
  std::function<void(const wire::DeviceSnapshot*, const std::string& why)> on_snapshot;
  EventLoop::TimerId kill_timer = 0;
};

// How a worker's process ended.
struct WorkerExit {
  bool expected = false;
  bool fault = false;  // the worker or its client did something wrong: `why` tells
  int status = 0;      // when it exited
  int signal = 0;      // when a signal ended it
  std::string why;
};

class WorkerPool {
 public:
  struct Callbacks {
    std::function<void(const Worker&, const WorkerExit&)>
        on_end;                                           // of an assigned one, account closed
    std::function<void(const Worker&)> on_usage;          // its charge changed
    std::function<void(const Worker&)> on_declined = {};  // the client does without its ring
  };
  WorkerPool(EventLoop& loop, std::string executable, std::string run_dir, Callbacks callbacks);
  ~WorkerPool();

  // Warm workers that were started with another driver or other settings are dropped.
  void configure(const Settings& settings);
  // Keeps the settings' number of workers warm for each of these GPUs.
  void keep_warm(std::vector<std::string> gpus);

  // Calls back at once when one is warm, else when one has started; null and why if none does.
  // Whoever is called back either assigns the worker or gives it back with put_back().
  using Acquired = std::function<void(Worker*, const std::string& why)>;
  void acquire(const std::string& gpu, Acquired acquired);
  void put_back(Worker& worker);
  // `relay`: for a relay to another host.
  bool assign(Worker& worker, const Worker::Owner& owner, worker::AssignPayload& payload,
              int client_fd, std::shared_ptr<Ring> ring,
              const worker::RelayPayload* relay = nullptr);
  // The connection of another host's relay to one here.
  bool assign_far(Worker& worker, int fd, FarEvents events);
  // A ring for a local session, or in a virtual machine's region, if they are switched on.
  std::shared_ptr<Ring> make_ring(uint32_t epoch, std::shared_ptr<SliceAccount> account);
  std::shared_ptr<Ring> take_slot(Region& region, uint32_t epoch);

  using Probed = std::function<void(const wire::DeviceSnapshot*, const std::string& why)>;
  void probe(const std::string& gpu, Probed probed);

  // Asks it to end; kills it after the grace time.
  void end(Worker& worker);
  // At the broker's own end: kills all and waits for them.
  void end_all();

  uint32_t warm_count(const std::string& gpu) const;
  // What changes when another driver is in the driver directory.
  const std::string& driver_identity() const { return driver_identity_; }

 private:
  bool has_spin_page();
  Worker* start(const std::string& gpu, bool probe, std::string* why);
  bool spawn(Worker& worker, std::string* why);
  std::vector<std::string> arguments(const Worker& worker) const;
  std::vector<std::string> environment(const std::string& gpu) const;
  void refill();
  void refill_soon(int64_t ms);
  void on_channel(Worker& worker);
  void on_message(Worker& worker, worker::Message& message);
  void on_exit(Worker& worker);
  void ready(Worker& worker, bool ok, const std::string& why);
  void kill(Worker& worker, int signal);
  void distrust(Worker& worker, const std::string& what);

  EventLoop& loop_;
  const std::string executable_;
  WorkerLogs logs_;  // before the workers, whose logs end with them
  Callbacks callbacks_;
  Settings settings_;
  std::string identity_;  // of everything that a warm worker was started with
  std::string driver_identity_;
  uint64_t epoch_ = 1;
  Fd spin_page_;
  std::vector<std::string> warm_gpus_;
  std::map<std::string, int64_t> failed_until_;  // GPU whose worker did not start: try again then
  std::map<std::string, int> failures_;
  std::list<std::unique_ptr<Worker>> workers_;
  EventLoop::TimerId refill_timer_ = 0;
  int64_t refill_due_ = 0;
  bool noticed_user_ = false;
};

}  // namespace gpupool::broker
