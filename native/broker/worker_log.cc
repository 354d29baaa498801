#include "broker/worker_log.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>

#include <algorithm>

#include "broker/log.h"
#include "broker/loop.h"

namespace gpupool::broker {
namespace {

constexpr char kAtLimit[] = "\n[the log ends here: its limit is reached]\n";
constexpr char kNoRoom[] =
    "\n[the log ends here: the logs of its lease, or all, take the room there is]\n";
constexpr size_t kNoteRoom = 128;  // of each log, for one of these
static_assert(sizeof kAtLimit <= kNoteRoom && sizeof kNoRoom <= kNoteRoom);
constexpr size_t kEarlyLimit = 16 * 1024;
constexpr int kReadsAtOnce = 8;  // then the loop looks after the others

}  // namespace

WorkerLog::WorkerLog(EventLoop& loop, Fd pipe, WorkerLogs& logs, uint64_t limit)
    : loop_(loop), pipe_(std::move(pipe)), logs_(logs), left_(limit) {
  loop_.watch(pipe_.get(), EPOLLIN, [this](uint32_t) { drain(); });
}

WorkerLog::~WorkerLog() {
  if (pipe_) loop_.forget(pipe_.get());
  if (log_ != nullptr) logs_.finish(log_);
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

void WorkerLog::begin(const std::string& session, const wire::Uuid& lease) {
  log_ = logs_.begin(session, lease);
  std::string early;
  early.swap(early_);
  if (!early.empty()) take(early.data(), early.size());
}

// Beyond the limit the pipe is still emptied, so that the worker never waits for its log.
void WorkerLog::take(const char* data, size_t bytes) {
  if (log_ == nullptr) {
    early_.append(data, std::min(bytes, kEarlyLimit - std::min(kEarlyLimit, early_.size())));
    return;
  }
  if (failed_ || left_ == 0) return;
  if (!file_) {
    if (logs_.grow(*log_, kNoteRoom) < kNoteRoom) {
      failed_ = true;
      return log_limited("there is no room for worker log " + log_->path);
    }
    file_.reset(
        open(log_->path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
  }
  std::string_view end;
  if (bytes >= left_) {
    bytes = left_;
    end = kAtLimit;
  }
  left_ -= bytes;
  if (const uint64_t granted = logs_.grow(*log_, bytes); granted < bytes) {
    bytes = granted;
    left_ = 0;
    end = kNoRoom;
  }
  const bool written =
      file_ && write(file_.get(), data, bytes) == static_cast<ssize_t>(bytes) &&
      write(file_.get(), end.data(), end.size()) == static_cast<ssize_t>(end.size());
  if (!written) {
    failed_ = true;
    log_limited("worker log " + log_->path + " is not written any further: " + strerror(errno));
  }
}

}  // namespace gpupool::broker
