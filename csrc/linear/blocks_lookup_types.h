// Numbers of the IQ types that come from a table, for AVX-512 VBMI and GFNI.  Only for blocks.isa.cpp.
//
// A gather of sixteen numbers takes nine cycles.  Here tables hold 2 or 3 bits per number, so that
// half an entry is a byte, and `vpermb` looks 64 halves up in 64 entries of a table in one cycle.
// Bits of two numbers beside bits of their signs are an index in turn, of six bits: `vpermb` ignores
// the other two, and a table that has each number as often as the bits it does not depend on makes
// masks needless.
#pragma once

#include "linear/block_types.h"

namespace hmt::HMT_ISA {

// Of types without a table; the others follow.
template <typename Type>
struct Lookup {
  static constexpr bool kHas = false, kUnpacks = false;
};

#if defined(HMT_VBMI)

struct Bytes64 {
  alignas(64) uint8_t at[64];
  HMT_INLINE __m512i load() const { return _mm512_load_si512(at); }
};

// By bits of an index: the number that `bits` bits from `code` on say, negative where bit `sign` is
// set, plus the offset.
constexpr Bytes64 number_table(const uint8_t (&numbers)[8], size_t bits, size_t code, size_t sign,
                               int offset) {
  Bytes64 table{};
  for (size_t i = 0; i < 64; ++i) {
    const int number = numbers[i >> code & ((1u << bits) - 1)];
    table.at[i] = static_cast<uint8_t>(offset + ((i >> sign & 1) != 0 ? -number : number));
  }
  return table;
}

// The matrix of `vgf2p8affineqb` whose result has in bit i the parity of the bits `from[i]`.
constexpr int64_t bit_matrix(const uint8_t (&from)[8]) {
  uint64_t matrix = 0;
  for (size_t i = 0; i < 8; ++i) matrix |= uint64_t{from[i]} << 8 * (7 - i);
  return static_cast<int64_t>(matrix);
}
HMT_INLINE __m512i move_bits(__m512i bytes, int64_t matrix) {
  return _mm512_gf2p8affine_epi64_epi8(bytes, _mm512_set1_epi64(matrix), 0);
}

// For `vpmultishiftqb`: four bytes of each 32-bit word, from these bits on.
constexpr Bytes64 windows(int a, int b, int c, int d) {
  Bytes64 control{};
  for (size_t i = 0; i < 64; ++i) {
    const int from[4] = {a, b, c, d};
    control.at[i] = static_cast<uint8_t>((from[i % 4] + 32 * static_cast<int>(i / 4 % 2)) & 63);
  }
  return control;
}
HMT_INLINE __m512i bytes_at(const Bytes64& control, __m512i words) {
  return _mm512_multishift_epi64_epi8(control.load(), words);
}

HMT_INLINE __m512i select(uint32_t mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(static_cast<int>(mask)), a, b, 0xca);
}
HMT_INLINE __m512i permute(const Bytes64& table, __m512i index) {
  return _mm512_permutexvar_epi8(index, table.load());
}
HMT_INLINE __mmask64 bit_mask(__m512i bytes, uint8_t bit) {
  return _mm512_test_epi8_mask(bytes, _mm512_set1_epi8(static_cast<char>(bit)));
}

// Where bits 6, 7 and 8 of 64 indices are set: mask i stands for part i of a table.  Parts are looked
// up one after the other where they may be right, so that no results have to be blended.
template <size_t kTables>
struct TableMasks {
  __mmask64 of[kTables];

  HMT_INLINE explicit TableMasks(__m512i index, __mmask64 eight = 0) {
    of[0] = ~__mmask64{0};
    of[1] = bit_mask(index, 64);
    of[2] = _mm512_movepi8_mask(index);
    of[3] = _kand_mask64(of[1], of[2]);
    if constexpr (kTables == 8) {
      of[4] = eight;
      HMT_UNROLL(3)
      for (size_t i = 1; i < 4; ++i) of[4 + i] = _kand_mask64(of[i], eight);
    }
  }
};

