// Messages of the client library on standard error: GPUPOOL_LOG=error|info|debug (default: error).
#pragma once

namespace gpupool::client {

enum class Level { kError = 0, kInfo = 1, kDebug = 2 };

bool log_enabled(Level level);
// True if GPUPOOL_LOG is set at all: then also conditions that a program may expect are explained.
bool log_chosen();
void log(Level level, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace gpupool::client
