// Tokens times blocks of the IQ types whose numbers come from a table, with AVX-512 VBMI and GFNI.
// Only for blocks.isa.cpp.
//
// Numbers come out in another order than that of columns (`kOrder`), and so a token's codes are
// reordered when it is arranged.
//
// Two threads of a Xeon core read one token's weights at these shares of the rate of reading (with a
// gather for each four numbers before; Q4_K: 84%): IQ2_XXS 68% (20), IQ2_XS 56 (20), IQ2_S 51 (21),
// IQ3_XXS 72 (25), IQ3_S 62 (26), IQ1_S 33 (14), IQ1_M 36 (16).  What bounds them are the two ports
// for 512 bits, 40 to 80 instructions for 512 weights, and of IQ2_S and IQ1_* the gathers.
#pragma once

#include "linear/blocks_int8.h"
#include "linear/blocks_lookup_types.h"

#if defined(HMT_VBMI)

namespace hmt::HMT_ISA {

// The tables of a type lie behind the entries of its grid.
template <typename Type>
HMT_INLINE const uint8_t* tables_of(const Weight& w) {
  constexpr size_t kEntries = Lookup<Type>::kEntries;
  constexpr size_t kNumbers = Lookup<Type>::kOrder == Order::kXxs3 ||
                              Lookup<Type>::kOrder == Order::kFours ? 4 : 8;
  return reinterpret_cast<const uint8_t*>(w.grid) + kEntries * kNumbers;
}

// 64 of a token's codes in the order of `Lookup`.
template <Order kOrder>
HMT_INLINE __m512i in_order(const int8_t* codes) {
  struct Control {
    Bytes64 index{};
    constexpr Control() {
      for (size_t i = 0; i < 64; ++i) {
        index.at[i] = static_cast<uint8_t>(i / 32 * 32 + column_of(kOrder, i % 32 / 4, i % 4));
      }
    }
  };
  static constexpr Control kControl;
  return _mm512_permutexvar_epi8(kControl.index.load(), _mm512_loadu_si512(codes));
}

template <Order kOrder>
void reorder(const int8_t* codes, size_t columns, int8_t* out) {
  for (size_t at = 0; at < columns; at += 64) {
    _mm512_storeu_si512(out + at, in_order<kOrder>(codes + at));
  }
}

// One token times a panel.
template <typename Type>
struct LookupToken {
  using Form = FormOf<Type>;
  static constexpr size_t kWords = Type::kShape.words();

  // Asks for a part of what comes later.
  static HMT_INLINE void ask(uintptr_t later, size_t g) {
    if (later == 0) return;
    for (size_t line = g * kWords / 8; line < (g + 1) * kWords / 8; ++line) {
      __builtin_prefetch(reinterpret_cast<const void*>(later + 64 * line));
    }
  }

  static constexpr bool kTwoScales = Form::kGroup == 16;
  static constexpr bool kPairs = !Lookup<Type>::kUnpacks;

