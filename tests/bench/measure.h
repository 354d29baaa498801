// Clocks and collected measurements of the benchmark's client.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace gpupool::bench {

inline double now_seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// Processor time of all threads of the process: what others do on the machine hardly shows in it.
inline double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// One value per repetition and name; printed as one JSON object per name.
class Results {
 public:
  void add(const std::string& name, const char* unit, double value) {
    auto& entry = entries_[name];
    if (entry.values.empty()) order_.push_back(name);
    entry.unit = unit;
    entry.values.push_back(value);
  }

  void print() const {
    for (const std::string& name : order_) {
      const Entry& entry = entries_.at(name);
      std::printf("{\"name\": \"%s\", \"unit\": \"%s\", \"median\": %.9g, \"values\": [",
                  name.c_str(), entry.unit.c_str(), median(entry.values));
      for (size_t i = 0; i < entry.values.size(); ++i) {
        std::printf("%s%.9g", i == 0 ? "" : ", ", entry.values[i]);
      }
      std::printf("]}\n");
    }
    std::fflush(stdout);
  }

 private:
  struct Entry {
    std::string unit;
    std::vector<double> values;
  };
  std::map<std::string, Entry> entries_;
  std::vector<std::string> order_;
};

}  // namespace gpupool::bench
