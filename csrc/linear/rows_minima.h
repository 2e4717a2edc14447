// Minima of groups of int8 codes: each is multiplied with the sum of a token's activations over the
// group.  Only for rows.isa.cpp.
#pragma once

#include "linear/kernels.h"
#include "linear/rows_decode.h"

namespace hmt::HMT_ISA {
namespace {

HMT_INLINE size_t segments_of(const Weight& w) {
  const size_t width = segment_width(w);
  return (w.columns + width - 1) / width;
}

// Minima of one row, one for each segment; null where the weight has none.
HMT_INLINE const float* row_minima(const Weight& w, size_t row) {
  if (w.minima == nullptr) return nullptr;
  return static_cast<const float*>(w.minima) + row / w.tile_rows * segments_of(w);
}

// Of a token's columns [begin, begin + count), exact.
HMT_INLINE int32_t sum_of_codes(const Inputs& in, size_t token, size_t begin, size_t count) {
  int32_t total = 0;
  if (begin % 16 == 0 && (count % 16 == 0 || begin + count == in.columns)) {
    const int32_t* sums = in.sums + token * (in.stride / 16) + begin / 16;
    for (size_t i = 0; i < (count + 15) / 16; ++i) total += sums[i];
  } else {
    for (size_t c = begin; c < begin + count; ++c) total += in.codes[token * in.stride + c];
  }
  return total;
}

HMT_INLINE float sum_of_numbers(const Inputs& in, size_t token, size_t begin, size_t count) {
  const float* x = in.f32 + token * in.stride + begin;
  F16v lanes = zero();
  size_t c = 0;
  for (; c + 16 <= count; c += 16) lanes = add(lanes, load(x + c));
  float total = total_of(lanes);
  for (; c < count; ++c) total += x[c];
  return total;
}

// Of a token over one segment.
HMT_INLINE float segment_sum(const Weight& w, const Inputs& in, size_t token, size_t segment) {
  const size_t width = segment_width(w), begin = segment * width, left = w.columns - begin;
  const size_t count = left < width ? left : width;
  if (!w.int8_activations) return sum_of_numbers(in, token, begin, count);
  return static_cast<float>(sum_of_codes(in, token, begin, count));
}

// A row's minima times a token's sums over segments.
HMT_INLINE float minima_product(const float* minima, const float* sums, size_t segments) {
  F16v lanes = zero();
  size_t s = 0;
  for (; s + 16 <= segments; s += 16) lanes = fma(load(minima + s), load(sums + s), lanes);
  float total = total_of(lanes);
  for (; s < segments; ++s) total += minima[s] * sums[s];
  return total;
}

}  // namespace
}  // namespace hmt::HMT_ISA
