// Loss and gradients of a small Llama, windows at a time, with the tile unit's 16-bit products (AMX, x86-64).
//
// T tokens of a slice, S of a window, E hidden size, H query heads, K kv heads, D head dim, I MLP size, V vocabulary.
#include "tiles.h"

namespace {

float sum(const float* x, int n) {
  float s = 0;
  for (int i = 0; i < n; i++) s += x[i];
  return s;
}

struct Shape {
  int E, H, K, D, I, V, L;
  float eps, scale;
  int qkv() const { return (H + 2 * K) * D; }
};

// A matrix [out, in], ready for products with it and with its transpose.
struct Matrix {
  int out, in;
  std::vector<bf16> forth, back;
  size_t at;  // where its values and gradients are among all
  void read(const float* values) {
    std::vector<bf16> plain(size_t(out) * in);
    narrow(values + at, plain.data(), plain.size());
    forth.resize(plain.size());
    back.resize(plain.size());
    right_turned(plain.data(), in, in, out, forth.data());
    right(plain.data(), in, out, in, back.data());
  }
};

struct Layer {
  Matrix out, qkv, down, gate_up;
  size_t norm1, norm2;
};

struct Model {
  Shape s;
  size_t embed, norm, size;
  Matrix head;
  std::vector<Layer> layers;
  const float* values;

  // The order of the values is the alphabetical one of their names.
  Model(Shape shape, const float* given) : s(shape), values(given) {
    size_t at = 0;
    auto take = [&](size_t n) { return std::exchange(at, at + n); };
    auto matrix = [&](int out, int in) { return Matrix{out, in, {}, {}, take(size_t(out) * in)}; };
    embed = take(size_t(s.V) * s.E);
    head = matrix(s.V, s.E);
    for (int l = 0; l < s.L; l++) {
      Layer layer;
      layer.out = matrix(s.E, s.H * s.D);
      layer.qkv = matrix(s.qkv(), s.E);
      layer.norm1 = take(s.E);
      layer.down = matrix(s.E, s.I);
      layer.gate_up = matrix(2 * s.I, s.E);
      layer.norm2 = take(s.E);
      for (Matrix* m : {&layer.out, &layer.qkv, &layer.down, &layer.gate_up}) m->read(values);
      layers.push_back(std::move(layer));
    }
    norm = take(s.E);
    size = at;
    head.read(values);
  }
};

// What the way back needs of one layer.
struct Kept {
  Buffer<float> x, r1, middle, r2, gate_up;
  Buffer<bf16> n1, qkv, weights, y, n2, h;
};

struct Worker {
  const Model& m;
  Shape s;
  int S, R, T;  // of a slice
  std::vector<float> gradients;
  double loss = 0;
  std::vector<Kept> kept;
  Buffer<float> x, dx, wide, wider, part, cosine, sine, dqkv, rf;
  Buffer<bf16> a, b, c, d, nf, small;

  Worker(const Model& model, int length, int windows)
      : m(model), s(model.s), S(length), R(windows), T(length * windows), gradients(model.size), kept(model.s.L) {
    int half = s.D / 2;
    float *cs = cosine.of(S * half), *sn = sine.of(S * half);
    for (int t = 0; t < S; t++)
      for (int i = 0; i < half; i++) {
        double angle = t * std::pow(theta, -double(i) / half);
        cs[t * half + i] = std::cos(angle);
        sn[t * half + i] = std::sin(angle);
      }
  }
  static constexpr double theta = 10000.0;

