// Rings in a sealed memfd or in a slot of a larger file, with the session's own socket as the bell.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "carriers/ring.h"

#ifndef MFD_ALLOW_SEALING
#define MFD_ALLOW_SEALING 2u
#endif

namespace gpupool::carriers {
namespace {

// What a client answers to an offer, 8 bytes on its connection.
constexpr uint64_t kTakesRing = 1, kTakesSocket = 2;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

class Mapping final : public RingRegion {
 public:
  Mapping(void* base, size_t bytes) : base_(base), bytes_(bytes) {}
  ~Mapping() override { munmap(base_, bytes_); }
  uint8_t* base() override { return static_cast<uint8_t*>(base_); }

 private:
  void* const base_;
  const size_t bytes_;
};

struct OwnedFd {
  ~OwnedFd() {
    if (fd >= 0) close(fd);
  }
  const int fd;
};

std::string failed(const char* what) {
  return std::string("the ring's memory: ") + what + ": " + strerror(errno);
}

}  // namespace

std::unique_ptr<RingRegion> map_ring(int file, const RingLayout& layout, std::string* why,
                                     const RingPlace& place) {
  struct stat status;
  const uint64_t bytes = layout.region_bytes();
  const bool slot = place.file_bytes != 0;
  if (!layout.valid() || place.offset % kRingControlBytes != 0 ||
      (slot ? place.offset > place.file_bytes || bytes > place.file_bytes - place.offset
            : place.offset != 0)) {
    return *why = "the ring's sizes are impossible", nullptr;
  }
  if (fstat(file, &status) != 0) return *why = failed("fstat"), nullptr;
  const auto there = static_cast<uint64_t>(status.st_size);
  if (there < bytes) return *why = "the ring's memory is smaller than it should be", nullptr;
  if (slot) {
    if (!S_ISREG(status.st_mode) || there != place.file_bytes) {
      return *why = "the ring's file is not the one that it should be", nullptr;
    }
  } else {
    // Without the seal whoever else has it could cut it off under our hands.
    const int seals = fcntl(file, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
      return *why = "the ring's memory is not sealed", nullptr;
    }
  }
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                    static_cast<off_t>(place.offset));
  if (base == MAP_FAILED) return *why = failed("mmap"), nullptr;
  madvise(base, bytes, MADV_DONTFORK);
  madvise(base, bytes, MADV_DONTDUMP);
  return std::make_unique<Mapping>(base, bytes);
}

int make_ring_memfd(const RingLayout& layout, uint32_t epoch, std::string* why) {
  const int fd = memfd_create("gpupool-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return *why = failed("memfd_create"), -1;
  if (ftruncate(fd, static_cast<off_t>(layout.region_bytes())) != 0 ||
      fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    *why = failed("size and seals");
    close(fd);
    return -1;
  }
  // Only the control page is touched here: the rest is charged to whoever uses it.
  void* control = mmap(nullptr, kRingControlBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (control == MAP_FAILED) {
    *why = failed("mmap");
    close(fd);
    return -1;
  }
  prepare_ring(control, layout, epoch);
  munmap(control, kRingControlBytes);
  return fd;
}

std::unique_ptr<Carrier> choose_ring(std::unique_ptr<Carrier> socket, int file, uint32_t version,
                                     const RingLayout& layout, uint32_t epoch,
                                     const RingPlace& place) {
  const OwnedFd owned{file};
  std::string why;
  std::unique_ptr<RingRegion> region;
  if (file >= 0 && version == kRingVersion) region = map_ring(file, layout, &why, place);
  if (region != nullptr) {
    const auto* control = reinterpret_cast<const RingControl*>(region->base());
    if (control->magic != kRingMagic || control->version != kRingVersion ||
        control->epoch.load() != epoch) {
      region.reset();
    }
  }
  const uint64_t choice = region != nullptr ? kTakesRing : kTakesSocket;
  if (!write_all(*socket, &choice, sizeof choice, -1) || region == nullptr) return socket;
  return make_ring_carrier(std::move(region), layout, RingSide::kClient, epoch,
                           make_socket_bell(release_socket(std::move(socket))), nullptr,
                           place.file_bytes != 0);
}

std::unique_ptr<Carrier> await_choice(int connection, int file, const RingLayout& layout,
                                      uint32_t epoch, SpinGate* gate, int64_t timeout_us,
                                      const RingPlace& place) {
  const OwnedFd owned{file};
  auto socket = make_socket_carrier(connection, gate);
  uint64_t choice = 0;
  if (!read_all(*socket, &choice, sizeof choice, timeout_us)) return nullptr;
  if (choice == kTakesSocket) return socket;
  std::string why;
  auto region = choice == kTakesRing ? map_ring(file, layout, &why, place) : nullptr;
  if (region == nullptr) return nullptr;
  return make_ring_carrier(std::move(region), layout, RingSide::kWorker, epoch,
                           make_socket_bell(release_socket(std::move(socket))), gate,
                           place.file_bytes != 0);
}

}  // namespace gpupool::carriers
