#include "linear/low_rank.h"

#include "fused/float_convert.h"

namespace hmt::HMT_ISA {
namespace {

// Sums at a time: they hide the latency of one.
constexpr size_t kSums = 4;

// out[r] = row r of weights . x, for `rows` of kSums at most: they share what is read of x.
template <typename Inputs, typename Weights>
void dots(const typename Inputs::Type* x, const typename Weights::Type* weights, size_t rows,
          size_t columns, float* out) {
  F16v sums[kSums] = {zero(), zero(), zero(), zero()};
  const typename Weights::Type* from[kSums];
  for (size_t r = 0; r < kSums; ++r) from[r] = weights + (r < rows ? r : 0) * columns;
  size_t i = 0;
  for (; i + 16 <= columns; i += 16) {
    const F16v some = Inputs::read(x + i);
    for (size_t r = 0; r < kSums; ++r) sums[r] = fma(some, Weights::read(from[r] + i), sums[r]);
  }
  if (const size_t left = columns - i; left > 0) {
    const F16v some = read<Inputs>(x + i, left);
    for (size_t r = 0; r < kSums; ++r) {
      sums[r] = fma(some, read<Weights>(from[r] + i, left), sums[r]);
    }
  }
  for (size_t r = 0; r < rows; ++r) out[r] = sum(sums[r]);
}

void down(const LowRank& adapter, const void* x, DType type, size_t columns, size_t begin,
          size_t end, float* low) {
  with_numbers(type, [&](auto inputs) {
    with_numbers(adapter.down_type, [&](auto weights) {
      using Inputs = decltype(inputs);
      using Weights = decltype(weights);
      const auto* values = static_cast<const typename Inputs::Type*>(x);
      const auto* matrix = static_cast<const typename Weights::Type*>(adapter.down);
      for (size_t r = begin; r < end; r += kSums) {
        dots<Inputs, Weights>(values, matrix + r * columns, end - r < kSums ? end - r : kSums,
                              columns, low + r);
      }
    });
  });
}

template <typename Numbers, typename Weights>
void add_up(const LowRank& adapter, const float* low, typename Numbers::Type* out, size_t columns,
            size_t begin, size_t end) {
  const auto* matrix = static_cast<const typename Weights::Type*>(adapter.up);
  const F16v scale = set1(adapter.scale);
  size_t i = begin;
  for (; i + 16 * kSums <= end; i += 16 * kSums) {
    F16v sums[kSums] = {zero(), zero(), zero(), zero()};
    for (size_t r = 0; r < adapter.rank; ++r) {
      const F16v factor = set1(low[r]);
      const auto* row = matrix + r * columns + i;
      for (size_t k = 0; k < kSums; ++k) {
        sums[k] = fma(factor, Weights::read(row + 16 * k), sums[k]);
      }
    }
    for (size_t k = 0; k < kSums; ++k) {
      auto* to = out + i + 16 * k;
      Numbers::write(to, Numbers::round(add(Numbers::read(to), mul(scale, sums[k]))));
    }
  }
  for (; i < end; i += 16) {
    const size_t some = end - i < 16 ? end - i : 16;
    F16v total = zero();
    for (size_t r = 0; r < adapter.rank; ++r) {
      total = fma(set1(low[r]), read<Weights>(matrix + r * columns + i, some), total);
    }
    const F16v value = add(read<Numbers>(out + i, some), mul(scale, total));
    write<Numbers>(out + i, some, Numbers::round(value));
  }
}

void up(const LowRank& adapter, const float* low, void* out, DType type, size_t columns,
        size_t begin, size_t end) {
  with_numbers(type, [&](auto numbers) {
    with_numbers(adapter.up_type, [&](auto weights) {
      using Numbers = decltype(numbers);
      add_up<Numbers, decltype(weights)>(adapter, low, static_cast<typename Numbers::Type*>(out),
                                         columns, begin, end);
    });
  });
}

}  // namespace

const LowRankKernels low_rank_kernels = {down, up};

}  // namespace hmt::HMT_ISA
