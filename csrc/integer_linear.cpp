// Linear layers whose products are exact integers: int8 activations times int8 or int4 weights.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace hmt {
namespace {

constexpr size_t kLanes = 16;

// Rows per range: few enough to balance the threads, enough to find a token's codes in the cache
// again.  Below 256 KiB of weights times tokens the call ends before another thread has woken.
size_t row_grain(size_t rows, size_t row_bytes, size_t tokens) {
  const size_t bytes = std::max<size_t>(1, row_bytes * tokens);
  if (rows * bytes < size_t{256} << 10) return rows;
  return std::max<size_t>(16, (size_t{64} << 10) / bytes);
}

uint32_t magnitude_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffffu;
}

HMT_CLONES float quantize_token(const float* x, size_t columns, int8_t* codes) {
  // Magnitudes compare like integers, and NaN above everything, so it ends up in the scale.
  uint32_t top = 0;
  for (size_t i = 0; i < columns; ++i) top = std::max(top, magnitude_bits(x[i]));
  float peak;
  std::memcpy(&peak, &top, sizeof peak);
  const float scale = peak / 127.0f;
  const float divisor = scale > 0.0f ? scale : 1.0f;
  for (size_t i = 0; i < columns; ++i) {
    float value = x[i] / divisor;
    value = value > -127.0f ? value : -127.0f;
    value = value < 127.0f ? value : 127.0f;
    // Rounds to the nearest integer, ties to even: at this size a float has no fraction bits.
    value = (value + 12582912.0f) - 12582912.0f;
    codes[i] = static_cast<int8_t>(static_cast<int32_t>(value));
  }
  return scale;
}

HMT_CLONES void widen(const int8_t* codes, size_t columns, int16_t* wide) {
  for (size_t i = 0; i < columns; ++i) wide[i] = codes[i];
}

HMT_CLONES void dots_int8(const int16_t* x, const int8_t* weights, const float* scales,
                          size_t begin, size_t end, size_t columns, float token_scale,
                          float* out) {
  for (size_t row = begin; row < end; ++row) {
    const int8_t* w = weights + row * columns;
    int32_t dot = 0;
    for (size_t i = 0; i < columns; ++i) dot += static_cast<int16_t>(w[i]) * x[i];
    out[row] = static_cast<float>(dot) * scales[row] * token_scale;
  }
}

// A token's codes as four planes, plane k holding columns k, k + 4, ..., to meet the four nibbles
// of a 16-bit word of weights; and 8 * sum(codes) of each group, because weights are stored + 8.
void arrange(const int8_t* codes, size_t columns, size_t group, int16_t* planes,
             int32_t* offsets) {
  const size_t words = columns / 4;
  for (size_t i = 0; i < words; ++i) {
    for (size_t k = 0; k < 4; ++k) planes[k * words + i] = codes[4 * i + k];
  }
  for (size_t g = 0; g < columns / group; ++g) {
    int32_t sum = 0;
    for (size_t i = g * group; i < (g + 1) * group; ++i) sum += codes[i];
    offsets[g] = 8 * sum;
  }
}

struct Scratch {
  explicit Scratch(size_t columns) : words(columns / 4), pairs(columns / 8), sums(columns / 32) {}
  std::vector<int16_t> words;
  std::vector<int16_t> pairs;
  std::vector<int32_t> sums;
};

