// What the GPUs look like to CUDA: snapshots taken by probe workers, and a slice's own view of its
// GPU made from them.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "broker/leases.h"
#include "broker/workers.h"

namespace gpupool::broker {

struct Device {
  enum class Status { kProbing, kReady, kFailed };
  Status status = Status::kProbing;
  std::string why;  // kFailed
  wire::DeviceSnapshot snapshot{};
  int failures = 0;
  uint64_t round = 0;  // results of an older round are ignored
  EventLoop::TimerId retry = 0;
};

class DeviceTable {
 public:
  using OnChange = std::function<void(const std::string& gpu, const Device& device)>;
  DeviceTable(EventLoop& loop, WorkerPool& workers, OnChange on_change);

  // Probes GPUs that are new; all of them when the driver is another one. Forgets the others.
  void configure(const std::vector<std::string>& gpus, const std::string& driver_identity);
  void probe_all();

  const Device* find(const std::string& gpu) const;
  // What a tenant of the lease sees, slice by slice. kFailed: `why` is a sentence about the first
  // GPU that cannot be used.
  Device::Status snapshots(const LeaseEntry& lease, std::vector<wire::DeviceSnapshot>* snapshots,
                           std::string* why) const;
  const std::map<std::string, Device>& devices() const { return devices_; }

 private:
  void probe(const std::string& gpu);

  EventLoop& loop_;
  WorkerPool& workers_;
  OnChange on_change_;
  std::string driver_identity_;
  std::map<std::string, Device> devices_;
  uint64_t next_round_ = 1;
};

// The device as the slice's tenant sees it: UUID, PCI address and memory are the slice's own.
wire::DeviceSnapshot slice_snapshot(const wire::DeviceSnapshot& device, const SliceSpec& slice);

void describe_device(const std::string& gpu, const Device& device, DeviceState* state);

}  // namespace gpupool::broker
