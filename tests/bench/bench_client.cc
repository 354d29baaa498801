// The CUDA program that tools/bench runs through a slice. In each repetition every measurement
// stands beside its raw baseline, so that ratios are taken within seconds of each other on the same
// machine. Prints one JSON object per measurement.
//
//   gpupool-bench-client all      --carrier unix|tcp|ring --repetitions N [--launches N]
//                                 [--region FILE]  FILE: baseline through memory shared with
//                                 another machine, where `serve` answers
//   gpupool-bench-client serve    --region FILE
//   gpupool-bench-client latency  --seconds N: of synchronising calls
//   gpupool-bench-client attack   --port DEVICE --region FILE --seconds N
//   gpupool-bench-client startup  --repetitions N --direct DIR   DIR: driver without remoting
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "attack.h"
#include "baseline.h"
#include "driver.h"
#include "measure.h"

extern char** environ;

namespace gpupool::bench {
namespace {

constexpr char kPtx[] =
    ".version 6.5\n.target sm_75\n.address_size 64\n"
    ".visible .entry nothing(.param .u64 nothing_pointer, .param .u32 nothing_count,\n"
    "  .param .f32 nothing_factor)\n{\n  ret;\n}\n";
constexpr size_t kLargest = 64 * 1024 * 1024;
constexpr size_t kRoundTripBytes = 72;  // about what a synchronising call and its answer have
constexpr size_t kLaunchBytes = 96;     // about what a launch has on the wire

struct CopySize {
  const char* name;
  size_t bytes;
  int count;
};
constexpr CopySize kCopySizes[] = {
    {"4 KiB", 4096, 2000},   {"64 KiB", 65536, 500},  {"1 MiB", 1 << 20, 100},
    {"16 MiB", 16 << 20, 8}, {"64 MiB", kLargest, 3},
};

// A program with a context, a kernel and a buffer, and what is measured with it.
class Program {
 public:
  Program() {
    driver_.load();
    CUdevice device;
    BENCH_CHECK(driver_.cuInit(0));
    BENCH_CHECK(driver_.cuDeviceGet(&device, 0));
    BENCH_CHECK(driver_.cuDevicePrimaryCtxRetain(&context_, device));
    BENCH_CHECK(driver_.cuCtxSetCurrent(context_));
    BENCH_CHECK(driver_.cuModuleLoadData(&module_, kPtx));
    BENCH_CHECK(driver_.cuModuleGetFunction(&function_, module_, "nothing"));
    BENCH_CHECK(driver_.cuMemAlloc_v2(&buffer_, 4096));
    launch();
    synchronize();
  }

  void launch() {
    void* parameters[] = {&buffer_, &count_, &factor_};
    BENCH_CHECK(
        driver_.cuLaunchKernel(function_, 1, 1, 1, 32, 1, 1, 0, nullptr, parameters, nullptr));
  }
  void synchronize() { BENCH_CHECK(driver_.cuCtxSynchronize()); }

  std::vector<double> synchronizing_calls(int count) {
    return each(count, [this] { synchronize(); });
  }
  std::vector<double> launches_with_wait(int count) {
    return each(count, [this] {
      launch();
      synchronize();
    });
  }

  void launches(int count, Results& results) {
    synchronize();
    double cpu_start = cpu_seconds(), start = now_seconds();
    for (int i = 0; i < count; ++i) launch();
    double returned = now_seconds(), cpu_end = cpu_seconds();
    synchronize();
    double end = now_seconds();
    results.add("launch rate", "1/s", count / (end - start));
    results.add("launch, client wall time", "us", (returned - start) * 1e6 / count);
    results.add("launch, client CPU time", "us", (cpu_end - cpu_start) * 1e6 / count);
  }

  void allocations(int count, Results& results) {
    CUdeviceptr pointer;
    double start = now_seconds();
    for (int i = 0; i < count; ++i) {
      BENCH_CHECK(driver_.cuMemAlloc_v2(&pointer, 1 << 20));
      BENCH_CHECK(driver_.cuMemFree_v2(pointer));
    }
    results.add("alloc + free", "us", (now_seconds() - start) * 1e6 / count);
  }

