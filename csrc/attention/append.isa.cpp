// Writing tokens to pages, in every encoding.
#include "attention/kernels.h"
#include "attention/lanes.h"

namespace hmt::HMT_ISA {
namespace {

template <typename T>
void put(uint8_t* memory, size_t index, T value) {
  std::memcpy(memory + index * sizeof value, &value, sizeof value);
}

// Where a number goes: in keys, words of one token are 16 words apart; in values, words of one
// column hold the tokens one after the other.
struct Place {
  size_t per_word, dim, slot;
  bool value;

  // Index of a token's number i among numbers of the page.
  size_t at(size_t i) const {
    if (value) return (slot / per_word * dim + i) * per_word + slot % per_word;
    return (i / per_word * kPageTokens + slot) * per_word + i % per_word;
  }
};

template <typename T>
void scatter(const T* numbers, const Place& place, uint8_t* out) {
  for (size_t i = 0; i < place.dim; ++i) put(out, place.at(i), numbers[i]);
}

// Keys of two bytes, a word at a time.
void scatter_key_words(const uint8_t* row, const Place& place, uint8_t* out) {
  for (size_t word = 0; word < place.dim / 2; ++word) {
    std::memcpy(out + (word * kPageTokens + place.slot) * 4, row + word * 4, 4);
  }
}

void write_halves(const uint8_t* row, const Place& place, uint8_t* out) {
  if (!place.value) return scatter_key_words(row, place, out);
  for (size_t i = 0; i < place.dim; ++i) std::memcpy(out + place.at(i) * 2, row + i * 2, 2);
}

void write_floats(const float* row, PageEncoding encoding, const Place& place, uint8_t* out) {
  if (encoding == PageEncoding::kF32) return scatter(row, place, out);
  const int type = encoding == PageEncoding::kBF16 ? 1 : 2;
  for (size_t begin = 0; begin < place.dim; begin += 16) {
    uint16_t halves[16];
    store_number(halves, type, 0, load(row + begin));
    const size_t count = place.dim - begin < 16 ? place.dim - begin : 16;
    for (size_t i = 0; i < count; ++i) put(out, place.at(begin + i), halves[i]);
  }
}

// Codes of 16 numbers; a scale of 0 gives zeros.
void round_codes(const float* row, float scale, float least, float most, int32_t* codes) {
  const F16v quotient = div(load(row), set1(scale == 0.0f ? 1.0f : scale));
  // In this order, NaN becomes a bound.
  store(codes, to_int(min(max(quotient, set1(least)), set1(most))));
}

// row: zero from place.dim up to a multiple of 32
void write_int8(const float* row, const Place& place, uint8_t* out, uint8_t* scales) {
  F16v most = zero();
  for (size_t i = 0; i < place.dim; i += 16) most = max(most, abs(load(row + i)));
  const float scale = greatest(most) / 127.0f;
  put(scales, place.slot, scale);
  for (size_t begin = 0; begin < place.dim; begin += 16) {
    int32_t codes[16];
    round_codes(row + begin, scale, -127.0f, 127.0f, codes);
    const size_t count = place.dim - begin < 16 ? place.dim - begin : 16;
    for (size_t i = 0; i < count; ++i) {
      put(out, place.at(begin + i), static_cast<int8_t>(scale == 0.0f ? 0 : codes[i]));
    }
  }
}

void put_nibble(uint8_t* out, size_t index, int32_t code) {
  const size_t word = index / 8, i = index % 8;
  uint8_t& byte = out[word * 4 + i % 4];
  const int shift = i < 4 ? 0 : 4;
  byte = static_cast<uint8_t>((byte & ~(15 << shift)) | (code << shift));
}

void write_int4(const float* row, const Place& place, uint8_t* out, uint8_t* scales) {
  for (size_t begin = 0; begin < place.dim; begin += kInt4Group) {
    const F16v a = load(row + begin), b = load(row + begin + 16);
    // Numbers beyond the row are zeros, which change neither.
    const float high = greatest(max(max(a, b), zero()));
    const float low = -greatest(max(sub(zero(), min(a, b)), zero()));
    // + 0 makes the scale of zeros positive.
    const uint16_t rounded = float_to_bf16((-low >= high ? low : high) / -8.0f + 0.0f);
    const float scale = bf16_to_float(rounded);
    put(scales, begin / kInt4Group * kPageTokens + place.slot, rounded);
    int32_t codes[kInt4Group];
    round_codes(row + begin, scale, -8.0f, 7.0f, codes);
    round_codes(row + begin + 16, scale, -8.0f, 7.0f, codes + 16);
    for (size_t i = 0; i < kInt4Group && begin + i < place.dim; ++i) {
      put_nibble(out, place.at(begin + i), scale == 0.0f ? 8 : codes[i] + 8);
    }
  }
}

// To the nearest, ties to even.
uint8_t e4m3_of(float number) {
  const uint32_t word = to_bits(number), size = word & 0x7fffffffu;
  const auto sign = static_cast<uint8_t>(word >> 24 & 0x80u);
  if (size > 0x7f800000u) return sign | 0x7f;
  const float magnitude = from_bits(size) < 448.0f ? from_bits(size) : 448.0f;
  // Below 2^-6 in steps of 2^-9, which are the last bits of a number as large as 2^14.
  if (magnitude < 0x1p-6f) return sign | static_cast<uint8_t>(to_bits(magnitude + 0x1p14f));
  const uint32_t bits = to_bits(magnitude);
  const uint32_t rounded = (bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20;
  return sign | static_cast<uint8_t>(rounded - (120u << 3));
}

void write_fp8(const float* row, const Place& place, uint8_t* out) {
  for (size_t i = 0; i < place.dim; ++i) out[place.at(i)] = e4m3_of(row[i]);
}

// One row of one head.
void write_row(PageEncoding encoding, const uint8_t* row, DType type, const Place& place,
               uint8_t* out, uint8_t* scales, float* numbers) {
  const bool halves = encoding == PageEncoding::kBF16 || encoding == PageEncoding::kF16;
  if (halves && static_cast<int>(encoding) == static_cast<int>(type)) {
    return write_halves(row, place, out);
  }
  const size_t padded = (place.dim + kInt4Group - 1) / kInt4Group * kInt4Group;
  widen_row(row, static_cast<int>(type), place.dim, numbers);
  for (size_t i = place.dim; i < padded; ++i) numbers[i] = 0.0f;
  if (encoding == PageEncoding::kInt8) return write_int8(numbers, place, out, scales);
  if (encoding == PageEncoding::kInt4) return write_int4(numbers, place, out, scales);
  if (encoding == PageEncoding::kFp8) return write_fp8(numbers, place, out);
  write_floats(numbers, encoding, place, out);
}

const uint8_t* row_of(const HeadRows& rows, size_t token, size_t head) {
  const size_t bytes = rows.type == DType::kF32 ? 4 : 2;
  return static_cast<const uint8_t*>(rows.data) +
         (token * rows.token_stride + head * rows.head_stride) * bytes;
}

void write(const PageLayout& layout, uint8_t* page, size_t slot, size_t tokens,
           const HeadRows& key, const HeadRows& value, float* numbers) {
  const size_t per_word = layout.per_word();
  for (size_t head = 0; head < layout.heads; ++head) {
    for (size_t i = 0; i < tokens; ++i) {
      const Place place{per_word, layout.key_dim, slot + i, false};
      write_row(layout.encoding, row_of(key, i, head), key.type, place, page + layout.key_at(head),
                page + layout.key_scales_at(head), numbers);
    }
    for (size_t i = 0; i < tokens && !layout.latent; ++i) {
      const Place place{per_word, layout.value_dim, slot + i, true};
      write_row(layout.encoding, row_of(value, i, head), value.type, place,
                page + layout.value_at(head), page + layout.value_scales_at(head), numbers);
    }
  }
}

}  // namespace

const PageKernels page_kernels = {write};

}  // namespace hmt::HMT_ISA
