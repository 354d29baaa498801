// Integrals in several ways that are hard on a compiler and a debugger alike: function pointers
// fetched from the device, virtual functions of objects built on the device, recursion, lambdas,
// structures by value, the device's own heap; and a Monte Carlo estimate with 64-bit random
// numbers.
#include <cstdint>
#include <vector>

#include "expect.h"

using Function = double (*)(double);

__device__ double square(double x) { return x * x; }
__device__ double exponential(double x) { return exp(-x); }
__device__ double wave(double x) { return sin(3 * x) / (1 + x * x); }

__device__ const Function functions[] = {square, exponential, wave};
__device__ Function chosen = wave;

// Read when the kernel runs, so that the call stays indirect.
struct Interval {
  double from, to;
  char padding[3];  // makes the structure's tail interesting
  int which;
};

__device__ double simpson(double from, double to, double a, double middle, double b) {
  return (to - from) / 6 * (a + 4 * middle + b);
}

__device__ __noinline__ double adaptive(Function f, double from, double to, double tolerance,
                                        double a, double middle, double b, double whole,
                                        int depth) {
  const double centre = (from + to) / 2;
  const double left_middle = f((from + centre) / 2), right_middle = f((centre + to) / 2);
  const double left = simpson(from, centre, a, left_middle, middle);
  const double right = simpson(centre, to, middle, right_middle, b);
  if (depth == 0 || fabs(left + right - whole) <= 15 * tolerance) {
    return left + right + (left + right - whole) / 15;
  }
  return adaptive(f, from, centre, tolerance / 2, a, left_middle, middle, left, depth - 1) +
         adaptive(f, centre, to, tolerance / 2, middle, right_middle, b, right, depth - 1);
}

__global__ void integrate(const Interval *intervals, int count, double *out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const Interval interval = intervals[i];
  const Function f = interval.which < 3 ? functions[interval.which] : chosen;
  const double a = f(interval.from), b = f(interval.to);
  const double middle = f((interval.from + interval.to) / 2);
  out[i] = adaptive(f, interval.from, interval.to, 1e-10, a, middle, b,
                    simpson(interval.from, interval.to, a, middle, b), 12);
}

__global__ void integrate_one(Interval interval, Function f, double *out) {
  const double a = f(interval.from), b = f(interval.to);
  const double middle = f((interval.from + interval.to) / 2);
  *out = adaptive(f, interval.from, interval.to, 1e-10, a, middle, b,
                  simpson(interval.from, interval.to, a, middle, b), 12);
}

class Shape {
 public:
  __device__ virtual ~Shape() {}
  __device__ virtual double area() const = 0;
};

class Circle : public Shape {
 public:
  __device__ explicit Circle(double radius) : radius_(radius) {}
  __device__ double area() const override { return 3.141592653589793 * radius_ * radius_; }

 private:
  double radius_;
};

class Triangle : public Shape {
 public:
  __device__ Triangle(double a, double b, double c) : a_(a), b_(b), c_(c) {}
  __device__ double area() const override {
    const double s = (a_ + b_ + c_) / 2;
    return sqrt(s * (s - a_) * (s - b_) * (s - c_));
  }

 private:
  double a_, b_, c_;
};

__global__ void areas(int count, double *out) {
  const int i = threadIdx.x;
  if (i >= count) return;
  Shape *shape;
  if (i % 2 == 0) {
    shape = new Circle(i + 1);
  } else {
    shape = new Triangle(3 * i, 4 * i, 5 * i);
  }
  out[i] = shape->area();
  delete shape;
}

template <typename Operation>
__global__ void apply(Operation operation, int count, double *out) {
  const int i = threadIdx.x;
  if (i < count) out[i] = operation(static_cast<double>(i));
}

struct Polynomial {
  double coefficients[5];
  __device__ double operator()(double x) const {
    double value = 0;
    for (int i = 4; i >= 0; --i) value = fma(value, x, coefficients[i]);
    return value;
  }
};

