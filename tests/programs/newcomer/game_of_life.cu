// Conway's Game of Life on a torus: a tile and its halo in shared memory, pitched memory, two
// buffers that take turns, and a count of the living that is kept in a device variable. The board's
// sides are no multiples of the tile's.
#include <cstdint>
#include <vector>

#include "expect.h"

constexpr int kTileWidth = 32, kTileHeight = 8;

__device__ unsigned int living;

__device__ __forceinline__ int wrap(int value, int size) { return (value % size + size) % size; }

__global__ void step(const uint8_t *__restrict__ from, uint8_t *__restrict__ to, size_t from_pitch,
                     size_t to_pitch, int width, int height) {
  __shared__ uint8_t tile[kTileHeight + 2][kTileWidth + 2];
  const int left = blockIdx.x * kTileWidth - 1, top = blockIdx.y * kTileHeight - 1;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < (kTileHeight + 2) * (kTileWidth + 2);
       i += blockDim.x * blockDim.y) {
    const int row = i / (kTileWidth + 2), column = i % (kTileWidth + 2);
    tile[row][column] = from[wrap(top + row, height) * from_pitch + wrap(left + column, width)];
  }
  __syncthreads();

  const int x = left + 1 + threadIdx.x, y = top + 1 + threadIdx.y;
  bool alive = false;
  if (x < width && y < height) {
    // A tile that ends beyond the board sees the torus's other side where the board ends.
    int neighbours = 0;
#pragma unroll
    for (int dy = 0; dy < 3; ++dy) {
#pragma unroll
      for (int dx = 0; dx < 3; ++dx) {
        if (dx != 1 || dy != 1) neighbours += tile[threadIdx.y + dy][threadIdx.x + dx];
      }
    }
    alive = neighbours == 3 || (neighbours == 2 && tile[threadIdx.y + 1][threadIdx.x + 1] != 0);
    to[y * to_pitch + x] = alive;
  }
  const int count = __syncthreads_count(alive);
  if (threadIdx.x == 0 && threadIdx.y == 0) atomicAdd(&living, static_cast<unsigned>(count));
}

std::vector<uint8_t> reference_step(const std::vector<uint8_t> &board, int width, int height) {
  std::vector<uint8_t> next(board.size());
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      int neighbours = 0;
      for (int dy = -1; dy <= 1; ++dy) {
        for (int dx = -1; dx <= 1; ++dx) {
          if (dx == 0 && dy == 0) continue;
          neighbours += board[(y + dy + height) % height * width + (x + dx + width) % width];
        }
      }
      next[y * width + x] = neighbours == 3 || (neighbours == 2 && board[y * width + x] != 0);
    }
  }
  return next;
}

int main() {
  constexpr int kWidth = 101, kHeight = 61, kGenerations = 25;
  std::vector<uint8_t> board(kWidth * kHeight);
  uint32_t state = 12345;
  for (auto &cell : board) {
    state = state * 1664525u + 1013904223u;
    cell = state >> 30 == 0;
  }
  // A glider, far from the random part, that must cross the board's edge.
  for (int y = 0; y < 20; ++y) {
    for (int x = 0; x < 20; ++x) board[y * kWidth + x] = 0;
  }
  for (const auto &cell : {std::pair{1, 0}, {2, 1}, {0, 2}, {1, 2}, {2, 2}}) {
    board[(cell.second + 1) * kWidth + cell.first + 1] = 1;
  }

  uint8_t *boards[2];
  size_t pitches[2];
  for (int i = 0; i < 2; ++i) {
    CUDA(cudaMallocPitch(&boards[i], &pitches[i], kWidth, kHeight));
    EXPECT(pitches[i] >= kWidth, "pitch %zu", pitches[i]);
    CUDA(cudaMemset2D(boards[i], pitches[i], 0x55, kWidth, kHeight));
  }
  CUDA(cudaMemcpy2D(boards[0], pitches[0], board.data(), kWidth, kWidth, kHeight,
                    cudaMemcpyHostToDevice));
  const dim3 block(kTileWidth, kTileHeight);
  const dim3 grid((kWidth + kTileWidth - 1) / kTileWidth,
                  (kHeight + kTileHeight - 1) / kTileHeight);
  for (int generation = 0; generation < kGenerations; ++generation) {
    const unsigned int zero = 0;
    CUDA(cudaMemcpyToSymbol(living, &zero, sizeof zero));
    const int from = generation % 2, to = 1 - from;
    step<<<grid, block>>>(boards[from], boards[to], pitches[from], pitches[to], kWidth, kHeight);
    CUDA(cudaGetLastError());
    unsigned int count;
    CUDA(cudaMemcpyFromSymbol(&count, living, sizeof count));
    std::vector<uint8_t> result(board.size());
    CUDA(cudaMemcpy2D(result.data(), kWidth, boards[to], pitches[to], kWidth, kHeight,
                      cudaMemcpyDeviceToHost));
    board = reference_step(board, kWidth, kHeight);
    unsigned int expected = 0;
    for (int i = 0; i < kWidth * kHeight; ++i) {
      EXPECT(result[i] == board[i], "generation %d, cell (%d, %d)", generation, i % kWidth,
             i / kWidth);
      expected += board[i];
    }
    EXPECT(count == expected, "generation %d: %u alive, expected %u", generation, count, expected);
  }
  CUDA(cudaFree(boards[0]));
  CUDA(cudaFree(boards[1]));
  std::printf("ok\n");
  return 0;
}
