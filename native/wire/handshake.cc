#include "wire/handshake.h"

#include <errno.h>
#include <sodium.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace gpupool::wire {
namespace {

constexpr char kClientLabel[] = "gpupool client 1";
constexpr char kServerLabel[] = "gpupool server 1";
static_assert(sizeof kClientLabel == 17 && sizeof kServerLabel == 17);

// A Hello of a later minor version may be longer: what it appends is proven, but not looked at.
constexpr size_t kMaxHelloBytes = 4096;
constexpr size_t kMaxSentence = 4096;
constexpr uint32_t kMaxDevices = (kMaxFrameBody - sizeof(WelcomeBody)) / sizeof(DeviceSnapshot);

struct Mac {
  uint8_t bytes[crypto_auth_hmacsha256_BYTES];
};
static_assert(sizeof(Mac) == sizeof(ProofBody));

class Hmac {
 public:
  Hmac(const LeaseKey& key, const char* label) {
    crypto_auth_hmacsha256_init(&state_, key.data(), key.size());
    add(label, 16);
  }
  Hmac& add(const void* data, size_t bytes) {
    crypto_auth_hmacsha256_update(&state_, static_cast<const unsigned char*>(data), bytes);
    return *this;
  }
  Mac finish() {
    Mac mac;
    crypto_auth_hmacsha256_final(&state_, mac.bytes);
    sodium_memzero(&state_, sizeof state_);
    return mac;
  }

 private:
  crypto_auth_hmacsha256_state state_;
};

bool same(const Mac& mac, const uint8_t* proof) {
  return sodium_memcmp(mac.bytes, proof, sizeof mac.bytes) == 0;
}

FrameHeader handshake_header(FrameKind kind, size_t body) {
  FrameHeader header{};
  header.magic = kFrameMagic;
  header.kind = static_cast<uint16_t>(kind);
  header.body_bytes = static_cast<uint32_t>(body);
  return header;
}

void append(std::string& out, const void* data, size_t bytes) {
  out.append(static_cast<const char*>(data), bytes);
}

// What is alike in every handshake frame; empty: right.
std::string check_header(const FrameHeader& header) {
  if (header.magic != kFrameMagic) return "this is no gpupool frame (wrong magic number)";
  if (header.bulk_count != 0 || header.bulk_bytes != 0) return "a handshake frame has bulk data";
  if (header.sequence != 0) return "a handshake frame has a sequence number";
  if (header.body_bytes % 8 != 0 || header.body_bytes > kMaxFrameBody) {
    return "a handshake frame has a wrong size";
  }
  return {};
}

class Deadline {
 public:
  explicit Deadline(int ms) : end_(Clock::now() + std::chrono::milliseconds(ms)) {}
  int left_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_ - Clock::now()).count();
    return static_cast<int>(std::clamp<long long>(left, 0, 1 << 30));
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point end_;
};

// One run of the client's side; a method that returns false has filled in the result.
class ClientSide {
 public:
  ClientSide(HandshakeStream& stream, const LeaseFile& lease, const HelloRequest& request, int ms)
      : stream_(stream), lease_(lease), request_(request), deadline_(ms) {}

  HandshakeResult run() {
    if (sodium_init() < 0) {
      fail("libsodium could not be initialised");
    } else if (say_hello() && prove() && take_welcome()) {
      result_.ok = true;
    }
    return std::move(result_);
  }

 private:
  bool fail(std::string message) {
    result_.message = std::move(message);
    return false;
  }

  bool send(FrameKind kind, const void* body, size_t bytes) {
    std::string frame;
    const FrameHeader header = handshake_header(kind, bytes);
    append(frame, &header, sizeof header);
    append(frame, body, bytes);
    if (stream_.send_all(frame.data(), frame.size(), deadline_.left_ms())) return true;
    // The broker may have refused and closed before it read everything: its word counts more.
    FrameHeader answer;
    if (stream_.receive_all(&answer, sizeof answer, std::min(100, deadline_.left_ms())) &&
        check_header(answer).empty() && answer.kind == static_cast<uint16_t>(FrameKind::kRefused)) {
      return take_refusal(answer);
    }
    return fail("the broker closed the connection during the handshake");
  }

