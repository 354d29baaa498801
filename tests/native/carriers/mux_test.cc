// Two ends of a multiplexer over a stream that is cut into random pieces, and ends that misbehave.
#include "carriers/mux.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "mux_fixture.h"

namespace gpupool::carriers {
namespace {

// A program at one end of a connection: sends its bytes and takes in what comes.
struct Talker {
  int fd;
  std::string to_send;
  size_t sent = 0;
  std::string got;
  bool ended = false;

  void step() {
    if (sent < to_send.size()) {
      const ssize_t n =
          send(fd, to_send.data() + sent, to_send.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n > 0) sent += static_cast<size_t>(n);
    }
    char buffer[65536];
    const ssize_t n = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (n > 0) got.append(buffer, static_cast<size_t>(n));
    if (n == 0) ended = true;
  }
};

std::string random_bytes(unsigned seed, size_t bytes) {
  std::mt19937 random(seed);
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

bool is_closed(int fd) {
  pollfd state{fd, POLLIN, 0};
  return poll(&state, 1, 0) > 0 && (state.revents & POLLHUP) != 0;
}

TEST_F(MuxTest, CarriesManyConnectionsInBothDirections) {
  ASSERT_TRUE(wire.up(guest, host));
  constexpr size_t kCount = 20;
  std::vector<Talker> inside, outside;
  for (size_t i = 0; i < kCount; i++) {
    inside.push_back({guest.open(), random_bytes(100 + static_cast<unsigned>(i), i * i * 1000)});
  }
  ASSERT_TRUE(wire.until(guest, host, [&] { return host.sockets.size() == kCount; }));
  for (size_t i = 0; i < kCount; i++) {
    outside.push_back({host.sockets[i], random_bytes(200 + static_cast<unsigned>(i), 300000)});
  }
  ASSERT_TRUE(wire.until(guest, host, [&] {
    bool done = true;
    for (size_t i = 0; i < kCount; i++) {
      inside[i].step();
      outside[i].step();
      done = done && inside[i].got.size() == outside[i].to_send.size() &&
             outside[i].got.size() == inside[i].to_send.size();
    }
    return done;
  }));
  for (size_t i = 0; i < kCount; i++) {
    EXPECT_TRUE(outside[i].got == inside[i].to_send) << i;
    EXPECT_TRUE(inside[i].got == outside[i].to_send) << i;
  }
  EXPECT_EQ(guest.faults + host.faults, 0);
}

TEST_F(MuxTest, ASocketThatIsNotReadKeepsNoOtherWaiting) {
  ASSERT_TRUE(wire.up(guest, host));
  Talker stuck{guest.open(), random_bytes(1, 8 << 20)};
  Talker other{guest.open(), random_bytes(2, 8 << 20)};
  ASSERT_TRUE(wire.until(guest, host, [&] { return host.sockets.size() == 2; }));
  Talker reader{host.sockets[1], random_bytes(3, 4 << 20)};
  size_t most = 0;
  ASSERT_TRUE(wire.until(guest, host, [&] {
    stuck.step();
    other.step();
    reader.step();
    most = std::max({most, host.mux->buffered(), guest.mux->buffered()});
    return reader.got.size() == other.to_send.size() && other.got.size() == reader.to_send.size();
  }));
  EXPECT_TRUE(reader.got == other.to_send);
  EXPECT_LT(stuck.sent, stuck.to_send.size());
  EXPECT_LT(most, 4u << 20);
  // And when it is read after all, nothing was lost.
  Talker late{host.sockets[0], ""};
  ASSERT_TRUE(wire.until(guest, host, [&] {
    stuck.step();
    late.step();
    return late.got.size() == stuck.to_send.size();
  }));
  EXPECT_TRUE(late.got == stuck.to_send);
}

TEST_F(MuxTest, AHalfClosedConnectionStillCarriesTheOtherHalf) {
  ASSERT_TRUE(wire.up(guest, host));
  Talker inside{guest.open(), "last words"};
  inside.step();
  shutdown(inside.fd, SHUT_WR);
  ASSERT_TRUE(wire.until(guest, host, [&] { return host.sockets.size() == 1; }));
  Talker outside{host.sockets[0], random_bytes(4, 500000)};
  ASSERT_TRUE(wire.until(guest, host, [&] {
    outside.step();
    inside.step();
    return outside.ended && inside.got.size() == outside.to_send.size();
  }));
  EXPECT_EQ(outside.got, "last words");
  EXPECT_TRUE(inside.got == outside.to_send);
  EXPECT_FALSE(inside.ended);
  shutdown(outside.fd, SHUT_WR);
  ASSERT_TRUE(wire.until(guest, host, [&] {
    inside.step();
    return inside.ended && guest.mux->channels() == 0 && host.mux->channels() == 0;
  }));
}

TEST_F(MuxTest, WhatWasSentBeforeACloseArrives) {
  ASSERT_TRUE(wire.up(guest, host));
  const int fd = guest.open();
  const std::string text = random_bytes(5, 50000);
  ASSERT_EQ(send(fd, text.data(), text.size(), 0), 50000);
  close(fd);
  guest.sockets.clear();
  ASSERT_TRUE(wire.until(guest, host, [&] { return host.sockets.size() == 1; }));
  Talker outside{host.sockets[0], ""};
  ASSERT_TRUE(wire.until(guest, host, [&] {
    outside.step();
    return outside.ended;
  }));
  EXPECT_TRUE(outside.got == text);
  EXPECT_EQ(host.mux->channels(), 0u);
}

TEST_F(MuxTest, ARefusedChannelSaysWhyAndHarmsNoOther) {
  ASSERT_TRUE(wire.up(guest, host));
  Talker good{guest.open(), "a"};
  ASSERT_TRUE(wire.until(guest, host, [&] { return host.sockets.size() == 1; }));
  host.refuse = "the lease has ended";
  Talker bad{guest.open(), "b"};
  bad.step();
  ASSERT_TRUE(wire.until(guest, host, [&] { return guest.not_accepted.size() == 1; }));
  EXPECT_EQ(guest.not_accepted[0], "the lease has ended");
  ASSERT_TRUE(wire.until(guest, host, [&] {
    bad.step();
    return bad.ended;
  }));
  Talker outside{host.sockets[0], "c"};
  ASSERT_TRUE(wire.until(guest, host, [&] {
    good.step();
    outside.step();
    return good.got == "c" && outside.got == "a";
  }));
  EXPECT_EQ(host.faults, 0);
}

TEST_F(MuxTest, NoMoreChannelsThanAllowed) {
  End few(Mux::Side::kHost, 3);
  ASSERT_TRUE(wire.up(guest, few));
  for (int i = 0; i < 5; i++) guest.open();
  ASSERT_TRUE(wire.until(guest, few, [&] { return guest.not_accepted.size() == 2; }));
  EXPECT_NE(guest.not_accepted[0].find("3"), std::string::npos);
  EXPECT_EQ(few.mux->channels(), 3u);
  EXPECT_EQ(few.faults, 0);
}

TEST_F(MuxTest, InformationArrivesWheneverItIsSet) {
  host.mux->set_info("{\"n\":1}");
  ASSERT_TRUE(wire.until(guest, host, [&] { return guest.info == "{\"n\":1}"; }));
  host.mux->set_info("{\"n\":2}");
  ASSERT_TRUE(wire.until(guest, host, [&] { return guest.info == "{\"n\":2}"; }));
}

// Either end is replaced at any byte of the stream: the old connections end, new ones work.
TEST_F(MuxTest, BothBeginAnewAtWhateverByteAnEndDies) {
  std::mt19937 random(11);
  ASSERT_TRUE(wire.up(guest, host));
  for (int round = 0; round < 60; round++) {
    guest.sockets.clear();
    host.sockets.clear();
    Talker inside{guest.open(), random_bytes(random(), 400000)};
    ASSERT_TRUE(wire.until(guest, host, [&] { return host.sockets.size() == 1; }));
    Talker outside{host.sockets[0], random_bytes(random(), 400000)};
    const int steps = static_cast<int>(random() % 60);
    for (int i = 0; i < steps; i++) {
      inside.step();
      outside.step();
      wire.step(guest, host);
    }
    // What it had not written yet is lost with it; what it wrote stays in the stream.
    const bool guest_dies = random() % 2 == 0;
    std::string& stream = guest_dies ? wire.upwards : wire.downwards;
    char buffer[300000];
    const int from = guest_dies ? guest.outside : host.outside;
    const ssize_t written = recv(from, buffer, sizeof buffer, MSG_DONTWAIT);
    if (written > 0) stream.append(buffer, random() % (static_cast<size_t>(written) + 1));
    (guest_dies ? guest : host).restart();
    ASSERT_TRUE(wire.until(guest, host, [&] {
      return is_closed(guest_dies ? outside.fd : inside.fd) && guest.mux->up() && host.mux->up();
    })) << round;
    if (!guest_dies) {
      // The guest learns of it from the host's hello.
      EXPECT_EQ(guest.mux->channels(), 0u) << round;
    }
    host.sockets.clear();
    Talker again{guest.open(), "once more"};
    ASSERT_TRUE(wire.until(guest, host, [&] { return host.sockets.size() == 1; })) << round;
    Talker answers{host.sockets[0], "yes"};
    ASSERT_TRUE(wire.until(guest, host, [&] {
      again.step();
      answers.step();
      return again.got == "yes" && answers.got == "once more";
    })) << round;
    for (int fd : {inside.fd, outside.fd, again.fd, answers.fd}) shutdown(fd, SHUT_RDWR);
    ASSERT_TRUE(wire.until(
        guest, host, [&] { return guest.mux->channels() == 0 && host.mux->channels() == 0; }));
  }
}

TEST_F(MuxTest, AHelloThatWasLostIsAskedForAgain) {
  char buffer[100000];
  while (recv(guest.outside, buffer, sizeof buffer, MSG_DONTWAIT) > 0) {
  }
  while (recv(host.outside, buffer, sizeof buffer, MSG_DONTWAIT) > 0) {
  }
  for (int i = 0; i < 100; i++) wire.step(guest, host);
  EXPECT_FALSE(guest.mux->up());
  guest.mux->ask_again();
  EXPECT_TRUE(wire.up(guest, host));
}

TEST_F(MuxTest, TheOwnerLearnsThatThePortHungUp) {
  ASSERT_TRUE(wire.up(guest, host));
  const int fd = guest.open();
  close(guest.outside);
  guest.outside = -1;
  while (guest.mux->run()) {
  }
  EXPECT_TRUE(is_closed(fd));
}

// ---- Hostile ends -------------------------------------------------------------------------------

std::string frame(uint32_t epoch, uint32_t channel, int kind, const std::string& body,
                  uint16_t reserved = 0) {
  const MuxHeader header{epoch, channel, static_cast<uint16_t>(kind), reserved,
                         static_cast<uint32_t>(body.size())};
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + body;
}

std::string hello_frame(uint64_t epoch, uint16_t low = 1, uint16_t high = 1) {
  MuxHello hello{};
  memcpy(hello.magic, kMuxMagic, sizeof hello.magic);
  hello.epoch = epoch;
  hello.version_min = low;
  hello.version_max = high;
  return frame(kMuxHelloEpoch, 0, 1, std::string(reinterpret_cast<char*>(&hello), sizeof hello));
}

std::string credit(uint64_t limit) {
  return std::string(reinterpret_cast<const char*>(&limit), sizeof limit);
}

constexpr uint32_t kEpoch = 0x1234567;

struct Bad {
  const char* name;
  std::string bytes;  // after a hello with kEpoch, and channel 1 opened
};

class HostileGuest : public ::testing::TestWithParam<Bad> {};

// Feeds the host what a guest of the test's own sends, and lets it react.
void feed(End& host, const std::string& bytes) {
  size_t at = 0;
  char sink[65536];
  for (int idle = 0; idle < 3;) {
    const ssize_t sent = at == bytes.size() ? 0
                                            : send(host.outside, bytes.data() + at,
                                                   bytes.size() - at, MSG_DONTWAIT | MSG_NOSIGNAL);
    at += sent > 0 ? static_cast<size_t>(sent) : 0;
    ASSERT_TRUE(host.mux->run());
    const ssize_t got = recv(host.outside, sink, sizeof sink, MSG_DONTWAIT);
    pollfd more{host.mux->fd(), POLLIN, 0};
    idle = sent <= 0 && got <= 0 && poll(&more, 1, 0) == 0 ? idle + 1 : 0;
  }
}

TEST_P(HostileGuest, EndsItsChannelsAndMayBeginAnew) {
  End host(Mux::Side::kHost);
  feed(host, hello_frame(kEpoch) + frame(kEpoch, 1, 2, ""));
  ASSERT_TRUE(host.mux->up());
  ASSERT_EQ(host.sockets.size(), 1u);
  feed(host, GetParam().bytes);
  EXPECT_EQ(host.faults, 1);
  EXPECT_FALSE(host.mux->up());
  EXPECT_TRUE(is_closed(host.sockets[0]));
  feed(host, "rubbish" + hello_frame(99) + frame(99, 1, 2, "") + frame(99, 1, 4, "data"));
  ASSERT_TRUE(host.mux->up());
  ASSERT_EQ(host.sockets.size(), 2u);
  char buffer[16];
  ASSERT_EQ(recv(host.sockets[1], buffer, sizeof buffer, MSG_DONTWAIT), 4);
  EXPECT_EQ(memcmp(buffer, "data", 4), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Frames, HostileGuest,
    ::testing::Values(
        Bad{"UnknownKind", frame(kEpoch, 1, 9, "")}, Bad{"KindZero", frame(kEpoch, 1, 0, "")},
        Bad{"Reserved", frame(kEpoch, 1, 4, "x", 1)},
        Bad{"WrongEpoch", frame(kEpoch + 1, 1, 4, "x")},
        Bad{"HelloAsAFrame", frame(kEpoch, 0, 1, std::string(128, 'x'))},
        Bad{"ShortHello", frame(kMuxHelloEpoch, 0, 1, "x")},
        Bad{"HelloWithoutMagic", frame(kMuxHelloEpoch, 0, 1, std::string(128, 'x'))},
        Bad{"HelloWithoutEpoch", hello_frame(uint64_t{7} << 32)},
        Bad{"OpenOfZero", frame(kEpoch, 0, 2, "")}, Bad{"OpenTwice", frame(kEpoch, 1, 2, "")},
        Bad{"OpenWithABody", frame(kEpoch, 2, 2, "x")}, Bad{"Accept", frame(kEpoch, 1, 3, "")},
        Bad{"Info", frame(kEpoch, 0, 8, "{}")}, Bad{"NeverOpened", frame(kEpoch, 2, 4, "x")},
        Bad{"NeverOpenedEnd", frame(kEpoch, 77, 6, "")}, Bad{"EmptyData", frame(kEpoch, 1, 4, "")},
        Bad{"LongData", frame(kEpoch, 1, 4, std::string(kMuxMaxData + 1, 'x'))},
        Bad{"GiganticData", frame(kEpoch, 1, 4, "x").replace(12, 4, "\xff\xff\xff\xff")},
        Bad{"MoreThanGranted", frame(kEpoch, 1, 4, std::string(kMuxMaxData, 'x')) +
                                   frame(kEpoch, 1, 4, std::string(kMuxMaxData, 'x')) +
                                   frame(kEpoch, 1, 4, "x")},
        Bad{"CreditBelow", frame(kEpoch, 1, 5, credit(kMuxFirstCredit - 1))},
        Bad{"CreditTooLarge", frame(kEpoch, 1, 5, credit(kMuxMaxWindow + 1))},
        Bad{"CreditHuge", frame(kEpoch, 1, 5, credit(UINT64_MAX))},
        Bad{"CreditShort", frame(kEpoch, 1, 5, "x")},
        Bad{"LongClose", frame(kEpoch, 1, 7, std::string(kMuxMaxText + 1, 'x'))},
        Bad{"EndTwice", frame(kEpoch, 1, 6, "") + frame(kEpoch, 1, 6, "")},
        Bad{"DataAfterEnd", frame(kEpoch, 1, 6, "") + frame(kEpoch, 1, 4, "x")}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(MuxHostile, AGuestOfALaterVersionIsRefusedWithASentence) {
  End host(Mux::Side::kHost);
  std::string got;
  const std::string hello = hello_frame(kEpoch, 2, 3);
  ASSERT_EQ(send(host.outside, hello.data(), hello.size(), 0), static_cast<ssize_t>(hello.size()));
  ASSERT_TRUE(host.mux->run());
  char buffer[65536];
  for (ssize_t n; (n = recv(host.outside, buffer, sizeof buffer, MSG_DONTWAIT)) > 0;) {
    got.append(buffer, static_cast<size_t>(n));
  }
  EXPECT_FALSE(host.mux->up());
  EXPECT_NE(host.refused.find("2 to 3"), std::string::npos);
  EXPECT_NE(got.find("no version"), std::string::npos);
  // One that speaks more than this version is served.
  feed(host, hello_frame(kEpoch + 5, 1, 9));
  EXPECT_TRUE(host.mux->up());
}

// Opens without end, and never reads: what is kept stays small.
TEST(MuxHostile, WhoNeverReadsFillsNoMemory) {
  End host(Mux::Side::kHost);
  std::string bytes = hello_frame(kEpoch);
  uint32_t channel = 0;
  size_t sent = 0, most = 0;
  for (int i = 0; i < 300000; i++) {
    while (bytes.size() < 65536) {
      channel++;
      bytes += frame(kEpoch, channel, 2, "") + frame(kEpoch, channel, 7, "");
    }
    const ssize_t n = send(host.outside, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) bytes.erase(0, static_cast<size_t>(n));
    if (n > 0) sent += static_cast<size_t>(n);
    ASSERT_TRUE(host.mux->run());
    for (int& fd : host.sockets) close(fd);
    host.sockets.clear();
    most = std::max(most, host.mux->buffered());
    if (n <= 0 && i > 10000) break;
  }
  EXPECT_GT(sent, 1u << 20);
  EXPECT_LT(most, 4u << 20);
}

// Each opening makes sockets: the owner's other work is not kept waiting for thousands of them.
TEST(MuxHostile, FewChannelsAreOpenedAtOnceAndNoneIsForgotten) {
  End host(Mux::Side::kHost);
  feed(host, hello_frame(kEpoch));
  std::string bytes;
  for (uint32_t c = 1; c <= 500; c++) bytes += frame(kEpoch, c, 2, "");
  ASSERT_EQ(send(host.outside, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  ASSERT_TRUE(host.mux->run());
  EXPECT_GT(host.sockets.size(), 0u);
  EXPECT_LE(host.sockets.size(), 32u);
  feed(host, "");
  EXPECT_EQ(host.sockets.size(), 500u);
  EXPECT_EQ(host.faults, 0);
}

// Every channel sends all that it may, and nobody reads on the host.
TEST(MuxHostile, MemoryIsBoundedWithAllChannelsFull) {
  End host(Mux::Side::kHost, 64);
  std::string bytes = hello_frame(kEpoch);
  for (uint32_t c = 1; c <= 64; c++) bytes += frame(kEpoch, c, 2, "");
  for (uint32_t c = 1; c <= 64; c++) {
    for (int i = 0; i < 2; i++) bytes += frame(kEpoch, c, 4, std::string(kMuxMaxData, 'x'));
  }
  feed(host, bytes);
  EXPECT_EQ(host.faults, 0);
  EXPECT_EQ(host.mux->channels(), 64u);
  EXPECT_LE(host.mux->buffered(), 64 * kMuxFirstCredit + (1u << 20));
}

// A right conversation in which some bytes are changed, left out or put in; and plain noise.
TEST(MuxHostile, NoiseNeverHarms) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; round++) {
    End host(Mux::Side::kHost, 8);
    std::string bytes = hello_frame(kEpoch);
    uint32_t highest = 0;
    for (int i = 0; i < 60; i++) {
      const uint32_t channel = 1 + static_cast<uint32_t>(random() % (highest + 1));
      switch (random() % 7) {
        case 0:
          bytes += frame(kEpoch, ++highest, 2, "");
          break;
        case 1:
          bytes += frame(kEpoch, channel, 6, "");
          break;
        case 2:
          bytes += frame(kEpoch, channel, 7, "bye");
          break;
        case 3:
          bytes += frame(kEpoch, channel, 5, credit(kMuxFirstCredit + random() % 1000000));
          break;
        default:
          bytes += frame(kEpoch, channel, 4, random_bytes(random(), 1 + random() % 3000));
      }
    }
    const int changes = static_cast<int>(random() % 4);
    for (int i = 0; i < changes; i++) {
      const size_t at = random() % bytes.size();
      switch (random() % 3) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes.erase(at, random() % 40);
          break;
        default:
          bytes.insert(at, random_bytes(random(), random() % 40));
      }
    }
    feed(host, bytes);
    EXPECT_LE(host.mux->channels(), 8u);
    EXPECT_LT(host.mux->buffered(), 4u << 20);
    // It can always begin anew.
    feed(host, std::string(kMuxFillerBytes, '\0') + hello_frame(kEpoch + 1));
    EXPECT_TRUE(host.mux->up()) << round;
    EXPECT_EQ(host.mux->channels(), 0u);
  }
}

}  // namespace
}  // namespace gpupool::carriers
