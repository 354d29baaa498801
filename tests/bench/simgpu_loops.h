// The loops that everyone writes in C, as yardsticks for the simulated GPU. Compiled with -O2.
#pragma once

namespace gpupool::bench {

// c = a * b, all n x n in rows; computes rows [from, to) of c.
void matmul_loop(const float* a, const float* b, float* c, int n, int from, int to);

// Iterations until divergence, at most `limit`, of an n x n picture; rows [from, to).
void mandelbrot_loop(int* out, int n, int limit, int from, int to);

}  // namespace gpupool::bench
