// What a program in a virtual machine is given along with the first bytes.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "carriers/descriptors.h"
#include "mux_fixture.h"

namespace gpupool::carriers {
namespace {

// The descriptors that come with the next bytes; `text`: the bytes.
std::vector<int> receive_descriptors(int fd, std::string* text) {
  char bytes[65536];
  iovec part{bytes, sizeof bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  DescriptorRoom room;
  room.prepare(&message);
  const ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  std::vector<int> found;
  if (got <= 0) return found;
  text->append(bytes, static_cast<size_t>(got));
  take_descriptors(&message, [&](int one) { found.push_back(one); });
  return found;
}

TEST_F(MuxTest, TheFirstBytesToAProgramBringTheDescriptor) {
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  guest.given = host.given = pipe_ends[1];
  ASSERT_TRUE(wire.up(guest, host));
  const int program = guest.open(), other = guest.open();
  ASSERT_TRUE(wire.until(guest, host, [&] { return host.sockets.size() == 2; }));
  ASSERT_EQ(send(program, "up", 2, 0), 2);
  ASSERT_EQ(send(host.sockets[0], "one", 3, 0), 3);
  std::string text, up;
  std::vector<int> fds, at_host;
  ASSERT_TRUE(wire.until(guest, host, [&] {
    for (int fd : receive_descriptors(program, &text)) fds.push_back(fd);
    for (int fd : receive_descriptors(host.sockets[0], &up)) at_host.push_back(fd);
    return text == "one" && up == "up";
  }));
  ASSERT_EQ(fds.size(), 1u);
  EXPECT_TRUE(at_host.empty());  // the host gives none away
  struct stat given, got;
  ASSERT_EQ(fstat(pipe_ends[1], &given), 0);
  ASSERT_EQ(fstat(fds[0], &got), 0);
  EXPECT_EQ(given.st_ino, got.st_ino);
  // Once, and not where there is none any more.
  guest.given = -1;
  ASSERT_EQ(send(host.sockets[0], "two", 3, 0), 3);
  ASSERT_EQ(send(host.sockets[1], "three", 5, 0), 5);
  std::string more;
  ASSERT_TRUE(wire.until(guest, host, [&] {
    for (int fd : receive_descriptors(program, &text)) fds.push_back(fd);
    for (int fd : receive_descriptors(other, &more)) fds.push_back(fd);
    return text == "onetwo" && more == "three";
  }));
  EXPECT_EQ(fds.size(), 1u);
  for (int fd : {fds[0], pipe_ends[0], pipe_ends[1]}) close(fd);
}

}  // namespace
}  // namespace gpupool::carriers
