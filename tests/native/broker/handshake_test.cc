#include "wire/handshake.h"

#include <gtest/gtest.h>
#include <string.h>

#include <algorithm>
#include <random>

namespace gpupool::wire {
namespace {

LeaseFile a_lease() {
  LeaseFile lease;
  for (size_t i = 0; i < lease.lease.size(); i++) lease.lease[i] = static_cast<uint8_t>(i + 1);
  for (size_t i = 0; i < lease.key.size(); i++) lease.key[i] = static_cast<uint8_t>(200 - i);
  lease.carriers.push_back({"unix", "/run/somewhere", "", 0});
  return lease;
}

constexpr Uuid kSession = {9, 8, 7};

// The client's stream, with the broker's side at the other end of a function call.
class Loopback : public HandshakeStream {
 public:
  explicit Loopback(const LeaseFile& known)
      : server([known](const Uuid& id) {
          return id == known.lease ? std::optional<LeaseKey>(known.key) : std::nullopt;
        }) {}
  explicit Loopback(const Uuid& stands_for) : server(stands_for) {}

  bool send_all(const void* data, size_t bytes, int) override {
    std::string sent(static_cast<const char*>(data), bytes);
    if (change_sent) change_sent(sent);
    size_t at = 0;
    while (at < sent.size()) {
      const size_t count = std::min({server.wanted(), sent.size() - at, piece});
      if (count == 0) break;
      server.input(reinterpret_cast<const uint8_t*>(sent.data()) + at, count);
      at += count;
      if (server.state() == ServerHandshake::State::kProven) {
        std::vector<DeviceSnapshot> devices(2);
        devices[1].memory_bytes = 4096;
        server.welcome(kSession, 77, 1000, devices, offer, region);
      }
    }
    return true;
  }

  bool receive_all(void* data, size_t bytes, int) override {
    if (change_received && !changed_) {
      change_received(server.output());
      changed_ = true;
    }
    if (server.output().size() < bytes) return false;
    memcpy(data, server.output().data(), bytes);
    server.output().erase(0, bytes);
    return true;
  }

  ServerHandshake server;
  size_t piece = 1 << 20;
  CarrierOffer offer{};
  RegionOffer region{};
  std::function<void(std::string&)> change_sent, change_received;