  bool receive(FrameKind kind, FrameHeader* header) {
    if (!stream_.receive_all(header, sizeof *header, deadline_.left_ms())) {
      return fail(deadline_.left_ms() == 0
                      ? "the broker did not answer in time"
                      : "the broker closed the connection during the handshake");
    }
    if (std::string wrong = check_header(*header); !wrong.empty()) {
      return fail("the answer is not a broker's: " + wrong);
    }
    if (header->kind == static_cast<uint16_t>(FrameKind::kRefused)) return take_refusal(*header);
    if (header->kind != static_cast<uint16_t>(kind)) {
      return fail("the broker sent frame kind " + std::to_string(header->kind) + " instead of " +
                  std::to_string(static_cast<int>(kind)));
    }
    return true;
  }

  bool take_refusal(const FrameHeader& header) {
    std::string body(header.body_bytes, '\0');
    RefusedBody refused;
    if (body.size() < sizeof refused || body.size() > sizeof refused + kMaxSentence + 8 ||
        !stream_.receive_all(body.data(), body.size(), deadline_.left_ms())) {
      return fail("the broker refused the connection without saying why");
    }
    memcpy(&refused, body.data(), sizeof refused);
    result_.refused = true;
    result_.code = static_cast<RefusalCode>(refused.code);
    const size_t text = std::min<size_t>(refused.text_bytes, body.size() - sizeof refused);
    if (text == 0) return fail("the broker refused the connection without saying why");
    return fail(body.substr(sizeof refused, text));
  }

  bool say_hello() {
    hello_.magic = kHelloMagic;
    hello_.major = kProtocolMajor;
    hello_.minor = request_.minor;
    hello_.minor_min = request_.minor_min;
    hello_.purpose = static_cast<uint16_t>(request_.purpose);
    memcpy(hello_.lease, lease_.lease.data(), sizeof hello_.lease);
    memcpy(hello_.session, request_.session.data(), sizeof hello_.session);
    hello_.device = request_.device;
    hello_.pid = request_.pid != 0 ? request_.pid : static_cast<uint32_t>(getpid());
    const char* program =
        request_.program.empty() ? program_invocation_short_name : request_.program.c_str();
    strncpy(hello_.program, program, sizeof hello_.program - 1);
    hello_.arena_base = request_.arena_base;
    hello_.arena_bytes = request_.arena_bytes;
    hello_.accepts = request_.accepts;
    randombytes_buf(hello_.client_nonce, sizeof hello_.client_nonce);
    return send(FrameKind::kHello, &hello_, hello_bytes());
  }

  bool prove() {
    FrameHeader header;
    if (!receive(FrameKind::kChallenge, &header)) return false;
    if (header.body_bytes != sizeof challenge_ ||
        !stream_.receive_all(&challenge_, sizeof challenge_, deadline_.left_ms())) {
      return fail("the broker's challenge is not complete");
    }
    if (challenge_.major != kProtocolMajor || challenge_.minor < request_.minor_min ||
        challenge_.minor > request_.minor) {
      return fail("the broker chose protocol version " + std::to_string(challenge_.major) + "." +
                  std::to_string(challenge_.minor) + ", which this library does not speak");
    }
    result_.minor = challenge_.minor;
    const Mac mac = Hmac(lease_.key, kClientLabel)
                        .add(challenge_.server_nonce, sizeof challenge_.server_nonce)
                        .add(&hello_, hello_bytes())
                        .finish();
    return send(FrameKind::kProof, mac.bytes, sizeof mac.bytes);
  }

  size_t hello_bytes() const { return request_.minor >= 2 ? sizeof hello_ : kFirstHelloBytes; }

