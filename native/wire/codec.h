// Commands and replies as bytes: an encoder that writes straight into a batch buffer, and a decoder
// that checks every bound. Scalars of generated operations take 8 bytes each, so layouts are fixed
// by the order of the parameters alone; hand-written operations send the structures of messages.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "wire/frame.h"

namespace gpupool::wire {

constexpr size_t align8(size_t bytes) { return (bytes + 7) & ~size_t{7}; }

// Writes into memory of the caller, who has made sure that there is room: reserve what
// put_size() and bytes_size() say.
class Encoder {
 public:
  explicit Encoder(uint8_t* at) : start_(at), at_(at) {}

  static constexpr size_t bytes_size(size_t bytes) { return 8 + align8(bytes); }

  template <typename T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
    memcpy(at_, &value, sizeof value);
    at_ += sizeof value;
  }
  // A scalar, widened to 8 bytes.
  void scalar(uint64_t value) { put(value); }
  void handle(Handle value) { put(value); }
  void real(double value) { put(value); }
  // A length and as many bytes, padded with zeros.
  void bytes(const void* data, size_t length) {
    scalar(length);
    raw(data, length);
  }
  // Bytes without their length, padded with zeros.
  void raw(const void* data, size_t length) {
    if (length == 0) return;
    const size_t padded = align8(length);
    memset(at_ + padded - 8, 0, 8);
    memcpy(at_, data, length);
    at_ += padded;
  }
  size_t size() const { return static_cast<size_t>(at_ - start_); }
  uint8_t* at() const { return at_; }

 private:
  uint8_t* start_;
  uint8_t* at_;
};

// Reads from memory that nobody else can change. After the first read past the end everything is
// zero and ok() is false; finished() is true when exactly everything was read.
class Decoder {
 public:
  Decoder(const uint8_t* at, size_t bytes) : at_(at), left_(bytes) {}

  bool ok() const { return ok_; }
  bool finished() const { return ok_ && left_ == 0; }
  size_t left() const { return left_; }

  template <typename T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
    T value;
    if (!take(sizeof value)) {
      memset(static_cast<void*>(&value), 0, sizeof value);
      return value;
    }
    memcpy(static_cast<void*>(&value), at_ - sizeof value, sizeof value);
    return value;
  }
  uint64_t scalar() { return get<uint64_t>(); }
  // A scalar that must fit its type; a value beyond it makes the command malformed.
  template <typename T>
  T narrow() {
    const uint64_t value = scalar();
    if constexpr (std::is_signed_v<T>) {
      const auto wide = static_cast<int64_t>(value);
      if (wide != static_cast<int64_t>(static_cast<T>(wide))) ok_ = false;
      return ok_ ? static_cast<T>(wide) : T{};
    } else {
      if (value != static_cast<uint64_t>(static_cast<T>(value))) ok_ = false;
      return ok_ ? static_cast<T>(value) : T{};
    }
  }
  Handle handle() { return get<Handle>(); }
  double real() { return get<double>(); }
  std::string_view bytes() {
    const uint64_t length = scalar();
    return raw(length);
  }
  std::string_view raw(uint64_t length) {
    if (!ok_ || length > left_ || align8(length) > left_) {
      ok_ = false;
      return {};
    }
    const auto* data = reinterpret_cast<const char*>(at_);
    take(align8(length));
    return {data, static_cast<size_t>(length)};
  }

 private:
  bool take(size_t bytes) {
    if (!ok_ || bytes > left_) {
      ok_ = false;
      return false;
    }
    at_ += bytes;
    left_ -= bytes;
    return true;
  }

  const uint8_t* at_;
  size_t left_;
  bool ok_ = true;
};

}  // namespace gpupool::wire
