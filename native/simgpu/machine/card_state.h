// The state of one simulated card that all processes of the machine share: who holds how much of
// its memory, and whose turn it is to compute. It lies in a mapped file and survives the sudden
// death of any process: a process's slot is guarded by a file lock that the kernel drops with it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace gpupool::simgpu {

struct CardPage;  // the layout of the file

struct CardProcess {
  int pid = 0;  // in the pid namespace of that process
  uint32_t uid = 0;
  uint64_t used_bytes = 0;
  uint32_t contexts = 0;
  uint32_t utilization_percent = 0;  // its share of the last second
};

class CardState {
 public:
  // Opens (or makes) the card's file. nullptr: `error` says in one sentence what went wrong.
  static std::unique_ptr<CardState> open(const std::string& directory, const std::string& uuid,
                                         uint64_t total_bytes, std::string* error);
  ~CardState();
  CardState(const CardState&) = delete;
  CardState& operator=(const CardState&) = delete;

  // Takes a slot for this process; needed before charge() and acquire(). False: too many processes.
  bool join();
  // Takes `bytes` from the card. False: the card has not that much, even after what dead processes
  // held was given back.
  bool charge(uint64_t bytes);
  void uncharge(uint64_t bytes);
  void add_contexts(int difference);
  uint64_t used_bytes();  // by all live processes
  std::vector<CardProcess> processes();

  // The card's compute unit belongs to one context at a time, in turns. acquire() waits for this
  // context's turn; false: `cancelled` said so first. release() gives the card to the next waiter.
  bool acquire(uint32_t context, const std::function<bool()>& cancelled);
  void release();
  // True when the holder's turn is over and another context waits.
  bool turn_is_over() const;
  // Adds the time since the turn began (or since the last call) to the busy time of the card and of
  // this process.
  void note_busy();
  // Share of the last second in which the card was held, in percent.
  uint32_t utilization_percent() const;

  // In a fork()ed child: forget the file without touching what the parent holds.
  void abandon();

 private:
  CardState() = default;
  void lock();
  void unlock();
  bool slot_is_alive(uint32_t slot) const;  // slot numbers count from 0
  void reap();                              // with the lock held
  void hand_over();                         // with the lock held and no holder
  uint64_t sum() const;

  CardPage* page_ = nullptr;
  int fd_ = -1;
  int slot_ = -1;
  uint64_t total_ = 0;
  std::atomic<uint64_t> busy_since_{0};
};

}  // namespace gpupool::simgpu