  // Copies both ways; false: what came back is not what was sent.
  bool copies(const CopySize& size, const char* source, char* target, Results& results) {
    CUdeviceptr pointer;
    BENCH_CHECK(driver_.cuMemAlloc_v2(&pointer, size.bytes));
    BENCH_CHECK(driver_.cuMemcpyHtoD_v2(pointer, source, size.bytes));
    synchronize();
    double start = now_seconds();
    for (int i = 0; i < size.count; ++i) {
      BENCH_CHECK(driver_.cuMemcpyHtoD_v2(pointer, source, size.bytes));
    }
    synchronize();
    add_rate(results, std::string("to device, ") + size.name, size, now_seconds() - start);
    std::memset(target, 0x5a, size.bytes);
    start = now_seconds();
    for (int i = 0; i < size.count; ++i) {
      BENCH_CHECK(driver_.cuMemcpyDtoH_v2(target, pointer, size.bytes));
    }
    add_rate(results, std::string("to host, ") + size.name, size, now_seconds() - start);
    BENCH_CHECK(driver_.cuMemFree_v2(pointer));
    return std::memcmp(source, target, size.bytes) == 0;
  }

  static void add_rate(Results& results, const std::string& name, const CopySize& size,
                       double seconds) {
    results.add(name, "MB/s", static_cast<double>(size.bytes) * size.count / 1e6 / seconds);
  }

 private:
  template <typename Call>
  std::vector<double> each(int count, Call call) {
    std::vector<double> seconds(static_cast<size_t>(count));
    for (double& one : seconds) {
      double start = now_seconds();
      call();
      one = now_seconds() - start;
    }
    return seconds;
  }

  Driver driver_;
  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
  CUdeviceptr buffer_ = 0;
  unsigned count_ = 7;
  float factor_ = 1.5f;
};

void add_latency(Results& results, const std::string& name, std::vector<double> seconds) {
  results.add(name, "us", median(seconds) * 1e6);
}

// How long calls take while something else may go on, the worst ones too.
int measure_latency(int seconds) {
  Program program;
  std::vector<double> all;
  for (const double end = now_seconds() + seconds; now_seconds() < end;) {
    const std::vector<double> some = program.synchronizing_calls(1000);
    all.insert(all.end(), some.begin(), some.end());
  }
  std::sort(all.begin(), all.end());
  Results results;
  results.add("calls", "1/s", static_cast<double>(all.size()) / seconds);
  results.add("p50", "us", all[all.size() / 2] * 1e6);
  results.add("p99", "us", all[all.size() / 100 * 99] * 1e6);
  results.add("worst", "us", all.back() * 1e6);
  results.print();
  return 0;
}

int measure_all(Carrier carrier, const std::string& region, int repetitions, int launches) {
  // Before any thread of the driver exists: the peer is a fork of this process.
  std::optional<RawPeer> own;
  if (region.empty())
    own.emplace(carrier);
  else
    own.emplace(region.c_str());
  RawPeer& raw = *own;
  std::vector<char> source(kLargest), target(kLargest);
  uint64_t state = 88172645463325252ull;  // xorshift: what does not compress
  for (size_t i = 0; i < kLargest; i += sizeof state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(&source[i], &state, sizeof state);
  }
  Program program;
  Results results;
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    add_latency(results, "raw ping-pong", raw.ping_pong(3000, kRoundTripBytes));
    add_latency(results, "synchronising call", program.synchronizing_calls(3000));
    add_latency(results, "launch + synchronise", program.launches_with_wait(3000));
    program.allocations(1000, results);

    // The same number of messages of the same size as one stream, 32 KiB a write.
    constexpr size_t kWrite = 32 * 1024;
    int writes = static_cast<int>(static_cast<size_t>(launches) * kLaunchBytes / kWrite) + 1;
    double seconds = raw.send_stream(source.data(), kWrite, writes);
    results.add("raw stream of launches", "1/s",
                static_cast<double>(writes) * kWrite / kLaunchBytes / seconds);
    program.launches(launches, results);

    for (const CopySize& size : kCopySizes) {
      Program::add_rate(results, std::string("raw to device, ") + size.name, size,
                        raw.send_stream(source.data(), size.bytes, size.count));
      Program::add_rate(results, std::string("raw to host, ") + size.name, size,
                        raw.receive(target.data(), size.bytes, size.count));
      double start = now_seconds();
      for (int i = 0; i < size.count; ++i) {
        std::memcpy(target.data(), source.data(), size.bytes);
        asm volatile("" ::"r"(target.data()) : "memory");
      }
      Program::add_rate(results, std::string("memcpy, ") + size.name, size, now_seconds() - start);
      if (!program.copies(size, source.data(), target.data(), results)) {
        std::fprintf(stderr, "bench: what was copied to the device and back is not the same (%s)\n",
                     size.name);
        return 5;
      }
    }
  }
  results.print();
  return 0;
}

// One run of this program up to its first kernel, in seconds since the call of posix_spawn.
double start_once(const std::string& self, std::vector<std::string> environment) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) std::exit(2);
  std::string end = std::to_string(pipe_ends[1]);
  const char* arguments[] = {self.c_str(), "first", end.c_str(), nullptr};
  std::vector<char*> variables;
  for (std::string& variable : environment) variables.push_back(variable.data());
  variables.push_back(nullptr);
  pid_t child = 0;
  double start = now_seconds(), finished = 0;
  if (posix_spawn(&child, self.c_str(), nullptr, nullptr, const_cast<char**>(arguments),
                  variables.data()) != 0) {
    std::fprintf(stderr, "bench: could not start %s\n", self.c_str());
    std::exit(2);
  }
  close(pipe_ends[1]);
  ssize_t got = read(pipe_ends[0], &finished, sizeof finished);
  close(pipe_ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (got != static_cast<ssize_t>(sizeof finished) || status != 0) {
    std::fprintf(stderr, "bench: the started program failed (status 0x%x)\n", status);
    std::exit(5);
  }
  return finished - start;
}

