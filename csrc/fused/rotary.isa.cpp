#include "fused/rotary.h"

#include "fused/float_convert.h"

namespace hmt::HMT_ISA {
namespace {

// Thirty-two numbers, those in even places and those in odd ones.
HMT_INLINE void split_pairs(const float* p, F16v& even, F16v& odd) {
#if defined(HMT_AVX512)
  const __m512i places =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512 low = _mm512_loadu_ps(p), high = _mm512_loadu_ps(p + 16);
  even = {_mm512_permutex2var_ps(low, places, high)};
  odd = {_mm512_permutex2var_ps(low, _mm512_or_si512(places, _mm512_set1_epi32(1)), high)};
#else
  float evens[16], odds[16];
  for (size_t i = 0; i < 16; ++i) {
    evens[i] = p[2 * i];
    odds[i] = p[2 * i + 1];
  }
  even = load(evens);
  odd = load(odds);
#endif
}

template <typename Numbers>
HMT_INLINE void turn(F16v first, F16v second, F16v cos, F16v sin, typename Numbers::Type* out,
                     size_t half, size_t count) {
  const F16v left = sub(Numbers::round(mul(first, cos)), Numbers::round(mul(second, sin)));
  const F16v right = add(Numbers::round(mul(second, cos)), Numbers::round(mul(first, sin)));
  write<Numbers>(out, count, Numbers::round(left));
  write<Numbers>(out + half, count, Numbers::round(right));
}

// cos and sin are rounded already and may be read up to a multiple of 16.
template <typename Numbers>
HMT_INLINE void turn_halves(const typename Numbers::Type* x, typename Numbers::Type* out,
                            const float* cos, const float* sin, size_t half) {
  for (size_t i = 0; i < half; i += 16) {
    const size_t count = half - i < 16 ? half - i : 16;
    turn<Numbers>(read<Numbers>(x + i, count), read<Numbers>(x + half + i, count), load(cos + i),
                  load(sin + i), out + i, half, count);
  }
}

// `head` has room for 2 half + 32 numbers: results land where numbers are still to be read.
template <typename Numbers>
HMT_INLINE void turn_pairs(const typename Numbers::Type* x, typename Numbers::Type* out,
                           const float* cos, const float* sin, size_t half, float* head) {
  for (size_t i = 0; i < 2 * half; i += 16) {
    store(head + i, read<Numbers>(x + i, 2 * half - i < 16 ? 2 * half - i : 16));
  }
  for (size_t i = 0; i < half; i += 16) {
    F16v first, second;
    split_pairs(head + 2 * i, first, second);
    turn<Numbers>(first, second, load(cos + i), load(sin + i), out + i, half,
                  half - i < 16 ? half - i : 16);
  }
}

template <typename Numbers>
void round_all(const float* x, size_t count, float* out) {
  for (size_t i = 0; i < count; i += 16) {
    store(out + i, Numbers::round(read<F32Numbers>(x + i, count - i < 16 ? count - i : 16)));
  }
}

template <typename Numbers>
void rotate_as(const Rotation& r, size_t begin, size_t end, float* work) {
  using Type = typename Numbers::Type;
  const size_t turned = r.turned, half = turned / 2;
  float* cos = work;
  float* sin = cos + half + 16;
  float* head = sin + half + 16;
  for (size_t i = 0; i < turned + 32; ++i) head[i] = 0.0f;
  for (size_t t = begin; t < end; ++t) {
    round_all<Numbers>(r.cos + t * turned, half, cos);
    round_all<Numbers>(r.sin + t * turned, half, sin);
    for (size_t g = 0; g < r.count; ++g) {
      const Heads& group = r.groups[g];
      for (size_t h = 0; h < group.heads; ++h) {
        const Type* x = static_cast<const Type*>(group.x) + t * group.x_token_stride +
                        h * group.x_head_stride;
        Type* out = static_cast<Type*>(group.out) + t * group.out_token_stride +
                    h * group.out_head_stride;
        if (r.interleaved) {
          turn_pairs<Numbers>(x, out, cos, sin, half, head);
        } else {
          turn_halves<Numbers>(x, out, cos, sin, half);
        }
        if (out != x && group.dim > turned) {
          std::memcpy(out + turned, x + turned, (group.dim - turned) * sizeof(Type));
        }
      }
    }
  }
}

void rotate(const Rotation& rotation, size_t begin, size_t end, float* work) {
  with_numbers(rotation.type, [&](auto numbers) {
    rotate_as<decltype(numbers)>(rotation, begin, end, work);
  });
}

}  // namespace

const RotaryKernels rotary_kernels = {rotate};

}  // namespace hmt::HMT_ISA
