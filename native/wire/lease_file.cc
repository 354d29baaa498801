// How a program finds its lease, lease files, and uuids in text; the rest of handshake.h is in
// handshake.cc.
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "wire/handshake.h"

namespace gpupool::wire {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxLeaseFile = 64 * 1024;
constexpr size_t kMaxUnixPath = 107;  // sun_path without its NUL

bool nibble(char c, unsigned* out) {
  if (c >= '0' && c <= '9') {
    *out = c - '0';
  } else if (c >= 'a' && c <= 'f') {
    *out = c - 'a' + 10;
  } else if (c >= 'A' && c <= 'F') {
    *out = c - 'A' + 10;
  } else {
    return false;
  }
  return true;
}

bool parse_hex(std::string_view text, uint8_t* out, size_t bytes) {
  if (text.size() != bytes * 2) return false;
  for (size_t i = 0; i < bytes; i++) {
    unsigned high, low;
    if (!nibble(text[2 * i], &high) || !nibble(text[2 * i + 1], &low)) return false;
    out[i] = static_cast<uint8_t>(high << 4 | low);
  }
  return true;
}

std::string text_member(const Json& object, const char* name) {
  auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

// false: `why` says what is missing. Unknown kinds are left out without a word.
bool add_carrier(const Json& object, LeaseFile& lease, std::string* why) {
  if (!object.is_object()) return *why = "a carrier is not an object", false;
  LeaseCarrier carrier;
  carrier.kind = text_member(object, "kind");
  if (carrier.kind == "unix") {
    carrier.path = text_member(object, "path");
    if (carrier.path.empty() || carrier.path.size() > kMaxUnixPath) {
      return *why = "a unix carrier needs a path of at most 107 bytes", false;
    }
  } else if (carrier.kind == "tcp") {
    carrier.host = text_member(object, "host");
    auto port = object.find("port");
    if (carrier.host.empty() || port == object.end() || !port->is_number_unsigned() ||
        port->get<uint64_t>() == 0 || port->get<uint64_t>() > 65535) {
      return *why = "a tcp carrier needs a host and a port", false;
    }
    carrier.port = static_cast<uint16_t>(port->get<uint64_t>());
  } else {
    return true;
  }
  lease.carriers.push_back(std::move(carrier));
  return true;
}

// nullptr: none is named.
const char* lease_file() {
  const char* path = getenv("GPUPOOL_LEASE_FILE");
  return path != nullptr && *path != '\0' ? path : nullptr;
}

std::optional<LeaseFile> read_lease(const char* path, std::string* why) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
  if (fd < 0) return *why = strerror(errno), std::nullopt;
  std::string text;
  char chunk[4096];
  ssize_t got;
  while ((got = read(fd, chunk, sizeof chunk)) != 0) {
    if (got < 0) {
      if (errno == EINTR) continue;
      *why = strerror(errno);
      close(fd);
      return std::nullopt;
    }
    text.append(chunk, static_cast<size_t>(got));
    if (text.size() > kMaxLeaseFile) break;
  }
  close(fd);
  if (text.size() > kMaxLeaseFile) return *why = "it is over 64 KiB", std::nullopt;
  return parse_lease(text, why);
}

}  // namespace

std::string format_uuid(const Uuid& uuid) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  text.reserve(36);
  for (size_t i = 0; i < uuid.size(); i++) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits[uuid[i] >> 4];
    text += digits[uuid[i] & 15];
  }
  return text;
}

std::optional<Uuid> parse_uuid(std::string_view text) {
  if (text.size() != 36) return std::nullopt;
  std::string hex;
  for (size_t i = 0; i < text.size(); i++) {
    if (i == 8 || i == 13 || i == 18 || i == 23) {
      if (text[i] != '-') return std::nullopt;
    } else {
      hex += text[i];
    }
  }
  Uuid uuid;
  if (!parse_hex(hex, uuid.data(), uuid.size())) return std::nullopt;
  return uuid;
}

std::optional<LeaseFile> parse_lease(std::string_view text, std::string* why) {
  const Json document = Json::parse(text.begin(), text.end(), nullptr, false);
  if (document.is_discarded() || !document.is_object()) {
    return *why = "it is not a JSON object", std::nullopt;
  }
  auto version = document.find("version");
  if (version == document.end() || !version->is_number_integer() || version->get<int64_t>() != 1) {
    return *why = "its version is not 1", std::nullopt;
  }
  LeaseFile lease;
  auto uuid = parse_uuid(text_member(document, "lease"));
  if (!uuid) return *why = "\"lease\" is not a uuid", std::nullopt;
  lease.lease = *uuid;
  if (!parse_hex(text_member(document, "key"), lease.key.data(), lease.key.size())) {
    return *why = "\"key\" is not 64 hexadecimal digits", std::nullopt;
  }
  auto carriers = document.find("carriers");
  if (carriers == document.end() || !carriers->is_array()) {
    return *why = "\"carriers\" is not a list", std::nullopt;
  }
  for (const Json& carrier : *carriers) {
    if (!add_carrier(carrier, lease, why)) return std::nullopt;
  }
  if (lease.carriers.empty()) {
    return *why = "it names no carrier that this library knows", std::nullopt;
  }
  return lease;
}

std::optional<LeaseFile> load_lease_from_environment(std::string* why) {
  std::optional<LeaseFile> lease;
  std::string prefix;
  if (const char* path = lease_file(); path != nullptr) {
    prefix = std::string("lease file ") + path + ": ";
    lease = read_lease(path, why);
    if (!lease) return *why = prefix + *why, std::nullopt;
  } else if (lease_was_given()) {
    prefix = std::string(kSliceDirectory) + ": ";
    lease.emplace().carriers = {{"unix", kSliceSocket, "", 0}};
  } else if (access(kGuestSocket, F_OK) == 0) {
    prefix = std::string(kGuestSocket) + ": ";
    lease.emplace().carriers = {{"unix", kGuestSocket, "", 0}};
  } else {
    *why =
        "GPUPOOL_LEASE_FILE is not set: start the program with gpupoolctl run, or its container "
        "with --device gpupool/slice=NAME; in a virtual machine ask gpupool-guest status";
    return std::nullopt;
  }
  const char* only = getenv("GPUPOOL_CARRIER");
  if (only != nullptr && *only != '\0') {
    std::erase_if(lease->carriers, [&](const LeaseCarrier& c) { return c.kind != only; });
    if (lease->carriers.empty()) {
      return *why = prefix + "it has no carrier of the kind " + only + " (GPUPOOL_CARRIER)",
             std::nullopt;
    }
  }
  return lease;
}

bool lease_was_given() { return lease_file() != nullptr || access(kSliceDirectory, F_OK) == 0; }

}  // namespace gpupool::wire