// A table of 64 kTables bytes.
template <size_t kTables>
struct ByteTable {
  __m512i parts[kTables];

  HMT_INLINE explicit ByteTable(const uint8_t* table, int64_t matrix = 0) {
    HMT_UNROLL(8)
    for (size_t i = 0; i < kTables; ++i) {
      parts[i] = _mm512_loadu_si512(table + 64 * i);
      if (matrix != 0) parts[i] = move_bits(parts[i], matrix);
    }
  }
  HMT_INLINE __m512i look_up(__m512i index, const TableMasks<kTables>& masks) const {
    __m512i bytes = _mm512_permutexvar_epi8(index, parts[0]);
    HMT_UNROLL(8)
    for (size_t i = 1; i < kTables; ++i) {
      bytes = _mm512_mask_permutexvar_epi8(bytes, masks.of[i], index, parts[i]);
    }
    return bytes;
  }
};

inline constexpr uint8_t kTwoBits[8] = {8, 25, 43};
inline constexpr uint8_t kThreeBits[8] = {4, 12, 20, 28, 36, 44, 52, 62};
inline constexpr uint8_t kOdd[8] = {1, 3, 5, 7, 9, 11, 13, 15};

// In which order the numbers of 32 columns come.
enum class Order { kEights, kXxs3, kFours, kEvenOdd };

// The column of a byte of the words of register `quad`.
constexpr size_t column_of(Order order, size_t quad, size_t byte) {
  if (order == Order::kEights) return 8 * byte + quad;
  if (order == Order::kFours) return 16 * (quad / 4) + 4 * byte + quad % 4;
  if (order == Order::kEvenOdd) return 8 * (quad / 2) + 2 * byte + quad % 2;
  constexpr size_t kEntries[4] = {0, 4, 2, 6};
  return 4 * (kEntries[byte] + quad / 4) + quad % 4;
}

// Of a type: `numbers` gives eight registers of 64 numbers of 32 columns, plus the type's offset.
// kUnpacks is true where all in a register belong to one group; otherwise the first and the last 16
// columns are in the lower and upper halves of words, numbers have an offset of their own, and
// `scales` gives the scales of both in the halves.
template <>
struct Lookup<IQ2_XXS> {
  static constexpr bool kHas = true, kUnpacks = true;
  static constexpr size_t kEntries = 256;
  static constexpr Order kOrder = Order::kEights;
  ByteTable<4> low, high;

  // Numbers 0 to 3 two bits higher, turned round.
  HMT_INLINE explicit Lookup(const uint8_t* tables)
      : low(tables, bit_matrix({64, 128, 1, 2, 4, 8, 16, 32})), high(tables + kEntries) {}

  HMT_INLINE void numbers(const Block& b, size_t g, __m512i (&out)[8]) const {
    static constexpr Bytes64 kSigns = windows(0, 7, 14, 21);
    static constexpr Bytes64 kNumbers[6] = {
        number_table(kTwoBits, 2, 2, 0, 128), number_table(kTwoBits, 2, 4, 1, 128),
        number_table(kTwoBits, 2, 0, 2, 128), number_table(kTwoBits, 2, 4, 3, 128),
        number_table(kTwoBits, 2, 0, 4, 128), number_table(kTwoBits, 2, 2, 5, 128)};
    const __m512i index = b.word(2 * g).v, signs = bytes_at(kSigns, b.word(2 * g + 1).v);
    const TableMasks<4> bits(index);
    const __m512i l = low.look_up(index, bits), h = high.look_up(index, bits);
    const __m512i second = move_bits(l, bit_matrix({64, 128, 0, 0, 1, 2, 0, 0}));
    const __m512i last = move_bits(signs, bit_matrix({0, 0, 0, 0, 64, 127, 0, 0}));
    const __m512i a = select(0x3c3c3c3c, l, signs), c = select(0x33333333, second, signs);
    const __m512i d = select(0x0f0f0f0f, h, signs);
    const __m512i e = select(0x0f0f0f0f, _mm512_srli_epi32(h, 4), last);
    out[0] = permute(kNumbers[0], a);
    out[1] = permute(kNumbers[1], a);
    out[2] = permute(kNumbers[2], c);
    out[3] = permute(kNumbers[3], c);
    out[4] = permute(kNumbers[4], d);
    out[5] = permute(kNumbers[5], d);
    out[6] = permute(kNumbers[4], e);
    out[7] = permute(kNumbers[5], e);
  }
};

