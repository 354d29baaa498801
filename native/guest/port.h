// The guest's end of the virtio-serial port: where it is, and whether its host is there.
#pragma once

#include <string>

#include "broker/fd.h"

namespace gpupool::guest {

using broker::Fd;

constexpr char kPortDirectory[] = "/dev/virtio-ports/";
constexpr char kPort[] = "/dev/virtio-ports/org.gpupool.0";

class Port {
 public:
  enum class State {
    kAbsent,  // no such device
    kFailed,  // it cannot be opened: problem()
    kNoHost,  // open, and nobody is at the host's end
    kReady,
  };

  // `path`: the device; a unix socket is connected to instead (tests).
  explicit Port(std::string path) : path_(std::move(path)) {}

  // Looks, opens or closes: what can be done now.
  State look();
  // Gives a port up whose stream has ended.
  void hung_up();

  const std::string& path() const { return path_; }
  const std::string& problem() const { return problem_; }
  int fd() const { return fd_.get(); }

 private:
  std::string device() const;
  bool still_there() const;
  State open_device(const std::string& device);
  State connect_socket();

  const std::string path_;
  Fd fd_;
  bool socket_ = false;
  std::string problem_;
};

}  // namespace gpupool::guest