  bool take_welcome() {
    FrameHeader header;
    if (!receive(FrameKind::kWelcome, &header)) return false;
    WelcomeBody welcome;
    if (header.body_bytes < sizeof welcome ||
        !stream_.receive_all(&welcome, sizeof welcome, deadline_.left_ms())) {
      return fail("the broker's welcome is not complete");
    }
    const Mac mac = Hmac(lease_.key, kServerLabel)
                        .add(hello_.client_nonce, sizeof hello_.client_nonce)
                        .add(challenge_.server_nonce, sizeof challenge_.server_nonce)
                        .finish();
    if (!same(mac, welcome.proof)) {
      return fail("the broker did not prove that it knows the lease's key");
    }
    const bool offered = result_.minor >= 2 && request_.accepts != 0;
    const uint64_t least = sizeof welcome +
                           uint64_t{welcome.device_count} * sizeof(DeviceSnapshot) +
                           (offered ? sizeof(CarrierOffer) : 0);
    const bool region = offered && (request_.accepts & kAcceptsRegion) != 0 &&
                        header.body_bytes == least + sizeof(RegionOffer);
    if (welcome.device_count > kMaxDevices || (header.body_bytes != least && !region)) {
      return fail("the broker's welcome has a wrong size");
    }
    result_.devices.resize(welcome.device_count);
    if (!result_.devices.empty() &&
        !stream_.receive_all(result_.devices.data(),
                             result_.devices.size() * sizeof(DeviceSnapshot),
                             deadline_.left_ms())) {
      return fail("the broker's welcome is not complete");
    }
    if (offered &&
        !stream_.receive_all(&result_.offer, sizeof result_.offer, deadline_.left_ms())) {
      return fail("the broker's welcome is not complete");
    }
    if (region &&
        !stream_.receive_all(&result_.region, sizeof result_.region, deadline_.left_ms())) {
      return fail("the broker's welcome is not complete");
    }
    if (region != (result_.offer.kind == static_cast<uint32_t>(OfferKind::kRegion))) {
      return fail("the broker's offer has a wrong size");
    }
    for (DeviceSnapshot& device : result_.devices) device.name[sizeof device.name - 1] = '\0';
    memcpy(result_.session.data(), welcome.session, sizeof welcome.session);
    result_.epoch = welcome.epoch;
    result_.initial_credit = welcome.initial_credit;
    return true;
  }

  HandshakeStream& stream_;
  const LeaseFile& lease_;
  const HelloRequest& request_;
  Deadline deadline_;
  HandshakeResult result_;
  HelloBody hello_{};
  ChallengeBody challenge_{};
};

}  // namespace

HandshakeResult client_handshake(HandshakeStream& stream, const LeaseFile& lease,
                                 const HelloRequest& request, int timeout_ms) {
  return ClientSide(stream, lease, request, timeout_ms).run();
}

Connected connect_lease(const LeaseFile& lease, const HelloRequest& request,
                        const OpenCarrier& open, size_t first, int timeout_ms) {
  Connected connected;
  const Deadline deadline(timeout_ms);
  std::string message;
  for (size_t i = 0; i < lease.carriers.size(); i++) {
    const size_t index = (first + i) % lease.carriers.size();
    const LeaseCarrier& carrier = lease.carriers[index];
    std::string why;
    auto stream = open(carrier, &why);
    if (stream) {
      connected.handshake = client_handshake(*stream, lease, request, deadline.left_ms());
      if (connected.handshake.ok) {
        connected.stream = std::move(stream);
        connected.carrier = index;
        return connected;
      }
      if (connected.handshake.refused) return connected;
      why = connected.handshake.message;
    }
    if (!message.empty()) message += "; ";
    message +=
        carrier.kind + " " +
        (carrier.kind == "tcp" ? carrier.host + ":" + std::to_string(carrier.port) : carrier.path) +
        ": " + why;
  }
  connected.handshake = {};
  connected.handshake.message = "no carrier of the lease works: " + message;
  return connected;
}

// ---- Broker side ------------------------------------------------------------------------------

ServerHandshake::ServerHandshake(FindKey find_key) : find_key_(std::move(find_key)) {}

ServerHandshake::ServerHandshake(const Uuid& stands_for) : stands_for_(stands_for) {}

ServerHandshake::~ServerHandshake() { sodium_memzero(key_.data(), key_.size()); }

