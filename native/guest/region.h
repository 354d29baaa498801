// The memory that the virtual machine shares with its host: part of a device (ivshmem), found by
// what the host has written into its first page. It is of use only where the hypervisor lets it be
// cached, so its speed is measured.
#pragma once

#include <cstdint>
#include <string>

#include "broker/fd.h"
#include "guest/pci.h"

namespace gpupool::guest {

using broker::Fd;

class Region {
 public:
  enum class State {
    kAbsent,  // there is none, or it is of a lease that has ended
    kFailed,  // it cannot be used: problem()
    kSlow,    // other ways are faster
    kUsable,
  };

  // `path`: of the device's memory, or of a file; empty: that of a PCI device. `least`: MiB/s that
  // it has to move in either direction.
  Region(std::string path, uint64_t least) : wanted_(std::move(path)), least_(least) {}

  // Looks whether it is there, now and then; measures one that is new, or was slow. `now`: also if
  // it was looked at a moment ago.
  void look(bool now);

  State state() const { return state_; }
  // To be given to programs; -1: it is not to be used.
  int fd() const { return state_ == State::kUsable ? fd_.get() : -1; }
  const std::string& path() const { return path_; }
  const std::string& problem() const { return problem_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t read_speed() const { return read_speed_; }  // MiB/s
  uint64_t write_speed() const { return write_speed_; }
  uint64_t least() const { return least_; }

 private:
  bool still_there() const;
  bool open(const std::string& path);
  void measure(uint8_t* scratch);

  const std::string wanted_;
  const uint64_t least_;
  SharedMemoryDevices devices_;
  int64_t looked_ns_ = 0, measured_ns_ = 0;
  State state_ = State::kAbsent;
  Fd fd_;
  std::string path_, problem_;
  uint64_t bytes_ = 0, read_speed_ = 0, write_speed_ = 0;
};

}  // namespace gpupool::guest
