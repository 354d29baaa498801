// The CUDA program that `tools/bench simgpu` runs on the simulated GPU. Each kernel stands beside
// the same computation as a plain C loop with as many threads, in turns, so that both see the same
// machine; wall time, and processor time of the whole process. Prints one JSON object per
// measurement; ends with status 5 when a result is wrong.
//
//   gpupool-bench-simgpu --threads N --repetitions N
//
// GPUPOOL_SIMGPU_THREADS is to have the same number of threads.
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"
#include "measure.h"
#include "simgpu_loops.h"

namespace gpupool::bench {
namespace {

constexpr char kKernels[] =
#include "simgpu_kernels.inc"
    ;
constexpr char kNothing[] =
    ".version 6.5\n.target sm_75\n.address_size 64\n.visible .entry nothing()\n{\n  ret;\n}\n";
constexpr int kMatrix = 512, kPicture = 512, kIterations = 256, kLaunches = 2000;

[[noreturn]] void wrong(const char* what) {
  std::fprintf(stderr, "bench: the simulated GPU's %s is wrong\n", what);
  std::exit(5);
}

// Runs fn(from, to) over [0, n) on several threads.
void in_parallel(int threads, int n, const std::function<void(int, int)>& fn) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(fn, n * t / threads, n * (t + 1) / threads);
  fn(0, n / threads);
  for (std::thread& t : others) t.join();
}

class Program {
 public:
  explicit Program(int threads) : threads_(threads) {
    driver_.load();
    CUdevice device;
    CUcontext context;
    BENCH_CHECK(driver_.cuInit(0));
    BENCH_CHECK(driver_.cuDeviceGet(&device, 0));
    BENCH_CHECK(driver_.cuDevicePrimaryCtxRetain(&context, device));
    BENCH_CHECK(driver_.cuCtxSetCurrent(context));
    matmul_ = function(kKernels, "matmul_tiled");
    mandelbrot_ = function(kKernels, "mandelbrot");
    nothing_ = function(kNothing, "nothing");
    a_.resize(kMatrix * kMatrix);
    b_.resize(a_.size());
    c_.resize(a_.size());
    for (size_t k = 0; k < a_.size(); ++k) {
      a_[k] = static_cast<float>(static_cast<int>(k * 37 % 101) - 50) / 50;
      b_[k] = static_cast<float>(static_cast<int>(k * 53 % 103) - 51) / 51;
    }
    picture_.resize(kPicture * kPicture);
    device_a_ = copy(a_), device_b_ = copy(b_), device_c_ = copy(c_);
    device_picture_ = copy(picture_);
  }

  void repetition(Results& results, bool check) {
    int n = kMatrix, limit = kIterations;
    add(results, "C loop, matmul", [&] {
      in_parallel(threads_, n, [&](int from, int to) {
        matmul_loop(a_.data(), b_.data(), c_.data(), n, from, to);
      });
    });
    void* matmul[] = {&device_a_, &device_b_, &device_c_, &n};
    add(results, "matmul", [&] { launch(matmul_, n / 16, n / 16, 16, 16, matmul); });
    if (check) {
      const std::vector<float> got = back<float>(device_c_, c_.size());
      for (size_t k = 0; k < got.size(); ++k)
        if (!(std::fabs(got[k] - c_[k]) < 1e-3f)) wrong("matmul");
    }
    n = kPicture;
    add(results, "C loop, mandelbrot", [&] {
      // In strips, as the work of the rows differs.
      in_parallel(threads_, threads_, [&](int first, int) {
        for (int row = first; row < n; row += threads_)
          mandelbrot_loop(picture_.data(), n, limit, row, row + 1);
      });
    });
    void* mandelbrot[] = {&device_picture_, &n, &limit};
    add(results, "mandelbrot", [&] { launch(mandelbrot_, n / 32, n / 8, 32, 8, mandelbrot); });
    if (check) {
      // A fused multiply-add rounds once, so pixels at the edge may differ.
      const std::vector<int> got = back<int>(device_picture_, picture_.size());
      size_t different = 0;
      for (size_t k = 0; k < got.size(); ++k) different += got[k] != picture_[k];
      if (different > got.size() / 50) wrong("mandelbrot");
    }
    add(
        results, "null kernel",
        [&] {
          for (int k = 0; k < kLaunches; ++k)
            BENCH_CHECK(
                driver_.cuLaunchKernel(nothing_, 1, 1, 1, 32, 1, 1, 0, nullptr, nullptr, nullptr));
          BENCH_CHECK(driver_.cuCtxSynchronize());
        },
        kLaunches);
  }

 private:
  CUfunction function(const char* ptx, const char* name) {
    CUmodule module;
    CUfunction f;
    BENCH_CHECK(driver_.cuModuleLoadData(&module, ptx));
    BENCH_CHECK(driver_.cuModuleGetFunction(&f, module, name));
    return f;
  }
  template <class T>
  CUdeviceptr copy(const std::vector<T>& v) {
    CUdeviceptr p;
    BENCH_CHECK(driver_.cuMemAlloc_v2(&p, v.size() * sizeof(T)));
    BENCH_CHECK(driver_.cuMemcpyHtoD_v2(p, v.data(), v.size() * sizeof(T)));
    return p;
  }
  template <class T>
  std::vector<T> back(CUdeviceptr p, size_t n) {
    std::vector<T> v(n);
    BENCH_CHECK(driver_.cuMemcpyDtoH_v2(v.data(), p, n * sizeof(T)));
    return v;
  }
  void launch(CUfunction f, int gx, int gy, int bx, int by, void** parameters) {
    BENCH_CHECK(driver_.cuLaunchKernel(f, static_cast<unsigned>(gx), static_cast<unsigned>(gy), 1,
                                       static_cast<unsigned>(bx), static_cast<unsigned>(by), 1, 0,
                                       nullptr, parameters, nullptr));
    BENCH_CHECK(driver_.cuCtxSynchronize());
  }
  // Milliseconds; of one of `count`, microseconds.
  template <class Fn>
  void add(Results& results, const std::string& name, Fn fn, int count = 0) {
    const double begin = now_seconds(), cpu = cpu_seconds();
    fn();
    const double wall = now_seconds() - begin, used = cpu_seconds() - cpu;
    const double scale = count ? 1e6 / count : 1e3;
    results.add(name, count ? "us" : "ms", wall * scale);
    results.add(name + ", processor time", count ? "us" : "ms", used * scale);
  }

  int threads_;
  Driver driver_;
  CUfunction matmul_, mandelbrot_, nothing_;
  std::vector<float> a_, b_, c_;
  std::vector<int> picture_;
  CUdeviceptr device_a_, device_b_, device_c_, device_picture_;
};

int run(int argc, char** argv) {
  int threads = 1, repetitions = 5;
  for (int k = 1; k + 1 < argc; k += 2) {
    const std::string option = argv[k];
    if (option == "--threads") threads = std::atoi(argv[k + 1]);
    if (option == "--repetitions") repetitions = std::atoi(argv[k + 1]);
  }
  if (threads < 1 || threads > 64 || repetitions < 1) {
    std::fprintf(stderr, "usage: gpupool-bench-simgpu --threads N --repetitions N\n");
    return 2;
  }
  Program program(threads);
  Results warm_up, results;
  program.repetition(warm_up, true);
  for (int r = 0; r < repetitions; ++r) program.repetition(results, false);
  results.print();
  return 0;
}

}  // namespace
}  // namespace gpupool::bench

int main(int argc, char** argv) { return gpupool::bench::run(argc, argv); }