int measure_startup(int repetitions, const std::string& direct) {
  char self[4096];
  ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  if (length <= 0) return 2;
  self[length] = 0;
  std::vector<std::string> remoted, local;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    std::string text = *variable;
    remoted.push_back(text);
    if (text.rfind("LD_LIBRARY_PATH=", 0) != 0 && text.rfind("GPUPOOL_LEASE_FILE=", 0) != 0) {
      local.push_back(text);
    }
  }
  local.push_back("LD_LIBRARY_PATH=" + direct);
  Results results;
  start_once(self, remoted);  // not counted: brings files into the page cache
  start_once(self, local);
  for (int i = 0; i < repetitions; ++i) {
    results.add("direct start to first kernel", "ms", start_once(self, local) * 1e3);
    results.add("start to first kernel", "ms", start_once(self, remoted) * 1e3);
    usleep(50000);  // the broker makes another worker ready
  }
  results.print();
  return 0;
}

int first_kernel(int fd) {
  Program program;
  double finished = now_seconds();
  if (write(fd, &finished, sizeof finished) != static_cast<ssize_t>(sizeof finished)) return 2;
  return 0;
}

int usage() {
  std::fprintf(
      stderr,
      "usage: gpupool-bench-client all|startup|serve|latency|attack [--carrier unix|tcp|ring]\n"
      "                            [--repetitions N] [--launches N] [--direct DIR] [--region "
      "FILE]\n"
      "                            [--port DEVICE] [--seconds N]\n");
  return 2;
}

int run(int argc, char** argv) {
  if (argc < 2) return usage();
  std::string mode = argv[1], direct, port, region;
  Carrier carrier = Carrier::kUnix;
  int repetitions = 5, launches = 200000, seconds = 5;
  if (mode == "first" && argc == 3) return first_kernel(std::atoi(argv[2]));
  for (int i = 2; i + 1 < argc; i += 2) {
    std::string option = argv[i], value = argv[i + 1];
    if (option == "--carrier" && value == "tcp")
      carrier = Carrier::kTcp;
    else if (option == "--carrier" && value == "unix")
      carrier = Carrier::kUnix;
    else if (option == "--carrier" && value == "ring")
      carrier = Carrier::kRing;
    else if (option == "--repetitions")
      repetitions = std::max(1, std::atoi(value.c_str()));
    else if (option == "--launches")
      launches = std::max(1, std::atoi(value.c_str()));
    else if (option == "--direct")
      direct = value;
    else if (option == "--port")
      port = value;
    else if (option == "--region")
      region = value;
    else if (option == "--seconds")
      seconds = std::max(1, std::atoi(value.c_str()));
    else
      return usage();
  }
  if (mode == "all") return measure_all(carrier, region, repetitions, launches);
  if (mode == "serve" && !region.empty()) serve_region(region.c_str());
  if (mode == "attack" && !port.empty()) return attack(port.c_str(), region.c_str(), seconds);
  if (mode == "latency") return measure_latency(seconds);
  if (mode == "startup" && !direct.empty()) return measure_startup(repetitions, direct);
  return usage();
}

}  // namespace
}  // namespace gpupool::bench

int main(int argc, char** argv) { return gpupool::bench::run(argc, argv); }
