// What a worker gives up before it reads a byte from a tenant: privileges, other descriptors, and
// system calls that no driver needs.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace gpupool::worker {

// Dies with the process `broker` (also when it is dead already); closes descriptors above
// kChannelFd; no core dumps, which would hold a tenant's data. False: `why` is one sentence.
bool confine_process(pid_t broker, std::string* why);

// Moves this process to a cgroup of its own below `parent`, a cgroup v2 directory. The broker
// removes it afterwards. A host without such a directory goes without: `why` says so.
bool enter_cgroup(const std::string& parent, std::string* why);

// Changes to `user` with its groups, for good. Nothing is done when this process is not root.
bool drop_privileges(const std::string& user, std::string* why);

// The most private memory that this process may have from now on: what it has, and its session's.
// Beyond it an allocation fails, so that a tenant's worker never drives its host out of memory.
class DataLimit {
 public:
  explicit DataLimit(uint64_t host_bytes);
  // A simulated device's memory is the process's too.
  void allow(uint64_t slice_bytes) const;

 private:
  uint64_t base_ = 0;  // 0: unknown, no limit
};

// After the driver was loaded, since some start a helper program then: no new privileges and the
// deny list of system calls, for all threads. They give EPERM.
bool deny_system_calls(std::string* why);

}  // namespace gpupool::worker
