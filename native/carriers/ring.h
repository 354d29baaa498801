// A ring in shared memory as a carrier (doc/rings.md). It needs the region, wherever that lies, and
// a bell.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "carriers/bell.h"
#include "carriers/carrier.h"
#include "carriers/ring_layout.h"
#include "carriers/spin_gate.h"

namespace gpupool::carriers {

enum class RingSide { kClient, kWorker };

// A mapped region; what it is a mapping of does not matter.
class RingRegion {
 public:
  virtual ~RingRegion() = default;
  virtual uint8_t* base() = 0;
};

// Fills in the control page of a region that is all zero. By the host, before anybody uses it.
void prepare_ring(void* region, const RingLayout& layout, uint32_t epoch);

// `gate`: the worker's side, null: it never spins; stays the caller's. `of_machine`: the region is
// that of a virtual machine. Its client runs on other processors than the worker, and bells are
// slow. For the client it is part of a device that can be unplugged, some time after the bell's
// other side has gone; then nothing touches it any more.
std::unique_ptr<Carrier> make_ring_carrier(std::unique_ptr<RingRegion> region,
                                           const RingLayout& layout, RingSide side, uint32_t epoch,
                                           std::unique_ptr<Bell> bell, SpinGate* gate = nullptr,
                                           bool of_machine = false);

// ---- The region is a memfd or a slot of a virtual machine's region, the bell a connected socket
// --

// Where in its file a ring's region lies.
struct RingPlace {
  uint64_t offset = 0;
  uint64_t file_bytes = 0;  // of the whole file; 0: a sealed memfd that holds nothing else
};

// Maps a region; null: `why`. The memory is not inherited by children. The descriptor stays the
// caller's. Refuses a memfd that the other side could make smaller; a file that others lie in, too,
// is only checked to be as large as it should be now (doc/rings.md).
std::unique_ptr<RingRegion> map_ring(int file, const RingLayout& layout, std::string* why,
                                     const RingPlace& place = {});

// A sealed memfd with a region that is ready for use; -1: `why`.
int make_ring_memfd(const RingLayout& layout, uint32_t epoch, std::string* why);

// Client: looks at what the host has offered, and tells it over the connection (a socket carrier)
// whether it takes it. A ring, or what was given. Takes the descriptor.
std::unique_ptr<Carrier> choose_ring(std::unique_ptr<Carrier> socket, int file, uint32_t version,
                                     const RingLayout& layout, uint32_t epoch,
                                     const RingPlace& place = {});

// Worker: waits for the client's choice. Null: none came within `timeout_us`. Takes both
// descriptors.
std::unique_ptr<Carrier> await_choice(int connection, int file, const RingLayout& layout,
                                      uint32_t epoch, SpinGate* gate, int64_t timeout_us,
                                      const RingPlace& place = {});

}  // namespace gpupool::carriers
