// `gpupool-guest status`: one sentence on why there is a GPU or none.
#pragma once

#include <string>

namespace gpupool::guest {

enum StatusExit : int {
  kStatusOk = 0,
  kStatusNoPort = 3,
  kStatusNoHost = 4,
  kStatusRefused = 5,
  kStatusNoHelper = 6,
  kStatusNotPermitted = 7,
};

// Prints it and returns the exit status.
int print_status(const std::string& run_dir, bool json);

}  // namespace gpupool::guest