// Entries of four numbers, each of three bits.
template <const uint8_t (&kValues)[8], size_t kTables>
struct ThreeBitLookup {
  static constexpr bool kHas = true, kUnpacks = true;
  static constexpr size_t kEntries = 64 * kTables;
  ByteTable<kTables> low, high;

  HMT_INLINE explicit ThreeBitLookup(const uint8_t* tables)
      : low(tables), high(tables + kEntries) {}

  // `signs` has in bits 3, 0, 4 and 1 those of the four numbers.
  HMT_INLINE void entries(__m512i index, const TableMasks<kTables>& bits, __m512i signs,
                          __m512i* out) const {
    static constexpr Bytes64 kNumbers[4] = {
        number_table(kValues, 3, 0, 3, 128), number_table(kValues, 3, 3, 0, 128),
        number_table(kValues, 3, 0, 4, 128), number_table(kValues, 3, 3, 1, 128)};
    const __m512i l = low.look_up(index, bits), h = high.look_up(index, bits);
    out[0] = permute(kNumbers[0], select(0x07070707, l, signs));
    out[1] = permute(kNumbers[1], select(0x38383838, l, signs));
    out[2] = permute(kNumbers[2], select(0x07070707, h, signs));
    out[3] = permute(kNumbers[3], select(0x38383838, h, signs));
  }
};

template <>
struct Lookup<IQ3_XXS> : ThreeBitLookup<kThreeBits, 4> {
  using ThreeBitLookup::ThreeBitLookup;
  static constexpr Order kOrder = Order::kXxs3;

  HMT_INLINE void numbers(const Block& b, size_t g, __m512i (&out)[8]) const {
    static constexpr Bytes64 kSigns = windows(0, 14, 7, 21);
    const __m512i first = b.word(2 * g).v, second = b.word(2 * g + 1).v;
    const __m512i signs = bytes_at(kSigns, b.word(16 + g).v);
    const __m512i even = select(0x00ff00ff, first, _mm512_slli_epi32(second, 8));
    const __m512i odd = select(0x00ff00ff, _mm512_srli_epi32(first, 8), second);
    entries(even, TableMasks<4>(even), move_bits(signs, bit_matrix({2, 8, 0, 1, 4, 0, 0, 0})), out);
    entries(odd, TableMasks<4>(odd), move_bits(signs, bit_matrix({32, 127, 0, 16, 64, 0, 0, 0})),
            out + 4);
  }
};

template <>
struct Lookup<IQ2_XS> {
  static constexpr bool kHas = true, kUnpacks = false;
  static constexpr size_t kEntries = 512;
  static constexpr Order kOrder = Order::kEights;
  static constexpr int kOffset = 43;
  ByteTable<8> low, high;

  HMT_INLINE explicit Lookup(const uint8_t* tables)
      : low(tables, bit_matrix({4, 8, 1, 2, 16, 32, 64, 128})),
        high(tables + kEntries, bit_matrix({16, 32, 1, 2, 4, 8, 64, 128})) {}

