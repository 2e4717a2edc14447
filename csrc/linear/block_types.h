// What the blocks of ggml's types hold, of the sixteen rows of a panel at once.  Only for *.isa.cpp.
//
// A type has, of a block of a panel:
//
//   codes   calls emit(quad, words) for each four columns, with their codes plus the type's offset
//           as unsigned bytes
//   scale   the integer scale of a group
//   pairs   the integer minima of groups 4 k + {0, 2} and {1, 3}, as 16-bit integers, where it has
//           minima and several groups
//   d, e    the floats; e where it has minima
//
// Layouts: ggml-common.h; kernels/reference/gguf_blocks.py says the same one row at a time.
#pragma once

#include "linear/block_shapes.h"
#include "simd/words.h"

namespace hmt::HMT_ISA {

struct Block {
  const uint8_t* data;
  const uint16_t* taken;  // f16 scales of the rows, where the type's words do not hold them
  const uint32_t* grid;

  HMT_INLINE I16v word(size_t w) const { return load_words(data + 64 * w); }
  HMT_INLINE F16v scale() const { return load_f16(taken); }
};

// What most types have; loops over codes are unrolled where a place in a word must be a constant.
template <Code kCode_>
struct BlockType {
  static constexpr Code kCode = kCode_;
  static constexpr BlockShape kShape = block_shape(kCode_);
  static HMT_INLINE F16v d(const Block& b) { return b.scale(); }
  static HMT_INLINE F16v e(const Block&) { return zero(); }
  static HMT_INLINE I16v scale(const Block&, size_t) { return set1(int32_t{1}); }
  static HMT_INLINE I16v pairs(const Block&, size_t, int) { return set1(int32_t{0}); }
};

// Bytes minus 32, of 0..63, without a borrow between them.
HMT_INLINE I16v minus_32(I16v bytes) {
  const I16v high = mask_of(0x80808080);
  return differ(minus(either(bytes, high), mask_of(0x20202020)), high);
}
// Nibble g of the 16 or 8 in neighbouring words from `first` on.
HMT_INLINE I16v nibble_of(const Block& b, size_t first, size_t g) {
  return bits_in(shr(b.word(first + g / 8), static_cast<int>(4 * (g % 8))), 15);
}
HMT_INLINE I16v twice_plus_one(I16v a) { return add(add(a, a), set1(int32_t{1})); }
// Bit `from` of each byte at bit `to`.
HMT_INLINE I16v move_bit(I16v a, int from, int to, uint32_t mask) {
  return bits_in(from > to ? shr(a, from - to) : from < to ? shl(a, to - from) : a, mask);
}
HMT_INLINE F16v eighth(F16v a) { return mul(a, set1(0.125f)); }

struct Q5_0 : BlockType<Code::kQ5_0> {
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, size_t first, const Emit& emit) {
    const I16v fifth = b.word(first);
    HMT_UNROLL(4)
    for (size_t j = 0; j < 4; ++j) {
      const I16v w = b.word(first + 1 + j);
      const int at = static_cast<int>(4 * j);
      emit(j, either(bits_in(w, 0x0f0f0f0f), shl(spread_bits(shr(fifth, at)), 4)));
      emit(4 + j, either(bits_in(shr(w, 4), 0x0f0f0f0f), shl(spread_bits(shr(fifth, at + 16)), 4)));
    }
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    codes(b, 0, emit);
  }
};

struct Q5_1 : BlockType<Code::kQ5_1> {
  static HMT_INLINE F16v d(const Block& b) { return low_half(b.word(0)); }
  static HMT_INLINE F16v e(const Block& b) { return high_half(b.word(0)); }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    Q5_0::codes(b, 1, emit);
  }
};

struct Q8_0 : BlockType<Code::kQ8_0> {
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    HMT_UNROLL(8)
    for (size_t j = 0; j < 8; ++j) emit(j, differ(b.word(j), mask_of(0x80808080)));
  }
};

// Two bits of 256 numbers in 16 words from `first` on.
template <typename Emit>
HMT_INLINE void two_bits(const Block& b, size_t first, const Emit& emit) {
  HMT_UNROLL(2)
  for (size_t run = 0; run < 2; ++run) {
    HMT_UNROLL(8)
    for (size_t j = 0; j < 8; ++j) {
      const I16v w = b.word(first + 8 * run + j);
      HMT_UNROLL(4)
      for (size_t s = 0; s < 4; ++s) {
        emit(32 * run + 8 * s + j, bits_in(shr(w, static_cast<int>(2 * s)), 0x03030303));
      }
    }
  }
}

