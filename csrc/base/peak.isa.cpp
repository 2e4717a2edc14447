#include "base/peak.h"

#if defined(HMT_AVX2)
#include <immintrin.h>
#endif
#if defined(HMT_AMX)
#include "simd/tiles.h"
#endif

namespace hmt::HMT_ISA {
namespace {

using std::size_t;

// Products that are under way at once: two units times a latency of four or five cycles, and a few
// more.  Each is the input of its successor, so that no compiler finds two that are equal.
constexpr size_t kChains = 12;

// acc * kShrink + kGrow stays near 1 for ever.
constexpr float kShrink = 0.75f, kGrow = 0.25f;

#if defined(HMT_AVX512)

uint64_t f32(size_t rounds, float* sink) {
  const __m512 shrink = _mm512_set1_ps(kShrink), grow = _mm512_set1_ps(kGrow);
  __m512 acc[kChains];
  for (size_t c = 0; c < kChains; ++c) acc[c] = _mm512_set1_ps(1.0f + static_cast<float>(c));
  for (size_t i = 0; i < rounds; ++i) {
    for (size_t c = 0; c < kChains; ++c) acc[c] = _mm512_fmadd_ps(acc[c], shrink, grow);
  }
  for (size_t c = 0; c < kChains; ++c) *sink += _mm512_reduce_add_ps(acc[c]);
  return uint64_t{rounds} * kChains * 16 * 2;
}

#elif defined(HMT_AVX2)

float sum_of(__m256 values) {
  float lanes[8], sum = 0;
  _mm256_storeu_ps(lanes, values);
  for (float lane : lanes) sum += lane;
  return sum;
}

uint64_t f32(size_t rounds, float* sink) {
  const __m256 shrink = _mm256_set1_ps(kShrink), grow = _mm256_set1_ps(kGrow);
  __m256 acc[kChains];
  for (size_t c = 0; c < kChains; ++c) acc[c] = _mm256_set1_ps(1.0f + static_cast<float>(c));
  for (size_t i = 0; i < rounds; ++i) {
    for (size_t c = 0; c < kChains; ++c) acc[c] = _mm256_fmadd_ps(acc[c], shrink, grow);
  }
  for (size_t c = 0; c < kChains; ++c) *sink += sum_of(acc[c]);
  return uint64_t{rounds} * kChains * 8 * 2;
}

#else

// As many chains as fill eight registers of four numbers.
uint64_t f32(size_t rounds, float* sink) {
  constexpr size_t kNumbers = 32;
  float acc[kNumbers];
  for (size_t c = 0; c < kNumbers; ++c) acc[c] = 1.0f + static_cast<float>(c);
  for (size_t i = 0; i < rounds; ++i) {
    for (size_t c = 0; c < kNumbers; ++c) acc[c] = acc[c] * kShrink + kGrow;
  }
  for (float number : acc) *sink += number;
  return uint64_t{rounds} * kNumbers * 2;
}

#endif

#if defined(HMT_AMX)

// Four tiles of sums, as a kernel with two tiles of either factor has.  The factors are not 0:
// products of zeros take less power, and so run faster than any others.
constexpr size_t kTileBytes = 1024;

void load_factors(uint32_t word) {
  alignas(64) uint32_t factors[kTileBytes / 4];
  for (size_t i = 0; i < kTileBytes / 4; ++i) factors[i] = word;
  settle_tile_memory(factors);
  _tile_loadd(4, factors, 64);
  _tile_loadd(5, factors, 64);
  _tile_loadd(6, factors, 64);
  _tile_loadd(7, factors, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

void store_sums(float* sink) {
  alignas(64) int32_t sums[kTileBytes / 4];
  _tile_stored(0, sums, 64);
  *sink += static_cast<float>(sums[0]);
  _tile_stored(1, sums, 64);
  *sink += static_cast<float>(sums[1]);
  _tile_stored(2, sums, 64);
  *sink += static_cast<float>(sums[2]);
  _tile_stored(3, sums, 64);
  *sink += static_cast<float>(sums[3]);
}

uint64_t int8(size_t rounds, float* sink) {
  const Tiles tiles;
  load_factors(0x035af1a7u);
  for (size_t i = 0; i < rounds; ++i) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  store_sums(sink);
  return uint64_t{rounds} * 4 * (16 * 16 * 64 * 2);
}

uint64_t bf16(size_t rounds, float* sink) {
  const Tiles tiles;
  load_factors(0xbf213f47u);  // 0.78 and -0.63
  for (size_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  store_sums(sink);
  return uint64_t{rounds} * 4 * (16 * 16 * 32 * 2);
}

#else

#if defined(HMT_AVX512)

uint64_t int8(size_t rounds, float* sink) {
  const __m512i bytes = _mm512_set1_epi32(0x5a35f1a7), codes = _mm512_set1_epi32(0x0317f2e5);
  __m512i acc[kChains];
  for (size_t c = 0; c < kChains; ++c) acc[c] = _mm512_set1_epi32(static_cast<int>(c));
  for (size_t i = 0; i < rounds; ++i) {
    for (size_t c = 0; c < kChains; ++c) acc[c] = _mm512_dpbusd_epi32(acc[c], bytes, codes);
  }
  for (size_t c = 0; c < kChains; ++c) *sink += _mm512_reduce_add_ps(_mm512_cvtepi32_ps(acc[c]));
  return uint64_t{rounds} * kChains * 64 * 2;
}

#elif defined(HMT_AVX2)

// Three instructions for 32 products; the sums of 16 bits are small enough not to saturate.
uint64_t int8(size_t rounds, float* sink) {
  const __m256i codes = _mm256_set1_epi32(0x0317f2e5), ones = _mm256_set1_epi16(1);
  __m256i acc[kChains];
  for (size_t c = 0; c < kChains; ++c) acc[c] = _mm256_set1_epi32(static_cast<int>(c));
  for (size_t i = 0; i < rounds; ++i) {
    for (size_t c = 0; c < kChains; ++c) {
      const __m256i pairs = _mm256_maddubs_epi16(acc[c], codes);
      acc[c] = _mm256_add_epi32(acc[c], _mm256_madd_epi16(pairs, ones));
    }
  }
  for (size_t c = 0; c < kChains; ++c) *sink += sum_of(_mm256_cvtepi32_ps(acc[c]));
  return uint64_t{rounds} * kChains * 32 * 2;
}

#else

uint64_t int8(size_t rounds, float* sink) {
  constexpr size_t kNumbers = 32;
  uint32_t acc[kNumbers];
  for (size_t c = 0; c < kNumbers; ++c) acc[c] = static_cast<uint32_t>(c);
  for (size_t i = 0; i < rounds; ++i) {
    for (size_t c = 0; c < kNumbers; ++c) acc[c] += (acc[c] & 0xffu) * 0x35u;
  }
  for (uint32_t number : acc) *sink += static_cast<float>(number);
  return uint64_t{rounds} * kNumbers * 2;
}

#endif

#if defined(HMT_AVX512_BF16)

uint64_t bf16(size_t rounds, float* sink) {
  // 0.78 and -0.63 times themselves: sums stay in range for longer than anybody measures.
  const __m512i words = _mm512_set1_epi32(static_cast<int>(0xbf213f47u));
  __m512bh factors;
  static_assert(sizeof factors == sizeof words, "32 numbers");
  __builtin_memcpy(&factors, &words, sizeof factors);
  __m512 acc[kChains];
  for (size_t c = 0; c < kChains; ++c) acc[c] = _mm512_set1_ps(static_cast<float>(c));
  for (size_t i = 0; i < rounds; ++i) {
    for (size_t c = 0; c < kChains; ++c) acc[c] = _mm512_dpbf16_ps(acc[c], factors, factors);
  }
  for (size_t c = 0; c < kChains; ++c) *sink += _mm512_reduce_add_ps(acc[c]);
  return uint64_t{rounds} * kChains * 32 * 2;
}

#else

uint64_t bf16(size_t rounds, float* sink) { return f32(rounds, sink); }

#endif

#endif  // HMT_AMX

}  // namespace

const PeakKernels peak_kernels = {int8, bf16, f32};

}  // namespace hmt::HMT_ISA
