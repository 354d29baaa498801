#include "guest/port.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

namespace gpupool::guest {
namespace {

constexpr char kClass[] = "/sys/class/virtio-ports";

std::string first_line(const std::string& path) {
  const Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[256];
  const ssize_t got = file ? read(file.get(), text, sizeof text) : 0;
  std::string line(text, got > 0 ? static_cast<size_t>(got) : 0);
  return line.substr(0, line.find('\n'));
}

// /dev/virtio-ports is udev's; without it the kernel's own list has the names.
std::string find_by_name(const std::string& name) {
  DIR* directory = opendir(kClass);
  if (directory == nullptr) return {};
  std::string found;
  while (const dirent* entry = readdir(directory)) {
    const std::string device = entry->d_name;
    if (device[0] != '.' && first_line(std::string(kClass) + "/" + device + "/name") == name) {
      found = "/dev/" + device;
    }
  }
  closedir(directory);
  return found;
}

}  // namespace

std::string Port::device() const {
  struct stat status;
  if (stat(path_.c_str(), &status) == 0) return path_;
  const std::string directory = kPortDirectory;
  if (path_.compare(0, directory.size(), directory) != 0) return {};
  return find_by_name(path_.substr(directory.size()));
}

// A port that was unplugged and plugged in again is another file of the same name.
bool Port::still_there() const {
  struct stat now, open;
  const std::string device = this->device();
  return !device.empty() && stat(device.c_str(), &now) == 0 && fstat(fd_.get(), &open) == 0 &&
         now.st_dev == open.st_dev && now.st_ino == open.st_ino;
}

Port::State Port::look() {
  if (fd_ && !socket_ && !still_there()) fd_.reset();
  if (!fd_) {
    const std::string device = this->device();
    struct stat status;
    if (device.empty() || stat(device.c_str(), &status) != 0) return State::kAbsent;
    socket_ = S_ISSOCK(status.st_mode);
    const State state = socket_ ? connect_socket() : open_device(device);
    if (!fd_) return state;
  }
  pollfd state{fd_.get(), POLLIN, 0};
  if (poll(&state, 1, 0) > 0 && (state.revents & (POLLHUP | POLLERR)) != 0) {
    if (socket_) fd_.reset();
    return State::kNoHost;
  }
  return State::kReady;
}

Port::State Port::open_device(const std::string& device) {
  fd_.reset(open(device.c_str(), O_RDWR | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (fd_) return State::kReady;
  if (errno == ENOENT || errno == ENXIO || errno == ENODEV) return State::kAbsent;
  problem_ = errno == EBUSY ? "another process has it open" : strerror(errno);
  return State::kFailed;
}

Port::State Port::connect_socket() {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path_.copy(address.sun_path, sizeof address.sun_path - 1);
  fd_.reset(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd_ && connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
    return State::kReady;
  }
  fd_.reset();
  return State::kNoHost;
}

void Port::hung_up() {
  if (socket_) fd_.reset();
}

}  // namespace gpupool::guest
