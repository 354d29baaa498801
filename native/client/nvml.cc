// libnvidia-ml.so.1 of applications: the slices of the lease, as the broker tells them. It opens no
// session, and no connection is kept: a question is a connection of its own, so that fork() and a
// restart of the broker do no harm.
#include <pthread.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/connect.h"
#include "client/log.h"
#include "nvml/library.h"
#include "wire/status.h"

namespace gpupool::nvml {
namespace {

using client::Level;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Tools ask for many values of one moment, one after the other.
constexpr milliseconds kFresh{50};
// When a lease asks too often: what was known before will do, if it is not older than this.
constexpr milliseconds kStale{5000};
constexpr milliseconds kPause{1000};    // before it is asked again, then
constexpr milliseconds kPatience{100};  // the same where nothing is known yet
constexpr int kAttempts = 20;
constexpr int kTimeoutMs = 10000;

// CUdevice_attribute; cuda.h.
enum Attribute : int {
  kClockRate = 13,
  kEccEnabled = 32,
  kPciBusId = 33,
  kPciDeviceId = 34,
  kMemoryClockRate = 36,
  kMemoryBusWidth = 37,
  kPciDomainId = 50,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
};

std::string uuid_text(const wire::DeviceSnapshot& snapshot) {
  wire::Uuid uuid;
  memcpy(uuid.data(), snapshot.uuid, uuid.size());
  return "GPU-" + wire::format_uuid(uuid);
}

// How the lease does, as it was told at most kFresh ago.
class Lease {
 public:
  static Lease& get() { return *instance.load(); }

  // `speak`: say what is wrong.
  std::optional<wire::Status> ask(bool speak = true) {
    std::lock_guard guard(lock_);
    if (known_for(kFresh) || (Clock::now() < not_before_ && known_for(kStale))) return known_;
    std::string why;
    const auto lease = wire::load_lease_from_environment(&why);
    if (!lease) return complain(speak, "no lease: " + why);
    wire::HandshakeResult result;
    for (int attempt = 1;; attempt++) {
      auto status = wire::query_status(*lease, client::open_carrier, &result, kTimeoutMs);
      if (status) {
        complained_ = false;
        known_ = std::move(status);
        known_at_ = Clock::now();
        return known_;
      }
      if (!result.refused || result.code != wire::RefusalCode::kLimit) break;
      not_before_ = Clock::now() + kPause;
      if (known_for(kStale)) return known_;
      if (attempt == kAttempts) break;
      std::this_thread::sleep_for(kPatience);
    }
    known_.reset();
    return complain(speak, result.message);
  }

 private:
  // Another thread of the parent may have been asking: its locks will not be released here.
  static void after_fork_in_child() {
    instance.store(new Lease);
    new (&library().mutex) std::mutex;
  }

  bool known_for(milliseconds time) const { return known_ && Clock::now() - known_at_ < time; }

  // Once, not for every value that a tool would like to have.
  std::nullopt_t complain(bool speak, const std::string& why) {
    if (speak && !complained_) client::log(Level::kError, "NVML: %s", why.c_str());
    complained_ = complained_ || speak;
    return std::nullopt;
  }

  static std::atomic<Lease*> instance;
  static const int watched;
  std::mutex lock_;
  std::optional<wire::Status> known_;
  Clock::time_point known_at_, not_before_;
  bool complained_ = false;
};

std::atomic<Lease*> Lease::instance{new Lease};
const int Lease::watched = (library(), pthread_atfork(nullptr, nullptr, after_fork_in_child));

class SliceDevice final : public Device {
 public:
  SliceDevice(unsigned ordinal, const wire::DeviceSnapshot& snapshot) {
    index = ordinal;
    name = snapshot.name;
    uuid = uuid_text(snapshot);
    const auto attribute = [&](Attribute which) {
      return static_cast<unsigned>(std::max(snapshot.attributes[which], 0));
    };
    pci_domain = attribute(kPciDomainId);
    pci_bus = attribute(kPciBusId);
    pci_device = attribute(kPciDeviceId);
    cc_major = static_cast<int>(attribute(kComputeCapabilityMajor));
    cc_minor = static_cast<int>(attribute(kComputeCapabilityMinor));
    ecc = attribute(kEccEnabled) != 0;
    memory_bus_bits = attribute(kMemoryBusWidth);
    core_clock_mhz = attribute(kClockRate) / 1000;
    memory_clock_mhz = attribute(kMemoryClockRate) / 1000;
  }

