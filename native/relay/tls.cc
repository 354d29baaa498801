#include "relay/tls.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <string.h>

#include <algorithm>

#include "carriers/patience.h"

namespace gpupool::relay {
namespace {

SSL_CTX* context_of(void* context) { return static_cast<SSL_CTX*>(context); }
SSL* ssl_of(void* connection) { return static_cast<SSL*>(connection); }

std::string last_error() {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  if (code == 0) return errno != 0 ? strerror(errno) : "the connection was closed";
  const char* reason = ERR_reason_error_string(code);
  return reason != nullptr ? reason : "error " + std::to_string(code);
}

bool wait_for(int fd, short events, int64_t deadline_ns) {
  const int64_t left = (deadline_ns - carriers::Patience::now_ns()) / 1'000'000;
  pollfd entry{fd, events, 0};
  return left > 0 && poll(&entry, 1, static_cast<int>(left)) > 0;
}

}  // namespace

std::unique_ptr<TlsContext> TlsContext::load(const TlsFiles& files, Role role, std::string* why) {
  SSL_CTX* context = SSL_CTX_new(TLS_method());
  if (context == nullptr) return *why = "OpenSSL: " + last_error(), nullptr;
  std::unique_ptr<TlsContext> result(new TlsContext(context, role));
  SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
  // A session begins with a handshake of its own: nothing of it lives on.
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  errno = 0;
  if (SSL_CTX_load_verify_locations(context, files.authorities.c_str(), nullptr) != 1) {
    return *why = "the authorities' certificates " + files.authorities + ": " + last_error(),
           nullptr;
  }
  if (SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) != 1) {
    return *why = "the certificate " + files.certificate + ": " + last_error(), nullptr;
  }
  if (SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(context) != 1) {
    return *why = "the key " + files.key + ": " + last_error(), nullptr;
  }
  return result;
}

TlsContext::~TlsContext() { SSL_CTX_free(context_of(context_)); }

std::unique_ptr<TlsConnection> TlsContext::connect(Fd socket, const std::string& peer,
                                                   int64_t deadline_ns, std::string* why) const {
  fcntl(socket.get(), F_SETFL, O_NONBLOCK);
  SSL* ssl = SSL_new(context_of(context_));
  if (ssl == nullptr || SSL_set_fd(ssl, socket.get()) != 1) {
    SSL_free(ssl);
    return *why = "OpenSSL: " + last_error(), nullptr;
  }
  const int fd = socket.get();
  auto connection = std::make_unique<TlsConnection>(ssl, std::move(socket));
  if (role_ == Role::kClient) {
    // A name stands for itself only.
    SSL_set_hostflags(ssl, X509_CHECK_FLAG_NO_WILDCARDS);
    if (SSL_set1_host(ssl, peer.c_str()) != 1) return *why = "OpenSSL: " + last_error(), nullptr;
    SSL_set_connect_state(ssl);
  } else {
    SSL_set_accept_state(ssl);
  }
  for (;;) {
    errno = 0;
    ERR_clear_error();
    const int done = SSL_do_handshake(ssl);
    if (done == 1) return connection;
    const int error = SSL_get_error(ssl, done);
    const bool reads = error == SSL_ERROR_WANT_READ;
    if (!reads && error != SSL_ERROR_WANT_WRITE) {
      const long verified = SSL_get_verify_result(ssl);
      *why = "TLS handshake: " + last_error();
      if (verified != X509_V_OK)
        *why += std::string(": ") + X509_verify_cert_error_string(verified);
      return nullptr;
    }
    if (!wait_for(fd, reads ? POLLIN : POLLOUT, deadline_ns)) {
      return *why = "TLS handshake: no answer in time", nullptr;
    }
  }
}

TlsConnection::TlsConnection(void* connection, Fd socket)
    : connection_(connection), socket_(std::move(socket)) {}

TlsConnection::~TlsConnection() { SSL_free(ssl_of(connection_)); }

TlsConnection::Result TlsConnection::result(int returned) {
  switch (SSL_get_error(ssl_of(connection_), returned)) {
    case SSL_ERROR_WANT_READ:
      return Result::kWantsRead;
    case SSL_ERROR_WANT_WRITE:
      return Result::kWantsWrite;
    default:
      problem_ = last_error();
      return Result::kClosed;
  }
}

TlsConnection::Result TlsConnection::write(const void* data, size_t bytes, size_t* written) {
  errno = 0;
  const int done = SSL_write_ex(ssl_of(connection_), data, bytes, written);
  return done == 1 ? Result::kOk : result(done);
}

TlsConnection::Result TlsConnection::read(void* data, size_t bytes, size_t* got) {
  errno = 0;
  const int done = SSL_read_ex(ssl_of(connection_), data, bytes, got);
  return done == 1 ? Result::kOk : result(done);
}

bool TlsConnection::secret(uint8_t (&bytes)[32]) const {
  static constexpr char kLabel[] = "EXPORTER-gpupool-link";
  return SSL_export_keying_material(ssl_of(connection_), bytes, sizeof bytes, kLabel,
                                    sizeof kLabel - 1, nullptr, 0, 0) == 1;
}

std::vector<std::string> TlsConnection::peer_names() const {
  std::vector<std::string> names;
  X509* certificate = SSL_get1_peer_certificate(ssl_of(connection_));
  if (certificate == nullptr) return names;
  const auto add = [&names](const ASN1_STRING* text) {
    const auto* data = reinterpret_cast<const char*>(ASN1_STRING_get0_data(text));
    std::string name(data, static_cast<size_t>(ASN1_STRING_length(text)));
    // A name with a NUL or a line's end in it is none.
    const bool plain =
        std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 127; });
    if (plain && !name.empty()) names.push_back(std::move(name));
  };
  bool alternative = false;
  if (auto* list = static_cast<GENERAL_NAMES*>(
          X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr))) {
    for (int i = 0; i < sk_GENERAL_NAME_num(list); i++) {
      const GENERAL_NAME* entry = sk_GENERAL_NAME_value(list, i);
      if (entry->type != GEN_DNS) continue;
      alternative = true;
      add(entry->d.dNSName);
    }
    GENERAL_NAMES_free(list);
  }
  const X509_NAME* subject = X509_get_subject_name(certificate);
  const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (!alternative && at >= 0) add(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at)));
  X509_free(certificate);
  return names;
}

}  // namespace gpupool::relay