__host__ __device__ inline uint64_t mix(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// Exact integer arithmetic: the host finds the same count. The generator is Knuth's 64-bit LCG; the
// points' coordinates are its high 32 bits.
__host__ __device__ inline unsigned int inside(uint64_t seed, int points) {
  uint64_t state = mix(seed);
  unsigned int hits = 0;
  for (int i = 0; i < points; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const uint64_t x = state >> 33;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const uint64_t y = state >> 33;
    hits += x * x + y * y < (1ull << 62);
  }
  return hits;
}

__global__ void monte_carlo(uint64_t seed, int points, unsigned long long *hits, uint64_t *high) {
  const uint64_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned int mine = inside(seed + thread, points);
  atomicAdd(hits, static_cast<unsigned long long>(mine));
  high[thread] = __umul64hi(mix(thread), mix(~thread)) / (thread + 1) + mix(thread) % (thread + 3);
}

double reference(int which, double from, double to) {
  if (which == 0) return (to * to * to - from * from * from) / 3;
  if (which == 1) return std::exp(-from) - std::exp(-to);
  double sum = 0;  // Simpson's rule with many steps
  const int steps = 20000;
  for (int i = 0; i <= steps; ++i) {
    const double x = from + (to - from) * i / steps;
    sum += (i == 0 || i == steps ? 1 : i % 2 == 1 ? 4 : 2) * std::sin(3 * x) / (1 + x * x);
  }
  return sum * (to - from) / steps / 3;
}

int main() {
  constexpr int kCount = 70;
  std::vector<Interval> intervals(kCount);
  for (int i = 0; i < kCount; ++i) {
    intervals[i] = Interval{i * 0.01, 1 + i * 0.02, {1, 2, 3}, i % 4};
  }
  Interval *device_intervals;
  double *device_out;
  CUDA(cudaMalloc(&device_intervals, kCount * sizeof(Interval)));
  CUDA(cudaMalloc(&device_out, kCount * sizeof(double)));
  CUDA(cudaMemcpy(device_intervals, intervals.data(), kCount * sizeof(Interval),
                  cudaMemcpyHostToDevice));
  CUDA(cudaDeviceSetLimit(cudaLimitStackSize, 8192));
  integrate<<<3, 32>>>(device_intervals, kCount, device_out);
  CUDA(cudaGetLastError());
  std::vector<double> out(kCount);
  CUDA(cudaMemcpy(out.data(), device_out, kCount * sizeof(double), cudaMemcpyDeviceToHost));
  for (int i = 0; i < kCount; ++i) {
    const double expected = reference(intervals[i].which, intervals[i].from, intervals[i].to);
    EXPECT(close(out[i], expected, 1e-8), "integral %d: %.12g, expected %.12g", i, out[i],
           expected);
  }

  // The function's address as the device knows it, given back to a kernel as an argument.
  Function on_device;
  CUDA(cudaMemcpyFromSymbol(&on_device, functions, sizeof on_device, sizeof on_device));
  integrate_one<<<1, 1>>>(Interval{0, 2, {0, 0, 0}, 0}, on_device, device_out);
  CUDA(cudaMemcpyToSymbol(chosen, &on_device, sizeof on_device));
  Interval last{0, 3, {0, 0, 0}, 3};
  CUDA(cudaMemcpy(device_intervals, &last, sizeof last, cudaMemcpyHostToDevice));
  integrate<<<1, 1>>>(device_intervals, 1, device_out + 1);
  CUDA(cudaGetLastError());
  CUDA(cudaMemcpy(out.data(), device_out, 2 * sizeof(double), cudaMemcpyDeviceToHost));
  EXPECT(close(out[0], 1 - std::exp(-2.0), 1e-9), "%.12g", out[0]);
  EXPECT(close(out[1], 1 - std::exp(-3.0), 1e-9), "%.12g", out[1]);

  areas<<<1, 64>>>(50, device_out);
  CUDA(cudaGetLastError());
  CUDA(cudaMemcpy(out.data(), device_out, 50 * sizeof(double), cudaMemcpyDeviceToHost));
  for (int i = 0; i < 50; ++i) {
    const double expected = i % 2 == 0 ? 3.141592653589793 * (i + 1) * (i + 1) : 6.0 * i * i;
    EXPECT(close(out[i], expected, 1e-12), "area %d: %g, expected %g", i, out[i], expected);
  }

  apply<<<1, 32>>>(Polynomial{{1, -2, 0.5, 0, 0.25}}, 20, device_out);
  CUDA(cudaGetLastError());
  CUDA(cudaMemcpy(out.data(), device_out, 20 * sizeof(double), cudaMemcpyDeviceToHost));
  for (int i = 0; i < 20; ++i) {
    const double expected = 1 - 2.0 * i + 0.5 * i * i + 0.25 * i * i * i * i;
    EXPECT(close(out[i], expected, 1e-14), "polynomial at %d: %g", i, out[i]);
  }
  const double slope = 2.5, offset = -1;
  apply<<<1, 32>>>([=] __device__(double x) { return slope * x + offset; }, 20, device_out);
  CUDA(cudaGetLastError());
  CUDA(cudaMemcpy(out.data(), device_out, 20 * sizeof(double), cudaMemcpyDeviceToHost));
  for (int i = 0; i < 20; ++i) EXPECT(out[i] == slope * i + offset, "line at %d: %g", i, out[i]);

  constexpr int kThreads = 256, kBlocks = 4, kPoints = 200;
  unsigned long long *device_hits, hits, expected_hits = 0;
  uint64_t *device_high;
  std::vector<uint64_t> high(kThreads * kBlocks);
  CUDA(cudaMalloc(&device_hits, sizeof hits));
  CUDA(cudaMalloc(&device_high, high.size() * sizeof(uint64_t)));
  CUDA(cudaMemset(device_hits, 0, sizeof hits));
  monte_carlo<<<kBlocks, kThreads>>>(42, kPoints, device_hits, device_high);
  CUDA(cudaGetLastError());
  CUDA(cudaMemcpy(&hits, device_hits, sizeof hits, cudaMemcpyDeviceToHost));
  CUDA(
      cudaMemcpy(high.data(), device_high, high.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost));
  for (uint64_t thread = 0; thread < kThreads * kBlocks; ++thread) {
    expected_hits += inside(42 + thread, kPoints);
    const unsigned __int128 product =
        static_cast<unsigned __int128>(mix(thread)) * static_cast<unsigned __int128>(mix(~thread));
    const uint64_t expected =
        static_cast<uint64_t>(product >> 64) / (thread + 1) + mix(thread) % (thread + 3);
    EXPECT(high[thread] == expected, "high product of thread %d", static_cast<int>(thread));
  }
  EXPECT(hits == expected_hits, "%llu hits, expected %llu", hits, expected_hits);
  EXPECT(close(4.0 * hits / (kThreads * kBlocks * kPoints), 3.14159, 0.01), "pi");

  CUDA(cudaFree(device_intervals));
  CUDA(cudaFree(device_out));
  CUDA(cudaFree(device_hits));
  CUDA(cudaFree(device_high));
  std::printf("ok\n");
  return 0;
}
