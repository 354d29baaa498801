// Descriptors that travel with a message over a unix socket.
#pragma once

#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>

namespace gpupool::carriers {

constexpr size_t kMaxDescriptors = 4;  // with one message

// Room for descriptors; lives as long as the message.
class DescriptorRoom {
 public:
  // For receiving.
  void prepare(msghdr* message) {
    message->msg_control = bytes_;
    message->msg_controllen = sizeof bytes_;
  }
  // For sending; none: the message stays as it is.
  void attach(msghdr* message, const int* fds, size_t count) {
    if (count == 0) return;
    message->msg_control = bytes_;
    message->msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* head = CMSG_FIRSTHDR(message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(head), fds, count * sizeof(int));
  }

 private:
  alignas(cmsghdr) char bytes_[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
};

// `take(int fd)` for each that came with a received message; it then owns it.
template <typename Take>
void take_descriptors(msghdr* message, Take&& take) {
  for (cmsghdr* c = CMSG_FIRSTHDR(message); c != nullptr; c = CMSG_NXTHDR(message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; i++) {
      int fd;
      memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
      take(fd);
    }
  }
}

}  // namespace gpupool::carriers
