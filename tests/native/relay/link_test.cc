#include "relay/link.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <random>
#include <thread>

#include "relay/tls.h"

namespace gpupool::relay {
namespace {

using carriers::Moved;
using carriers::Part;
using carriers::Patience;
using carriers::Status;

constexpr int64_t kSecond = 1'000'000'000;

// Made once by OpenSSL's own program.
struct Certificates {
  std::filesystem::path root;
  TlsFiles files;
  Certificates() {
    char name[] = "/tmp/gpupool-link-XXXXXX";
    root = mkdtemp(name);
    files = {root / "host.crt", root / "host.key", root / "host.crt"};
    const std::string command =
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "
        "/CN=host "
        "-addext subjectAltName=DNS:host -keyout " +
        files.key + " -out " + files.certificate + " 2>/dev/null";
    if (system(command.c_str()) != 0) abort();
  }
  ~Certificates() { std::filesystem::remove_all(root); }
};

const TlsFiles& files() {
  signal(SIGPIPE, SIG_IGN);  // as gpupool-relay does
  static const Certificates certificates;
  return certificates.files;
}

const TlsContext& context(Role role) {
  std::string why;
  static const auto client = TlsContext::load(files(), Role::kClient, &why);
  static const auto server = TlsContext::load(files(), Role::kServer, &why);
  return role == Role::kClient ? *client : *server;
}

// Sockets on their way from the side that connects to the one that waits.
class Exchange {
 public:
  Exchange() : event_(eventfd(0, EFD_NONBLOCK | EFD_SEMAPHORE)) {}
  Fd connect() {
    int pair[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    std::lock_guard guard(lock_);
    last_[0] = dup(pair[0]);
    waiting_.push_back(pair[1]);
    const uint64_t one = 1;
    EXPECT_EQ(write(event_.get(), &one, sizeof one), 8);
    return Fd(pair[0]);
  }
  Fd accept(int64_t deadline_ns) {
    pollfd entry{event_.get(), POLLIN, 0};
    const int64_t left = (deadline_ns - Patience::now_ns()) / 1'000'000;
    if (left <= 0 || poll(&entry, 1, static_cast<int>(std::min<int64_t>(left, 200))) <= 0) {
      return {};
    }
    std::lock_guard guard(lock_);
    uint64_t one;
    if (read(event_.get(), &one, sizeof one) != 8) return {};
    const int fd = waiting_.front();
    waiting_.pop_front();
    return Fd(fd);
  }
  // The connection that stands is cut.
  void cut() {
    std::lock_guard guard(lock_);
    if (last_[0] >= 0) {
      ::shutdown(last_[0], SHUT_RDWR);
      close(last_[0]);
    }
    last_[0] = -1;
  }
  int event() const { return event_.get(); }
  std::atomic<bool> away{false};

 private:
  Fd event_;
  std::mutex lock_;
  std::deque<int> waiting_;
  int last_[1] = {-1};
};

class TestRenewal final : public Renewal {
 public:
  TestRenewal(Exchange& exchange, Role role) : exchange_(exchange), role_(role) {}
  std::unique_ptr<TlsConnection> renew(int64_t deadline_ns, bool*, std::string* why) override {
    if (exchange_.away) return *why = "away", nullptr;
    Fd fd = role_ == Role::kClient ? exchange_.connect() : exchange_.accept(deadline_ns);
    if (!fd) return nullptr;
    return context(role_).connect(std::move(fd), "host",
                                  std::min(deadline_ns, Patience::now_ns() + 2 * kSecond), why);
  }
  int news() const override { return role_ == Role::kServer ? exchange_.event() : -1; }
  bool take_news() override { return true; }

