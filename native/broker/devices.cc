#include "broker/devices.h"

#include <string.h>

#include <algorithm>
#include <set>

#include "broker/log.h"

namespace gpupool::broker {
namespace {

constexpr int64_t kFirstRetryMs = 1000;
constexpr int64_t kLastRetryMs = 60000;

// CUdevice_attribute; cuda.h. The broker is built without our CUDA header, since it makes no call.
enum Attribute : int {
  kPciBusId = 33,
  kPciDeviceId = 34,
  kPciDomainId = 50,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
};

}  // namespace

DeviceTable::DeviceTable(EventLoop& loop, WorkerPool& workers, OnChange on_change)
    : loop_(loop), workers_(workers), on_change_(std::move(on_change)) {}

void DeviceTable::configure(const std::vector<std::string>& gpus,
                            const std::string& driver_identity) {
  const std::set<std::string> wanted(gpus.begin(), gpus.end());
  for (auto entry = devices_.begin(); entry != devices_.end();) {
    if (wanted.contains(entry->first)) {
      ++entry;
    } else {
      loop_.cancel(entry->second.retry);
      entry = devices_.erase(entry);
    }
  }
  const bool other_driver = driver_identity != driver_identity_;
  driver_identity_ = driver_identity;
  for (const std::string& gpu : wanted) {
    if (other_driver || !devices_.contains(gpu)) probe(gpu);
  }
}

void DeviceTable::probe_all() {
  for (auto& [gpu, device] : devices_) probe(gpu);
}

const Device* DeviceTable::find(const std::string& gpu) const {
  auto found = devices_.find(gpu);
  return found == devices_.end() ? nullptr : &found->second;
}

Device::Status DeviceTable::snapshots(const LeaseEntry& lease,
                                      std::vector<wire::DeviceSnapshot>* snapshots,
                                      std::string* why) const {
  for (const SliceSpec& slice : lease.slices) {
    if (slice.relay != nullptr) {
      snapshots->push_back(slice_snapshot(slice.relay->snapshot, slice));
      continue;
    }
    const Device* device = find(slice.gpu);
    if (device == nullptr || device->status == Device::Status::kFailed) {
      *why = "GPU " + slice.gpu +
             " cannot be used: " + (device == nullptr ? "this host does not have it" : device->why);
      return Device::Status::kFailed;
    }
    if (device->status == Device::Status::kProbing) return Device::Status::kProbing;
    snapshots->push_back(slice_snapshot(device->snapshot, slice));
  }
  return Device::Status::kReady;
}

void DeviceTable::probe(const std::string& gpu) {
  Device& started = devices_[gpu];
  loop_.cancel(started.retry);
  const uint64_t round = next_round_++;
  started.round = round;
  // A device that was ready stays so while it is looked at again.
  if (started.status != Device::Status::kReady) started.status = Device::Status::kProbing;
  workers_.probe(gpu, [this, gpu, round](const wire::DeviceSnapshot* snapshot,
                                         const std::string& why) {
    auto found = devices_.find(gpu);
    if (found == devices_.end() || found->second.round != round) return;
    Device& device = found->second;
    if (snapshot != nullptr) {
      device.snapshot = *snapshot;
      device.snapshot.name[sizeof device.snapshot.name - 1] = '\0';
      device.status = Device::Status::kReady;
      device.why.clear();
      device.failures = 0;
    } else {
      device.status = Device::Status::kFailed;
      device.why = why;
      log_limited("GPU " + gpu + " cannot be used: " + why);
      const int64_t delay = std::min(kFirstRetryMs << std::min(device.failures++, 6), kLastRetryMs);
      device.retry = loop_.after(delay, [this, gpu] { probe(gpu); });
    }
    on_change_(gpu, device);
  });
}

wire::DeviceSnapshot slice_snapshot(const wire::DeviceSnapshot& device, const SliceSpec& slice) {
  wire::DeviceSnapshot snapshot = device;
  memcpy(snapshot.uuid, slice.id.data(), sizeof snapshot.uuid);
  snapshot.memory_bytes = slice.account->limit();
  snapshot.compute_percent = slice.compute_percent;
  snapshot.attributes[kPciDomainId] = static_cast<int32_t>(slice.pci_domain);
  snapshot.attributes[kPciBusId] = static_cast<int32_t>(slice.pci_bus);
  snapshot.attributes[kPciDeviceId] = static_cast<int32_t>(slice.pci_device);
  return snapshot;
}

void describe_device(const std::string& gpu, const Device& device, DeviceState* state) {
  state->set_uuid(gpu);
  state->set_ready(device.status == Device::Status::kReady);
  if (device.status == Device::Status::kProbing) state->set_sentence("it is being probed");
  if (device.status == Device::Status::kFailed) state->set_sentence(device.why);
  if (device.status != Device::Status::kReady) return;
  state->set_name(device.snapshot.name);
  state->set_memory_bytes(device.snapshot.memory_bytes);
  state->set_cc_major(static_cast<uint32_t>(device.snapshot.attributes[kComputeCapabilityMajor]));
  state->set_cc_minor(static_cast<uint32_t>(device.snapshot.attributes[kComputeCapabilityMinor]));
  state->set_driver_version(device.snapshot.driver_version);
  state->set_snapshot(&device.snapshot, sizeof device.snapshot);
}

}  // namespace gpupool::broker
