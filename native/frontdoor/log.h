// Messages of the driver library for people, on standard error. GPUPOOL_LOG_LEVEL chooses how much:
// error, warning (the default), info or debug.
#pragma once

namespace gpupool::frontdoor {

enum class LogLevel { kError = 0, kWarning = 1, kInfo = 2, kDebug = 3 };

bool log_enabled(LogLevel level);
void log(LogLevel level, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace gpupool::frontdoor
