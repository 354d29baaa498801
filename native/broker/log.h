// The broker's log on standard error, one line per message; with levels when it goes to the
// journal.
#pragma once

#include <string_view>

namespace gpupool::broker {

enum class LogLevel { kError = 3, kWarning = 4, kNotice = 5, kInfo = 6 };

void log(LogLevel level, std::string_view text);

// For what strangers can cause: at most about 20 lines a second; what was left out is counted.
void log_limited(std::string_view text);

}  // namespace gpupool::broker
