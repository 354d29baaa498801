// The device code of threads_and_events.c.
extern "C" {
__device__ unsigned crc_table[256];
__constant__ unsigned salt;

// Each thread: CRC-32 of one piece.
__global__ void crc_pieces(const unsigned char* data, unsigned piece, unsigned pieces,
                           unsigned* crc) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= pieces) return;
  unsigned c = 0xffffffffu;
  const unsigned char* p = data + (unsigned long long)i * piece;
  for (unsigned j = 0; j < piece; ++j) c = crc_table[(c ^ p[j]) & 255] ^ (c >> 8);
  crc[i] = ~c ^ salt;
}

// One block: sum and xor of all of them, in dynamic shared memory.
__global__ void fold(const unsigned* crc, unsigned pieces, char tag, unsigned long long* out) {
  extern __shared__ unsigned long long s[];
  unsigned long long sum = 0, x = 0;
  for (unsigned i = threadIdx.x; i < pieces; i += blockDim.x) {
    sum += crc[i];
    x ^= (unsigned long long)crc[i] << (i & 31);
  }
  s[threadIdx.x] = sum;
  s[blockDim.x + threadIdx.x] = x;
  __syncthreads();
  for (unsigned d = blockDim.x / 2; d; d >>= 1) {
    if (threadIdx.x < d) {
      s[threadIdx.x] += s[threadIdx.x + d];
      s[blockDim.x + threadIdx.x] ^= s[blockDim.x + threadIdx.x + d];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    out[0] = s[0] + tag;
    out[1] = s[blockDim.x];
  }
}
}