// Dot products of all groups of one row with one token, without the + 8 taken out: sums[groups].
// Every step is a plain loop over the whole row, which vectorises without horizontal sums.  Four
// products of a nibble and a code are at most 4 * 15 * 127 = 7620, so int16 holds four such sums.
inline __attribute__((always_inline)) void dot_groups(const int16_t* planes, const uint8_t* weights,
                                                      size_t columns, size_t group,
                                                      int16_t* __restrict__ words,
                                                      int16_t* __restrict__ pairs,
                                                      int32_t* __restrict__ sums) {
  const size_t count = columns / 4;
  const int16_t *x0 = planes, *x1 = x0 + count, *x2 = x1 + count, *x3 = x2 + count;
  for (size_t i = 0; i < count; ++i) {
    uint16_t word;
    std::memcpy(&word, weights + 2 * i, sizeof word);
    const auto c0 = static_cast<int16_t>(static_cast<int16_t>(word & 15) * x0[i]);
    const auto c1 = static_cast<int16_t>(static_cast<int16_t>((word >> 4) & 15) * x1[i]);
    const auto c2 = static_cast<int16_t>(static_cast<int16_t>((word >> 8) & 15) * x2[i]);
    const auto c3 = static_cast<int16_t>(static_cast<int16_t>(word >> 12) * x3[i]);
    words[i] = static_cast<int16_t>(c0 + c1 + c2 + c3);
  }
  for (size_t i = 0; i < count / 2; ++i) {
    pairs[i] = static_cast<int16_t>(words[2 * i] + words[2 * i + 1]);
  }
  for (size_t i = 0; i < count / 4; ++i) {
    words[i] = static_cast<int16_t>(pairs[2 * i] + pairs[2 * i + 1]);
  }
  for (size_t i = 0; i < count / 8; ++i) sums[i] = words[2 * i] + words[2 * i + 1];
  for (size_t width = 32; width < group; width *= 2) {
    for (size_t i = 0; i < columns / (2 * width); ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
}

HMT_CLONES void dots_int4(const int16_t* planes, const int32_t* offsets, const uint8_t* weights,
                          const float* scales, size_t begin, size_t end, size_t columns,
                          size_t group, float token_scale, Scratch& scratch, float* out) {
  const size_t groups = columns / group;
  int32_t* sums = scratch.sums.data();
  for (size_t row = begin; row < end; ++row) {
    dot_groups(planes, weights + row * columns / 2, columns, group, scratch.words.data(),
               scratch.pairs.data(), sums);
    const float* s = scales + row * groups;
    float lanes[kLanes] = {};
    size_t g = 0;
    for (; g + kLanes <= groups; g += kLanes) {
      for (size_t k = 0; k < kLanes; ++k) {
        lanes[k] += static_cast<float>(sums[g + k] - offsets[g + k]) * s[g + k];
      }
    }
    for (size_t k = 0; g < groups; ++g, ++k) {
      lanes[k] += static_cast<float>(sums[g] - offsets[g]) * s[g];
    }
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
      for (size_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    }
    out[row] = lanes[0] * token_scale;
  }
}

}  // namespace

void quantize_tokens(const float* x, size_t tokens, size_t columns, int8_t* codes, float* scales) {
  for (size_t t = 0; t < tokens; ++t) {
    scales[t] = quantize_token(x + t * columns, columns, codes + t * columns);
  }
}

void linear_int8(const float* x, size_t tokens, const int8_t* weights, const float* scales,
                 size_t rows, size_t columns, float* out) {
  std::vector<int8_t> codes(tokens * columns);
  std::vector<float> token_scales(tokens);
  std::vector<int16_t> wide(tokens * columns);
  quantize_tokens(x, tokens, columns, codes.data(), token_scales.data());
  widen(codes.data(), tokens * columns, wide.data());
  const size_t grain = row_grain(rows, columns, tokens);
  ThreadPool::instance().run(rows, grain, [&](size_t begin, size_t end) {
    for (size_t t = 0; t < tokens; ++t) {
      dots_int8(wide.data() + t * columns, weights, scales, begin, end, columns, token_scales[t],
                out + t * rows);
    }
  });
}

void linear_int4(const float* x, size_t tokens, const uint8_t* weights, const float* scales,
                 size_t rows, size_t columns, size_t group, float* out) {
  const size_t groups = columns / group;
  std::vector<int8_t> codes(tokens * columns);
  std::vector<float> token_scales(tokens);
  std::vector<int16_t> planes(tokens * columns);
  std::vector<int32_t> offsets(tokens * groups);
  quantize_tokens(x, tokens, columns, codes.data(), token_scales.data());
  for (size_t t = 0; t < tokens; ++t) {
    arrange(codes.data() + t * columns, columns, group, planes.data() + t * columns,
            offsets.data() + t * groups);
  }
  const size_t grain = row_grain(rows, columns / 2, tokens);
  ThreadPool::instance().run(rows, grain, [&](size_t begin, size_t end) {
    Scratch scratch(columns);
    for (size_t t = 0; t < tokens; ++t) {
      dots_int4(planes.data() + t * columns, offsets.data() + t * groups, weights, scales, begin,
                end, columns, group, token_scales[t], scratch, out + t * rows);
    }
  });
}

}  // namespace hmt