  void rms(const float* x, const float* w, float* r, bf16* y) {
    float row[4096];
    for (int t = 0; t < T; t++, x += s.E, y += s.E) {
      float total = 0;
      for (int i = 0; i < s.E; i++) total += x[i] * x[i];
      r[t] = 1 / std::sqrt(total / s.E + s.eps);
      for (int i = 0; i < s.E; i++) row[i] = x[i] * r[t] * w[i];
      narrow(row, y, s.E);
    }
  }
  // dx += of d, the derivative of rms's result.
  void rms_back(const float* x, const float* w, const float* r, const float* d, float* dx, float* dw) {
    for (int t = 0; t < T; t++, x += s.E, d += s.E, dx += s.E) {
      float total = 0;
      for (int i = 0; i < s.E; i++) total += d[i] * w[i] * x[i];
      float k = total * r[t] * r[t] * r[t] / s.E;
      for (int i = 0; i < s.E; i++) {
        dw[i] += d[i] * x[i] * r[t];
        dx[i] += d[i] * w[i] * r[t] - x[i] * k;
      }
    }
  }
  void turn(float* qkv, float direction) {  // the heads of q and k, in place
    int half = s.D / 2;
    for (int t = 0; t < T; t++)
      for (int head = 0; head < s.H + s.K; head++) {
        float* x = qkv + size_t(t) * s.qkv() + head * s.D;
        const float *cs = cosine.data + (t % S) * half, *sn = sine.data + (t % S) * half;
        for (int i = 0; i < half; i++) {
          float left = x[i], other = x[i + half], turned = direction * sn[i];
          x[i] = left * cs[i] - other * turned;
          x[i + half] = other * cs[i] + left * turned;
        }
      }
  }
  void linear(const bf16* x, const Matrix& w, float* y, bool add) {
    multiply(rows(x, w.in), w.forth.data(), w.in, y, w.out, T, w.out, add);
  }
  // d [T, out] is narrowed into c; dx [T, in] and the gradient of w, whose input was x.
  void linear_back(const float* g, const bf16* x, const Matrix& w, float* dx) {
    bf16* narrowed = c.of(size_t(T) * w.out);
    narrow(g, narrowed, size_t(T) * w.out);
    multiply(rows(narrowed, w.out), w.back.data(), w.out, dx, w.in, T, w.in, false);
    bf16 *l = a.of(size_t(T) * w.out), *r = b.of(size_t(T) * w.in);
    left_turned(narrowed, w.out, w.out, T, l);
    right(x, w.in, T, w.in, r);
    multiply(tiles(l, T), r, T, gradients.data() + w.at, w.in, w.out, w.in, true);
  }

  void attend(Kept& k) {
    bf16 *weights = k.weights.of(size_t(R) * s.H * S * S), *y = k.y.of(size_t(T) * s.H * s.D);
    bf16 *keys = a.of(size_t(S) * s.D), *values = b.of(size_t(S) * s.D);
    float *scores = part.of(32 * S), *out = wider.of(32 * s.D);
    size_t ld = s.qkv();
    for (int r = 0; r < R; r++)
      for (int head = 0; head < s.H; head++) {
        const bf16* base = k.qkv.data + size_t(r) * S * ld;
        int kv = head / (s.H / s.K);
        right_turned(base + (s.H + kv) * s.D, ld, s.D, S, keys);
        right(base + (s.H + s.K + kv) * s.D, ld, S, s.D, values);
        bf16* P = weights + (size_t(r) * s.H + head) * S * S;
        for (int q = 0; q < S; q += 32) {
          int limit = q + 32;
          multiply(rows(base + q * ld + head * s.D, ld), keys, s.D, scores, S, 32, limit, false);
          for (int i = 0; i < 32; i++) {
            float* row = scores + i * S;
            int n = q + i + 1;
            float top = row[0];
            for (int j = 1; j < n; j++) top = row[j] > top ? row[j] : top;
            for (int j = 0; j < n; j++) row[j] = std::exp((row[j] - top) * s.scale);
            float share = 1 / sum(row, n);
            for (int j = 0; j < n; j++) row[j] *= share;
            for (int j = n; j < limit; j++) row[j] = 0;
            narrow(row, P + size_t(q + i) * S, limit);
          }
          multiply(rows(P + size_t(q) * S, S), values, S, out, s.D, 32, s.D, false, 0, limit);
          for (int i = 0; i < 32; i++)
            narrow(out + i * s.D, y + (size_t(r) * S + q + i) * s.H * s.D + head * s.D, s.D);
        }
      }
  }
  void attend_back(Kept& k, const float* dy, float* dqkv) {
    size_t ld = s.qkv(), wide = s.H * s.D;
    memset(dqkv, 0, sizeof(float) * T * ld);
    bf16* dyn = c.of(size_t(T) * wide);
    narrow(dy, dyn, size_t(T) * wide);
    size_t n = size_t(S) * s.D;
    bf16* packed = b.of(5 * n);
    bf16 *values = packed, *keys = packed + n, *queries = packed + 2 * n, *dyr = packed + 3 * n;
    bf16 *dS = d.of(size_t(S) * S), *turned = a.of(size_t(S) * S);
    float* scores = part.of(32 * S);
    for (int r = 0; r < R; r++)
      for (int head = 0; head < s.H; head++) {
        const bf16* base = k.qkv.data + size_t(r) * S * ld;
        const bf16* g = dyn + size_t(r) * S * wide + head * s.D;
        float* out = dqkv + size_t(r) * S * ld;
        int kv = head / (s.H / s.K);
        right_turned(base + (s.H + s.K + kv) * s.D, ld, s.D, S, values);
        right(base + (s.H + kv) * s.D, ld, S, s.D, keys);
        right(base + head * s.D, ld, S, s.D, queries);
        right(g, wide, S, s.D, dyr);
        const bf16* P = k.weights.data + (size_t(r) * s.H + head) * S * S;
        for (int q = 0; q < S; q += 32) {
          int limit = q + 32;
          multiply(rows(g + q * wide, wide), values, s.D, scores, S, 32, limit, false);
          for (int i = 0; i < 32; i++) {
            float* row = scores + i * S;
            const bf16* p = P + size_t(q + i) * S;
            float total = 0;
            for (int j = 0; j < limit; j++) {
              float w = widened(p[j]);
              total += w * row[j];
            }
            for (int j = 0; j < limit; j++) row[j] = widened(p[j]) * (row[j] - total) * s.scale;
            narrow(row, dS + size_t(q + i) * S, limit);
          }
          multiply(rows(dS + size_t(q) * S, S), keys, S, out + q * ld + head * s.D, ld, 32, s.D, false, 0, limit);
        }
        for (int j = 0; j < S; j += 32) {
          left_turned(dS + size_t(j) * S + j, S, 32, S - j, turned);
          // The rows from j on of queries: its tiles are [columns][S / 32].
          multiply_from(turned, S - j, queries, j, out + j * ld + (s.H + kv) * s.D, ld);
          left_turned(P + size_t(j) * S + j, S, 32, S - j, turned);
          multiply_from(turned, S - j, dyr, j, out + j * ld + (s.H + s.K + kv) * s.D, ld);
        }
      }
  }
  void multiply_from(const bf16* left, int depth, const bf16* right, int from, float* out, size_t ld) {
    multiply(tiles(left, depth), right + from / 32 * 512, S, out, ld, 32, s.D, true, 0, depth);
  }
  static float widened(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
  }