  HMT_INLINE void numbers(const Block& b, size_t g, __m512i (&out)[8]) const {
    static constexpr Bytes64 kNumbers[6] = {
        number_table(kTwoBits, 2, 0, 4, kOffset), number_table(kTwoBits, 2, 0, 2, kOffset),
        number_table(kTwoBits, 2, 4, 3, kOffset), number_table(kTwoBits, 2, 2, 5, kOffset),
        number_table(kTwoBits, 2, 2, 0, kOffset), number_table(kTwoBits, 2, 4, 1, kOffset)};
    const __m512i even = _mm512_shuffle_epi8(
        b.word(2 * g).v, _mm512_set4_epi32(0x0f0d0e0c, 0x0b090a08, 0x07050604, 0x03010200));
    const __m512i odd = _mm512_shuffle_epi8(
        b.word(2 * g + 1).v, _mm512_set4_epi32(0x0e0c0f0d, 0x0a080b09, 0x06040705, 0x02000301));
    const __m512i index = select(0x0000ffff, even, odd);
    const __m512i signs = _mm512_rol_epi32(select(0x0000ffff, odd, even), 16);  // and bit 8
    const TableMasks<8> bits(index, bit_mask(signs, 1));
    const __m512i l = low.look_up(index, bits), h = high.look_up(index, bits);
    const __m512i more = move_bits(signs, bit_matrix({32, 64, 128, 0xfe, 2, 16, 0, 0}));
    const __m512i l2 = move_bits(l, bit_matrix({4, 8, 64, 128, 0, 0, 0, 0}));
    const __m512i h2 = move_bits(h, bit_matrix({1, 2, 0, 0, 64, 128, 0, 0}));
    const __m512i a = select(0x33333333, l, signs), c = select(0x0f0f0f0f, l2, more);
    const __m512i d = select(0x3c3c3c3c, h, more), e = select(0x33333333, h2, more);
    out[0] = permute(kNumbers[0], c);
    out[1] = permute(kNumbers[1], a);
    out[2] = permute(kNumbers[2], a);
    out[3] = permute(kNumbers[3], c);
    out[4] = permute(kNumbers[4], d);
    out[5] = permute(kNumbers[5], d);
    out[6] = permute(kNumbers[1], e);
    out[7] = permute(kNumbers[2], e);
  }

  static HMT_INLINE I16v scales(const Block& b, size_t g) {
    static constexpr Bytes64 kNibbles[4] = {windows(-1, 0, 3, 0), windows(7, 0, 11, 0),
                                            windows(15, 0, 19, 0), windows(23, 0, 27, 0)};
    const __m512i twice = bytes_at(kNibbles[g % 4], b.word(16 + g / 4).v);
    return {_mm512_ternarylogic_epi32(twice, _mm512_set1_epi32(0x001e001e),
                                      _mm512_set1_epi32(0x00010001), 0xea)};
  }
};

template <>
struct Lookup<IQ3_S> : ThreeBitLookup<kOdd, 8> {
  using ThreeBitLookup::ThreeBitLookup;
  static constexpr Order kOrder = Order::kFours;

  HMT_INLINE void numbers(const Block& b, size_t g, __m512i (&out)[8]) const {
    static constexpr Bytes64 kHigh[8] = {windows(0, 0, 0, 0),     windows(4, 4, 4, 4),
                                         windows(8, 8, 8, 8),     windows(12, 12, 12, 12),
                                         windows(16, 16, 16, 16), windows(20, 20, 20, 20),
                                         windows(24, 24, 24, 24), windows(28, 28, 28, 28)};
    static constexpr Bytes64 kSigns[2] = {windows(0, 4, 8, 12), windows(16, 20, 24, 28)};
    HMT_UNROLL(2)
    for (size_t i = 0; i < 2; ++i) {
      const size_t word = 2 * g + i;
      const __m512i index = b.word(word).v;
      const __m512i eighth = bytes_at(kHigh[word % 8], b.word(16 + word / 8).v);
      const __m512i signs = move_bits(bytes_at(kSigns[i], b.word(18 + g).v),
                                      bit_matrix({2, 8, 0, 1, 4, 0, 0, 0}));
      const TableMasks<8> bits(
          index, _mm512_test_epi8_mask(eighth, _mm512_set1_epi32(0x08040201)));
      entries(index, bits, signs, out + 4 * i);
    }
  }
};

// Types of 1024 and 2048 entries gather the packed numbers of an entry: `vpermb` would need as long.
template <size_t kCount>
struct GatheredLookup {
  static constexpr bool kHas = true, kUnpacks = true;
  static constexpr size_t kEntries = kCount;
  static constexpr Order kOrder = Order::kEvenOdd;
  const uint8_t* tables;

  HMT_INLINE explicit GatheredLookup(const uint8_t* t) : tables(t) {}

