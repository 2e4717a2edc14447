// How keys and values lie in pages of 16 tokens.
//
// A page of one layer is one extent:
//
//     keys    [heads, key_dim / u, 16, u]     u numbers of a token, side by side in a 4-byte word
//     values  [heads, 16 / u, value_dim, u]   u tokens' numbers of one column, in a 4-byte word
//     scales  of the keys, then of the values, where the encoding has them
//
// with u = 1 number (f32), 2 (bf16, f16), 4 (int8, fp8) or 8 (int4) in a word.  So sixteen words of keys
// are sixteen tokens, and sixteen words of values are sixteen columns: scores and outputs add up in
// the lanes of a register, without sums across lanes, and the words are what VDPBF16PS, VPDPBUSD
// and AMX tiles take.  Rows of head_dim numbers would have to be transposed in each step, which
// costs as much as a quarter of the products of eight queries.
//
// int8   code = round(x / scale), scale = max|x| / 127 of a row of head_dim numbers;
//        scales f32 [heads, 16].
// int4   groups of 32 numbers of a row, symmetric: code -8..7, kept as code + 8; scale =
//        bf16(-e / 8), where e is the group's smallest or greatest number, whichever is further
//        from 0 (the smallest in a tie), so that -8 stands for e; scales bf16 [heads, groups, 16].
//        Number i of a word's eight is in byte i % 4, in its low half where i < 4.
// fp8    e4m3fn without scales, rounded half to even; what is beyond 448 becomes 448.  NaN is kept,
//        and may be read as 480.
// Latent layers (MLA) keep keys only; a token's value is the first value_dim numbers of its key.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hmt {

constexpr std::size_t kPageTokens = 16;
constexpr std::size_t kInt4Group = 32;

// The first three are those of DType.
enum class PageEncoding : int { kF32, kBF16, kF16, kInt8, kInt4, kFp8 };

// key_dim is a multiple of u.
struct PageLayout {
  PageEncoding encoding;
  std::size_t heads, key_dim, value_dim;
  bool latent;

  constexpr std::size_t bits() const {
    constexpr std::size_t kBits[] = {32, 16, 16, 8, 4, 8};
    return kBits[static_cast<int>(encoding)];
  }
  constexpr std::size_t per_word() const { return 32 / bits(); }

  // All in bytes.
  constexpr std::size_t key_bytes() const { return kPageTokens * key_dim * bits() / 8; }
  constexpr std::size_t value_bytes() const {
    return latent ? 0 : kPageTokens * value_dim * bits() / 8;
  }
  // Whether numbers are integers that are multiplied with scales.
  constexpr bool codes() const {
    return encoding == PageEncoding::kInt8 || encoding == PageEncoding::kInt4;
  }
  // Scales of a row of `dim` numbers.
  constexpr std::size_t scales(std::size_t dim) const {
    if (encoding == PageEncoding::kInt4) return (dim + kInt4Group - 1) / kInt4Group;
    return encoding == PageEncoding::kInt8 ? 1 : 0;
  }
  constexpr std::size_t scale_bytes(std::size_t dim) const {
    return scales(dim) * kPageTokens * (encoding == PageEncoding::kInt8 ? 4 : 2);
  }
  constexpr std::size_t key_at(std::size_t head) const { return head * key_bytes(); }
  constexpr std::size_t value_at(std::size_t head) const {
    return heads * key_bytes() + head * value_bytes();
  }
  constexpr std::size_t key_scales_at(std::size_t head) const {
    return heads * (key_bytes() + value_bytes()) + head * scale_bytes(key_dim);
  }
  constexpr std::size_t value_scales_at(std::size_t head) const {
    return key_scales_at(heads) + head * scale_bytes(value_dim);
  }
  constexpr std::size_t page_bytes() const {
    return latent ? key_scales_at(heads) : value_scales_at(heads);
  }
};

// The pages of one layer: page p begins at data + p * stride bytes.
struct Pages {
  PageLayout layout;
  uint8_t* data;
  std::size_t stride;
};

}  // namespace hmt
