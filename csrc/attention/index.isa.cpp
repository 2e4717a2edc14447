#include "attention/index.h"

#include "attention/lanes.h"

namespace hmt::HMT_ISA {
namespace {

using E = PageEncoding;

// Registers for products: positions by vectors of 16 heads.
#if defined(HMT_AVX512)
constexpr size_t kPositions = 6, kVectors = 4;
#elif defined(HMT_AVX2)
constexpr size_t kPositions = 3, kVectors = 2;
#else
constexpr size_t kPositions = 1, kVectors = 1;
#endif

size_t vectors(const IndexQueries& queries) { return (queries.count + 15) / 16; }

// Whether products of two numbers are exact in f32, so that FMA rounds as a product and a sum do.
bool exact(const IndexKeys& keys, const IndexQueries& queries) {
  return queries.heads.type != DType::kF32 && keys.encoding != E::kF32 && keys.encoding != E::kInt8;
}

size_t packed_bytes(const IndexKeys& keys, const IndexQueries& queries) {
  return vectors(queries) * 16 * (keys.dim * 4 + 4);
}

// Queries as f32 [vectors, dim, 16 heads]; then weights f32 [vectors, 16].  Heads that there are not
// have zeros.
void pack(const IndexKeys& keys, const IndexQueries& queries, size_t token, uint8_t* out) {
  const size_t dim = keys.dim, heads = queries.count;
  const size_t width = queries.heads.type == DType::kF32 ? 4 : 2;
  auto* numbers = reinterpret_cast<float*>(out);
  std::memset(out, 0, packed_bytes(keys, queries));
  for (size_t h = 0; h < heads; ++h) {
    const size_t at = token * queries.heads.token_stride + h * queries.heads.head_stride;
    const auto* row = static_cast<const uint8_t*>(queries.heads.data) + at * width;
    for (size_t i = 0; i < dim; i += 16) {
      float lanes[16];
      const size_t count = dim - i < 16 ? dim - i : 16;
      widen_row(row + i * width, static_cast<int>(queries.heads.type), count, lanes);
      for (size_t k = 0; k < count; ++k) numbers[(h / 16 * dim + i + k) * 16 + h % 16] = lanes[k];
    }
  }
  float* weights = numbers + vectors(queries) * dim * 16;
  std::memcpy(weights, queries.weights + token * heads, heads * sizeof(float));
}

// e4m3fn to f32: exponents move, and 2^120 makes up for their other bias.
HMT_INLINE float fp8_to_float(uint8_t code) {
  const uint32_t bits = uint32_t{code & 0x80u} << 24 | uint32_t{code & 0x7fu} << 20;
  return from_bits(bits) * 0x1p120f;
}

void decode(const IndexKeys& keys, size_t position, float* out) {
  const uint8_t* row = keys.row(position);
  const size_t dim = keys.dim;
  if (keys.encoding == E::kFp8) {
    for (size_t i = 0; i < dim; ++i) out[i] = fp8_to_float(row[i]);
  } else if (keys.encoding == E::kInt8) {
    float scale;
    std::memcpy(&scale, keys.page(position) + kPageTokens * dim + position % kPageTokens * 4, 4);
    const auto* codes = reinterpret_cast<const int8_t*>(row);
    for (size_t i = 0; i < dim; ++i) out[i] = static_cast<float>(codes[i]) * scale;
  } else {
    widen_row(row, static_cast<int>(keys.encoding), dim, out);
  }
}

void rows(const IndexKeys& keys, size_t begin, size_t end, float* decoded, const uint8_t** out) {
  const bool in_place = keys.encoding == E::kF32;
  for (size_t p = begin; p < end; ++p) {
    float* to = decoded + (p - begin) * keys.dim;
    if (!in_place) decode(keys, p, to);
    out[p - begin] = in_place ? keys.row(p) : reinterpret_cast<const uint8_t*>(to);
  }
}

// Lanes i and i + 8, then 4, 2, 1: as `sum`, in registers.
HMT_INLINE float sum_of_lanes(F16v a) {
#if defined(HMT_AVX512) || defined(HMT_AVX2)
#if defined(HMT_AVX512)
  const __m256 low = _mm512_castps512_ps256(a.v);
  const __m256 eight = _mm256_add_ps(low, _mm512_extractf32x8_ps(a.v, 1));
#else
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
#endif
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
  return sum(a);
#endif
}

// Adds the heads of kV vectors to the totals of kP positions.
template <bool kExact, size_t kP, size_t kV>
HMT_INLINE void add_heads(const float* query, const float* weights, size_t dim, float scale,
                          const uint8_t* const* rows, F16v* totals) {
  F16v sums[kP][kV];
  for (auto& row : sums) {
    for (F16v& sum : row) sum = zero();
  }
  for (size_t i = 0; i < dim; ++i) {
    F16v heads[kV];
    for (size_t v = 0; v < kV; ++v) heads[v] = load(query + (v * dim + i) * 16);
    for (size_t p = 0; p < kP; ++p) {
      float number;
      std::memcpy(&number, rows[p] + i * 4, 4);
      for (size_t v = 0; v < kV; ++v) {
        sums[p][v] = kExact ? fma(heads[v], set1(number), sums[p][v])
                            : add(sums[p][v], mul(heads[v], set1(number)));
      }
    }
  }
  for (size_t p = 0; p < kP; ++p) {
    for (size_t v = 0; v < kV; ++v) {
      // Which operand comes first decides what becomes of a NaN: it stays.
      const F16v head = max(zero(), mul(sums[p][v], set1(scale)));
      totals[p] = add(totals[p], mul(head, load(weights + 16 * v)));
    }
  }
}

template <bool kExact, size_t kP>
HMT_INLINE void score_rows(size_t all, size_t dim, float scale, const float* query,
                           const uint8_t* const* rows, float* scores) {
  const float* weights = query + all * dim * 16;
  F16v totals[kP];
  for (F16v& total : totals) total = zero();
  size_t v = 0;
  for (; v + kVectors <= all; v += kVectors) {
    add_heads<kExact, kP, kVectors>(query + v * dim * 16, weights + 16 * v, dim, scale, rows,
                                    totals);
  }
  for (; v < all; ++v) {
    add_heads<kExact, kP, 1>(query + v * dim * 16, weights + 16 * v, dim, scale, rows, totals);
  }
  for (size_t p = 0; p < kP; ++p) scores[p] = sum_of_lanes(totals[p]);
}

template <bool kExact>
void score_all(size_t all, size_t dim, float scale, const float* query, const uint8_t* const* rows,
               size_t count, float* scores) {
  size_t p = 0;
  for (; p + kPositions <= count; p += kPositions) {
    score_rows<kExact, kPositions>(all, dim, scale, query, rows + p, scores + p);
  }
  for (; p < count; ++p) score_rows<kExact, 1>(all, dim, scale, query, rows + p, scores + p);
}

void score(const IndexKeys& keys, const IndexQueries& queries, const uint8_t* packed,
           const uint8_t* const* rows, size_t count, float* scores) {
  const auto* query = reinterpret_cast<const float*>(packed);
  const size_t all = vectors(queries);
  if (exact(keys, queries)) {
    score_all<true>(all, keys.dim, queries.scale, query, rows, count, scores);
  } else {
    score_all<false>(all, keys.dim, queries.scale, query, rows, count, scores);
  }
}

}  // namespace

const IndexKernels index_kernels = {packed_bytes, pack, rows, score};

}  // namespace hmt::HMT_ISA