  // `index` may have more bits; bits 0, 1, 6 and 7 of bytes of `signs` go to the tables.
  HMT_INLINE void entry(__m512i index, __m512i signs, const Bytes64& even, const Bytes64& odd,
                        __m512i* out) const {
    const __m512i last = _mm512_set1_epi32(static_cast<int>(kEntries) - 1);
    const __m512i inside = _mm512_and_si512(index, last);
    const __m512i packed = _mm512_i32gather_epi32(inside, tables + 2 * kEntries, 4);
    const __m512i with = select(0x3c3c3c3c, packed, signs);
    out[0] = permute(even, with);
    out[1] = permute(odd, with);
  }
};

template <>
struct Lookup<IQ2_S> : GatheredLookup<1024> {
  using GatheredLookup::GatheredLookup;

  HMT_INLINE void numbers(const Block& b, size_t g, __m512i (&out)[8]) const {
    static constexpr Bytes64 kSigns[4] = {windows(0, 2, 4, 6), windows(8, 10, 12, 14),
                                          windows(16, 18, 20, 22), windows(24, 26, 28, 30)};
    static constexpr Bytes64 kEven = number_table(kTwoBits, 2, 2, 0, 128);
    static constexpr Bytes64 kOddNumbers = number_table(kTwoBits, 2, 4, 1, 128);
    const I16v low = b.word(g), signs = b.word(8 + g);
    const I16v high = shl(shr(b.word(16 + g / 4), static_cast<int>(8 * (g % 4))), 8);
    HMT_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
      const __m512i index = select(255, shr(low, 8 * i).v, shr(high, 2 * i).v);
      entry(index, bytes_at(kSigns[i], signs.v), kEven, kOddNumbers, out + 2 * i);
    }
  }
};

// Eight times -1, 0 or 1, plus or minus one, plus 9.
constexpr Bytes64 ternary_table(size_t code) {
  Bytes64 table{};
  for (size_t i = 0; i < 64; ++i) {
    table.at[i] = static_cast<uint8_t>(8 * (i >> code & 3) + ((i & 1) != 0 ? 0 : 2));
  }
  return table;
}

struct TernaryLookup : GatheredLookup<2048> {
  using GatheredLookup::GatheredLookup;

  // `minus` has the sign of what is added in the first bit of bytes.
  HMT_INLINE void entry(__m512i index, __m512i minus, __m512i* out) const {
    static constexpr Bytes64 kEven = ternary_table(2), kOddNumbers = ternary_table(4);
    GatheredLookup::entry(index, minus, kEven, kOddNumbers, out);
  }
};

template <>
struct Lookup<IQ1_S> : TernaryLookup {
  using TernaryLookup::TernaryLookup;

  HMT_INLINE void numbers(const Block& b, size_t g, __m512i (&out)[8]) const {
    static constexpr Bytes64 kMinus = windows(23, 23, 23, 23);
    const I16v low = b.word(g), high = shl(IQ1_S::high(b, g), 8);
    const __m512i minus = bytes_at(kMinus, high.v);
    HMT_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
      entry(select(255, shr(low, 8 * i).v, shr(high, 3 * i).v), minus, out + 2 * i);
    }
  }
};

template <>
struct Lookup<IQ1_M> : TernaryLookup {
  using TernaryLookup::TernaryLookup;

  HMT_INLINE void numbers(const Block& b, size_t g, __m512i (&out)[8]) const {
    static constexpr Bytes64 kMinus[4] = {windows(11, 11, 11, 11), windows(15, 15, 15, 15),
                                          windows(19, 19, 19, 19), windows(23, 23, 23, 23)};
    const I16v low = b.word(g);
    const I16v high = shl(shr(b.word(8 + g / 2), static_cast<int>(16 * (g % 2))), 8);
    HMT_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
      entry(select(255, shr(low, 8 * i).v, shr(high, 4 * i).v), bytes_at(kMinus[i], high.v),
            out + 2 * i);
    }
  }
};

#endif

}  // namespace hmt::HMT_ISA
