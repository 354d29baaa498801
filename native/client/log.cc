#include "client/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

namespace gpupool::client {
namespace {

struct Setting {
  Level level = Level::kError;
  bool chosen = false;
};

Setting read_setting() {
  Setting setting;
  const char* text = getenv("GPUPOOL_LOG");
  if (text == nullptr || *text == '\0') return setting;
  setting.chosen = true;
  if (strcmp(text, "info") == 0) setting.level = Level::kInfo;
  if (strcmp(text, "debug") == 0) setting.level = Level::kDebug;
  return setting;
}

const Setting& setting() {
  static const Setting value = read_setting();
  return value;
}

}  // namespace

bool log_enabled(Level level) { return level <= setting().level; }
bool log_chosen() { return setting().chosen; }

void log(Level level, const char* format, ...) {
  if (!log_enabled(level)) return;
  static const char* const names[] = {"error", "info", "debug"};
  char line[1024];
  int n = snprintf(line, sizeof line, "gpupool[%d] %s: ", static_cast<int>(getpid()),
                   names[static_cast<int>(level)]);
  va_list arguments;
  va_start(arguments, format);
  n += vsnprintf(line + n, sizeof line - static_cast<size_t>(n) - 1, format, arguments);
  va_end(arguments);
  if (n > static_cast<int>(sizeof line) - 2) n = sizeof line - 2;
  line[n++] = '\n';
  // One write, so that the lines of several threads do not mix.
  if (::write(STDERR_FILENO, line, static_cast<size_t>(n)) < 0) return;
}

}  // namespace gpupool::client
