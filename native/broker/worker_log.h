// What a worker writes to its standard output and error, until a limit, into
// <run_dir>/log/worker-<session>.log. What it says before it has a session is kept for then.
#pragma once

#include <cstdint>
#include <string>

#include "broker/fd.h"

namespace gpupool::broker {

class EventLoop;

class WorkerLog {
 public:
  WorkerLog(EventLoop& loop, Fd pipe, std::string directory, uint64_t limit);
  ~WorkerLog();
  WorkerLog(const WorkerLog&) = delete;
  WorkerLog& operator=(const WorkerLog&) = delete;

  void begin(const std::string& session);
  void drain();  // takes what is in the pipe now
  // The beginning of what was written, for a worker that died without a session.
  const std::string& early() const { return early_; }

 private:
  void take(const char* data, size_t bytes);

  EventLoop& loop_;
  Fd pipe_;
  std::string directory_;
  std::string path_;  // empty: no session yet
  std::string early_;
  Fd file_;
  uint64_t left_;
  bool failed_ = false;
};

// Makes the directory, readable by its owner only; removes the oldest logs above `keep`.
void prepare_log_directory(const std::string& directory, size_t keep);

}  // namespace gpupool::broker
