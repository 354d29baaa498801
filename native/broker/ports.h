// The ports of virtual machines: for each lease that has one, a connection to the unix socket that
// QEMU listens on, and the channels that the guest opens over it. A channel goes through the door
// like any client, with its lease proven by the port. Where the machine has a vsock device, its
// helper connects to the host by itself, and its CID proves the lease.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "broker/devices.h"
#include "broker/door.h"
#include "broker/fd.h"
#include "broker/leases.h"
#include "broker/loop.h"
#include "broker/reserve.h"

namespace gpupool::broker {

class PortTable {
 public:
  PortTable(EventLoop& loop, Door& door, LeaseTable& leases, DeviceTable& devices);
  ~PortTable();

  // Connects and lets go of ports as the leases say. `regions`: what comes through them may use
  // the machine's region.
  void apply(bool regions);
  // Waits for machines at this vsock port from now on; 0: no more.
  void listen(uint32_t vsock_port);
  void tell();  // tells the guests what has changed of their slices

 private:
  class Port;
  std::string describe(const LeaseEntry& lease) const;
  void on_knock();
  void come(Fd fd, uint32_t cid, uint32_t port);
  std::shared_ptr<Region> region_of(const RegionSpec& spec, std::string* why);

  EventLoop& loop_;
  Door& door_;
  LeaseTable& leases_;
  DeviceTable& devices_;
  std::map<wire::Uuid, std::unique_ptr<Port>> ports_;   // by lease
  std::map<wire::Uuid, std::unique_ptr<Port>> vsocks_;  // the same
  bool regions_ = false;
  // By path, inode and size: those that a port or a session still uses.
  std::map<std::tuple<std::string, uint64_t, uint64_t>, std::weak_ptr<Region>> region_table_;
  uint32_t vsock_port_ = 0;
  Fd vsock_listener_;
  Reserve reserve_;
};

}  // namespace gpupool::broker
