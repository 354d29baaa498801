// Answers clients that ask how their lease does (NVML), without a session or a worker.
#pragma once

#include <list>
#include <map>
#include <string>

#include "broker/devices.h"
#include "broker/door.h"
#include "broker/leases.h"
#include "broker/sessions.h"
#include "broker/token_bucket.h"

namespace gpupool::broker {

class StatusDesk {
 public:
  StatusDesk(Door& door, LeaseTable& leases, DeviceTable& devices, SessionTable& sessions);

  void set_driver_version(std::string version) { driver_version_ = std::move(version); }

  void on_proven(const Door::Guest& guest);
  void on_device_change();
  void on_lease_end(const wire::Uuid& lease) { allowances_.erase(lease); }

 private:
  bool allow(const wire::Uuid& lease);
  void answer(const Door::Guest& guest);

  Door& door_;
  LeaseTable& leases_;
  DeviceTable& devices_;
  SessionTable& sessions_;
  std::string driver_version_;
  std::map<wire::Uuid, TokenBucket> allowances_;  // questions of each lease
  std::list<Door::Guest> waiting_;                // for snapshots
};

}  // namespace gpupool::broker
