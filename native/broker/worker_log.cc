#include "broker/worker_log.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "broker/log.h"
#include "broker/loop.h"

namespace gpupool::broker {
namespace {

constexpr size_t kEarlyLimit = 16 * 1024;
constexpr int kReadsAtOnce = 8;  // then the loop looks after the others

}  // namespace

WorkerLog::WorkerLog(EventLoop& loop, Fd pipe, std::string directory, uint64_t limit)
    : loop_(loop), pipe_(std::move(pipe)), directory_(std::move(directory)), left_(limit) {
  loop_.watch(pipe_.get(), EPOLLIN, [this](uint32_t) { drain(); });
}

WorkerLog::~WorkerLog() {
  if (pipe_) loop_.forget(pipe_.get());
}

void WorkerLog::drain() {
  char chunk[16 * 1024];
  for (int i = 0; pipe_ && i < kReadsAtOnce; i++) {
    const ssize_t got = read(pipe_.get(), chunk, sizeof chunk);
    if (got > 0) {
      take(chunk, static_cast<size_t>(got));
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      loop_.forget(pipe_.get());
      pipe_.reset();
    } else {
      return;
    }
  }
}

void WorkerLog::begin(const std::string& session) {
  path_ = directory_ + "/worker-" + session + ".log";
  std::string early;
  early.swap(early_);
  if (!early.empty()) take(early.data(), early.size());
}

// Beyond the limit the pipe is still emptied, so that the worker never waits for its log.
void WorkerLog::take(const char* data, size_t bytes) {
  if (path_.empty()) {
    early_.append(data, std::min(bytes, kEarlyLimit - std::min(kEarlyLimit, early_.size())));
    return;
  }
  if (failed_ || left_ == 0) return;
  if (!file_)
    file_.reset(open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
  std::string end;
  if (bytes >= left_) {
    bytes = left_;
    end = "\n[the log ends here: its limit is reached]\n";
  }
  left_ -= bytes;
  const bool written =
      file_ && write(file_.get(), data, bytes) == static_cast<ssize_t>(bytes) &&
      write(file_.get(), end.data(), end.size()) == static_cast<ssize_t>(end.size());
  if (!written) {
    failed_ = true;
    log_limited("worker log " + path_ + " is not written any further: " + strerror(errno));
  }
}

void prepare_log_directory(const std::string& directory, size_t keep) {
  namespace fs = std::filesystem;
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    log(LogLevel::kWarning, "no worker logs: cannot make " + directory + ": " + strerror(errno));
    return;
  }
  struct stat status;
  if (lstat(directory.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) ||
      (status.st_uid != 0 && status.st_uid != geteuid())) {
    log(LogLevel::kWarning, "no worker logs: " + directory + " is not a directory of our own");
    return;
  }
  std::error_code error;
  std::vector<std::pair<fs::file_time_type, fs::path>> logs;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    if (entry.path().filename().string().starts_with("worker-") && entry.is_regular_file(error)) {
      logs.emplace_back(entry.last_write_time(error), entry.path());
    }
  }
  if (logs.size() <= keep) return;
  std::sort(logs.begin(), logs.end());
  for (size_t i = 0; i < logs.size() - keep; i++) fs::remove(logs[i].second, error);
}

}  // namespace gpupool::broker
