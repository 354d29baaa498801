#include "broker/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <string>

namespace gpupool::broker {
namespace {

std::string prefix(LogLevel level) {
  static const bool journal = getenv("JOURNAL_STREAM") != nullptr;
  if (journal) return "<" + std::to_string(static_cast<int>(level)) + ">";
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  tm parts;
  gmtime_r(&now.tv_sec, &parts);
  char text[64];
  snprintf(text, sizeof text, "%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ %s ", parts.tm_year + 1900,
           parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
           now.tv_nsec / 1000000,
           level == LogLevel::kError     ? "ERROR"
           : level == LogLevel::kWarning ? "WARNING"
           : level == LogLevel::kNotice  ? "NOTICE"
                                         : "INFO");
  return text;
}

}  // namespace

void log(LogLevel level, std::string_view text) {
  std::string line = prefix(level);
  // What strangers sent may be part of the text: nothing of it may look like a line of its own.
  for (char c : text) line += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c;
  line += '\n';
  // A log that cannot be written is no reason to stop serving.
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

void log_limited(std::string_view text) {
  static double tokens = 50;
  static double last = 0;
  static unsigned suppressed = 0;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const double seconds = static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
  tokens = std::min(50.0, tokens + (seconds - last) * 20);
  last = seconds;
  if (tokens < 1) {
    suppressed++;
    return;
  }
  tokens -= 1;
  if (suppressed != 0) {
    log(LogLevel::kNotice, std::to_string(suppressed) + " messages like the next were left out");
    suppressed = 0;
  }
  log(LogLevel::kInfo, text);
}

}  // namespace gpupool::broker
