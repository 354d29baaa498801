#include "worker/channel.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "carriers/descriptors.h"

namespace gpupool::worker {

bool send_message(int channel, MessageKind kind, uint64_t value, std::string_view payload,
                  const std::vector<int>& fds, uint64_t limit, uint64_t used, bool wait) {
  payload = payload.substr(0, kMaxPayload);
  MessageHeader header{static_cast<uint32_t>(kind), static_cast<uint32_t>(payload.size()), value,
                       limit, used};
  iovec parts[2] = {{&header, sizeof header}, {const_cast<char*>(payload.data()), payload.size()}};
  msghdr packet{};
  packet.msg_iov = parts;
  packet.msg_iovlen = payload.empty() ? 1 : 2;
  carriers::DescriptorRoom room;
  room.attach(&packet, fds.data(), std::min(fds.size(), carriers::kMaxDescriptors));
  for (;;) {
    if (sendmsg(channel, &packet, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT)) >= 0) return true;
    if (errno != EINTR) return false;
  }
}

ReceiveStatus receive_message(int channel, Message* message, bool wait) {
  char payload[kMaxPayload];
  iovec parts[2] = {{&message->header, sizeof message->header}, {payload, sizeof payload}};
  carriers::DescriptorRoom room;
  msghdr packet{};
  packet.msg_iov = parts;
  packet.msg_iovlen = 2;
  room.prepare(&packet);
  ssize_t got;
  do {
    got = recvmsg(channel, &packet, MSG_CMSG_CLOEXEC | (wait ? 0 : MSG_DONTWAIT));
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    return errno == EAGAIN || errno == EWOULDBLOCK ? ReceiveStatus::kNothing
                                                   : ReceiveStatus::kClosed;
  }
  message->fds.clear();
  carriers::take_descriptors(&packet, [message](int fd) { message->fds.push_back(fd); });
  const bool whole =
      static_cast<size_t>(got) >= sizeof(MessageHeader) &&
      (packet.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0 &&
      static_cast<size_t>(got) == sizeof(MessageHeader) + message->header.payload_bytes;
  if (!whole) {
    for (int fd : message->fds) close(fd);
    message->fds.clear();
    return ReceiveStatus::kClosed;
  }
  message->payload.assign(payload, static_cast<size_t>(got) - sizeof(MessageHeader));
  return ReceiveStatus::kMessage;
}

}  // namespace gpupool::worker
