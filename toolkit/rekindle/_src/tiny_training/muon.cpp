// The optimizer's step: Muon for matrices, Adam for the rest, as `optimizer.py` has it.
#include "tiles.h"

namespace {

// One leaf's step of Muon: Newton-Schulz makes all singular values of the averaged gradient about 1.
struct Muon {
  Buffer<float> x, y, square, fourth;
  Buffer<bf16> narrowed, left, packed;

  void step(float* value, const float* gradient, float* mean, int rows_, int columns, float rate) {
    size_t n = size_t(rows_) * columns;
    bool tall = rows_ > columns;
    int M = tall ? columns : rows_, N = tall ? rows_ : columns;
    float *x = this->x.of(n), *y = this->y.of(n), *a = square.of(size_t(M) * M), *aa = fourth.of(size_t(M) * M);
    float total = 0;
    for (size_t i = 0; i < n; i++) {
      mean[i] = 0.95f * mean[i] + 0.05f * gradient[i];
      y[i] = 0.95f * mean[i] + 0.05f * gradient[i];
      total += y[i] * y[i];
    }
    float norm = 1 / (std::sqrt(total) + 1e-8f);
    for (int r = 0; r < rows_; r++)
      for (int c = 0; c < columns; c++)
        x[tall ? size_t(c) * rows_ + r : size_t(r) * columns + c] = y[size_t(r) * columns + c] * norm;
    for (int iteration = 0; iteration < 5; iteration++) {
      bf16 *xn = narrowed.of(n), *p = packed.of(n), *l = left.of(size_t(M) * M);
      narrow(x, xn, n);
      right_turned(xn, N, N, M, p);
      multiply(rows(xn, N), p, N, a, M, M, M, false);
      narrow(a, l, size_t(M) * M);
      right(l, M, M, M, p);
      multiply(rows(l, M), p, M, aa, M, M, M, false);
      for (int i = 0; i < M * M; i++) a[i] = -4.7750f * a[i] + 2.0315f * aa[i];
      narrow(a, l, size_t(M) * M);
      right(xn, N, M, N, p);
      multiply(rows(l, M), p, M, y, N, M, N, false);
      for (size_t i = 0; i < n; i++) x[i] = 3.4445f * x[i] + y[i];
    }
    float scale = rate * std::sqrt(std::max(1.0f, float(rows_) / columns));
    for (int r = 0; r < rows_; r++)
      for (int c = 0; c < columns; c++) {
        float& v = value[size_t(r) * columns + c];
        v -= scale * x[tall ? size_t(c) * rows_ + r : size_t(r) * columns + c] + rate * 0.01f * v;
      }
  }
};

}  // namespace

// In place: `count` leaves of rows × columns (0 columns: a vector) one behind the other; `kinds` 1 for Muon.
extern "C" void optimize(int count, const int* shapes, const int* kinds, float* values, const float* gradients,
                         float* means, float* squares, int number, float matrix_rate, float other_rate, int threads) {
  std::vector<size_t> at{0};
  for (int i = 0; i < count; i++) at.push_back(at[i] + size_t(shapes[2 * i]) * std::max(shapes[2 * i + 1], 1));
  float first = 1 - std::pow(0.9, number), second = 1 - std::pow(0.98, number);
  std::vector<std::thread> running;
  for (int thread = 0; thread < threads; thread++)
    running.emplace_back([&, thread] {
      configure();
      Muon muon;
      for (int i = thread; i < count; i += threads) {
        float *value = values + at[i], *mean = means + at[i], *square = squares + at[i];
        const float* gradient = gradients + at[i];
        if (kinds[i]) {
          muon.step(value, gradient, mean, shapes[2 * i], shapes[2 * i + 1], matrix_rate);
          continue;
        }
        for (size_t j = 0; j < at[i + 1] - at[i]; j++) {
          mean[j] = 0.9f * mean[j] + 0.1f * gradient[j];
          square[j] = 0.98f * square[j] + 0.02f * gradient[j] * gradient[j];
          value[j] -= other_rate * mean[j] / first / (std::sqrt(square[j] / second) + 1e-8f);
        }
      }
      _tile_release();
    });
  for (auto& thread : running) thread.join();
}
