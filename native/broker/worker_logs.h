// The directory of the workers' logs, <run_dir>/log, and how much of it each lease may take: what a
// worker writes is a tenant's to choose, and the directory's room is everybody's.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <string>

#include "wire/handshake.h"

namespace gpupool::broker {

class WorkerLogs {
 public:
  // Bytes in blocks of the file system; see doc/operation.md.
  struct Limits {
    uint64_t lease_finished = 8 << 20;  // the logs of ended workers of a lease
    uint64_t lease = 16 << 20;          // with those of running ones
    uint64_t all = 64 << 20;
    size_t lease_files = 64;  // of ended workers
    size_t files = 256;
  };
  // One worker's, from its session's beginning to its end.
  struct Log {
    std::string path;
    wire::Uuid lease{};  // zero: an earlier broker's
    uint64_t bytes = 0;
  };

  // Makes the directory, readable by its owner only, and counts what an earlier broker left there.
  explicit WorkerLogs(std::string directory);
  WorkerLogs(std::string directory, const Limits& limits);

  Log* begin(const std::string& session, const wire::Uuid& lease);
  // How many of these bytes may be written; removes the oldest logs of ended workers for them, of
  // the lease if it is the lease's room that is used up. The log has grown by what is returned.
  uint64_t grow(Log& log, uint64_t bytes);
  void finish(Log* log);

 private:
  struct Use {
    uint64_t bytes = 0, finished_bytes = 0;
    size_t finished = 0;
  };
  using Logs = std::list<Log>;

  bool prepare();
  void take_old_ones();
  void remove(Logs::iterator log);
  bool remove_oldest(const wire::Uuid* lease);  // of all: null
  void count(const Log& log, uint64_t grown);   // in blocks

  const std::string directory_;
  const Limits limits_;
  Logs running_, finished_;  // the latter by the time of their end
  std::map<wire::Uuid, Use> leases_;
  uint64_t bytes_ = 0;
};

}  // namespace gpupool::broker
