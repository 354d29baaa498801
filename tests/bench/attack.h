// What a hostile guest does to its host.
#pragma once

namespace gpupool::bench {

// Random bytes into the virtio-serial port and all over the region, for so many seconds; then says
// how much as JSON. An exit status.
int attack(const char* port, const char* region, int seconds);

}  // namespace gpupool::bench