  void slice(const int* windows, float share) {
    float* h = x.of(size_t(T) * s.E);
    std::vector<int> inputs(T), targets(T);
    for (int r = 0; r < R; r++)
      for (int t = 0; t < S; t++) {
        inputs[r * S + t] = std::max(windows[r * (S + 1) + t], 0);
        targets[r * S + t] = windows[r * (S + 1) + t + 1];
      }
    for (int t = 0; t < T; t++)
      memcpy(h + size_t(t) * s.E, m.values + m.embed + size_t(inputs[t]) * s.E, sizeof(float) * s.E);
    for (int l = 0; l < s.L; l++) {
      Kept& k = kept[l];
      const Layer& w = m.layers[l];
      memcpy(k.x.of(size_t(T) * s.E), h, sizeof(float) * T * s.E);
      rms(h, m.values + w.norm1, k.r1.of(T), k.n1.of(size_t(T) * s.E));
      float* qkv = wide.of(size_t(T) * s.qkv());
      linear(k.n1.data, w.qkv, qkv, false);
      turn(qkv, 1);
      narrow(qkv, k.qkv.of(size_t(T) * s.qkv()), size_t(T) * s.qkv());
      attend(k);
      linear(k.y.data, w.out, h, true);
      memcpy(k.middle.of(size_t(T) * s.E), h, sizeof(float) * T * s.E);
      rms(h, m.values + w.norm2, k.r2.of(T), k.n2.of(size_t(T) * s.E));
      float* gu = k.gate_up.of(size_t(T) * 2 * s.I);
      linear(k.n2.data, w.gate_up, gu, false);
      bf16* inner = k.h.of(size_t(T) * s.I);
      float row[8192];
      for (int t = 0; t < T; t++) {
        const float *gate = gu + size_t(t) * 2 * s.I, *up = gate + s.I;
        for (int i = 0; i < s.I; i++) row[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
        narrow(row, inner + size_t(t) * s.I, s.I);
      }
      linear(inner, w.down, h, true);
    }
    rms(h, m.values + m.norm, rf.of(T), nf.of(size_t(T) * s.E));
    float *g = wide.of(size_t(T) * std::max({s.V / 4, s.qkv(), 2 * s.I})), *back = dx.of(size_t(T) * s.E);
    scores(targets.data(), share, g);
    memset(back, 0, sizeof(float) * T * s.E);
    rms_back(h, m.values + m.norm, rf.data, g, back, gradients.data() + m.norm);
    float* dn = wider.of(size_t(T) * std::max({s.E, s.I, s.H * s.D}));
    float* dq = dqkv.of(size_t(T) * s.qkv());
    for (int l = s.L - 1; l >= 0; l--) {
      Kept& k = kept[l];
      const Layer& w = m.layers[l];
      linear_back(back, k.h.data, w.down, dn);
      for (int t = 0; t < T; t++) {
        const float *gate = k.gate_up.data + size_t(t) * 2 * s.I, *up = gate + s.I, *d = dn + size_t(t) * s.I;
        float *dgate = g + size_t(t) * 2 * s.I, *dup = dgate + s.I;
        for (int i = 0; i < s.I; i++) {
          float sigma = 1 / (1 + std::exp(-gate[i]));
          dgate[i] = d[i] * up[i] * sigma * (1 + gate[i] * (1 - sigma));
          dup[i] = d[i] * gate[i] * sigma;
        }
      }
      linear_back(g, k.n2.data, w.gate_up, dn);
      rms_back(k.middle.data, m.values + w.norm2, k.r2.data, dn, back, gradients.data() + w.norm2);
      linear_back(back, k.y.data, w.out, dn);
      attend_back(k, dn, dq);
      turn(dq, -1);
      linear_back(dq, k.n1.data, w.qkv, dn);
      rms_back(k.x.data, m.values + w.norm1, k.r1.data, dn, back, gradients.data() + w.norm1);
    }
    for (int t = 0; t < T; t++) {
      float* to = gradients.data() + m.embed + size_t(inputs[t]) * s.E;
      for (int i = 0; i < s.E; i++) to[i] += back[size_t(t) * s.E + i];
    }
  }
  // Loss, gradient of the head, and g [T, E], the derivative by the last norm's result.
  void scores(const int* targets, float share, float* g) {
    const int part_size = 256;
    for (int from = 0; from < T; from += part_size) {
      int n = std::min(part_size, T - from);
      float* z = wider.of(size_t(n) * s.V);
      bf16* zn = c.of(size_t(n) * s.V);
      const bf16* in = nf.data + size_t(from) * s.E;
      multiply(rows(in, s.E), m.head.forth.data(), s.E, z, s.V, n, s.V, false);
      for (int t = 0; t < n; t++) {
        float* row = z + size_t(t) * s.V;
        int target = targets[from + t];
        if (target < 0) {
          memset(row, 0, sizeof(float) * s.V);
        } else {
          float top = row[0], wanted = row[target];
          for (int j = 1; j < s.V; j++) top = row[j] > top ? row[j] : top;
          float total = 0;
          for (int j = 0; j < s.V; j++) total += row[j] = std::exp(row[j] - top);
          loss += share * (std::log(total) + top - wanted);
          float k = share / total;
          for (int j = 0; j < s.V; j++) row[j] *= k;
          row[target] -= share;
        }
        narrow(row, zn + size_t(t) * s.V, s.V);
      }
      multiply(rows(zn, s.V), m.head.back.data(), s.V, g + size_t(from) * s.E, s.E, n, s.E, false);
      bf16 *l = a.of(size_t(n) * s.V), *r = b.of(size_t(n) * s.E);
      left_turned(zn, s.V, s.V, n, l);
      right(in, s.E, n, s.E, r);
      multiply(tiles(l, n), r, n, gradients.data() + m.head.at, s.E, s.V, s.E, true);
    }
  }
};

}  // namespace

extern "C" int usable() {
  return __builtin_cpu_supports("avx512bf16") && !syscall(SYS_arch_prctl, 0x1023, 18);  // asks for the tile registers
}

// windows [B, S + 1], both B / threads and S multiples of what a slice takes; → the loss; gradients as the values.
extern "C" double loss_and_gradients(const int* shape, float eps, const float* values, const int* windows, int B, int S,
                                     int threads, int slice_windows, float* gradients) {
  Shape s{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], eps, 0};
  s.scale = 1 / std::sqrt(float(s.D));
  Model model(s, values);
  long counted = 0;
  for (int r = 0; r < B; r++)
    for (int t = 1; t <= S; t++) counted += windows[r * (S + 1) + t] >= 0;
  std::vector<Worker> workers;
  workers.reserve(threads);
  for (int i = 0; i < threads; i++) workers.emplace_back(model, S, slice_windows);
  std::vector<std::thread> running;
  for (int i = 0; i < threads; i++)
    running.emplace_back([&, i] {
      configure();
      for (int r = B / threads * i; r < B / threads * (i + 1); r += slice_windows)
        workers[i].slice(windows + size_t(r) * (S + 1), 1.0f / std::max(counted, 1L));
      _tile_release();
    });
  for (auto& thread : running) thread.join();
  double loss = 0;
  memset(gradients, 0, sizeof(float) * model.size);
  for (auto& worker : workers) {
    loss += worker.loss;
    for (size_t i = 0; i < model.size; i++) gradients[i] += worker.gradients[i];
  }
  return loss;
}