  // The sum over a block; of kPairs `starts` are sums of x, as two 16-bit integers.
  static HMT_INLINE I16v sum_of(const Lookup<Type>& lookup, const Block& b, const int8_t* x,
                                const int32_t* starts, uintptr_t later) {
    I16v totals[2] = {set1(int32_t{0}), set1(int32_t{0})}, excess = set1(int32_t{0});
    for (size_t g = 0; g < 8; ++g) {
      __m512i numbers[8];
      lookup.numbers(b, g, numbers);
      const auto four = [&](size_t i) { return _mm512_set1_epi32(word_at(x + 32 * g + 4 * i)); };
      if constexpr (kPairs) {
        const I16v scales = Lookup<Type>::scales(b, g);
        HMT_UNROLL(8)
        for (size_t i = 0; i < 8; ++i) {
          const I16v products = {_mm512_maddubs_epi16(numbers[i], four(i))};
          totals[i % 2] = dot_pairs(totals[i % 2], products, scales);
        }
        excess = dot_pairs(excess, scales, starts[g]);
      } else {
        constexpr size_t kSums = kTwoScales ? 2 : 1;
        HMT_UNROLL(2)
        for (size_t n = 0; n < kSums; ++n) {
          I16v sum = set1(starts[kSums * g + n]);
          HMT_UNROLL(8)
          for (size_t i = n * 4; i < (n + 1) * 8 / kSums; ++i) {
            sum = {_mm512_dpbusd_epi32(sum.v, numbers[i], four(i))};
          }
          const I16v scale = Type::scale(b, kSums * g + n);
          totals[n] = Form::kPart != 0 ? dot_pairs(totals[n], scale, sum)
                                       : add(totals[n], mul(scale, sum));
        }
      }
      ask(later, g);
    }
    if constexpr (kPairs) {
      totals[0] = sub(totals[0], mul(excess, set1(int32_t{Lookup<Type>::kOffset})));
    }
    return add(totals[0], totals[1]);
  }

  static __attribute__((noinline)) void run(const BlockCall& call, const int32_t* starts,
                                            size_t panel, float* out) {
    constexpr size_t kStarts = kPairs ? 8 : Form::kArranged;
    const Weight& w = call.w;
    const bool asks = asks_ahead(1, true);
    const Lookup<Type> lookup(tables_of<Type>(w));
    F16v total = zero();
    for (size_t i = 0; i < w.columns / Form::kNumbers; ++i) {
      const Block b = block_at(w, kWords, panel * blocks_of(w) + i);
      const auto address = reinterpret_cast<uintptr_t>(b.data);
      const I16v sum = sum_of(lookup, b, call.codes + 256 * i, starts + i * kStarts,
                              asks ? address + kBytesAhead : 0);
      total = add(total, mul(to_float(sum), mul(Type::d(b), set1(call.in.scales[i]))));
    }
    store(out, total);
  }
};

// Two panels interleaved, as in `multiply_one_token`, are 5% slower here: tables take registers.
template <typename Type>
void multiply_one_token_by_lookup(const BlockCall& call, size_t first_row, size_t end_row,
                                  float* out) {
  Scratch scratch(call.w.columns / 8);
  const int32_t* starts = call.arranged;
  if (LookupToken<Type>::kPairs) {
    int32_t* pairs = scratch.take<int32_t>(call.w.columns / 32);
    for (size_t g = 0; g < call.w.columns / 32; ++g) {
      const int32_t* sums = call.in.sums + 2 * g;
      pairs[g] = (sums[0] & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(sums[1]) << 16);
    }
    starts = pairs;
  }
  for (size_t row = first_row; row < end_row; row += kPanelRows) {
    alignas(64) float lanes[16];
    LookupToken<Type>::run(call, starts, row / kPanelRows, lanes);
    write_rows(lanes, 1, end_row - row, out + row - first_row, 0);
  }
}

// `unpack` with codes in the order of `Lookup`.
template <typename Type>
__attribute__((noinline)) void unpack_by_lookup(const Weight& w, size_t panel, size_t first,
                                                size_t count, Unpacked<FormOf<Type>>* out) {
  const Lookup<Type> lookup(tables_of<Type>(w));
  const size_t blocks = w.columns / FormOf<Type>::kNumbers;
  for (size_t i = 0; i < count && first + i < blocks; ++i) {
    const Block b = block_at(w, Type::kShape.words(), panel * blocks_of(w) + first + i);
    for (size_t g = 0; g < 8; ++g) {
      __m512i numbers[8];
      lookup.numbers(b, g, numbers);
      HMT_UNROLL(8)
      for (size_t k = 0; k < 8; ++k) _mm512_store_si512(out[i].codes[8 * g + k], numbers[k]);
    }
    unpack_scales<Type>(b, 0, out[i]);
  }
}

}  // namespace hmt::HMT_ISA

#endif