Uuid ServerHandshake::lease() const {
  if (stands_for_) return *stands_for_;
  Uuid uuid;
  memcpy(uuid.data(), hello_.lease, uuid.size());
  return uuid;
}

Uuid ServerHandshake::session() const {
  Uuid uuid;
  memcpy(uuid.data(), hello_.session, uuid.size());
  return uuid;
}

size_t ServerHandshake::wanted() const {
  if (state_ != State::kReadingHello && state_ != State::kReadingProof) return 0;
  if (input_.size() < sizeof(FrameHeader)) return sizeof(FrameHeader) - input_.size();
  FrameHeader header;
  memcpy(&header, input_.data(), sizeof header);
  return sizeof header + header.body_bytes - input_.size();
}

void ServerHandshake::input(const uint8_t* data, size_t bytes) {
  const bool header_was_there = input_.size() >= sizeof(FrameHeader);
  append(input_, data, bytes);
  if (input_.size() < sizeof(FrameHeader)) {
    // Whoever does not speak our protocol learns it from the first word.
    uint32_t magic;
    if (input_.size() >= sizeof magic && memcmp(input_.data(), &kFrameMagic, sizeof magic) != 0) {
      refuse(RefusalCode::kBadFrame, "this is no gpupool frame (wrong magic number)");
    }
    return;
  }
  if (!header_was_there) {
    FrameHeader header;
    memcpy(&header, input_.data(), sizeof header);
    std::string wrong = check_header(header);
    const bool hello = state_ == State::kReadingHello;
    const FrameKind kind = hello ? FrameKind::kHello : FrameKind::kProof;
    if (wrong.empty() && header.kind != static_cast<uint16_t>(kind)) {
      wrong = "frame kind " + std::to_string(header.kind) + " where " +
              std::to_string(static_cast<int>(kind)) + " is due";
    }
    if (wrong.empty() &&
        (hello ? header.body_bytes < kFirstHelloBytes || header.body_bytes > kMaxHelloBytes
               : header.body_bytes != sizeof(ProofBody))) {
      wrong = "a handshake frame has a wrong size";
    }
    if (!wrong.empty()) return refuse(RefusalCode::kBadFrame, wrong);
  }
  if (wanted() != 0) return;
  std::string frame;
  frame.swap(input_);
  if (state_ == State::kReadingHello) {
    hello_bytes_ = frame.substr(sizeof(FrameHeader));
    memcpy(&hello_, hello_bytes_.data(), std::min(hello_bytes_.size(), sizeof hello_));
    hello_.program[sizeof hello_.program - 1] = '\0';
    on_hello();
  } else {
    ProofBody proof;
    memcpy(&proof, frame.data() + sizeof(FrameHeader), sizeof proof);
    on_proof(proof);
  }
}

void ServerHandshake::on_hello() {
  if (hello_.magic != kHelloMagic) {
    return refuse(RefusalCode::kBadFrame, "the Hello has a wrong magic number");
  }
  minor_ = std::min(hello_.minor, kProtocolMinor);
  if (hello_.major != kProtocolMajor || minor_ < std::max(hello_.minor_min, kProtocolMinorMin)) {
    const auto version = [](int major, int low, int high) {
      return std::to_string(major) + "." + std::to_string(low) + " to " + std::to_string(major) +
             "." + std::to_string(high);
    };
    return refuse(RefusalCode::kVersion,
                  "no protocol version in common: the client speaks " +
                      version(hello_.major, hello_.minor_min, hello_.minor) + ", this host " +
                      version(kProtocolMajor, kProtocolMinorMin, kProtocolMinor));
  }
  const auto purpose = static_cast<ConnectionPurpose>(hello_.purpose);
  if (purpose != ConnectionPurpose::kSession && purpose != ConnectionPurpose::kDevice &&
      purpose != ConnectionPurpose::kStatus) {
    return refuse(RefusalCode::kBadFrame, "the Hello has an unknown purpose");
  }
  const auto key = key_of_client();
  if (!key) {
    return refuse(RefusalCode::kUnknownLease,
                  "lease " + format_uuid(lease()) + " does not exist on this host, or has ended");
  }
  key_ = *key;
  ChallengeBody challenge{};
  challenge.major = kProtocolMajor;
  challenge.minor = minor_;
  randombytes_buf(server_nonce_, sizeof server_nonce_);
  memcpy(challenge.server_nonce, server_nonce_, sizeof server_nonce_);
  const FrameHeader header = handshake_header(FrameKind::kChallenge, sizeof challenge);
  append(output_, &header, sizeof header);
  append(output_, &challenge, sizeof challenge);
  state_ = State::kReadingProof;
}