  nvmlReturn_t memory(MemoryUse* use) override {
    const auto status = ask();
    if (!status) return kGpuIsLost;
    const wire::SliceStatus& slice = status->slices[index];
    *use = {slice.memory_bytes, std::min(slice.used_bytes, slice.memory_bytes)};
    return kSuccess;
  }

  nvmlReturn_t processes(std::vector<Process>* list) override {
    const auto status = ask();
    if (!status) return kGpuIsLost;
    std::map<unsigned, uint64_t> by_pid;  // a process may have several sessions
    for (const wire::ProcessStatus& process : status->processes) {
      if (process.device == index) by_pid[process.pid] += process.used_bytes;
    }
    for (const auto& [pid, bytes] : by_pid) list->push_back({pid, bytes});
    return kSuccess;
  }

  // The share of time with work on the device; that of the memory's controller nobody measures.
  nvmlReturn_t utilization(Utilization* percent) override {
    const auto status = ask();
    if (!status) return kGpuIsLost;
    const uint32_t busy = status->slices[index].busy_permille;
    if (busy == wire::kNotMeasured) return kNotSupported;
    *percent = {std::min(busy, 1000u) / 10, 0};
    return kSuccess;
  }

  nvmlReturn_t process_utilization(std::vector<ProcessUse>* list) override {
    const auto status = ask();
    if (!status) return kGpuIsLost;
    if (status->slices[index].busy_permille == wire::kNotMeasured) return kNotSupported;
    std::map<unsigned, unsigned> by_pid;
    for (const wire::ProcessStatus& process : status->processes) {
      if (process.device != index || process.busy_permille == wire::kNotMeasured) continue;
      by_pid[process.pid] += std::min(process.busy_permille, 1000u);
    }
    for (const auto& [pid, permille] : by_pid) {
      list->push_back({pid, std::min(permille, 1000u) / 10});
    }
    return kSuccess;
  }

 private:
  // A lease's slices do not change while it lives; another lease may be behind the file by now.
  std::optional<wire::Status> ask() const {
    auto status = Lease::get().ask();
    if (status && (index >= status->devices.size() || uuid_text(status->devices[index]) != uuid)) {
      return std::nullopt;
    }
    return status;
  }
};

}  // namespace

nvmlReturn_t start(Library& library) {
  // As with cuInit: a program that was given a lease is told what is wrong with it; others just see
  // that there is no driver.
  const bool speak = client::log_chosen() || wire::lease_was_given();
  const auto status = Lease::get().ask(speak);
  if (!status) return kDriverNotLoaded;
  const bool same = std::equal(library.devices.begin(), library.devices.end(),
                               status->devices.begin(), status->devices.end(),
                               [](const auto& device, const wire::DeviceSnapshot& snapshot) {
                                 return device->uuid == uuid_text(snapshot);
                               });
  library.driver_version = status->driver_version;
  library.cuda_version =
      status->devices.empty() ? 0 : static_cast<int>(status->devices[0].driver_version);
  if (same) return kSuccess;
  for (auto& device : library.devices) (void)device.release();  // a program may hold the handle
  library.devices.clear();
  for (const wire::DeviceSnapshot& snapshot : status->devices) {
    library.devices.push_back(
        std::make_unique<SliceDevice>(static_cast<unsigned>(library.devices.size()), snapshot));
  }
  return kSuccess;
}

// Of the lease's own processes only. A process that cannot be seen from here has the name that it
// gave itself.
std::optional<std::string> process_name(unsigned pid) {
  const auto status = Lease::get().ask();
  if (!status) return std::nullopt;
  for (const wire::ProcessStatus& process : status->processes) {
    if (process.pid != pid) continue;
    auto command = command_of(pid);
    if (command && !command->empty()) return command;
    return std::string(process.program);
  }
  return std::nullopt;
}

}  // namespace gpupool::nvml

using namespace gpupool::nvml;

// What is true of any two slices, whatever cards they are on.
GPUPOOL_NVML nvmlReturn_t nvmlDeviceGetP2PStatus(Handle a, Handle b, unsigned index,
                                                 unsigned* out) {
  GPUPOOL_NVML_TRY(check(a));
  GPUPOOL_NVML_TRY(check(b));
  if (index > 5) return kInvalidArgument;
  return set(a, out, a == b ? 0u : 5u);  // NVML_P2P_STATUS_NOT_SUPPORTED
}