struct Q2_K : BlockType<Code::kQ2_K> {
  static HMT_INLINE F16v d(const Block& b) { return low_half(b.word(20)); }
  static HMT_INLINE F16v e(const Block& b) { return sub(zero(), high_half(b.word(20))); }
  static HMT_INLINE I16v scale(const Block& b, size_t g) {
    return bits_in(shr(b.word(g / 4), static_cast<int>(8 * (g % 4))), 15);
  }
  static HMT_INLINE I16v pairs(const Block& b, size_t k, int odd) {
    return bits_in(shr(b.word(k), 4 + 8 * odd), 0x000f000f);
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    two_bits(b, 4, emit);
  }
};

struct Q3_K : BlockType<Code::kQ3_K> {
  static HMT_INLINE I16v scale(const Block& b, size_t g) {
    const size_t k = g / 4;
    const I16v w = b.word(24 + k % 2);
    const I16v low = bits_in(k < 2 ? w : shr(w, 4), 0x0f0f0f0f);
    const I16v high = bits_in(shr(b.word(26), static_cast<int>(2 * k)), 0x03030303);
    return signed_byte(minus_32(either(low, shl(high, 4))), static_cast<int>(g % 4));
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    HMT_UNROLL(8)
    for (size_t j = 0; j < 8; ++j) {
      const I16v third = b.word(j);
      HMT_UNROLL(2)
      for (size_t run = 0; run < 2; ++run) {
        const I16v w = b.word(8 + 8 * run + j);
        HMT_UNROLL(4)
        for (size_t s = 0; s < 4; ++s) {
          const I16v high = move_bit(third, static_cast<int>(4 * run + s), 2, 0x04040404);
          const I16v low = bits_in(shr(w, static_cast<int>(2 * s)), 0x03030303);
          emit(32 * run + 8 * s + j, either(low, high));
        }
      }
    }
  }
};

// Q4_K and Q5_K, whose scales and minima of 6 bits lie in words 1 to 3.
template <Code kCode>
struct Kq : BlockType<kCode> {
  static HMT_INLINE F16v d(const Block& b) { return low_half(b.word(0)); }
  static HMT_INLINE F16v e(const Block& b) { return sub(zero(), high_half(b.word(0))); }
  static HMT_INLINE I16v scale(const Block& b, size_t g) {
    const I16v w = g < 4 ? bits_in(b.word(1), 0x3f3f3f3f)
                         : either(bits_in(b.word(3), 0x0f0f0f0f),
                                  bits_in(shr(b.word(1), 2), 0x30303030));
    return bits_in(shr(w, static_cast<int>(8 * (g % 4))), 255);
  }
  static HMT_INLINE I16v pairs(const Block& b, size_t k, int odd) {
    const I16v w = k == 0 ? bits_in(b.word(2), 0x3f3f3f3f)
                          : either(bits_in(shr(b.word(3), 4), 0x0f0f0f0f),
                                   bits_in(shr(b.word(2), 2), 0x30303030));
    return bits_in(shr(w, 8 * odd), 0x00ff00ff);
  }
};

struct Q4_K : Kq<Code::kQ4_K> {
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    HMT_UNROLL(4)
    for (size_t run = 0; run < 4; ++run) {
      HMT_UNROLL(8)
      for (size_t j = 0; j < 8; ++j) {
        const I16v w = b.word(4 + 8 * run + j);
        emit(16 * run + j, bits_in(w, 0x0f0f0f0f));
        emit(16 * run + 8 + j, bits_in(shr(w, 4), 0x0f0f0f0f));
      }
    }
  }
};

struct Q5_K : Kq<Code::kQ5_K> {
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    HMT_UNROLL(8)
    for (size_t j = 0; j < 8; ++j) {
      const I16v fifth = b.word(4 + j);
      HMT_UNROLL(4)
      for (size_t run = 0; run < 4; ++run) {
        const I16v w = b.word(12 + 8 * run + j);
        const int n = static_cast<int>(2 * run);
        emit(16 * run + j,
             either(bits_in(w, 0x0f0f0f0f), move_bit(fifth, n, 4, 0x10101010)));
        emit(16 * run + 8 + j,
             either(bits_in(shr(w, 4), 0x0f0f0f0f), move_bit(fifth, n + 1, 4, 0x10101010)));
      }
    }
  }
};

