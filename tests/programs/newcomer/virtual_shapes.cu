// ray marching of a scene of device-side virtual classes (new/delete on the device, recursion,
// templates, function pointers, device printf).
#include <algorithm>
#include <cmath>
#include <vector>

#include "require.h"
#define HD __host__ __device__

struct V3 {
  double x, y, z;
};
HD inline V3 operator+(V3 a, V3 b) { return {a.x + b.x, a.y + b.y, a.z + b.z}; }
HD inline V3 operator-(V3 a, V3 b) { return {a.x - b.x, a.y - b.y, a.z - b.z}; }
HD inline V3 operator*(V3 a, double s) { return {a.x * s, a.y * s, a.z * s}; }
HD inline double length(V3 a) { return sqrt(a.x * a.x + a.y * a.y + a.z * a.z); }

__device__ int alive_device = 0;
HD inline void alive(int d) {
#ifdef __CUDA_ARCH__
  atomicAdd(&alive_device, d);
#else
  (void)d;
#endif
}

struct Shape {
  HD Shape() { alive(1); }
  HD virtual ~Shape() { alive(-1); }
  HD virtual double distance(V3 p) const = 0;
};
struct Sphere : Shape {
  V3 c;
  double r;
  HD Sphere(V3 c_, double r_) : c(c_), r(r_) {}
  HD double distance(V3 p) const override { return length(p - c) - r; }
};
struct Box : Shape {
  V3 c, h;
  HD Box(V3 c_, V3 h_) : c(c_), h(h_) {}
  HD double distance(V3 p) const override {
    V3 q = {fabs(p.x - c.x) - h.x, fabs(p.y - c.y) - h.y, fabs(p.z - c.z) - h.z};
    V3 o = {fmax(q.x, 0.0), fmax(q.y, 0.0), fmax(q.z, 0.0)};
    return length(o) + fmin(fmax(q.x, fmax(q.y, q.z)), 0.0);
  }
};
struct Union {
  HD static double join(double a, double b) { return fmin(a, b); }
};
struct Minus {
  HD static double join(double a, double b) { return fmax(a, -b); }
};
template <class Op>
struct Pair : Shape {
  Shape *a, *b;
  HD Pair(Shape* a_, Shape* b_) : a(a_), b(b_) {}
  HD ~Pair() override {
    delete a;
    delete b;
  }
  HD double distance(V3 p) const override { return Op::join(a->distance(p), b->distance(p)); }
};

// A chain of `depth` spheres under one recursive builder, minus a box, plus a floor slab.
HD Shape* chain(int depth) {
  Shape* s = new Sphere({depth * 0.5 - 1.0, 0.15 * depth, 3.0 + 0.2 * depth}, 0.45);
  return depth == 0 ? s : new Pair<Union>(s, chain(depth - 1));
}
HD Shape* scene() {
  return new Pair<Union>(new Pair<Minus>(chain(4), new Box({0.2, 0.4, 3.0}, {0.3, 0.2, 0.5})),
                         new Box({0, -0.9, 4}, {3, 0.1, 2}));
}

HD double shade_depth(double t) { return t; }
HD double shade_inverse(double t) { return 1.0 / t; }
typedef double (*Shade)(double);
__device__ Shade shades[2] = {shade_depth, shade_inverse};

template <int Steps>
HD double march(const Shape* s, double u, double v) {
  V3 dir = {u, v, 1.0};
  dir = dir * (1.0 / length(dir));
  double t = 0;
  for (int i = 0; i < Steps; ++i) {
    double d = s->distance(dir * t);
    if (d < 1e-9) return t;
    t += d;
    if (t > 20) break;
  }
  return -1;
}

constexpr int W = 64, H = 48, STEPS = 48;
HD inline double px(int x) { return (x + 0.5) / W * 2 - 1; }
HD inline double py(int y) { return (y + 0.5) / H * 1.5 - 0.75; }

__global__ void create(Shape** out) { *out = scene(); }
__global__ void render(Shape** s, double* out, int mode) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= W || y >= H) return;
  double t = march<STEPS>(*s, px(x), py(y));
  out[y * W + x] = t > 0 ? shades[mode](t) : -1.0;
}
__global__ void destroy(Shape** s) {
  printf("device: %d shapes before, %s %5.2f\n", alive_device, "pi is", 3.14159);
  delete *s;
}

int main() {
  CK(cudaDeviceSetLimit(cudaLimitStackSize, 8192));
  CK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 8 << 20));
  size_t limit = 0;
  CK(cudaDeviceGetLimit(&limit, cudaLimitMallocHeapSize));
  REQUIRE(limit >= 8u << 20, "heap limit %zu", limit);
  Shape** ds;
  double* dout;
  CK(cudaMalloc(&ds, sizeof(Shape*)));
  CK(cudaMalloc(&dout, W * H * 8));
  create<<<1, 1>>>(ds);
  CK(cudaGetLastError());
  CK(cudaDeviceSynchronize());
  int count = 0;
  CK(cudaMemcpyFromSymbol(&count, alive_device, sizeof count));
  REQUIRE(count == 13, "%d shapes on the device, expected 13",
          count);  // 5 spheres, 4 pairs; box, minus; box, union
  Shape* hs = scene();
  for (int mode = 0; mode < 2; ++mode) {
    render<<<dim3(W / 16, H / 8), dim3(16, 8)>>>(ds, dout, mode);
    CK(cudaGetLastError());
    std::vector<double> out(W * H);
    CK(cudaMemcpy(out.data(), dout, W * H * 8, cudaMemcpyDeviceToHost));
    int differ = 0, hits = 0;
    for (int y = 0; y < H; ++y)
      for (int x = 0; x < W; ++x) {
        double t = march<STEPS>(hs, px(x), py(y));
        double want = t > 0 ? (mode ? shade_inverse(t) : shade_depth(t)) : -1.0,
               got = out[y * W + x];
        hits += t > 0;
        if (std::fabs(got - want) > 1e-6)
          ++differ;  // fma may decide otherwise at the last step of a grazing ray
      }
    REQUIRE(hits > 300 && hits < W * H, "%d hits", hits);
    REQUIRE(differ <= W * H / 200, "%d of %d pixels differ", differ, W * H);
    printf("mode %d: %d hits, %d differ\n", mode, hits, differ);
  }
  delete hs;
  destroy<<<1, 1>>>(ds);
  CK(cudaGetLastError());
  CK(cudaDeviceSynchronize());
  CK(cudaMemcpyFromSymbol(&count, alive_device, sizeof count));
  REQUIRE(count == 0, "%d shapes left", count);
  printf("ok\n");
}
