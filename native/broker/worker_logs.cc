#include "broker/worker_logs.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "broker/log.h"

namespace gpupool::broker {
namespace {

constexpr uint64_t kBlock = 4096;  // what even the shortest file takes

uint64_t blocks(uint64_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

uint64_t less(uint64_t whole, uint64_t part) { return whole - std::min(whole, part); }

}  // namespace

WorkerLogs::WorkerLogs(std::string directory) : WorkerLogs(std::move(directory), Limits()) {}

WorkerLogs::WorkerLogs(std::string directory, const Limits& limits)
    : directory_(std::move(directory)), limits_(limits) {
  if (prepare()) take_old_ones();
}

bool WorkerLogs::prepare() {
  if (mkdir(directory_.c_str(), 0700) != 0 && errno != EEXIST) {
    log(LogLevel::kWarning, "no worker logs: cannot make " + directory_ + ": " + strerror(errno));
    return false;
  }
  struct stat status;
  if (lstat(directory_.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) ||
      (status.st_uid != 0 && status.st_uid != geteuid())) {
    log(LogLevel::kWarning, "no worker logs: " + directory_ + " is not a directory of our own");
    return false;
  }
  return true;
}

void WorkerLogs::take_old_ones() {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<std::pair<fs::file_time_type, Log>> found;
  for (const auto& entry : fs::directory_iterator(directory_, error)) {
    if (!entry.path().filename().string().starts_with("worker-") || !entry.is_regular_file(error) ||
        entry.is_symlink(error)) {
      continue;
    }
    const uint64_t bytes = entry.file_size(error);
    if (error) continue;
    found.emplace_back(entry.last_write_time(error), Log{entry.path().string(), {}, bytes});
  }
  std::sort(found.begin(), found.end(),
            [](const auto& one, const auto& other) { return one.first < other.first; });
  for (auto& [time, old] : found) {
    count(old, blocks(old.bytes));
    running_.push_back(std::move(old));
    finish(&running_.back());
  }
  while (bytes_ > limits_.all && remove_oldest(nullptr)) {
  }
}

WorkerLogs::Log* WorkerLogs::begin(const std::string& session, const wire::Uuid& lease) {
  running_.push_back({directory_ + "/worker-" + session + ".log", lease});
  return &running_.back();
}

void WorkerLogs::count(const Log& log, uint64_t grown) {
  if (grown == 0) return;
  bytes_ += grown;
  leases_[log.lease].bytes += grown;
}

uint64_t WorkerLogs::grow(Log& log, uint64_t bytes) {
  const uint64_t had = blocks(log.bytes);
  const uint64_t wanted = blocks(log.bytes + bytes) - had;
  const auto used = [&] {
    const auto found = leases_.find(log.lease);
    return found == leases_.end() ? 0 : found->second.bytes;
  };
  while (used() + wanted > limits_.lease && remove_oldest(&log.lease)) {
  }
  while (bytes_ + wanted > limits_.all && remove_oldest(nullptr)) {
  }
  const uint64_t room = std::min(less(limits_.lease, used()), less(limits_.all, bytes_));
  const uint64_t size = std::min(log.bytes + bytes, had + room / kBlock * kBlock);
  count(log, blocks(size) - had);
  const uint64_t granted = size - log.bytes;
  log.bytes = size;
  return granted;
}

void WorkerLogs::finish(Log* log) {
  const auto found = std::find_if(running_.begin(), running_.end(),
                                  [log](const Log& entry) { return &entry == log; });
  if (log->bytes == 0) {  // there is no file
    running_.erase(found);
    return;
  }
  finished_.splice(finished_.end(), running_, found);
  const wire::Uuid lease = log->lease;
  Use& use = leases_[lease];
  use.finished_bytes += blocks(log->bytes);
  use.finished++;
  if (lease != wire::Uuid{}) {
    while (leases_.contains(lease) && (leases_[lease].finished_bytes > limits_.lease_finished ||
                                       leases_[lease].finished > limits_.lease_files)) {
      remove_oldest(&lease);
    }
  }
  while (finished_.size() > limits_.files) remove_oldest(nullptr);
}

void WorkerLogs::remove(Logs::iterator log) {
  if (unlink(log->path.c_str()) != 0 && errno != ENOENT) {
    log_limited("worker log " + log->path + " stays: " + strerror(errno));
  }
  const uint64_t bytes = blocks(log->bytes);
  bytes_ -= bytes;
  const auto use = leases_.find(log->lease);
  use->second.bytes -= bytes;
  use->second.finished_bytes -= bytes;
  use->second.finished--;
  if (use->second.bytes == 0) leases_.erase(use);
  finished_.erase(log);
}

bool WorkerLogs::remove_oldest(const wire::Uuid* lease) {
  const auto found = std::find_if(finished_.begin(), finished_.end(), [lease](const Log& log) {
    return lease == nullptr || log.lease == *lease;
  });
  if (found == finished_.end()) return false;
  remove(found);
  return true;
}

}  // namespace gpupool::broker
