#include "worker/channel.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

namespace gpupool::worker {

bool send_message(int channel, MessageKind kind, uint64_t value, std::string_view payload,
                  int fd_to_pass, uint64_t limit, uint64_t used, bool wait) {
  payload = payload.substr(0, kMaxPayload);
  MessageHeader header{static_cast<uint32_t>(kind), static_cast<uint32_t>(payload.size()), value,
                       limit, used};
  iovec parts[2] = {{&header, sizeof header}, {const_cast<char*>(payload.data()), payload.size()}};
  msghdr packet{};
  packet.msg_iov = parts;
  packet.msg_iovlen = payload.empty() ? 1 : 2;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd_to_pass >= 0) {
    packet.msg_control = control;
    packet.msg_controllen = sizeof control;
    cmsghdr* attached = CMSG_FIRSTHDR(&packet);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(attached), &fd_to_pass, sizeof(int));
  }
  for (;;) {
    if (sendmsg(channel, &packet, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT)) >= 0) return true;
    if (errno != EINTR) return false;
  }
}

ReceiveStatus receive_message(int channel, Message* message, bool wait) {
  char payload[kMaxPayload];
  iovec parts[2] = {{&message->header, sizeof message->header}, {payload, sizeof payload}};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
  msghdr packet{};
  packet.msg_iov = parts;
  packet.msg_iovlen = 2;
  packet.msg_control = control;
  packet.msg_controllen = sizeof control;
  ssize_t got;
  do {
    got = recvmsg(channel, &packet, MSG_CMSG_CLOEXEC | (wait ? 0 : MSG_DONTWAIT));
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    return errno == EAGAIN || errno == EWOULDBLOCK ? ReceiveStatus::kNothing
                                                   : ReceiveStatus::kClosed;
  }
  message->fd = -1;
  for (cmsghdr* c = CMSG_FIRSTHDR(&packet); c != nullptr; c = CMSG_NXTHDR(&packet, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; i++) {
      int fd;
      memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
      if (message->fd < 0) {
        message->fd = fd;
      } else {
        close(fd);
      }
    }
  }
  const bool whole =
      static_cast<size_t>(got) >= sizeof(MessageHeader) &&
      (packet.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0 &&
      static_cast<size_t>(got) == sizeof(MessageHeader) + message->header.payload_bytes;
  if (!whole) {
    if (message->fd >= 0) close(message->fd);
    message->fd = -1;
    return ReceiveStatus::kClosed;
  }
  message->payload.assign(payload, static_cast<size_t>(got) - sizeof(MessageHeader));
  return ReceiveStatus::kMessage;
}

}  // namespace gpupool::worker