// Where the socket stands for the lease, none is named and the key is no secret: both are zero.
std::optional<LeaseKey> ServerHandshake::key_of_client() const {
  if (!stands_for_) return find_key_(lease());
  const bool names_none = std::all_of(std::begin(hello_.lease), std::end(hello_.lease),
                                      [](uint8_t b) { return b == 0; });
  return names_none ? std::optional(LeaseKey{}) : std::nullopt;
}

void ServerHandshake::on_proof(const ProofBody& proof) {
  const Mac mac = Hmac(key_, kClientLabel)
                      .add(server_nonce_, sizeof server_nonce_)
                      .add(hello_bytes_.data(), hello_bytes_.size())
                      .finish();
  if (!same(mac, proof.proof)) {
    return refuse(RefusalCode::kProof,
                  "the client's key for lease " + format_uuid(lease()) + " is wrong");
  }
  state_ = State::kProven;
}

bool ServerHandshake::accepts(AcceptedOffers what) const {
  return minor_ >= 2 && (hello_.accepts & what) != 0;
}

void ServerHandshake::welcome(const Uuid& session, uint32_t epoch, uint64_t initial_credit,
                              const std::vector<DeviceSnapshot>& devices, const CarrierOffer& offer,
                              const RegionOffer& region) {
  WelcomeBody welcome{};
  const Mac mac = Hmac(key_, kServerLabel)
                      .add(hello_.client_nonce, sizeof hello_.client_nonce)
                      .add(server_nonce_, sizeof server_nonce_)
                      .finish();
  memcpy(welcome.proof, mac.bytes, sizeof mac.bytes);
  memcpy(welcome.session, session.data(), sizeof welcome.session);
  welcome.epoch = epoch;
  welcome.device_count = static_cast<uint32_t>(devices.size());
  welcome.initial_credit = initial_credit;
  const size_t snapshots = devices.size() * sizeof(DeviceSnapshot);
  const bool has_region = offer.kind == static_cast<uint32_t>(OfferKind::kRegion);
  const size_t offers =
      minor_ >= 2 && hello_.accepts != 0 ? sizeof offer + (has_region ? sizeof region : 0) : 0;
  const FrameHeader header =
      handshake_header(FrameKind::kWelcome, sizeof welcome + snapshots + offers);
  append(output_, &header, sizeof header);
  append(output_, &welcome, sizeof welcome);
  if (snapshots != 0) append(output_, devices.data(), snapshots);
  if (offers != 0) append(output_, &offer, sizeof offer);
  if (offers != 0 && has_region) append(output_, &region, sizeof region);
  state_ = State::kWelcomed;
}

void ServerHandshake::refuse(RefusalCode code, std::string_view sentence) {
  output_ += refusal_frame(code, sentence, 0, 0);
  state_ = State::kRefused;
}

std::string refusal_frame(RefusalCode code, std::string_view sentence, uint32_t epoch,
                          uint64_t sequence) {
  sentence = sentence.substr(0, kMaxSentence);
  const size_t padded = (sentence.size() + 7) / 8 * 8;
  FrameHeader header = handshake_header(FrameKind::kRefused, sizeof(RefusedBody) + padded);
  header.epoch = epoch;
  header.sequence = sequence;
  RefusedBody body{};
  body.code = static_cast<uint32_t>(code);
  body.text_bytes = static_cast<uint32_t>(sentence.size());
  std::string frame;
  append(frame, &header, sizeof header);
  append(frame, &body, sizeof body);
  frame.append(sentence);
  frame.append(padded - sentence.size(), '\0');
  return frame;
}

}  // namespace gpupool::wire
