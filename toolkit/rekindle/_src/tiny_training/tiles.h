// 16-bit products with float32 sums in the tile unit (AMX) of newer x86-64 processors, and what packs their operands.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#include <algorithm>
#include <utility>

namespace {

using bf16 = uint16_t;

template <class X>
struct Buffer {
  X* data = nullptr;
  size_t size = 0;
  ~Buffer() { free(data); }
  X* of(size_t n) {
    if (n > size) {
      free(data);
      data = static_cast<X*>(aligned_alloc(64, (n * sizeof(X) + 127) / 64 * 64));
      size = n;
    }
    return data;
  }
};

void narrow(const float* x, bf16* y, size_t n) {  // n is a multiple of 16
  for (size_t i = 0; i < n; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i)));
}

__m512i pairs(const bf16* a, const bf16* b) {  // 16 dwords: a below, b above
  __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
  __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// A product's operands are tiles of 1 KB, [blocks of 16 rows or columns][K / 32]; the left may also be plain rows.
struct Left {
  const bf16* at;
  size_t row_block, k_block, stride;
};
Left rows(const bf16* x, size_t ld) { return {x, 16 * ld, 32, 2 * ld}; }
Left tiles(const bf16* x, int k) { return {x, size_t(k) / 32 * 512, 512, 64}; }

// Left operand [M, K] of its transpose, rows x [K, M].
void left_turned(const bf16* x, size_t ld, int M, int K, bf16* out) {
  const __m512i step = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                          _mm512_set1_epi32(16));
  for (int m = 0; m < M; m += 16)
    for (int k = 0; k < K; k += 2) {
      int* tile = reinterpret_cast<int*>(out + (size_t(m / 16) * (K / 32) + k / 32) * 512) + (k % 32) / 2;
      _mm512_i32scatter_epi32(tile, step, pairs(x + k * ld + m, x + (k + 1) * ld + m), 4);
    }
}

// Right operand [K, N] of rows x [K, N].
void right(const bf16* x, size_t ld, int K, int N, bf16* out) {
  for (int k = 0; k < K; k += 2)
    for (int n = 0; n < N; n += 16)
      _mm512_storeu_si512(out + (size_t(n / 16) * (K / 32) + k / 32) * 512 + (k % 32) / 2 * 32,
                          pairs(x + k * ld + n, x + (k + 1) * ld + n));
}

// Right operand [K, N] of its transpose, rows x [N, K].
void right_turned(const bf16* x, size_t ld, int K, int N, bf16* out) {
  const __m512i step = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                          _mm512_set1_epi32(16));
  for (int n = 0; n < N; n++)
    for (int k = 0; k < K; k += 32) {
      int* tile = reinterpret_cast<int*>(out + (size_t(n / 16) * (K / 32) + k / 32) * 512) + n % 16;
      _mm512_i32scatter_epi32(tile, step, _mm512_loadu_si512(x + n * ld + k), 4);
    }
}

// c [M, N] (+)= a [M, from…to of K] · b; M and N are multiples of 32, `to - from` too; K is b's whole depth.
void multiply(Left a, const bf16* b, int K, float* c, size_t ldc, int M, int N, bool add, int from, int to) {
  const size_t depth = K / 32, wide = ldc * 4;
  for (int n = 0; n < N; n += 32)
    for (int m = 0; m < M; m += 32) {
      float *c0 = c + m * ldc + n, *c1 = c0 + 16 * ldc;
      if (add) {
        _tile_loadd(0, c0, wide);
        _tile_loadd(1, c0 + 16, wide);
        _tile_loadd(2, c1, wide);
        _tile_loadd(3, c1 + 16, wide);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      const bf16 *a0 = a.at + (m / 16) * a.row_block, *a1 = a0 + a.row_block;
      const bf16 *b0 = b + (n / 16) * depth * 512, *b1 = b0 + depth * 512;
      for (int k = from / 32; k < to / 32; k++) {
        _tile_loadd(4, a0 + k * a.k_block, a.stride);
        _tile_loadd(5, a1 + k * a.k_block, a.stride);
        _tile_loadd(6, b0 + k * 512, 64);
        _tile_loadd(7, b1 + k * 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, c0, wide);
      _tile_stored(1, c0 + 16, wide);
      _tile_stored(2, c1, wide);
      _tile_stored(3, c1 + 16, wide);
    }
}
void multiply(Left a, const bf16* b, int K, float* c, size_t ldc, int M, int N, bool add) {
  multiply(a, b, K, c, ldc, M, N, add, 0, K);
}

void configure() {
  alignas(64) uint8_t config[64] = {1};
  for (int tile = 0; tile < 8; tile++) {
    config[16 + 2 * tile] = 64;
    config[48 + tile] = 16;
  }
  _tile_loadconfig(config);
}

}  // namespace
