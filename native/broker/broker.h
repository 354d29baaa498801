// The broker of one host: its parts, and what gpupoold asks of it.
#pragma once

#include <string>

#include "broker/control_socket.h"
#include "broker/devices.h"
#include "broker/door.h"
#include "broker/events.h"
#include "broker/leases.h"
#include "broker/loop.h"
#include "broker/ports.h"
#include "broker/relays.h"
#include "broker/sessions.h"
#include "broker/slice_sockets.h"
#include "broker/status.h"
#include "broker/workers.h"

namespace gpupool::broker {

struct BrokerOptions {
  std::string run_dir;
  std::string worker;  // path of gpupool-worker
};

class Broker {
 public:
  explicit Broker(const BrokerOptions& options);  // throws StartError
  ~Broker();

  void run();  // until SIGTERM or SIGINT

 private:
  void watch_signals();
  void on_connect();
  void on_message(const ToBroker& message);
  void on_push(uint64_t request, const Push& push);
  void apply(uint64_t request, const Push& push);
  bool is_its_hosts(const Door::Guest& guest);
  void listen_tcp(const std::string& address, Applied* applied);
  void answer(uint64_t request, Code code, const std::string& sentence);
  void answer_query(uint64_t request);
  void report_device(const std::string& gpu, const Device& device);

  const BrokerOptions options_;
  EventLoop loop_;
  Fd lock_;
  Fd signals_;
  std::string instance_;
  EventLog events_;
  // In the order in which they need one another; destroyed in the reverse one.
  LeaseTable leases_;
  WorkerPool workers_;
  DeviceTable devices_;
  Door door_;
  SessionTable sessions_;
  StatusDesk status_;
  SliceSockets slice_sockets_;
  PortTable ports_;
  RelayTable relays_;
  ControlSocket control_;

  uint64_t generation_ = 0;             // in force
  uint64_t connection_generation_ = 0;  // the last one that this gpupoold pushed
  Push collecting_;
  size_t collecting_bytes_ = 0;
  std::string tcp_listen_, tcp_address_, tcp_error_;
};

}  // namespace gpupool::broker
