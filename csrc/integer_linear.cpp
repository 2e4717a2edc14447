// Linear layers whose products are exact integers: int8 activations times int8 or int4 weights.
#include <algorithm>
#include <cstring>

#include "aligned_array.h"
#include "fold.h"
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

// Tokens per range when they are rounded: about 30 us of work.
size_t token_grain(size_t columns) { return std::max<size_t>(1, (size_t{64} << 10) / columns); }

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

// How int4 rows are computed: `run` neighbouring rows as if they were one, because loops over few
// columns would be mostly prologue.
struct Int4Shape {
  Int4Shape(size_t rows, size_t columns, size_t group)
      : columns(columns),
        group(group),
        groups(columns / group),
        run(std::min(rows, std::max<size_t>(1, kRunColumns / columns))),
        words(run * columns / 4) {}
  static constexpr size_t kRunColumns = 2048;
  size_t columns, group, groups, run, words;
};

// A token's codes as four planes, plane k holding columns k, k + 4, ..., to meet the four nibbles
// of a 16-bit word of weights; and 8 * sum(codes) of each group, because weights are stored + 8.
// Both once for every row of a run.
HMT_CLONES void arrange(const int8_t* codes, const Int4Shape& shape, int16_t* planes,
                        int32_t* offsets) {
  for (size_t k = 0; k < 4; ++k) {
    int16_t* plane = planes + k * shape.words;
    for (size_t i = 0; i < shape.columns / 4; ++i) plane[i] = codes[4 * i + k];
    for (size_t i = shape.columns / 4; i < shape.words; ++i) {
      plane[i] = plane[i - shape.columns / 4];
    }
  }
  for (size_t g = 0; g < shape.groups; ++g) {
    int32_t sum = 0;
    for (size_t i = g * shape.group; i < (g + 1) * shape.group; ++i) sum += codes[i];
    for (size_t row = 0; row < shape.run; ++row) offsets[row * shape.groups + g] = 8 * sum;
  }
}

struct Scratch {
  explicit Scratch(size_t words) : words(words), pairs(words / 2), sums(words / 8) {}
  AlignedArray<int16_t> words;
  AlignedArray<int16_t> pairs;
  AlignedArray<int32_t> sums;
};

// Dot products of all groups of a run with one token, without the + 8 taken out: sums[groups].
// Every step is a plain loop over the whole run, which vectorises without horizontal sums.  Four
// products of a nibble and a code are at most 4 * 15 * 127 = 7620, so int16 holds four such sums.
//   count: 16-bit words of weights
inline __attribute__((always_inline)) void dot_groups(const int16_t* planes, const uint8_t* weights,
                                                      const Int4Shape& shape, size_t count,
                                                      int16_t* __restrict__ words,
                                                      int16_t* __restrict__ pairs,
                                                      int32_t* __restrict__ sums) {
  const int16_t *x0 = planes, *x1 = x0 + shape.words, *x2 = x1 + shape.words,
                *x3 = x2 + shape.words;
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
  for (size_t size = 32; size < shape.group; size *= 2) {
    for (size_t i = 0; i < count * 2 / size; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
}

HMT_CLONES void dots_int4(const int16_t* planes, const int32_t* offsets, const uint8_t* weights,
                          const float* scales, size_t begin, size_t end, const Int4Shape& shape,
                          float token_scale, Scratch& scratch, float* out) {
  for (size_t first = begin; first < end; first += shape.run) {
    const size_t rows = std::min(shape.run, end - first);
    const size_t bytes = rows * shape.columns / 2;
    const uint8_t* codes = weights + first * shape.columns / 2;
    // Later steps read no weights, so the processor stops fetching ahead: 0.54 ms instead of 0.72
    // for 4096 x 4096 weights out of memory.
    for (size_t i = bytes; i < 2 * bytes; i += 64) __builtin_prefetch(codes + i);
    dot_groups(planes, codes, shape, bytes / 2, scratch.words.data(), scratch.pairs.data(),
               scratch.sums.data());
    for (size_t row = 0; row < rows; ++row) {
      const int32_t* sums = scratch.sums.data() + row * shape.groups;
      const float* s = scales + (first + row) * shape.groups;
      float lanes[kLanes] = {};
      size_t g = 0;
      for (; g + kLanes <= shape.groups; g += kLanes) {
        for (size_t k = 0; k < kLanes; ++k) {
          lanes[k] += static_cast<float>(sums[g + k] - offsets[g + k]) * s[g + k];
        }
      }
      for (size_t k = 0; g < shape.groups; ++g, ++k) {
        lanes[k] += static_cast<float>(sums[g] - offsets[g]) * s[g];
      }
      out[first + row] = fold<kLanes>(lanes) * token_scale;
    }
  }
}

}  // namespace

void quantize_tokens(const float* x, size_t tokens, size_t columns, int8_t* codes, float* scales) {
  for (size_t t = 0; t < tokens; ++t) {
    scales[t] = quantize_token(x + t * columns, columns, codes + t * columns);
  }
}

void linear_int8(const float* x, size_t tokens, const int8_t* weights, const float* scales,
                 size_t rows, size_t columns, float* out, size_t threads) {
  AlignedArray<float> token_scales(tokens);
  AlignedArray<int16_t> wide(tokens * columns);
  share(tokens, token_grain(columns), threads, [&](size_t begin, size_t end) {
    AlignedArray<int8_t> codes(columns);
    for (size_t t = begin; t < end; ++t) {
      token_scales[t] = quantize_token(x + t * columns, columns, codes.data());
      widen(codes.data(), columns, wide.data() + t * columns);
    }
  });
  share(rows, row_grain(rows, columns, tokens), threads, [&](size_t begin, size_t end) {
    for (size_t t = 0; t < tokens; ++t) {
      dots_int8(wide.data() + t * columns, weights, scales, begin, end, columns, token_scales[t],
                out + t * rows);
    }
  });
}

void linear_int4(const float* x, size_t tokens, const uint8_t* weights, const float* scales,
                 size_t rows, size_t columns, size_t group, float* out, size_t threads) {
  const Int4Shape shape(rows, columns, group);
  const size_t numbers = shape.run * shape.columns, sums = shape.run * shape.groups;
  AlignedArray<float> token_scales(tokens);
  AlignedArray<int16_t> planes(tokens * numbers);
  AlignedArray<int32_t> offsets(tokens * sums);
  share(tokens, token_grain(columns), threads, [&](size_t begin, size_t end) {
    AlignedArray<int8_t> codes(columns);
    for (size_t t = begin; t < end; ++t) {
      token_scales[t] = quantize_token(x + t * columns, columns, codes.data());
      arrange(codes.data(), shape, planes.data() + t * numbers, offsets.data() + t * sums);
    }
  });
  share(rows, row_grain(rows, columns / 2, tokens), threads, [&](size_t begin, size_t end) {
    Scratch scratch(shape.words);
    for (size_t t = 0; t < tokens; ++t) {
      dots_int4(planes.data() + t * numbers, offsets.data() + t * sums, weights, scales, begin,
                end, shape, token_scales[t], scratch, out + t * rows);
    }
  });
}

}  // namespace hmt
