// Blocks of ggml's types as numbers, and times activations as they are.  Only for blocks.isa.cpp.
#pragma once

#include "linear/blocks_int8.h"

namespace hmt::HMT_ISA {

#if defined(HMT_AVX512)
constexpr size_t kFloatTokens = 4;
#else
constexpr size_t kFloatTokens = 1;
#endif

// Tokens times `columns` columns of a panel, added to their totals in four sums, of each fourth
// column: in the same order for any number of tokens.
template <size_t kTokens>
HMT_INLINE void add_columns(const float* const (&x)[kTokens], const float (*numbers)[16],
                            size_t columns, float* const (&totals)[kTokens]) {
  F16v sums[kTokens][4] = {};
  for (size_t c = 0; c < columns; c += 4) {
    HMT_UNROLL(4)
    for (size_t i = 0; i < 4; ++i) {
      const F16v column = load(numbers[c + i]);
      HMT_UNROLL(4)
      for (size_t t = 0; t < kTokens; ++t) {
        sums[t][i] = fma(column, set1(x[t][c + i]), sums[t][i]);
      }
    }
  }
  for (size_t t = 0; t < kTokens; ++t) {
    const F16v sum = add(add(sums[t][0], sums[t][1]), add(sums[t][2], sums[t][3]));
    store(totals[t], add(load(totals[t]), sum));
  }
}

inline void multiply_columns(const Inputs& in, size_t part, const float (*numbers)[16],
                             size_t columns, float* totals) {
  size_t token = 0;
  const auto row = [&](size_t t) { return in.f32 + t * in.stride + part * kActivationBlock; };
  for (; token + kFloatTokens <= in.tokens; token += kFloatTokens) {
    const float* x[kFloatTokens];
    float* sums[kFloatTokens];
    for (size_t t = 0; t < kFloatTokens; ++t) {
      x[t] = row(token + t);
      sums[t] = totals + 16 * (token + t);
    }
    add_columns<kFloatTokens>(x, numbers, columns, sums);
  }
  for (; token < in.tokens; ++token) {
    const float* x[1] = {row(token)};
    float* sums[1] = {totals + 16 * token};
    add_columns<1>(x, numbers, columns, sums);
  }
}

// Calls f(part, numbers [columns, 16], columns) for each 256 columns of a panel.
template <typename Type, typename F>
void each_part(const Weight& w, size_t panel, const F& f) {
  using Form = FormOf<Type>;
  alignas(64) float numbers[kActivationBlock][16];
  Unpacked<Form> some;
  for (size_t part = 0; part < activation_blocks(w.columns); ++part) {
    const size_t left = w.columns - part * kActivationBlock;
    const size_t columns = left < kActivationBlock ? left : kActivationBlock;
    unpack<Type>(w, panel, part, 1, &some);
    to_numbers<Form>(some, Type::kShape.offset, columns, numbers);
    f(part, numbers, columns);
  }
}

template <typename Type>
__attribute__((noinline)) void multiply_float_blocks(const Weight& w, const Inputs& in,
                                                     size_t first_row, size_t end_row, float* out,
                                                     size_t stride) {
  Scratch scratch(in.tokens * 64);
  float* totals = scratch.take<float>(in.tokens * 16);
  for (size_t row = first_row; row < end_row; row += kPanelRows) {
    std::memset(totals, 0, in.tokens * 64);
    each_part<Type>(w, row / kPanelRows, [&](size_t part, const float (*numbers)[16],
                                             size_t columns) {
      multiply_columns(in, part, numbers, columns, totals);
    });
    write_rows(totals, in.tokens, end_row - row, out + row - first_row, stride);
  }
}

// Rows [first, first + count), which lie in one panel.
template <typename Type>
__attribute__((noinline)) void decode_panel(const Weight& w, size_t first, size_t count,
                                            float* out) {
  each_part<Type>(w, first / kPanelRows, [&](size_t part, const float (*numbers)[16],
                                             size_t columns) {
    for (size_t r = 0; r < count; ++r) {
      const size_t lane = first % kPanelRows + r;
      float* target = out + r * w.columns + part * kActivationBlock;
      for (size_t c = 0; c < columns; ++c) target[c] = numbers[c][lane];
    }
  });
}

}  // namespace hmt::HMT_ISA