struct Q6_K : BlockType<Code::kQ6_K> {
  static HMT_INLINE I16v scale(const Block& b, size_t g) {
    return signed_byte(b.word(48 + g / 4), static_cast<int>(g % 4));
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    const I16v low = mask_of(0x0f0f0f0f), two = mask_of(0x30303030);
    HMT_UNROLL(2)
    for (size_t run = 0; run < 2; ++run) {
      HMT_UNROLL(8)
      for (size_t j = 0; j < 8; ++j) {
        const I16v first = b.word(16 * run + j), second = b.word(16 * run + 8 + j);
        const I16v high = b.word(32 + 8 * run + j);
        const size_t quad = 32 * run + j;
        emit(quad, choose(low, first, both(shl(high, 4), two)));
        emit(quad + 8, choose(low, second, both(shl(high, 2), two)));
        emit(quad + 16, choose(low, shr(first, 4), both(high, two)));
        emit(quad + 24, choose(low, shr(second, 4), both(shr(high, 2), two)));
      }
    }
  }
};

// ggml's kvalues_iq4nl plus 128.
alignas(16) constexpr uint8_t kIq4Codes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                               129, 141, 153, 166, 181, 197, 217, 241};

// 32 numbers in four words from `first` on.
template <typename Emit>
HMT_INLINE void iq4_codes(const Block& b, size_t first, size_t quad, const Emit& emit) {
  HMT_UNROLL(4)
  for (size_t j = 0; j < 4; ++j) {
    const I16v w = b.word(first + j);
    emit(quad + j, look_up(kIq4Codes, bits_in(w, 0x0f0f0f0f)));
    emit(quad + 4 + j, look_up(kIq4Codes, bits_in(shr(w, 4), 0x0f0f0f0f)));
  }
}

struct IQ4_NL : BlockType<Code::kIQ4_NL> {
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    iq4_codes(b, 0, 0, emit);
  }
};

struct IQ4_XS : BlockType<Code::kIQ4_XS> {
  static HMT_INLINE F16v d(const Block& b) { return low_half(b.word(0)); }
  static HMT_INLINE I16v scale(const Block& b, size_t g) {
    const I16v high = bits_in(shr(b.word(0), static_cast<int>(16 + 2 * g)), 3);
    return sub(either(nibble_of(b, 1, g), shl(high, 4)), set1(int32_t{32}));
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    HMT_UNROLL(8)
    for (size_t n = 0; n < 8; ++n) iq4_codes(b, 2 + 4 * n, 8 * n, emit);
  }
};

// Signs of eight numbers: bits 0 to 3 of each, the others do not matter.  Magnitudes plus 128 become
// those of negative numbers by a change of sign, modulo 256.
struct Signs {
  I16v first, second;
};
HMT_INLINE Signs byte_signs(I16v word, int at) {
  const I16v first = shr(word, at);
  return {first, shr(first, 4)};
}
// Four times seven sign bits, and an eighth of each that makes their number even.
struct EvenSigns {
  I16v word, parity;  // the latter three bits above the first sign of each

  HMT_INLINE explicit EvenSigns(I16v w) : word(w) {
    const I16v two = differ(w, shr(w, 1)), four = differ(two, shr(two, 2));
    parity = shl(differ(four, differ(shr(two, 4), shr(w, 6))), 3);
  }
  HMT_INLINE Signs at(int bit) const {
    const I16v first = shr(word, bit);
    return {first, choose(mask_of(7), shr(first, 4), shr(parity, bit))};
  }
};
// Eight numbers of an entry of the grid.
template <typename Emit>
HMT_INLINE void emit_eight(const Block& b, I16v index, Signs signs, size_t quad, const Emit& emit) {
  const I16v at = add(index, index);
  emit(quad, negate_where(gather(b.grid, at), signs.first));
  emit(quad + 1, negate_where(gather(b.grid, add(at, set1(int32_t{1}))), signs.second));
}

// Loops of types that look codes up are not unrolled: a block takes hundreds of instructions as it
// is.
struct IQ2_XXS : BlockType<Code::kIQ2_XXS> {
  static HMT_INLINE F16v d(const Block& b) { return eighth(b.scale()); }
  static HMT_INLINE I16v scale(const Block& b, size_t g) {
    return either(shr(b.word(2 * g + 1), 27), set1(int32_t{1}));
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    for (size_t g = 0; g < 8; ++g) {
      const I16v indices = b.word(2 * g);
      const EvenSigns signs(b.word(2 * g + 1));
      for (size_t l = 0; l < 4; ++l) {
        const I16v index = bits_in(shr(indices, static_cast<int>(8 * l)), 255);
        emit_eight(b, index, signs.at(static_cast<int>(7 * l)), 8 * g + 2 * l, emit);
      }
    }
  }
};

