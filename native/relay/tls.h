// TLS 1.3 between two hosts of a pool, both with a certificate. Only this room knows of OpenSSL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "broker/fd.h"

namespace gpupool::relay {

using broker::Fd;

struct TlsFiles {
  std::string certificate, key, authorities;  // PEM
};

enum class Role { kClient, kServer };

class TlsConnection;

// What a process knows of the host's certificate, read once.
class TlsContext {
 public:
  // Null: `why` is a sentence that names the file.
  static std::unique_ptr<TlsContext> load(const TlsFiles& files, Role role, std::string* why);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  // The handshake, over a connected socket, which is non-blocking afterwards. `peer` (client): the
  // host whose certificate it has to be. Null: `why` says what was wrong with whom.
  std::unique_ptr<TlsConnection> connect(Fd socket, const std::string& peer, int64_t deadline_ns,
                                         std::string* why) const;

 private:
  TlsContext(void* context, Role role) : context_(context), role_(role) {}
  void* const context_;  // SSL_CTX
  const Role role_;
};

// One thread at a time.
class TlsConnection {
 public:
  enum class Result { kOk, kWantsRead, kWantsWrite, kClosed };

  TlsConnection(void* connection, Fd socket);
  ~TlsConnection();
  TlsConnection(const TlsConnection&) = delete;
  TlsConnection& operator=(const TlsConnection&) = delete;

  // Some bytes; after kWants* the same call again, with the same bytes.
  Result write(const void* data, size_t bytes, size_t* written);
  Result read(void* data, size_t bytes, size_t* got);

  int fd() const { return socket_.get(); }
  // A secret that both sides of this connection have, and nobody else. False: OpenSSL failed.
  bool secret(uint8_t (&bytes)[32]) const;
  // The names in the other side's certificate: alternative names (DNS), else the common name.
  std::vector<std::string> peer_names() const;
  const std::string& problem() const { return problem_; }  // of what was closed

 private:
  Result result(int returned);

  void* const connection_;  // SSL
  const Fd socket_;
  std::string problem_;
};

}  // namespace gpupool::relay
