#include "broker/status.h"

#include <algorithm>

#include "wire/status.h"

namespace gpupool::broker {
namespace {

constexpr uint32_t kQuestionsPerSecond = 100;
constexpr uint32_t kQuestionsAtOnce = 300;  // as many programs may start at the same time
constexpr size_t kMaxWaiting = 256;

// Kernel and client count its processes differently: it is in a container, or on another machine.
bool elsewhere(uint32_t pid, uint32_t told_pid) { return pid != 0 && pid != told_pid; }

// What of a device's time the sessions of a lease had together; no sessions, none of it.
void add_busy(const std::vector<SessionTable::Use>& uses, std::vector<wire::SliceStatus>* slices) {
  for (uint32_t device = 0; device < slices->size(); device++) {
    uint32_t sum = 0;
    bool used = false, measured = false;
    for (const SessionTable::Use& use : uses) {
      if (use.device != device) continue;
      used = true;
      if (use.busy_permille == wire::kNotMeasured) continue;
      measured = true;
      sum += use.busy_permille;
    }
    (*slices)[device].busy_permille = used && !measured ? wire::kNotMeasured : std::min(sum, 1000u);
  }
}

}  // namespace

StatusDesk::StatusDesk(Door& door, LeaseTable& leases, DeviceTable& devices, SessionTable& sessions)
    : door_(door), leases_(leases), devices_(devices), sessions_(sessions) {}

bool StatusDesk::allow(const wire::Uuid& lease) {
  const auto [allowance, added] =
      allowances_.try_emplace(lease, kQuestionsAtOnce, kQuestionsPerSecond);
  return allowance->second.take(steady_ms());
}

void StatusDesk::on_proven(const Door::Guest& guest) {
  const wire::Uuid lease = guest->handshake().lease();
  if (leases_.find(lease) != nullptr && !allow(lease)) {
    return door_.refuse(guest, wire::RefusalCode::kLimit,
                        "lease " + wire::format_uuid(lease) + " asks too often how it does");
  }
  answer(guest);
}

void StatusDesk::on_device_change() {
  std::list<Door::Guest> waiting;
  waiting.swap(waiting_);
  for (const Door::Guest& guest : waiting) {
    if (!guest->gone()) answer(guest);  // which may put it back
  }
}

void StatusDesk::answer(const Door::Guest& guest) {
  using wire::RefusalCode;
  const wire::Uuid id = guest->handshake().lease();
  const LeaseEntry* lease = leases_.find(id);
  if (lease == nullptr) {
    return door_.refuse(guest, RefusalCode::kUnknownLease,
                        "lease " + wire::format_uuid(id) + " has ended");
  }
  wire::Status status;
  std::string why;
  switch (devices_.snapshots(*lease, &status.devices, &why)) {
    case Device::Status::kReady:
      break;
    case Device::Status::kFailed:
      return door_.refuse(guest, RefusalCode::kNoWorker, why);
    case Device::Status::kProbing:
      std::erase_if(waiting_, [](const Door::Guest& other) { return other->gone(); });
      if (waiting_.size() >= kMaxWaiting) {
        return door_.refuse(guest, RefusalCode::kLimit, "too many clients wait for the driver");
      }
      waiting_.push_back(guest);
      return;
  }

  status.driver_version = driver_version_;
  for (const SliceSpec& slice : lease->slices) {
    wire::SliceStatus entry{};
    entry.memory_bytes = slice.account->limit();
    entry.used_bytes = slice.account->used();
    status.slices.push_back(entry);
  }
  const bool asks_from_elsewhere = elsewhere(guest->peer().pid, guest->handshake().hello().pid);
  const std::vector<SessionTable::Use> uses = sessions_.uses(id);
  add_busy(uses, &status.slices);
  for (const SessionTable::Use& use : uses) {
    // To whom is elsewhere, pids of this host mean nothing, or another process.
    if (asks_from_elsewhere && !elsewhere(use.pid, use.told_pid)) continue;
    wire::ProcessStatus entry{};
    entry.pid = asks_from_elsewhere ? use.told_pid : use.pid;
    entry.device = use.device;
    entry.used_bytes = use.bytes;
    entry.busy_permille = use.busy_permille;
    use.program.copy(entry.program, sizeof entry.program - 1);
    status.processes.push_back(entry);
  }
  door_.answer(guest, status.devices, wire::status_frame(status));
}

}  // namespace gpupool::broker
