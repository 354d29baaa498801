// How the slices of a lease do: asked by the client without a session, told by the broker.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "wire/handshake.h"

namespace gpupool::wire {

struct Status {
  std::string driver_version;
  std::vector<DeviceSnapshot> devices;  // client: from kWelcome
  std::vector<SliceStatus> slices;      // one for each device
  std::vector<ProcessStatus> processes;
};

// Broker: the whole frame, without the devices. Of too many processes the first are told.
std::string status_frame(const Status& status);

// Client: a body of a kStatus frame; nullopt if it is wrong in any way.
std::optional<Status> parse_status(const uint8_t* body, size_t bytes);

// Client: opens a connection, asks, closes it. nullopt: the result says why; `refused` and the code
// are the broker's.
std::optional<Status> query_status(const LeaseFile& lease, const OpenCarrier& open,
                                   HandshakeResult* result, int timeout_ms = 10000);

}  // namespace gpupool::wire