 private:
  Exchange& exchange_;
  const Role role_;
};

// Both ends of a link, with a small window so that it wraps often.
struct Ends {
  explicit Ends(int64_t interruption_ns = 10 * kSecond)
      : limits{interruption_ns, 256 << 10},
        near_renewal(exchange, Role::kClient),
        far_renewal(exchange, Role::kServer),
        near(near_renewal, limits),
        far(far_renewal, limits) {
    std::string near_why, far_why;
    std::thread other([&] { EXPECT_TRUE(begin(near, near_renewal, &near_why)) << near_why; });
    EXPECT_TRUE(begin(far, far_renewal, &far_why)) << far_why;
    other.join();
  }
  static bool begin(Link& link, TestRenewal& renewal, std::string* why) {
    const int64_t deadline = Patience::now_ns() + 10 * kSecond;
    bool hopeless = false;
    std::unique_ptr<TlsConnection> connection;
    while (connection == nullptr && Patience::now_ns() < deadline) {
      connection = renewal.renew(deadline, &hopeless, why);
    }
    return connection != nullptr && link.begin(std::move(connection), deadline, why);
  }

  const LinkLimits limits;
  Exchange exchange;
  TestRenewal near_renewal, far_renewal;
  Link near, far;
};

void send_numbers(Link& link, uint64_t bytes, unsigned seed) {
  std::mt19937 sizes(seed);
  std::vector<uint8_t> data(200'000);
  uint64_t at = 0;
  while (at < bytes) {
    const size_t size = std::min<uint64_t>(bytes - at, 1 + sizes() % data.size());
    for (size_t i = 0; i < size; i++) data[i] = static_cast<uint8_t>((at + i) * 2654435761u >> 13);
    ASSERT_TRUE(carriers::write_all(link, data.data(), size, -1));
    at += size;
  }
}

void expect_numbers(Link& link, uint64_t bytes, unsigned seed) {
  std::mt19937 sizes(seed);
  std::vector<uint8_t> data(200'000);
  uint64_t at = 0;
  while (at < bytes) {
    const Part part{data.data(), std::min<uint64_t>(bytes - at, 1 + sizes() % data.size())};
    const Moved moved = link.read(&part, 1, true);
    ASSERT_EQ(moved.status, Status::kOk) << link.ending();
    for (size_t i = 0; i < moved.bytes; i++) {
      ASSERT_EQ(data[i], static_cast<uint8_t>((at + i) * 2654435761u >> 13)) << at + i;
    }
    at += moved.bytes;
  }
}

void both_ways(Ends& ends, uint64_t bytes, const std::function<void()>& meanwhile) {
  std::atomic<int> busy{4};
  // Who reads goes on looking after its link until all are done.
  const auto read = [&](Link& link, unsigned seed) {
    expect_numbers(link, bytes, seed);
    for (busy--; busy > 0;) {
      link.pump();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  const auto write = [&](Link& link, unsigned seed) {
    send_numbers(link, bytes, seed);
    busy--;
  };
  std::thread threads[] = {
      std::thread([&] { write(ends.near, 1); }), std::thread([&] { read(ends.far, 2); }),
      std::thread([&] { write(ends.far, 3); }), std::thread([&] { read(ends.near, 4); })};
  meanwhile();
  for (std::thread& thread : threads) thread.join();
}

TEST(RelayLink, CarriesBothWays) {
  Ends ends;
  both_ways(ends, 8 << 20, [] {});
}

TEST(RelayLink, NothingIsLostOrComesTwice) {
  Ends ends;
  both_ways(ends, 16 << 20, [&] {
    for (int i = 0; i < 30; i++) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ends.exchange.cut();
    }
  });
}

TEST(RelayLink, WaitsForRoomUntilTheOtherSideReads) {
  Ends ends;
  const std::vector<uint8_t> data(64 << 10);
  const Part part{const_cast<uint8_t*>(data.data()), data.size()};
  size_t sent = 0;
  for (Moved moved{}; (moved = ends.near.write(&part, 1, false)).status == Status::kOk;) {
    sent += moved.bytes;
    ASSERT_LE(sent, ends.limits.window);
  }
  EXPECT_GT(sent, ends.limits.window / 2);
  // Whoever waits for something else takes it in all the same, and is told of what was read.
  ends.far.pump();
  std::vector<uint8_t> got(sent);
  ASSERT_TRUE(carriers::read_all(ends.far, got.data(), got.size(), 5'000'000));
  const int64_t deadline = Patience::now_ns() + 5 * kSecond;
  Moved moved{};
  while ((moved = ends.near.write(&part, 1, false)).status == Status::kBlocked) {
    ASSERT_LT(Patience::now_ns(), deadline);
    ends.near.pump();
  }
  EXPECT_EQ(moved.status, Status::kOk);
}

TEST(RelayLink, AFarewellIsReadAfterAllElse) {
  Ends ends;
  std::atomic<bool> sent{false};
  std::thread pumping([&] {
    while (!sent) ends.near.pump();
  });
  std::thread other([&] {
    send_numbers(ends.near, 1 << 20, 1);
    sent = true;
    pumping.join();
    ends.near.say_goodbye("that was all");
    ends.near.shutdown();
  });
  expect_numbers(ends.far, 1 << 20, 2);
  uint8_t byte;
  const Part part{&byte, 1};
  EXPECT_EQ(ends.far.read(&part, 1, true).status, Status::kClosed);
  EXPECT_EQ(ends.far.ending(), "that was all");
  EXPECT_TRUE(ends.far.ended_by_peer());
  other.join();
}

TEST(RelayLink, ALongInterruptionEndsIt) {
  Ends ends(kSecond);
  ends.exchange.away = true;
  ends.exchange.cut();
  const auto start = Patience::now_ns();
  std::thread other([&] {
    uint8_t byte;
    const Part part{&byte, 1};
    EXPECT_EQ(ends.near.read(&part, 1, true).status, Status::kClosed);
  });
  uint8_t byte;
  const Part part{&byte, 1};
  EXPECT_EQ(ends.far.read(&part, 1, true).status, Status::kClosed);
  other.join();
  EXPECT_LT(Patience::now_ns() - start, 10 * kSecond);
  EXPECT_NE(ends.near.ending().find("lost"), std::string::npos);
}

TEST(RelayLink, UsageIsTold) {
  Ends ends;
  uint64_t bytes = 0;
  uint32_t busy = 0;
  ends.near.on_usage = [&](uint64_t told, uint32_t permille) { bytes = told, busy = permille; };
  ends.far.tell_usage(12345, 250);
  uint8_t byte = 1;
  const Part part{&byte, 1};
  ASSERT_EQ(ends.far.write(&part, 1, true).status, Status::kOk);
  ASSERT_EQ(ends.near.read(&part, 1, true).status, Status::kOk);
  EXPECT_EQ(bytes, 12345u);
  EXPECT_EQ(busy, 250u);
}

// ---- A hostile relay ----------------------------------------------------------------------------

struct Raw {
  uint32_t bytes, kind;
  uint64_t confirmed;
};

// What a link makes of bytes from somebody who has a certificate.
std::string ending_after(const std::string& stream, uint64_t received = 0) {
  Exchange exchange;
  TestRenewal renewal(exchange, Role::kServer);
  Link link(renewal, {kSecond / 2, 256 << 10});
  std::thread other([&] {
    std::string why;
    auto tls = context(Role::kClient)
                   .connect(exchange.connect(), "host", Patience::now_ns() + 5 * kSecond, &why);
    ASSERT_NE(tls, nullptr) << why;
    const uint64_t greeting[2] = {0x31304b4e494c5047, received};
    std::string all(reinterpret_cast<const char*>(greeting), sizeof greeting);
    all += stream;
    for (size_t at = 0; at < all.size();) {
      size_t done = 0;
      const auto result = tls->write(all.data() + at, all.size() - at, &done);
      if (result == TlsConnection::Result::kClosed) break;
      at += done;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  });
  std::string why;
  const bool begun = Ends::begin(link, renewal, &why);
  std::vector<uint8_t> data(100'000);
  const Part part{data.data(), data.size()};
  while (begun && link.read(&part, 1, true).status == Status::kOk) {
  }
  exchange.away = true;
  other.join();
  return begun ? link.ending() : why;
}

std::string record(uint32_t kind, uint32_t bytes, uint64_t confirmed = 0) {
  const Raw raw{bytes, kind, confirmed};
  return std::string(reinterpret_cast<const char*>(&raw), sizeof raw);
}

TEST(RelayLink, WhatCannotBeEndsIt) {
  EXPECT_NE(ending_after(record(9, 0)).find("unknown"), std::string::npos);
  EXPECT_NE(ending_after(record(1, 0)).find("unknown"), std::string::npos);
  EXPECT_NE(ending_after(record(1, 65537)).find("unknown"), std::string::npos);
  EXPECT_NE(ending_after(record(1, 0xffffffff)).find("unknown"), std::string::npos);
  EXPECT_NE(ending_after(record(2, 1)).find("unknown"), std::string::npos);
  EXPECT_NE(ending_after(record(3, 1025)).find("unknown"), std::string::npos);
  EXPECT_NE(ending_after(record(4, 8)).find("unknown"), std::string::npos);
  EXPECT_NE(ending_after(record(2, 0, 1)).find("was not sent"), std::string::npos);
  EXPECT_NE(ending_after(record(2, 0, ~0ull)).find("was not sent"), std::string::npos);
  EXPECT_NE(ending_after("", 7).find("middle of something"), std::string::npos);
  // Good ones before it are delivered.
  EXPECT_EQ(ending_after(record(1, 5) + "hello" + record(2, 0) + record(3, 3) + "bye"), "bye");
}

TEST(RelayLink, RandomBytesEndIt) {
  std::mt19937 random(5);
  for (int i = 0; i < 10; i++) {
    std::string bytes(20'000, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    EXPECT_FALSE(ending_after(bytes).empty());
  }
}

// ---- Certificates -------------------------------------------------------------------------------

TEST(RelayTls, AnotherNameIsRefused) {
  Exchange exchange;
  std::string near_why, far_why;
  std::thread other([&] {
    EXPECT_EQ(
        context(Role::kClient)
            .connect(exchange.connect(), "another", Patience::now_ns() + 5 * kSecond, &near_why),
        nullptr);
  });
  Fd fd;
  while (!fd) fd = exchange.accept(Patience::now_ns() + 5 * kSecond);
  context(Role::kServer).connect(std::move(fd), {}, Patience::now_ns() + 5 * kSecond, &far_why);
  other.join();
  EXPECT_NE(near_why.find("mismatch"), std::string::npos) << near_why;
}

TEST(RelayTls, TheOtherSidesNamesAreTold) {
  Exchange exchange;
  std::string why;
  std::thread other([&] {
    std::string near_why;
    const auto tls =
        context(Role::kClient)
            .connect(exchange.connect(), "host", Patience::now_ns() + 5 * kSecond, &near_why);
    EXPECT_NE(tls, nullptr) << near_why;
  });
  Fd fd;
  while (!fd) fd = exchange.accept(Patience::now_ns() + 5 * kSecond);
  const auto tls =
      context(Role::kServer).connect(std::move(fd), {}, Patience::now_ns() + 5 * kSecond, &why);
  ASSERT_NE(tls, nullptr) << why;
  EXPECT_EQ(tls->peer_names(), std::vector<std::string>{"host"});
  other.join();
}

TEST(RelayTls, FilesThatAreMissingAreNamed) {
  std::string why;
  EXPECT_EQ(TlsContext::load({"/nowhere", files().key, files().authorities}, Role::kClient, &why),
            nullptr);
  EXPECT_NE(why.find("/nowhere"), std::string::npos);
  EXPECT_EQ(TlsContext::load({files().certificate, files().authorities, files().authorities},
                             Role::kClient, &why),
            nullptr);
  EXPECT_NE(why.find("the key"), std::string::npos);
}

}  // namespace
}  // namespace gpupool::relay