 private:
  bool changed_ = false;
};

TEST(Handshake, OpensASession) {
  for (size_t piece : {1, 3, 47, 48, 49, 1000}) {
    Loopback stream(a_lease());
    stream.piece = piece;
    const HandshakeResult result = client_handshake(stream, a_lease(), {});
    ASSERT_TRUE(result.ok) << result.message;
    EXPECT_EQ(result.session, kSession);
    EXPECT_EQ(result.epoch, 77u);
    EXPECT_EQ(result.initial_credit, 1000u);
    EXPECT_EQ(result.minor, kProtocolMinor);
    ASSERT_EQ(result.devices.size(), 2u);
    EXPECT_EQ(result.devices[1].memory_bytes, 4096u);
    EXPECT_TRUE(stream.server.output().empty());
    EXPECT_EQ(stream.server.hello().pid, static_cast<uint32_t>(getpid()));
  }
}

TEST(Handshake, OffersOnlyWhatTheClientAccepts) {
  for (const bool accepts : {false, true}) {
    Loopback stream(a_lease());
    stream.offer = {static_cast<uint32_t>(OfferKind::kRing), 1, 4096, 65536};
    HelloRequest request;
    request.accepts = accepts ? uint32_t{kAcceptsRing} : 0;
    const HandshakeResult result = client_handshake(stream, a_lease(), request);
    ASSERT_TRUE(result.ok) << result.message;
    EXPECT_EQ(stream.server.accepts(kAcceptsRing), accepts);
    EXPECT_EQ(result.offer.kind, accepts ? 1u : 0u);
    EXPECT_EQ(result.offer.bulk_bytes, accepts ? 65536u : 0u);
    EXPECT_EQ(result.devices[1].memory_bytes, 4096u);
    EXPECT_TRUE(stream.server.output().empty());
  }
}

TEST(Handshake, OffersAPlaceInARegion) {
  for (const bool accepts : {false, true}) {
    Loopback stream(a_lease());
    stream.piece = 7;
    if (accepts) {
      stream.offer = {static_cast<uint32_t>(OfferKind::kRegion), 1, 4096, 65536};
      stream.region = {65536, 16 << 20};
    }
    HelloRequest request;
    request.accepts = kAcceptsRing | (accepts ? uint32_t{kAcceptsRegion} : 0);
    const HandshakeResult result = client_handshake(stream, a_lease(), request);
    ASSERT_TRUE(result.ok) << result.message;
    EXPECT_EQ(stream.server.accepts(kAcceptsRegion), accepts);
    EXPECT_EQ(result.offer.kind, accepts ? 2u : 0u);
    EXPECT_EQ(result.region.offset, accepts ? 65536u : 0u);
    EXPECT_EQ(result.region.region_bytes, accepts ? 16u << 20 : 0u);
    EXPECT_TRUE(stream.server.output().empty());
  }
}

// A broker that offers what was not asked for is not understood.
TEST(Handshake, ARegionThatWasNotAskedForIsRefused) {
  Loopback stream(a_lease());
  stream.offer = {static_cast<uint32_t>(OfferKind::kRegion), 1, 4096, 65536};
  HelloRequest request;
  request.accepts = kAcceptsRing;
  EXPECT_FALSE(client_handshake(stream, a_lease(), request).ok);
}

// Its Hello is shorter, and nothing follows its welcome.
TEST(Handshake, ServesTheFirstVersionAsBefore) {
  Loopback stream(a_lease());
  stream.offer = {static_cast<uint32_t>(OfferKind::kRing), 1, 4096, 65536};
  size_t hello = 0;
  stream.change_sent = [&](std::string& sent) {
    if (hello == 0) hello = sent.size();
  };
  HelloRequest request;
  request.minor = request.minor_min = 1;
  request.accepts = kAcceptsRing;
  const HandshakeResult result = client_handshake(stream, a_lease(), request);
  ASSERT_TRUE(result.ok) << result.message;
  EXPECT_EQ(hello, sizeof(FrameHeader) + 168);
  EXPECT_EQ(result.minor, 1);
  EXPECT_FALSE(stream.server.accepts(kAcceptsRing));
  EXPECT_EQ(result.offer.kind, 0u);
  EXPECT_TRUE(stream.server.output().empty());
}

TEST(Handshake, RefusesAWrongKey) {
  LeaseFile wrong = a_lease();
  wrong.key[31] ^= 1;
  Loopback stream(a_lease());
  const HandshakeResult result = client_handshake(stream, wrong, {});
  EXPECT_FALSE(result.ok);
  EXPECT_TRUE(result.refused);
  EXPECT_EQ(result.code, RefusalCode::kProof);
  EXPECT_NE(result.message.find("key"), std::string::npos);
}

TEST(Handshake, RefusesAnUnknownLease) {
  LeaseFile other = a_lease();
  other.lease[0] ^= 1;
  Loopback stream(a_lease());
  const HandshakeResult result = client_handshake(stream, other, {});
  EXPECT_TRUE(result.refused);
  EXPECT_EQ(result.code, RefusalCode::kUnknownLease);
}

// Whoever changes any byte of the Hello on its way is found out, or refused before.
TEST(Handshake, ProvesTheWholeHello) {
  for (size_t at = 0; at < sizeof(FrameHeader) + sizeof(HelloBody); at++) {
    Loopback stream(a_lease());
    bool first = true;
    stream.change_sent = [&](std::string& sent) {
      if (first) sent[at] = static_cast<char>(sent[at] ^ 0x40);
      first = false;
    };
    const HandshakeResult result = client_handshake(stream, a_lease(), {});
    // The header's acknowledgement and credit mean nothing here, and its epoch.
    const bool meaningless = at >= 12 && at < 16;
    const bool unused = at >= 24 && at < 40;
    EXPECT_EQ(result.ok, meaningless || unused) << "byte " << at;
  }
}

TEST(Handshake, TheBrokerMustProveItself) {
  LeaseFile wrong = a_lease();
  wrong.key[0] ^= 1;
  Loopback stream(wrong);  // a broker that does not know the key, and lets anybody in
  stream.change_sent = [&](std::string& sent) {
    if (sent.size() != sizeof(FrameHeader) + sizeof(ProofBody)) return;
    stream.server.welcome(kSession, 77, 1000, {});
    sent.clear();
  };
  const HandshakeResult result = client_handshake(stream, a_lease(), {});
  EXPECT_FALSE(result.ok);
  EXPECT_FALSE(result.refused);
  EXPECT_NE(result.message.find("did not prove"), std::string::npos) << result.message;
}

TEST(Handshake, AgreesOnAVersion) {
  struct {
    uint16_t minor, minor_min;
    bool ok;
  } cases[] = {
      {kProtocolMinor, kProtocolMinor, true},
      {kProtocolMinor + 5, kProtocolMinorMin, true},
      {kProtocolMinor + 5, kProtocolMinor + 1, false},
      {kProtocolMinorMin - 1, 0, false},
      {UINT16_MAX, 0, true},
  };
  for (const auto& each : cases) {
    Loopback stream(a_lease());
    HelloRequest request;
    request.minor = each.minor;
    request.minor_min = each.minor_min;
    const HandshakeResult result = client_handshake(stream, a_lease(), request);
    EXPECT_EQ(result.ok, each.ok) << each.minor << " " << each.minor_min;
    if (each.ok) {
      EXPECT_EQ(result.minor, kProtocolMinor);
    } else {
      EXPECT_EQ(result.code, RefusalCode::kVersion);
    }
  }
}

TEST(Handshake, AShortAnswerIsNoSuccess) {
  Loopback stream(a_lease());
  stream.change_received = [](std::string& answer) { answer.resize(answer.size() - 1); };
  const HandshakeResult result = client_handshake(stream, a_lease(), {});
  EXPECT_FALSE(result.ok);
  EXPECT_FALSE(result.refused);
}

TEST(Handshake, SurvivesNonsense) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 3000; round++) {
    ServerHandshake server([](const Uuid&) { return LeaseKey{}; });
    std::string bytes(1 + random() % 300, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    if (round % 2 == 0) {  // a right header
      FrameHeader header{};
      header.magic = kFrameMagic;
      header.kind = static_cast<uint16_t>(FrameKind::kHello);
      header.body_bytes = sizeof(HelloBody) + 8 * (random() % 3);
      bytes.replace(0, std::min(bytes.size(), sizeof header), reinterpret_cast<char*>(&header),
                    std::min(bytes.size(), sizeof header));
    }
    size_t at = 0;
    while (size_t count = std::min(server.wanted(), bytes.size() - at)) {
      server.input(reinterpret_cast<const uint8_t*>(bytes.data()) + at, count);
      at += count;
    }
    EXPECT_NE(server.state(), ServerHandshake::State::kProven);
  }
}

TEST(Handshake, ASocketThatStandsForALeaseTakesNoOther) {
  const LeaseFile known = a_lease();
  const auto shake = [&](const Uuid& lease, const LeaseKey& key) {
    Loopback stream(known.lease);
    LeaseFile client;
    client.lease = lease;
    client.key = key;
    HandshakeResult result = client_handshake(stream, client, {});
    EXPECT_EQ(stream.server.lease(), known.lease);
    return result;
  };
  EXPECT_TRUE(shake({}, {}).ok);
  EXPECT_EQ(shake(known.lease, known.key).code, RefusalCode::kUnknownLease);
  EXPECT_EQ(shake(known.lease, {}).code, RefusalCode::kUnknownLease);
  EXPECT_EQ(shake({}, known.key).code, RefusalCode::kProof);
}

TEST(Connect, TriesCarriersInOrderUntilOneWorks) {
  LeaseFile lease = a_lease();
  lease.carriers = {{"unix", "/a", "", 0}, {"tcp", "", "127.0.0.1", 5}, {"unix", "/c", "", 0}};
  std::vector<std::string> tried;
  const auto open = [&](const LeaseCarrier& carrier, std::string* why) {
    tried.push_back(carrier.path);
    std::unique_ptr<HandshakeStream> stream;
    if (carrier.kind == "tcp") {
      stream = std::make_unique<Loopback>(lease);
    } else {
      *why = "nobody there";
    }
    return stream;
  };
  Connected connected = connect_lease(lease, {}, open);
  EXPECT_TRUE(connected.handshake.ok);
  EXPECT_EQ(connected.carrier, 1u);
  EXPECT_EQ(tried, (std::vector<std::string>{"/a", ""}));

  lease.carriers.erase(lease.carriers.begin() + 1);
  connected = connect_lease(lease, {}, open);
  EXPECT_FALSE(connected.handshake.ok);
  EXPECT_NE(connected.handshake.message.find("/c: nobody there"), std::string::npos)
      << connected.handshake.message;
}

TEST(Lease, ParsesALeaseFile) {
  const std::string key(64, 'a');
  const std::string good =
      R"({"version":1,"lease":"00112233-4455-6677-8899-aabbccddeeff","key":")" + key +
      R"(","carriers":[{"kind":"warp","speed":9},)"
      R"({"kind":"unix","path":"/run/s"},{"kind":"tcp","host":"127.0.0.1","port":7}]})";
  std::string why;
  const auto lease = parse_lease(good, &why);
  ASSERT_TRUE(lease) << why;
  EXPECT_EQ(format_uuid(lease->lease), "00112233-4455-6677-8899-aabbccddeeff");
  EXPECT_EQ(lease->key[31], 0xaa);
  ASSERT_EQ(lease->carriers.size(), 2u);  // the unknown kind is left out
  EXPECT_EQ(lease->carriers[1].port, 7);

  const auto broken = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    why.clear();
    EXPECT_FALSE(parse_lease(text, &why)) << text;
    EXPECT_FALSE(why.empty());
  };
  broken("\"version\":1", "\"version\":2");
  broken("00112233", "0011223");
  broken("aaaaaa", "aaaa");
  broken("aaaaaa", "aaaagg");
  broken("/run/s", std::string(108, 'x'));
  broken("\"port\":7", "\"port\":70000");
  broken("\"port\":7", "\"port\":-1");
  broken("{\"version\"", "[\"version\"");
  broken("\"carriers\"", "\"others\"");
}

TEST(Uuid, RoundTrip) {
  std::mt19937 random(3);
  for (int i = 0; i < 100; i++) {
    Uuid uuid;
    for (uint8_t& byte : uuid) byte = static_cast<uint8_t>(random());
    EXPECT_EQ(parse_uuid(format_uuid(uuid)), uuid);
  }
  EXPECT_FALSE(parse_uuid("00112233445566778899aabbccddeeff"));
  EXPECT_FALSE(parse_uuid("00112233-4455-6677-8899-aabbccddeefg"));
}

}  // namespace
}  // namespace gpupool::wire
