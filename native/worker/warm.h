// What a warm worker does in advance, beyond loading the driver.
#pragma once

#include <string>

namespace gpupool::worker {

// Retains the device's primary context of the loaded driver, for the life of the process: a first
// context of a client is then there already. It costs device memory on every card. `directory` as
// for Driver::load. False: `why` is one sentence.
bool retain_primary_context(const std::string& directory, int ordinal, std::string* why);

}  // namespace gpupool::worker
