// The handshake of doc/protocol.md, both sides: a lease file and how a client opens a connection
// with it, and the broker's side as a state machine that is fed with bytes. No sockets are made
// here: the client gives a function that opens a carrier.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "wire/control.h"
#include "wire/frame.h"

namespace gpupool::wire {

using Uuid = std::array<uint8_t, 16>;
using LeaseKey = std::array<uint8_t, 32>;

std::string format_uuid(const Uuid& uuid);              // 8-4-4-4-12, lower case
std::optional<Uuid> parse_uuid(std::string_view text);  // the same, either case

// ---- Lease file -------------------------------------------------------------------------------

struct LeaseCarrier {
  std::string kind;   // "unix" or "tcp"
  std::string path;   // unix: of the broker's socket
  std::string host;   // tcp: numeric address
  uint16_t port = 0;  // tcp
};

struct LeaseFile {
  Uuid lease{};
  LeaseKey key{};
  std::vector<LeaseCarrier> carriers;  // in the order in which they are tried
};

// Parses the JSON text of a lease file. nullopt: `why` says what is wrong with it. Carriers of an
// unknown kind are left out, so that a newer host can offer more than this client knows.
std::optional<LeaseFile> parse_lease(std::string_view json, std::string* why);

// In a container: a socket that stands for a lease. Its lease is named, and proven, with zeros.
constexpr char kSliceDirectory[] = "/run/gpupool/slice";
constexpr char kSliceSocket[] = "/run/gpupool/slice/session.sock";
// In a virtual machine: the socket of gpupool-guest, which is there with and without a GPU.
constexpr char kGuestSocket[] = "/run/gpupool/guest.sock";

// The file named by GPUPOOL_LEASE_FILE, else the slice's socket, else that of gpupool-guest;
// GPUPOOL_CARRIER leaves only carriers of that kind.
std::optional<LeaseFile> load_lease_from_environment(std::string* why);

// Whether somebody meant this program to have a lease, good or not.
bool lease_was_given();

// ---- Client side ------------------------------------------------------------------------------

// What the handshake needs of a carrier's stream. Timeouts are in milliseconds for the whole call.
class HandshakeStream {
 public:
  virtual ~HandshakeStream() = default;
  virtual bool send_all(const void* data, size_t bytes, int timeout_ms) = 0;
  // Exactly `bytes` bytes, never more: what follows kWelcome belongs to the session.
  virtual bool receive_all(void* data, size_t bytes, int timeout_ms) = 0;
};

struct HelloRequest {
  ConnectionPurpose purpose = ConnectionPurpose::kSession;
  Uuid session{};                   // kDevice: from the control connection's Welcome
  uint32_t device = 0;              // kDevice: ordinal of the slice in the lease
  uint64_t arena_base = 0;          // kDevice
  uint64_t arena_bytes = 0;         // kDevice
  uint16_t minor = kProtocolMinor;  // other values: tests only
  uint16_t minor_min = kProtocolMinorMin;
  uint32_t accepts = 0;  // kDevice: AcceptedOffers
  uint32_t pid = 0;      // for people; 0: this process
  std::string program;   // the same; empty: this process's
};

struct HandshakeResult {
  bool ok = false;
  // Not ok and `refused`: the broker said no, with a code; trying another carrier is of no use.
  // Not ok and not `refused`: the carrier failed. `message` is one sentence either way.
  bool refused = false;
  RefusalCode code = RefusalCode::kInternal;
  std::string message;
  uint16_t minor = 0;  // version of this connection
  Uuid session{};
  uint32_t epoch = 0;  // of the frames that follow
  uint64_t initial_credit = 0;
  std::vector<DeviceSnapshot> devices;  // kSession, kStatus
  CarrierOffer offer{};                 // kDevice
  RegionOffer region{};                 // where the offer is kRegion
};

// Runs the client's side over an open stream; blocks at most about `timeout_ms` in all.
HandshakeResult client_handshake(HandshakeStream& stream, const LeaseFile& lease,
                                 const HelloRequest& request, int timeout_ms = 10000);

// Opens a carrier; nullptr: `why` is one sentence.
using OpenCarrier =
    std::function<std::unique_ptr<HandshakeStream>(const LeaseCarrier& carrier, std::string* why)>;

struct Connected {
  HandshakeResult handshake;
  std::unique_ptr<HandshakeStream> stream;  // what `open` returned; set when handshake.ok
  size_t carrier = 0;                       // index in LeaseFile::carriers
};

// Tries the lease's carriers in order until one lets the handshake succeed. A refusal ends the
// search. Start with the carrier that worked for the control connection by `first`.
Connected connect_lease(const LeaseFile& lease, const HelloRequest& request,
                        const OpenCarrier& open, size_t first = 0, int timeout_ms = 10000);

// ---- Broker side ------------------------------------------------------------------------------

// One connection's handshake, without I/O: the owner reads exactly wanted() bytes (fewer are fine),
// feeds them in and sends what output() holds. Never reads past the proof, so that everything that
// follows it in the stream is still in the socket for the worker.
class ServerHandshake {
 public:
  enum class State {
    kReadingHello,
    kReadingProof,
    kProven,  // the client has the key: the owner decides with welcome() or refuse()
    kWelcomed,
    kRefused,  // send output(), then close
  };

  // `find_key` says the key of a lease, nullopt: no such lease. Called once, with the Hello.
  using FindKey = std::function<std::optional<LeaseKey>(const Uuid& lease)>;
  explicit ServerHandshake(FindKey find_key);
  // Through a socket that stands for a lease: who comes has shown his right to it by that.
  explicit ServerHandshake(const Uuid& stands_for);
  ~ServerHandshake();
  ServerHandshake(const ServerHandshake&) = delete;
  ServerHandshake& operator=(const ServerHandshake&) = delete;

  State state() const { return state_; }
  size_t wanted() const;                          // bytes to read next; 0: none now
  void input(const uint8_t* data, size_t bytes);  // bytes <= wanted()
  std::string& output() { return output_; }       // to be sent; the owner erases what it sent

  const HelloBody& hello() const { return hello_; }  // program is NUL-terminated
  Uuid lease() const;                                // the client's, or that which is stood for
  Uuid session() const;                              // kDevice
  uint16_t minor() const { return minor_; }

  bool accepts(AcceptedOffers what) const;
  // In kProven. Appends kWelcome (with what follows it) or kRefused to output().
  void welcome(const Uuid& session, uint32_t epoch, uint64_t initial_credit,
               const std::vector<DeviceSnapshot>& devices, const CarrierOffer& offer = {},
               const RegionOffer& region = {});
  void refuse(RefusalCode code, std::string_view sentence);  // in any state

 private:
  void on_hello();
  void on_proof(const ProofBody& proof);

  std::optional<LeaseKey> key_of_client() const;

  FindKey find_key_;
  std::optional<Uuid> stands_for_;
  State state_ = State::kReadingHello;
  std::string input_;
  std::string output_;
  HelloBody hello_{};
  uint8_t server_nonce_[32] = {};
  std::string hello_bytes_;  // as received: what the proof is about
  LeaseKey key_{};
  uint16_t minor_ = 0;
};

// A whole kRefused frame, for a connection that is refused outside the handshake.
std::string refusal_frame(RefusalCode code, std::string_view sentence, uint32_t epoch,
                          uint64_t sequence);

}  // namespace gpupool::wire
