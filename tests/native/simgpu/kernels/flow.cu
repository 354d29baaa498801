// Control flow: recursion, pointers to functions, divergence, locks, barriers of warps.
#include <cstdio>

__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
extern "C" __global__ void recursion(int* out) { out[threadIdx.x] = fib(threadIdx.x % 16); }

typedef int (*Function)(int, int);
__device__ __noinline__ int f_add(int a, int b) { return a + b; }
__device__ __noinline__ int f_sub(int a, int b) { return a - b; }
__device__ __noinline__ int f_mul(int a, int b) { return a * b; }
__device__ Function table[3] = {f_add, f_sub, f_mul};
extern "C" __global__ void pointers(int* out, int n) {
  const int i = threadIdx.x;
  out[i] = table[(i + n) % 3](i, 7);
}

struct Shape {
  __device__ virtual float area() const = 0;
  __device__ virtual ~Shape() {}
};
struct Square : Shape {
  float a;
  __device__ Square(float x) : a(x) {}
  __device__ float area() const override { return a * a; }
};
struct Circle : Shape {
  float r;
  __device__ Circle(float x) : r(x) {}
  __device__ float area() const override { return 3.0f * r * r; }
};
extern "C" __global__ void virtual_calls(float* out) {
  const int i = threadIdx.x;
  Shape* s = (i & 1) ? static_cast<Shape*>(new Square(i)) : static_cast<Shape*>(new Circle(i));
  out[i] = s ? s->area() : -1;
  delete s;
}

extern "C" __global__ void print(int n) {
  if (threadIdx.x < n)
    printf("thread %d of %s: %.3f %lld\n", threadIdx.x, "block", threadIdx.x * 0.5, -5ll);
}

__device__ int lock_word;
extern "C" __global__ void spin_lock(int* counter) {
  while (atomicCAS(&lock_word, 0, 1) != 0) {
  }
  __threadfence();
  const int v = *(volatile int*)counter;
  *(volatile int*)counter = v + 1;
  __threadfence();
  atomicExch(&lock_word, 0);
}

__device__ __noinline__ bool try_lock(int* word) { return atomicCAS(word, 0, 1) == 0; }
__device__ __noinline__ void unlock(int* word) {
  __threadfence();
  atomicExch(word, 0);
}
extern "C" __global__ void spin_lock_by_calls(int* counter) {
  while (!try_lock(&lock_word)) {
  }
  const int v = *(volatile int*)counter;
  *(volatile int*)counter = v + 1;
  unlock(&lock_word);
}

extern "C" __global__ void syncwarp_branches(int* out) {
  __shared__ int s[32];
  const int t = threadIdx.x;
  s[t] = 0;
  __syncwarp();
  if (t < 16) {
    s[t] = t + 100;
    __syncwarp();
    out[t] = s[t + 16];
  } else {
    s[t] = t + 200;
    __syncwarp();
    out[t] = s[t - 16];
  }
}

extern "C" __global__ void producer_consumer(int* out) {
  __shared__ volatile int flag, value;
  if (threadIdx.x == 0) flag = 0;
  __syncwarp();
  if (threadIdx.x == 1) {
    while (flag == 0) {
    }
    out[0] = value;
  } else if (threadIdx.x == 0) {
    value = 42;
    __threadfence_block();
    flag = 1;
  }
}

extern "C" __global__ void divergent_loops(int* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  int n = i % 97 + 1, steps = 0;
  while (n != 1) {
    n = (n & 1) ? 3 * n + 1 : n / 2;
    ++steps;
  }
  switch (i % 7) {
    case 0:
      steps += 10;
      break;
    case 1:
      steps *= 2;
      break;
    case 2:
      steps -= 3;
      break;
    case 3:
      steps ^= 5;
      break;
    case 5:
      steps = -steps;
      break;
    default:
      break;
  }
  out[i] = steps;
}

extern "C" __global__ void local_array(int* out, int n) {
  int a[32];
  for (int k = 0; k < 32; ++k) a[k] = k * threadIdx.x;
  int s = 0;
  for (int k = 0; k < n; ++k) s += a[(k * 7 + threadIdx.x) & 31];
  out[threadIdx.x] = s;
}

struct Big {
  int v[20];
};
extern "C" __global__ void big_parameter(Big b, int* out) {
  out[threadIdx.x] = b.v[threadIdx.x % 20];
}

__device__ __noinline__ Big make_big(Big b, int x) {
  for (int k = 0; k < 20; ++k) b.v[k] += x;
  return b;
}
extern "C" __global__ void big_result(Big b, int* out) {
  const Big r = make_big(b, threadIdx.x);
  int s = 0;
  for (int k = 0; k < 20; ++k) s += r.v[k];
  out[threadIdx.x] = s;
}

extern "C" __global__ void votes(unsigned* out) {
  const unsigned t = threadIdx.x;
  out[t * 8 + 0] = __ballot_sync(0xffffffffu, t & 1);
  out[t * 8 + 1] = __any_sync(0xffffffffu, t == 40);
  out[t * 8 + 2] = __all_sync(0xffffffffu, t < 64);
  out[t * 8 + 3] = __match_any_sync(0xffffffffu, t % 3);
  out[t * 8 + 4] = __shfl_up_sync(0xffffffffu, t, 3, 8);
  out[t * 8 + 5] = __shfl_sync(0xffffffffu, t, 5, 16);
  if (t & 1)
    out[t * 8 + 6] = __activemask();
  else
    out[t * 8 + 6] = 0;
  out[t * 8 + 7] = __syncthreads_count(t % 5 == 0);
}

extern "C" __global__ void early_exit(int* out) {
  if (threadIdx.x % 3 == 0) return;
  __syncthreads();
  out[threadIdx.x] = __popc(__activemask());
}

extern "C" __global__ void out_of_bounds(int* out, int where) { out[where + threadIdx.x] = 1; }
extern "C" __global__ void misaligned(char* out) { *(int*)(out + 4 * threadIdx.x + 1) = 1; }
extern "C" __global__ void trapping() {
  if (threadIdx.x == 5) __trap();
}
extern "C" __global__ void wait_for_flag(volatile int* flag, int* out) {
  if (blockIdx.x == 0) {
    while (*flag == 0) {
    }
    *out = 1;
  } else if (threadIdx.x == 0) {
    *flag = 1;
  }
}
