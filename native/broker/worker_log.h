// What a worker writes to its standard output and error, until a limit, into
// <run_dir>/log/worker-<session>.log, as far as the lease has room there. What it says before it
// has a session is kept for then.
#pragma once

#include <cstdint>
#include <string>

#include "broker/fd.h"
#include "broker/worker_logs.h"

namespace gpupool::broker {

class EventLoop;

class WorkerLog {
 public:
  WorkerLog(EventLoop& loop, Fd pipe, WorkerLogs& logs, uint64_t limit);
  ~WorkerLog();
  WorkerLog(const WorkerLog&) = delete;
  WorkerLog& operator=(const WorkerLog&) = delete;

  void begin(const std::string& session, const wire::Uuid& lease);
  void drain();  // takes what is in the pipe now
  // The beginning of what was written, for a worker that died without a session.
  const std::string& early() const { return early_; }

 private:
  void take(const char* data, size_t bytes);

  EventLoop& loop_;
  Fd pipe_;
  WorkerLogs& logs_;
  WorkerLogs::Log* log_ = nullptr;  // none: no session yet
  std::string early_;
  Fd file_;
  uint64_t left_;
  bool failed_ = false;
};

}  // namespace gpupool::broker
