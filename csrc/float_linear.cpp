// Weights as numbers, and linear layers that multiply with those.
#include <algorithm>
#include <cstring>

#include "aligned_array.h"
#include "fold.h"
#include "kernels.h"
#include "thread_pool.h"

namespace hmt {
namespace {

constexpr size_t kLanes = 64;  // independent sums: four registers of 16 floats hide the latency
constexpr size_t kInt4Part = 32;  // divides every group

inline __attribute__((always_inline)) float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// e4m3fn: sign, 4 bits of exponent biased by 7, 3 of mantissa, no infinity.  Computed as mantissa
// times a power of two, so that no denormal f32 occurs (a process may flush them).
inline __attribute__((always_inline)) float from_e4m3(uint8_t code) {
  const uint32_t exponent = (code >> 3) & 15u;
  const uint32_t normal = exponent != 0;  // a normal number has a hidden 1 before its mantissa
  const auto mantissa = static_cast<int32_t>((code & 7u) + 8u * normal);
  const uint32_t sign = static_cast<uint32_t>(code & 128u) << 24;
  return static_cast<float>(mantissa) * from_bits(sign | (exponent + 118u - normal) << 23);
}

HMT_CLONES void fp8_row(const uint8_t* codes, const float* scales, size_t columns, size_t tile,
                        float* __restrict__ out) {
  for (size_t begin = 0; begin < columns; begin += tile) {
    const size_t end = std::min(begin + tile, columns);
    const float scale = scales[begin / tile];
    for (size_t i = begin; i < end; ++i) out[i] = from_e4m3(codes[i]) * scale;
  }
}

HMT_CLONES void int8_row(const int8_t* codes, float scale, size_t columns,
                         float* __restrict__ out) {
  for (size_t i = 0; i < columns; ++i) out[i] = static_cast<float>(codes[i]) * scale;
}

HMT_CLONES void int4_row(const uint8_t* codes, const float* scales, size_t columns, size_t group,
                         float* __restrict__ out) {
  for (size_t begin = 0; begin < columns; begin += group) {
    const float scale = scales[begin / group];
    // Constant counts are what makes the inner loop vectorise well.
    for (size_t part = begin; part < begin + group; part += kInt4Part) {
      for (size_t i = 0; i < kInt4Part / 2; ++i) {
        const uint8_t pair = codes[part / 2 + i];
        out[part + 2 * i] = static_cast<float>((pair & 15) - 8) * scale;
        out[part + 2 * i + 1] = static_cast<float>((pair >> 4) - 8) * scale;
      }
    }
  }
}

void decode_row(const Encoded& w, size_t row, float* out) {
  const auto* bytes = static_cast<const uint8_t*>(w.data);
  const size_t tiles = (w.columns + w.tile_columns - 1) / w.tile_columns;
  switch (w.code) {
    case Code::kFp8:
      return fp8_row(bytes + row * w.columns, w.scales + row / w.tile_rows * tiles, w.columns,
                     w.tile_columns, out);
    case Code::kInt8:
      return int8_row(static_cast<const int8_t*>(w.data) + row * w.columns, w.scales[row],
                      w.columns, out);
    case Code::kInt4:
      return int4_row(bytes + row * w.columns / 2, w.scales + row * tiles, w.columns,
                      w.tile_columns, out);
  }
}

inline float number(float value) { return value; }
inline float number(uint16_t bf16) { return from_bits(static_cast<uint32_t>(bf16) << 16); }

template <typename T>
inline __attribute__((always_inline)) float dot(const float* x, const T* w, size_t columns) {
  float lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) {
    for (size_t k = 0; k < kLanes; ++k) lanes[k] += x[i + k] * number(w[i + k]);
  }
  for (size_t k = 0; i < columns; ++i, ++k) lanes[k] += x[i] * number(w[i]);
  return fold<kLanes>(lanes);
}

HMT_CLONES float dot_f32(const float* x, const float* w, size_t columns) {
  return dot(x, w, columns);
}

HMT_CLONES float dot_bf16(const float* x, const uint16_t* w, size_t columns) {
  return dot(x, w, columns);
}

// Rows per range: at least 10 us of work.
size_t row_grain(size_t columns, size_t tokens) {
  return std::max<size_t>(1, (size_t{128} << 10) / (columns * (1 + tokens)));
}

}  // namespace

void dequantize(const Encoded& weights, size_t first, size_t rows, float* out, size_t threads) {
  const size_t columns = weights.columns;
  share(rows, row_grain(columns, 0), threads, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      decode_row(weights, first + row, out + row * columns);
    }
  });
}

void linear_float(const float* x, size_t tokens, const Encoded& weights, size_t rows, float* out,
                  size_t threads) {
  const size_t columns = weights.columns;
  share(rows, row_grain(columns, tokens), threads, [&](size_t begin, size_t end) {
    AlignedArray<float> numbers(columns);
    for (size_t row = begin; row < end; ++row) {
      decode_row(weights, row, numbers.data());
      for (size_t t = 0; t < tokens; ++t) {
        out[t * rows + row] = dot_f32(x + t * columns, numbers.data(), columns);
      }
    }
  });
}

void linear_bf16(const float* x, size_t tokens, const uint16_t* weights, size_t rows,
                 size_t columns, float* out, size_t threads) {
  share(rows, row_grain(columns, tokens), threads, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      for (size_t t = 0; t < tokens; ++t) {
        out[t * rows + row] = dot_bf16(x + t * columns, weights + row * columns, columns);
      }
    }
  });
}

}  // namespace hmt