struct IQ2_XS : BlockType<Code::kIQ2_XS> {
  static HMT_INLINE F16v d(const Block& b) { return eighth(b.scale()); }
  static HMT_INLINE I16v scale(const Block& b, size_t g) {
    return twice_plus_one(nibble_of(b, 16, g));
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    for (size_t w = 0; w < 16; ++w) {
      const I16v two = b.word(w);
      const EvenSigns signs(two);
      for (size_t half = 0; half < 2; ++half) {
        const int at = static_cast<int>(16 * half);
        emit_eight(b, bits_in(shr(two, at), 511), signs.at(at + 9), 4 * w + 2 * half, emit);
      }
    }
  }
};

struct IQ2_S : BlockType<Code::kIQ2_S> {
  static HMT_INLINE F16v d(const Block& b) { return eighth(b.scale()); }
  static HMT_INLINE I16v scale(const Block& b, size_t g) {
    return twice_plus_one(nibble_of(b, 18, g));
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    for (size_t l = 0; l < 32; ++l) {
      const int byte = static_cast<int>(8 * (l % 4));
      const I16v low = bits_in(shr(b.word(l / 4), byte), 255);
      const I16v high = bits_in(shr(b.word(16 + l / 16), static_cast<int>(2 * (l % 16))), 3);
      emit_eight(b, either(low, shl(high, 8)), byte_signs(b.word(8 + l / 4), byte), 2 * l, emit);
    }
  }
};

struct IQ3_XXS : BlockType<Code::kIQ3_XXS> {
  static HMT_INLINE F16v d(const Block& b) { return mul(b.scale(), set1(0.25f)); }
  static HMT_INLINE I16v scale(const Block& b, size_t g) {
    return either(shr(b.word(16 + g), 27), set1(int32_t{1}));
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    for (size_t g = 0; g < 8; ++g) {
      const EvenSigns even(b.word(16 + g));
      for (size_t l = 4 * g; l < 4 * (g + 1); ++l) {
        const Signs signs = even.at(static_cast<int>(7 * (l % 4)));
        const I16v two = shr(b.word(l / 2), static_cast<int>(16 * (l % 2)));
        emit(2 * l, negate_where(gather(b.grid, bits_in(two, 255)), signs.first));
        emit(2 * l + 1, negate_where(gather(b.grid, bits_in(shr(two, 8), 255)), signs.second));
      }
    }
  }
};

struct IQ3_S : BlockType<Code::kIQ3_S> {
  static HMT_INLINE I16v scale(const Block& b, size_t g) {
    return twice_plus_one(nibble_of(b, 26, g));
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    for (size_t q = 0; q < 64; ++q) {
      const I16v low = bits_in(shr(b.word(q / 4), static_cast<int>(8 * (q % 4))), 255);
      const I16v high = bits_in(shr(b.word(16 + q / 32), static_cast<int>(q % 32)), 1);
      const I16v signs = shr(b.word(18 + q / 8), static_cast<int>(4 * (q % 8)));
      emit(q, negate_where(gather(b.grid, either(low, shl(high, 8))), signs));
    }
  }
};

// Eight numbers of an entry, 8 (-1, 0 or 1) plus or minus one, plus 9: the grid has the first two
// summands plus 8, and two come to it where `minus` is 0.
template <typename Emit>
HMT_INLINE void emit_ternary(const Block& b, I16v index, I16v minus, size_t quad,
                             const Emit& emit) {
  const I16v at = add(index, index);
  const I16v more = mul(sub(set1(int32_t{1}), minus), mask_of(0x02020202));
  emit(quad, add(gather(b.grid, at), more));
  emit(quad + 1, add(gather(b.grid, add(at, set1(int32_t{1}))), more));
}

