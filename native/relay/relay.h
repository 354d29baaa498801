// The two ends of a session that uses a slice of another host: the relay near the client, which
// stands for the worker there, and the one far from it, which is the worker's client.
#pragma once

#include <memory>
#include <string>

#include "relay/tls.h"
#include "worker/channel.h"

namespace gpupool::relay {

// What became of it, for the broker: the normal end, or a fault and what it was.
struct Outcome {
  bool fault = false;
  std::string sentence;
};

// `assignment`: kAssign; its descriptors are taken.
Outcome serve_near(const TlsContext& tls, worker::Message& assignment);
// `assignment`: kFarAssign; its descriptors are taken.
Outcome serve_far(const TlsContext& tls, worker::Message& assignment);

}  // namespace gpupool::relay
