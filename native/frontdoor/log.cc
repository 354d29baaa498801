#include "frontdoor/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

namespace gpupool::frontdoor {
namespace {

constexpr const char* kNames[] = {"off", "error", "warning", "info", "debug"};

LogLevel threshold() {
  static const LogLevel level = [] {
    const char* value = getenv("GPUPOOL_LOG");
    for (int i = 0; value != nullptr && i < 5; ++i) {
      if (strcmp(value, kNames[i]) == 0) return static_cast<LogLevel>(i);
    }
    return LogLevel::kWarning;
  }();
  return level;
}

}  // namespace

bool log_enabled(LogLevel level) { return level <= threshold(); }

void log(LogLevel level, const char* format, ...) {
  if (!log_enabled(level)) return;
  char line[1024];
  int used =
      snprintf(line, sizeof line, "gpupool[%d] %s: ", getpid(), kNames[static_cast<int>(level)]);
  va_list arguments;
  va_start(arguments, format);
  int more = vsnprintf(line + used, sizeof line - used - 1, format, arguments);
  va_end(arguments);
  if (more > 0) used += more;
  if (used > static_cast<int>(sizeof line) - 2) used = sizeof line - 2;
  line[used++] = '\n';
  // One write, so that lines of several threads and processes don't mix.
  [[maybe_unused]] ssize_t ignored = write(STDERR_FILENO, line, used);
}

}  // namespace gpupool::frontdoor
