#include "wire/status.h"

#include <string.h>

#include <algorithm>

namespace gpupool::wire {
namespace {

constexpr uint32_t kMaxSlices = 256;

template <class Entry>
void append(std::string& out, const Entry& entry) {
  out.append(reinterpret_cast<const char*>(&entry), sizeof entry);
}

// What both sides know of a structure that is `bytes` long on the wire; the rest stays 0.
template <class Entry>
Entry take(const uint8_t* at, size_t bytes) {
  Entry entry{};
  memcpy(&entry, at, std::min(bytes, sizeof entry));
  return entry;
}

bool plausible(uint32_t bytes, size_t least) {
  return bytes >= least && bytes % 8 == 0 && bytes <= 4096;
}

}  // namespace

std::string status_frame(const Status& status) {
  StatusBody head{};
  head.body_bytes = sizeof(StatusBody);
  head.slice_bytes = sizeof(SliceStatus);
  head.slice_count = static_cast<uint32_t>(status.slices.size());
  head.process_bytes = sizeof(ProcessStatus);
  head.process_count =
      static_cast<uint32_t>(std::min<size_t>(status.processes.size(), kMaxStatusProcesses));
  status.driver_version.copy(head.driver_version, sizeof head.driver_version - 1);
  std::string body;
  append(body, head);
  for (const SliceStatus& slice : status.slices) append(body, slice);
  for (size_t i = 0; i < head.process_count; i++) append(body, status.processes[i]);

  FrameHeader header{};
  header.magic = kFrameMagic;
  header.kind = static_cast<uint16_t>(FrameKind::kStatus);
  header.body_bytes = static_cast<uint32_t>(body.size());
  std::string frame;
  append(frame, header);
  return frame + body;
}

std::optional<Status> parse_status(const uint8_t* body, size_t bytes) {
  if (bytes < sizeof(StatusBody)) return std::nullopt;
  const auto head = take<StatusBody>(body, sizeof(StatusBody));
  if (!plausible(head.body_bytes, sizeof(StatusBody)) ||
      !plausible(head.slice_bytes, sizeof(SliceStatus)) ||
      !plausible(head.process_bytes, kFirstProcessStatusBytes) || head.slice_count > kMaxSlices ||
      head.process_count > kMaxStatusProcesses ||
      bytes != head.body_bytes + uint64_t{head.slice_count} * head.slice_bytes +
                   uint64_t{head.process_count} * head.process_bytes) {
    return std::nullopt;
  }
  Status status;
  status.driver_version.assign(head.driver_version,
                               strnlen(head.driver_version, sizeof head.driver_version));
  const uint8_t* at = body + head.body_bytes;
  for (uint32_t i = 0; i < head.slice_count; i++, at += head.slice_bytes) {
    status.slices.push_back(take<SliceStatus>(at, head.slice_bytes));
  }
  for (uint32_t i = 0; i < head.process_count; i++, at += head.process_bytes) {
    auto process = take<ProcessStatus>(at, head.process_bytes);
    process.program[sizeof process.program - 1] = '\0';
    if (head.process_bytes < sizeof process) process.busy_permille = kNotMeasured;
    if (process.device >= head.slice_count) return std::nullopt;
    status.processes.push_back(process);
  }
  return status;
}

std::optional<Status> query_status(const LeaseFile& lease, const OpenCarrier& open,
                                   HandshakeResult* result, int timeout_ms) {
  HelloRequest request;
  request.purpose = ConnectionPurpose::kStatus;
  Connected connected = connect_lease(lease, request, open, 0, timeout_ms);
  *result = std::move(connected.handshake);
  if (!result->ok) return std::nullopt;
  result->ok = false;
  FrameHeader header;
  std::vector<uint8_t> body;
  if (connected.stream->receive_all(&header, sizeof header, timeout_ms) &&
      header.magic == kFrameMagic && header.kind == static_cast<uint16_t>(FrameKind::kStatus) &&
      header.bulk_count == 0 && header.body_bytes <= kMaxFrameBody) {
    body.resize(header.body_bytes);
    if (!connected.stream->receive_all(body.data(), body.size(), timeout_ms)) body.clear();
  }
  auto status = parse_status(body.data(), body.size());
  if (!status || status->slices.size() != result->devices.size()) {
    result->message = "the broker's answer about the lease is not complete";
    return std::nullopt;
  }
  status->devices = std::move(result->devices);
  result->ok = true;
  return status;
}

}  // namespace gpupool::wire