struct IQ1_S : BlockType<Code::kIQ1_S> {
  static HMT_INLINE F16v d(const Block& b) { return eighth(b.scale()); }
  static HMT_INLINE I16v high(const Block& b, size_t g) {
    return bits_in(shr(b.word(8 + g / 2), static_cast<int>(16 * (g % 2))), 0xffff);
  }
  static HMT_INLINE I16v scale(const Block& b, size_t g) {
    return twice_plus_one(bits_in(shr(high(b, g), 12), 7));
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    for (size_t l = 0; l < 32; ++l) {
      const I16v word = high(b, l / 4);
      const I16v low = bits_in(shr(b.word(l / 4), static_cast<int>(8 * (l % 4))), 255);
      const I16v three = bits_in(shr(word, static_cast<int>(3 * (l % 4))), 7);
      emit_ternary(b, either(low, shl(three, 8)), shr(word, 15), 2 * l, emit);
    }
  }
};

struct IQ1_M : BlockType<Code::kIQ1_M> {
  static HMT_INLINE F16v d(const Block& b) {
    const I16v first = b.word(12), second = b.word(13);  // the highest four bits of four halves
    const I16v low = either(bits_in(shr(first, 12), 15), bits_in(shr(first, 24), 0xf0));
    const I16v high = either(bits_in(shr(second, 4), 0xf00), bits_in(shr(second, 16), 0xf000));
    return eighth(low_half(either(low, high)));
  }
  static HMT_INLINE I16v scale(const Block& b, size_t g) {
    const int at = static_cast<int>(16 * (g / 4 % 2) + 3 * (g % 4));
    return twice_plus_one(bits_in(shr(b.word(12 + g / 8), at), 7));
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    for (size_t l = 0; l < 32; ++l) {
      const I16v nibble = nibble_of(b, 8, l);
      const I16v low = bits_in(shr(b.word(l / 4), static_cast<int>(8 * (l % 4))), 255);
      emit_ternary(b, either(low, shl(bits_in(nibble, 7), 8)), shr(nibble, 3), 2 * l, emit);
    }
  }
};

struct TQ1_0 : BlockType<Code::kTQ1_0> {
  // Digit n of base 3 of each byte: the byte is the fraction of 256 nearest from above.
  static HMT_INLINE I16v digit(I16v word, int32_t power) {
    const auto of = [&](I16v halves) {
      const I16v rest = bits_in(mul(halves, set1(power)), 0x00ff00ff);
      return bits_in(shr(mul(rest, set1(int32_t{3})), 8), 0x00030003);
    };
    const I16v even = of(bits_in(word, 0x00ff00ff)), odd = of(bits_in(shr(word, 8), 0x00ff00ff));
    return either(even, shl(odd, 8));
  }
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    int32_t power = 1;
    for (size_t n = 0; n < 5; ++n, power *= 3) {
      for (size_t j = 0; j < 8; ++j) emit(8 * n + j, digit(b.word(j), power));
      for (size_t j = 0; j < 4; ++j) emit(40 + 4 * n + j, digit(b.word(8 + j), power));
      if (n < 4) emit(60 + n, digit(b.word(12), power));
    }
  }
};

struct TQ2_0 : BlockType<Code::kTQ2_0> {
  template <typename Emit>
  static HMT_INLINE void codes(const Block& b, const Emit& emit) {
    two_bits(b, 0, emit);
  }
};

// Calls f(type{}) of a code that has blocks.
template <typename F>
HMT_INLINE void with_block_type(Code code, const F& f) {
  switch (code) {
    case Code::kQ5_0: return f(Q5_0{});
    case Code::kQ5_1: return f(Q5_1{});
    case Code::kQ8_0: return f(Q8_0{});
    case Code::kQ2_K: return f(Q2_K{});
    case Code::kQ3_K: return f(Q3_K{});
    case Code::kQ4_K: return f(Q4_K{});
    case Code::kQ5_K: return f(Q5_K{});
    case Code::kQ6_K: return f(Q6_K{});
    case Code::kIQ4_NL: return f(IQ4_NL{});
    case Code::kIQ4_XS: return f(IQ4_XS{});
    case Code::kIQ2_XXS: return f(IQ2_XXS{});
    case Code::kIQ2_XS: return f(IQ2_XS{});
    case Code::kIQ2_S: return f(IQ2_S{});
    case Code::kIQ3_XXS: return f(IQ3_XXS{});
    case Code::kIQ3_S: return f(IQ3_S{});
    case Code::kIQ1_S: return f(IQ1_S{});
    case Code::kIQ1_M: return f(IQ1_M{});
    case Code::kTQ1_0: return f(TQ1_0{});
    case Code::kTQ2_0: return f(TQ2_0{});
    default: return;
  }
}

}  // namespace hmt::HMT_ISA
