// Activations: rounded to int8, widened, narrowed.
#include "linear/kernels.h"
#include "simd/vec.h"

namespace hmt::HMT_ISA {
namespace {

// sums[i]: the sum of codes [16 i, 16 i + 16).  count is a multiple of 64.
void sum_sixteens(const int8_t* codes, size_t count, int32_t* sums) {
#if defined(HMT_AVX512)
  // Sums of 8 bytes are of unsigned ones: 128 is added to each code, and taken away from the sums.
  const __m512i flip = _mm512_set1_epi8(-128);
  const __m512i pick = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  for (size_t i = 0; i < count; i += 64) {
    const __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(codes + i), flip);
    const __m512i eights = _mm512_sad_epu8(bytes, _mm512_setzero_si512());
    const __m512i sixteens =
        _mm512_add_epi64(eights, _mm512_shuffle_epi32(eights, static_cast<_MM_PERM_ENUM>(0x4e)));
    const __m128i four = _mm512_castsi512_si128(_mm512_permutexvar_epi32(pick, sixteens));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums + i / 16),
                     _mm_sub_epi32(four, _mm_set1_epi32(16 * 128)));
  }
#elif defined(HMT_AVX2)
  const __m128i flip = _mm_set1_epi8(-128);
  for (size_t i = 0; i < count; i += 16) {
    const __m128i bytes =
        _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)), flip);
    const __m128i eights = _mm_sad_epu8(bytes, _mm_setzero_si128());
    sums[i / 16] = _mm_cvtsi128_si32(eights) + _mm_extract_epi32(eights, 2) - 16 * 128;
  }
#else
  for (size_t i = 0; i < count; i += 16) {
    int32_t total = 0;
    for (size_t k = 0; k < 16; ++k) total += codes[i + k];
    sums[i / 16] = total;
  }
#endif
}

// Sixteen numbers, of which the first `count` exist; the others are 0.
HMT_INLINE F16v load_some(const float* x, size_t count) {
  if (count >= 16) return load(x);
  float lanes[16] = {};
  std::memcpy(lanes, x, count * sizeof *x);
  return load(lanes);
}

float quantize(const float* x, size_t columns, int8_t* codes, size_t stride, int32_t* sums) {
  // Magnitudes compare like integers, and NaN above everything, so it ends up in the scale.
  I16v highest = set1(int32_t{0});
  for (size_t i = 0; i < columns; i += 16) {
    highest = max(highest, bits(abs(load_some(x + i, columns - i))));
  }
  int32_t lanes[16], top = 0;
  store(lanes, highest);
  for (int32_t lane : lanes) top = lane > top ? lane : top;
  const float scale = from_bits(static_cast<uint32_t>(top)) / 127.0f;
  const F16v divisor = set1(scale > 0.0f ? scale : 1.0f);
  for (size_t i = 0; i < columns; i += 16) {
    // The second operand is what NaN becomes.
    const F16v value = max(div(load_some(x + i, columns - i), divisor), set1(-127.0f));
    const I16v code = to_int(min(value, set1(127.0f)));
    if (columns - i >= 16) {
      store_bytes(codes + i, code);
    } else {
      int8_t last[16];
      store_bytes(last, code);
      std::memcpy(codes + i, last, columns - i);
    }
  }
  if (stride > columns) std::memset(codes + columns, 0, stride - columns);
  if (sums != nullptr) sum_sixteens(codes, stride, sums);
  return scale;
}

// See TokenKernels; 32 numbers fill two registers.
void quantize_groups(const float* x, size_t columns, int8_t* codes, size_t stride, int32_t* sums,
                     float* scales) {
  for (size_t i = 0; i < columns; i += 32) {
    const F16v low = load(x + i), high = load(x + i + 16);
    int32_t lanes[16], top = 0;
    store(lanes, max(bits(abs(low)), bits(abs(high))));
    for (int32_t lane : lanes) top = lane > top ? lane : top;
    const float scale = from_bits(static_cast<uint32_t>(top)) / 127.0f;
    const F16v divisor = set1(scale > 0.0f ? scale : 1.0f);
    const auto code = [&](F16v value) __attribute__((always_inline)) {
      return to_int(min(max(div(value, divisor), set1(-127.0f)), set1(127.0f)));
    };
    store_bytes(codes + i, code(low));
    store_bytes(codes + i + 16, code(high));
    scales[i / 32] = scale;
  }
  if (stride > columns) std::memset(codes + columns, 0, stride - columns);
  if (sums != nullptr) sum_sixteens(codes, stride, sums);
}

// Sixteen numbers of a type at any address, and back.
HMT_INLINE F16v load_typed(const void* x, DType type) {
  const auto* halves = static_cast<const uint16_t*>(x);
  if (type == DType::kF32) return load(static_cast<const float*>(x));
  return type == DType::kBF16 ? load_bf16(halves) : load_f16(halves);
}
HMT_INLINE void store_typed(void* out, DType type, F16v value) {
  auto* halves = static_cast<uint16_t*>(out);
  if (type == DType::kF32) store(static_cast<float*>(out), value);
  else if (type == DType::kBF16) store_bf16(halves, value);
  else store_f16(halves, value);
}
// The first `count` of them.
F16v load_typed_some(const void* x, DType type, size_t count) {
  alignas(64) char rest[64] = {};
  std::memcpy(rest, x, count * bytes_of(type));
  return load_typed(rest, type);
}
void store_typed_some(void* out, DType type, size_t count, F16v value) {
  alignas(64) char rest[64];
  store_typed(rest, type, value);
  std::memcpy(out, rest, count * bytes_of(type));
}

void widen(const void* x, DType type, size_t count, float* out) {
  if (type == DType::kF32) {
    std::memcpy(out, x, count * sizeof(float));
    return;
  }
  const auto* halves = static_cast<const uint16_t*>(x);
  size_t i = 0;
  for (; i + 16 <= count; i += 16) store(out + i, load_typed(halves + i, type));
  if (i < count) {
    store_typed_some(out + i, DType::kF32, count - i, load_typed_some(halves + i, type, count - i));
  }
}

void narrow(const float* x, const void* bias, DType bias_type, size_t count, void* out,
            DType type) {
  const auto* biases = static_cast<const char*>(bias);
  auto* target = static_cast<char*>(out);
  const size_t width = bytes_of(type), bias_width = bytes_of(bias_type);
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    F16v value = load(x + i);
    if (bias != nullptr) value = add(value, load_typed(biases + i * bias_width, bias_type));
    store_typed(target + i * width, type, value);
  }
  if (i == count) return;
  const size_t left = count - i;
  F16v value = load_some(x + i, left);
  if (bias != nullptr) {
    value = add(value, load_typed_some(biases + i * bias_width, bias_type, left));
  }
  store_typed_some(target + i * width, type, left, value);
}

}  // namespace

const TokenKernels token_kernels = {quantize, quantize_groups, widen, narrow};

}  // namespace hmt::HMT_ISA
