#include "simgpu/machine/card_state.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>

namespace gpupool::simgpu {
namespace {

constexpr uint64_t kMagic = 0x0002445241435047;  // "GPCARD", layout 2
constexpr uint32_t kSlots = 1024;
constexpr uint32_t kWaiters = 512;
constexpr uint64_t kTurn = 2'000'000;      // ns
constexpr uint64_t kBucket = 100'000'000;  // ns of one bucket of the busy time
constexpr uint32_t kBuckets = 16;
constexpr off_t kSlotLocks = off_t{1} << 40;  // file offset of the first slot's lock
constexpr long kRecheck = 20'000'000;         // ns between looks whether the holder is alive

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, long ns) {
  timespec timeout{0, ns};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

struct CardPage {
  // Busy time of the last second and a half.
  struct Busy {
    struct Bucket {
      std::atomic<uint64_t> number;  // time / kBucket
      std::atomic<uint64_t> busy;
    } buckets[kBuckets];

    void add(uint64_t since, uint64_t end);  // of one bucket
    uint32_t percent() const;                // of the last second
    void clear() {
      for (Bucket& bucket : buckets) bucket.number = bucket.busy = 0;
    }
  };

  uint64_t magic;
  pthread_mutex_t mutex;           // robust, shared between processes
  std::atomic<uint64_t> holder;    // (slot + 1) << 32 | context; 0: the card is free
  std::atomic<uint64_t> since;     // when the holder's turn began, CLOCK_MONOTONIC
  std::atomic<uint32_t> waiting;   // used entries of `waiters`
  std::atomic<uint32_t> sequence;  // futex word: changes when the holder changes
  uint64_t next_ticket;
  struct Waiter {
    uint64_t who;  // 0: the entry is free
    uint64_t ticket;
  } waiters[kWaiters];
  struct Slot {
    std::atomic<uint32_t> taken;
    int32_t pid;
    uint32_t uid;
    std::atomic<uint32_t> contexts;
    std::atomic<uint64_t> used;
    Busy busy;
  } slots[kSlots];
  uint32_t slots_end;  // slots from here on were never taken
  Busy busy;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

namespace {

bool make_directory(const std::string& directory) {
  if (mkdir(directory.c_str(), 01777) == 0) {
    chmod(directory.c_str(),
          01777);  // workers of several users share the card; umask took bits away
    return true;
  }
  return errno == EEXIST;
}

// Makes the file complete under another name and links it, so that nobody sees half a file.
bool create_file(const std::string& directory, const std::string& path) {
  std::string name = directory + "/.new-XXXXXX";
  int fd = mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) return false;
  bool made = false;
  if (ftruncate(fd, sizeof(CardPage)) == 0 && fchmod(fd, 0666) == 0) {
    void* at = mmap(nullptr, sizeof(CardPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) {
      auto* page = static_cast<CardPage*>(at);
      pthread_mutexattr_t attributes;
      pthread_mutexattr_init(&attributes);
      pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
      pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
      pthread_mutex_init(&page->mutex, &attributes);
      pthread_mutexattr_destroy(&attributes);
      page->magic = kMagic;
      munmap(at, sizeof(CardPage));
      made = link(name.c_str(), path.c_str()) == 0 || errno == EEXIST;
    }
  }
  int saved = errno;
  unlink(name.c_str());
  close(fd);
  errno = saved;
  return made;
}

}  // namespace

std::unique_ptr<CardState> CardState::open(const std::string& directory, const std::string& uuid,
                                           uint64_t total_bytes, std::string* error) {
  std::string path = directory + "/" + uuid + ".card-2";
  auto fail = [&](const std::string& what) {
    *error = "The state of the simulated GPU, " + path + ", " + what + ": " + strerror(errno) + ".";
    return nullptr;
  };
  if (!make_directory(directory)) return fail("can't be kept, its directory could not be made");
  // No O_CREAT on a file that may be another user's: sticky directories forbid that.
  int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) {
    if (!create_file(directory, path)) return fail("could not be made");
    fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  }
  if (fd < 0) return fail("could not be opened");
  struct stat status;
  if (fstat(fd, &status) != 0 || status.st_size < off_t(sizeof(CardPage))) {
    close(fd);
    errno = EINVAL;
    return fail("is too short; remove it when no simulated GPU is in use");
  }
  void* at = mmap(nullptr, sizeof(CardPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    close(fd);
    return fail("could not be mapped");
  }
  auto* page = static_cast<CardPage*>(at);
  if (page->magic != kMagic) {
    munmap(at, sizeof(CardPage));
    close(fd);
    errno = EINVAL;
    return fail("has another layout; remove it when no simulated GPU is in use");
  }
  std::unique_ptr<CardState> state(new CardState);
  state->page_ = page;
  state->fd_ = fd;
  state->total_ = total_bytes;
  return state;
}

CardState::~CardState() {
  if (!page_) return;
  if (slot_ >= 0) {
    lock();
    page_->slots[slot_].used = 0;
    page_->slots[slot_].contexts = 0;
    page_->slots[slot_].taken = 0;
    unlock();
  }
  munmap(page_, sizeof(CardPage));
  close(fd_);
}

void CardState::abandon() {
  if (fd_ >= 0) close(fd_);  // the parent's lock must end with the parent
  fd_ = -1;
}

void CardState::lock() {
  // Everything under the lock is written so that stopping anywhere leaves a usable state.
  if (pthread_mutex_lock(&page_->mutex) == EOWNERDEAD) pthread_mutex_consistent(&page_->mutex);
}

void CardState::unlock() { pthread_mutex_unlock(&page_->mutex); }

bool CardState::slot_is_alive(uint32_t slot) const {
  if (int(slot) == slot_) return true;
  if (slot >= kSlots || !page_->slots[slot].taken.load()) return false;
  struct flock probe = {};
  probe.l_type = F_WRLCK;
  probe.l_whence = SEEK_SET;
  probe.l_start = kSlotLocks + slot;
  probe.l_len = 1;
  if (fcntl(fd_, F_OFD_GETLK, &probe) != 0) return true;  // don't take from whom we can't judge
  return probe.l_type != F_UNLCK;
}

void CardState::reap() {
  for (uint32_t i = 0; i < page_->slots_end && i < kSlots; ++i) {
    auto& slot = page_->slots[i];
    if (slot.taken.load() && !slot_is_alive(i)) {
      slot.used = 0;
      slot.contexts = 0;
      slot.taken = 0;
    }
  }
}

uint64_t CardState::sum() const {
  uint64_t total = 0;
  for (uint32_t i = 0; i < page_->slots_end && i < kSlots; ++i) {
    if (page_->slots[i].taken.load()) total += page_->slots[i].used.load();
  }
  return total;
}

bool CardState::join() {
  lock();
  if (slot_ >= 0) {
    unlock();
    return true;
  }
  for (uint32_t i = 0; i < kSlots; ++i) {
    auto& slot = page_->slots[i];
    if (i < page_->slots_end && slot.taken.load() && slot_is_alive(i)) continue;
    struct flock claim = {};
    claim.l_type = F_WRLCK;
    claim.l_whence = SEEK_SET;
    claim.l_start = kSlotLocks + i;
    claim.l_len = 1;
    if (fcntl(fd_, F_OFD_SETLK, &claim) != 0) continue;
    slot.used = 0;
    slot.contexts = 0;
    slot.busy.clear();
    slot.pid = getpid();
    slot.uid = getuid();
    slot.taken = 1;
    page_->slots_end = std::max(page_->slots_end, i + 1);
    slot_ = int(i);
    break;
  }
  unlock();
  return slot_ >= 0;
}

bool CardState::charge(uint64_t bytes) {
  lock();
  uint64_t used = sum();
  if (bytes > total_ || used > total_ - bytes) {
    reap();
    used = sum();
  }
  bool fits = bytes <= total_ && used <= total_ - bytes;
  if (fits) page_->slots[slot_].used += bytes;
  unlock();
  return fits;
}

void CardState::uncharge(uint64_t bytes) {
  auto& used = page_->slots[slot_].used;
  uint64_t now = used.load();
  while (!used.compare_exchange_weak(now, now - std::min(now, bytes))) {
  }
}

void CardState::add_contexts(int difference) {
  page_->slots[slot_].contexts += uint32_t(difference);
}

uint64_t CardState::used_bytes() {
  lock();
  reap();
  uint64_t used = sum();
  unlock();
  return used;
}

std::vector<CardProcess> CardState::processes() {
  std::vector<CardProcess> list;
  lock();
  reap();
  for (uint32_t i = 0; i < page_->slots_end && i < kSlots; ++i) {
    const auto& slot = page_->slots[i];
    if (slot.taken.load() && slot.contexts.load()) {
      list.push_back(
          {slot.pid, slot.uid, slot.used.load(), slot.contexts.load(), slot.busy.percent()});
    }
  }
  unlock();
  return list;
}

void CardState::hand_over() {
  for (;;) {
    CardPage::Waiter* first = nullptr;
    for (auto& waiter : page_->waiters) {
      if (waiter.who && (!first || waiter.ticket < first->ticket)) first = &waiter;
    }
    if (!first) {
      page_->waiting = 0;
      return;
    }
    uint64_t who = first->who;
    first->who = 0;
    if (page_->waiting.load()) --page_->waiting;
    if (!slot_is_alive(uint32_t(who >> 32) - 1)) continue;
    uint64_t free = 0;
    page_->since = now_ns();
    if (!page_->holder.compare_exchange_strong(free, who)) {
      first->who = who;  // somebody was quicker: `first` waits on
      ++page_->waiting;
      return;
    }
    ++page_->sequence;
    futex_wake_all(&page_->sequence);
    return;
  }
}

bool CardState::acquire(uint32_t context, const std::function<bool()>& cancelled) {
  const uint64_t me = uint64_t(slot_ + 1) << 32 | context;
  uint64_t free = 0;
  if (!page_->waiting.load() && page_->holder.compare_exchange_strong(free, me)) {
    page_->since = now_ns();
    busy_since_ = page_->since.load();
    return true;
  }
  CardPage::Waiter* entry = nullptr;
  uint64_t ticket = 0;
  while (true) {
    lock();
    uint64_t holder = page_->holder.load();
    if (holder == me) {
      unlock();
      busy_since_ = page_->since.load();
      return true;
    }
    if (!entry || entry->who != me || entry->ticket != ticket) {
      entry = nullptr;
      for (auto& candidate : page_->waiters) {
        if (candidate.who && !slot_is_alive(uint32_t(candidate.who >> 32) - 1)) {
          candidate.who = 0;
          if (page_->waiting.load()) --page_->waiting;
        }
        if (!candidate.who && !entry) entry = &candidate;
      }
      if (entry) {
        ticket = ++page_->next_ticket;
        entry->ticket = ticket;
        entry->who = me;
        ++page_->waiting;
      }
      holder = page_->holder.load();
    }
    if (holder && !slot_is_alive(uint32_t(holder >> 32) - 1)) {
      page_->holder.compare_exchange_strong(holder, 0);
      holder = page_->holder.load();
    }
    if (!holder) hand_over();
    holder = page_->holder.load();
    uint32_t sequence = page_->sequence.load();
    if (holder != me && cancelled && cancelled()) {
      if (entry && entry->who == me && entry->ticket == ticket) {
        entry->who = 0;
        if (page_->waiting.load()) --page_->waiting;
      }
      unlock();
      return false;
    }
    unlock();
    if (holder != me) futex_wait(&page_->sequence, sequence, kRecheck);
  }
}

void CardState::release() {
  note_busy();
  page_->holder = 0;
  if (page_->waiting.load()) {
    lock();
    if (!page_->holder.load()) hand_over();
    unlock();
  }
}

bool CardState::turn_is_over() const {
  return page_->waiting.load() && now_ns() - page_->since.load() > kTurn;
}

void CardState::note_busy() {
  uint64_t now = now_ns(), since = busy_since_.exchange(now);
  while (since < now) {
    uint64_t end = std::min(now, (since / kBucket + 1) * kBucket);
    page_->busy.add(since, end);
    if (slot_ >= 0) page_->slots[slot_].busy.add(since, end);
    since = end;
    if (now - since > kBuckets * kBucket) since = now - kBuckets * kBucket;  // older is forgotten
  }
}

void CardPage::Busy::add(uint64_t since, uint64_t end) {
  const uint64_t number = since / kBucket;
  Bucket& bucket = buckets[number % kBuckets];
  uint64_t old = bucket.number.load();
  if (old != number && bucket.number.compare_exchange_strong(old, number)) bucket.busy = 0;
  bucket.busy += end - since;
}

uint32_t CardPage::Busy::percent() const {
  uint64_t now = now_ns(), current = now / kBucket, busy = 0;
  for (const Bucket& bucket : buckets) {
    uint64_t number = bucket.number.load();
    if (number <= current && current - number <= 10) busy += bucket.busy.load();
  }
  // What the present holder has not noted yet counts too.
  uint64_t window = 10 * kBucket + now % kBucket;
  return uint32_t(std::min<uint64_t>(100, busy * 100 / window));
}

uint32_t CardState::utilization_percent() const { return page_->busy.percent(); }

}  // namespace gpupool::simgpu
