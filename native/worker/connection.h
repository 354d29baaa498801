// The client's connection as the broker hands it over.
#pragma once

#include <memory>
#include <vector>

#include "carriers/carrier.h"
#include "carriers/spin_gate.h"
#include "worker/channel.h"

namespace gpupool::worker {

// Of the page of spinners, which is closed. Null: this thread never spins. It stays for as long as
// the process; one thread uses it.
carriers::SpinGate* open_gate(int page_fd, uint32_t spinners);

// The client's connection, or the ring that it was offered with it; tells the broker which. Takes
// the descriptors. Null: the client did not say in time what it is to be.
std::unique_ptr<carriers::Carrier> take_connection(const AssignPayload& payload,
                                                   const std::vector<int>& fds);

}  // namespace gpupool::worker
