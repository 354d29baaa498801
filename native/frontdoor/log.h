// Messages of the driver library for people, on standard error. GPUPOOL_LOG chooses how much: off,
// error, warning (the default), info or debug.
#pragma once

namespace gpupool::frontdoor {

enum class LogLevel { kError = 1, kWarning = 2, kInfo = 3, kDebug = 4 };

bool log_enabled(LogLevel level);
void log(LogLevel level, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace gpupool::frontdoor
