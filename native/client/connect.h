// How the client libraries open a carrier of a lease.
#pragma once

#include <memory>
#include <string>

#include "carriers/carrier.h"
#include "wire/handshake.h"

namespace gpupool::client {

// The handshake's view of a carrier.
class CarrierStream final : public wire::HandshakeStream {
 public:
  explicit CarrierStream(std::unique_ptr<carriers::Carrier> carrier)
      : carrier(std::move(carrier)) {}
  bool send_all(const void* data, size_t bytes, int timeout_ms) override {
    return carriers::write_all(*carrier, data, bytes, timeout_ms * 1000ll);
  }
  bool receive_all(void* data, size_t bytes, int timeout_ms) override {
    return carriers::read_all(*carrier, data, bytes, timeout_ms * 1000ll);
  }
  std::unique_ptr<carriers::Carrier> carrier;
};

// As wire::OpenCarrier; what it returns is a CarrierStream.
std::unique_ptr<wire::HandshakeStream> open_carrier(const wire::LeaseCarrier& where,
                                                    std::string* why);

}  // namespace gpupool::client
