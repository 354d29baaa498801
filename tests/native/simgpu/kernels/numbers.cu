// Arithmetic: functions of the device's math library, rounding, conversions, bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void math_float(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float v = x[i];
  float* o = out + i * 12;
  o[0] = sinf(v);
  o[1] = cosf(v);
  o[2] = expf(v);
  o[3] = logf(fabsf(v));
  o[4] = powf(fabsf(v), 1.5f);
  o[5] = tanhf(v);
  o[6] = sqrtf(fabsf(v));
  o[7] = 1.0f / v;
  o[8] = atanf(v);
  o[9] = erff(v);
  o[10] = cbrtf(v);
  o[11] = exp2f(v);
}
extern "C" __global__ void math_double(const double* x, double* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const double v = x[i];
  double* o = out + i * 12;
  o[0] = sin(v);
  o[1] = cos(v);
  o[2] = exp(v);
  o[3] = log(fabs(v));
  o[4] = pow(fabs(v), 1.5);
  o[5] = tanh(v);
  o[6] = sqrt(fabs(v));
  o[7] = 1.0 / v;
  o[8] = atan(v);
  o[9] = erf(v);
  o[10] = lgamma(fabs(v));
  o[11] = fmod(v, 3.0);
}
extern "C" __global__ void math_fast(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float v = x[i];
  float* o = out + i * 6;
  o[0] = __sinf(v);
  o[1] = __cosf(v);
  o[2] = __expf(v);
  o[3] = __logf(fabsf(v));
  o[4] = __fdividef(v, 3.0f);
  o[5] = rsqrtf(fabsf(v));
}
extern "C" __global__ void rounding(const float* a, const float* b, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float x = a[i], y = b[i];
  float* o = out + i * 16;
  o[0] = __fadd_rn(x, y);
  o[1] = __fadd_rz(x, y);
  o[2] = __fadd_ru(x, y);
  o[3] = __fadd_rd(x, y);
  o[4] = __fmul_rn(x, y);
  o[5] = __fmul_rz(x, y);
  o[6] = __fmul_ru(x, y);
  o[7] = __fmul_rd(x, y);
  o[8] = __fdiv_rn(x, y);
  o[9] = __fdiv_rz(x, y);
  o[10] = __fdiv_ru(x, y);
  o[11] = __fdiv_rd(x, y);
  o[12] = __fmaf_rn(x, y, x);
  o[13] = __fmaf_rz(x, y, x);
  o[14] = __fmaf_ru(x, y, x);
  o[15] = __fmaf_rd(x, y, x);
}
extern "C" __global__ void conversions(const double* x, long long* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const double v = x[i];
  const float f = static_cast<float>(v);
  long long* o = out + i * 16;
  o[0] = __double2int_rn(v);
  o[1] = __double2int_rz(v);
  o[2] = __double2int_ru(v);
  o[3] = __double2int_rd(v);
  o[4] = __double2uint_rn(v);
  o[5] = __float2int_rn(f);
  o[6] = __float2uint_rz(f);
  o[7] = __double2ll_rn(v);
  o[8] = static_cast<long long>(__double2ull_rz(v));
  o[9] = __float2ll_rd(f);
  o[10] = __float_as_int(__double2float_rz(v));
  o[11] = __float_as_int(__ll2float_ru(__double2ll_rn(v)));
  o[12] = __float_as_int(__saturatef(f));
  o[13] = __half_as_ushort(__float2half_rn(f));
  o[14] = __half_as_ushort(__float2half_rz(f));
  o[15] = __bfloat16_as_ushort(__float2bfloat16_rn(f));
}
extern "C" __global__ void integers(const long long* x, long long* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const long long v = x[i], y = x[(i + 1) % n];
  const int a = static_cast<int>(v), b = static_cast<int>(y);
  const unsigned ua = a, ub = b;
  long long* o = out + i * 20;
  o[0] = __clz(a);
  o[1] = __clzll(v);
  o[2] = __popc(ua);
  o[3] = __popcll(v);
  o[4] = __brev(ua);
  o[5] = __brevll(v);
  o[6] = __ffs(a);
  o[7] = __mulhi(a, b);
  o[8] = __umulhi(ua, ub);
  o[9] = __mul64hi(v, y);
  o[10] = __sad(a, b, 7);
  o[11] = __byte_perm(ua, ub, 0x3715);
  o[12] = b ? a / b : 0;
  o[13] = b ? a % b : 0;
  o[14] = y ? v / y : 0;
  o[15] = ub ? ua / ub : 0;
  o[16] = __funnelshift_l(ua, ub, a & 63);
  o[17] = __funnelshift_r(ua, ub, a & 63);
  o[18] = static_cast<signed char>(a) + static_cast<unsigned char>(b) + static_cast<short>(v);
  o[19] = __dp4a(a, b, 3);
}
extern "C" __global__ void halves(const float* a, const float* b, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const __half x = __float2half(a[i]), y = __float2half(b[i]);
  const __nv_bfloat16 u = __float2bfloat16(a[i]), v = __float2bfloat16(b[i]);
  float* o = out + i * 10;
  o[0] = __half2float(__hadd(x, y));
  o[1] = __half2float(__hmul(x, y));
  o[2] = __half2float(__hfma(x, y, x));
  o[3] = __hlt(x, y);
  o[4] = __half2float(__hmax(x, y));
  const __half2 p = __halves2half2(x, y), q = __hadd2(p, __halves2half2(y, y));
  o[5] = __low2float(q);
  o[6] = __high2float(q);
  o[7] = __bfloat162float(__hadd(u, v));
  o[8] = __bfloat162float(__hmul(u, v));
  o[9] = __half2float(x);
}
extern "C" __global__ void atomics(unsigned* u, float* f, double* d, unsigned long long* q) {
  const unsigned t = threadIdx.x + blockIdx.x * blockDim.x;
  atomicAdd(&u[0], t);
  atomicMin(&u[1], t);
  atomicMax(&u[2], t);
  atomicInc(&u[3], 100u);
  atomicOr(&u[4], 1u << (t & 31));
  atomicAnd(&u[5], ~(1u << (t & 7)));
  atomicXor(&u[6], t);
  atomicSub(&u[7], 1u);
  atomicAdd(f, 1.0f);
  atomicAdd(d, 0.5);
  atomicAdd(q, (unsigned long long)t << 20);
  __shared__ unsigned s;
  if (threadIdx.x == 0) s = 0;
  __syncthreads();
  atomicAdd(&s, t);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&u[8], s);
}
__constant__ int table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
__device__ int counter = 7;
extern "C" __global__ void constants(int* out) {
  out[threadIdx.x] = table[threadIdx.x & 7] + counter;
}
