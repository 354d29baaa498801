// The driver behind a worker: loaded with dlopen, its functions found with cuGetProcAddress. A
// worker links no CUDA library.
#pragma once

#include <memory>
#include <string>

#include "api/cuda_abi.h"
#include "wire/control.h"

namespace gpupool::worker {

// Generated: one pointer per function that the worker calls, null where this driver lacks it.
struct DriverTable;

class Driver {
 public:
  // `directory`: where libcuda.so.1 lies; empty: the system's. Calls cuInit. Null and a sentence in
  // `why` if there is no usable driver.
  static std::unique_ptr<Driver> load(const std::string& directory, std::string* why);
  ~Driver();

  const DriverTable& table() const { return *table_; }
  const DriverTable* operator->() const { return table_.get(); }
  int device_count() const { return device_count_; }
  // Ordinal of the device with this UUID, written as "GPU-…" or "MIG-…"; -1: none.
  int ordinal(const std::string& uuid) const;

 private:
  Driver();
  void* library_ = nullptr;
  std::unique_ptr<DriverTable> table_;
  int device_count_ = 0;
};

// Everything a client asks about a device, except what is the slice's own (virtual UUID, memory,
// PCI address, share): the broker fills that in. False and a sentence in `why` if the driver fails.
bool take_snapshot(const Driver& driver, int ordinal, wire::DeviceSnapshot* snapshot,
                   std::string* why);

}  // namespace gpupool::worker
