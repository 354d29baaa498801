#include "client/connect.h"

namespace gpupool::client {

std::unique_ptr<wire::HandshakeStream> open_carrier(const wire::LeaseCarrier& where,
                                                    std::string* why) {
  std::unique_ptr<carriers::Carrier> carrier;
  if (where.kind == "unix") {
    carrier = carriers::connect_unix(where.path, why);
  } else if (where.kind == "tcp") {
    carrier = carriers::connect_tcp(where.host, where.port, why);
  } else {
    *why = "this client knows no carrier of the kind " + where.kind;
  }
  if (carrier == nullptr) return nullptr;
  return std::make_unique<CarrierStream>(std::move(carrier));
}

}  // namespace gpupool::client
