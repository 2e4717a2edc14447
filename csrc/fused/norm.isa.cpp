#include "fused/norm.h"

#include "fused/float_convert.h"

namespace hmt::HMT_ISA {
namespace {

// Four sums at a time hide the latency of an addition.
constexpr size_t kSums = 4;

// The sum of squares of a row; with a residual, of the row that this adds to it.
template <typename Numbers, bool kAdd>
HMT_INLINE float sum_of_squares(const typename Numbers::Type* x, typename Numbers::Type* residual,
                                size_t width) {
  F16v sums[kSums] = {zero(), zero(), zero(), zero()};
  const auto add_square = [&](size_t i, size_t count, F16v& total) __attribute__((always_inline)) {
    F16v value = read<Numbers>(x + i, count);
    if (kAdd) {
      value = Numbers::round(add(read<Numbers>(residual + i, count), value));
      write<Numbers>(residual + i, count, value);
    }
    total = add(total, mul(value, value));
  };
  size_t i = 0;
  for (; i + 16 * kSums <= width; i += 16 * kSums) {
    for (size_t k = 0; k < kSums; ++k) add_square(i + 16 * k, 16, sums[k]);
  }
  for (size_t k = 0; i < width; i += 16, ++k) {
    add_square(i, width - i < 16 ? width - i : 16, sums[k]);
  }
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <typename A, typename B>
constexpr bool kIsSame = false;
template <typename A>
constexpr bool kIsSame<A, A> = true;

template <typename Numbers, typename Weights, bool kOffset>
void scale_row(const typename Numbers::Type* x, const typename Weights::Type* weight, size_t width,
               float factor, float offset, typename Numbers::Type* out, float* wide) {
  constexpr bool kRoundWeights = !kOffset && !kIsSame<Numbers, Weights>;
  const F16v factors = set1(factor), offsets = set1(offset);
  const auto scale = [&](size_t i, size_t count) __attribute__((always_inline)) {
    const F16v normed = mul(read<Numbers>(x + i, count), factors);
    F16v weights = read<Weights>(weight + i, count);
    if (kRoundWeights) weights = Numbers::round(weights);
    const F16v value = Numbers::round(
        kOffset ? mul(normed, add(offsets, weights)) : mul(weights, Numbers::round(normed)));
    write<Numbers>(out + i, count, value);
    if (wide != nullptr) write<F32Numbers>(wide + i, count, value);
  };
  size_t i = 0;
  for (; i + 16 <= width; i += 16) scale(i, 16);
  if (i < width) scale(i, width - i);
}

template <typename Numbers, typename Weights>
void rms_norm_as(const Norm& norm, size_t begin, size_t end, float* wide) {
  using Type = typename Numbers::Type;
  const float width = static_cast<float>(norm.width);
  for (size_t t = begin; t < end; ++t) {
    for (size_t h = 0; h < norm.heads; ++h) {
      const size_t at = t * norm.x_token_stride + h * norm.x_head_stride;
      const Type* x = static_cast<const Type*>(norm.x) + at;
      Type* out = static_cast<Type*>(norm.out) + t * norm.out_token_stride +
                  h * norm.out_head_stride;
      float squares;
      if (norm.residual != nullptr) {
        Type* residual = static_cast<Type*>(norm.residual) + at;
        squares = sum_of_squares<Numbers, true>(x, residual, norm.width);
        x = residual;
      } else {
        squares = sum_of_squares<Numbers, false>(x, nullptr, norm.width);
      }
      const float factor = 1.0f / std::sqrt(squares / width + norm.eps);
      const auto* weight = static_cast<const typename Weights::Type*>(norm.weight);
      const auto scale = norm.offset == 0.0f ? scale_row<Numbers, Weights, false>
                                             : scale_row<Numbers, Weights, true>;
      scale(x, weight, norm.width, factor, norm.offset, out, wide);
    }
  }
}

void rms_norm(const Norm& norm, size_t begin, size_t end, float* wide) {
  with_numbers(norm.type, [&](auto numbers) {
    with_numbers(norm.weight_type, [&](auto weights) {
      rms_norm_as<decltype(numbers), decltype(weights)>(norm, begin, end, wide);
    });
  });
}

template <typename Numbers>
void add_as(size_t count, const typename Numbers::Type* x, typename Numbers::Type* total) {
  for (size_t i = 0; i < count; i += 16) {
    const size_t some = count - i < 16 ? count - i : 16;
    const F16v value = add(read<Numbers>(total + i, some), read<Numbers>(x + i, some));
    write<Numbers>(total + i, some, Numbers::round(value));
  }
}

void add_numbers(DType type, size_t count, const void* x, void* total) {
  with_numbers(type, [&](auto numbers) {
    using Type = typename decltype(numbers)::Type;
    add_as<decltype(numbers)>(count, static_cast<const Type*>(x), static_cast<Type*>(total));
  });
}

}  // namespace

const NormKernels norm_kernels = {rms_norm, add_numbers};

}  // namespace hmt::HMT_ISA
