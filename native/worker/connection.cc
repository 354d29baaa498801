#include "worker/connection.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "carriers/ring.h"
#include "wire/control.h"

namespace gpupool::worker {

carriers::SpinGate* open_gate(int page_fd, uint32_t spinners) {
  void* page =
      mmap(nullptr, carriers::SpinGate::kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd, 0);
  close(page_fd);
  if (page == MAP_FAILED || spinners == 0) return nullptr;
  return new carriers::SpinGate(page, spinners);  // as long as the process
}

std::unique_ptr<carriers::Carrier> take_connection(const AssignPayload& payload,
                                                   const std::vector<int>& fds) {
  carriers::SpinGate* gate = fds.size() > 1 ? open_gate(fds[1], payload.spinners) : nullptr;
  if (payload.ring_command_bytes == 0 || fds.size() != 3) {
    return carriers::make_socket_carrier(fds[0], gate);
  }
  auto carrier = carriers::await_choice(
      fds[0], fds[2], {payload.ring_command_bytes, payload.ring_bulk_bytes}, payload.epoch, gate,
      wire::kHandshakeTimeoutSeconds * 1'000'000ll, {payload.ring_offset, payload.ring_file_bytes});
  if (carrier != nullptr) {
    const bool ring = strcmp(carrier->kind(), "ring") == 0;
    send_message(kChannelFd, MessageKind::kCarrier, ring ? 1 : 0);
  }
  return carrier;
}

}  // namespace gpupool::worker
