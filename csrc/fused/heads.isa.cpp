#include "fused/heads.h"

#include "fused/float_convert.h"

namespace hmt::HMT_ISA {
namespace {

constexpr size_t kAtOnce = 4;  // sums, so that no addition waits for the one before it

HMT_INLINE float total(F16v a) {
  float lanes[16];
  store(lanes, a);
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// matrix [in, out] by rows: sixteen results in a register, `Count` registers at once.
template <typename Numbers, size_t Count>
HMT_INLINE void by_rows(const float* x, size_t in, const typename Numbers::Type* matrix,
                        size_t stride, size_t last, typename Numbers::Type* out) {
  F16v sums[Count];
  for (F16v& sum : sums) sum = zero();
  for (size_t i = 0; i < in; ++i) {
    const F16v factor = set1(x[i]);
    const auto* row = matrix + i * stride;
    for (size_t c = 0; c + 1 < Count; ++c) {
      sums[c] = fma(factor, Numbers::read(row + 16 * c), sums[c]);
    }
    sums[Count - 1] = fma(factor, read<Numbers>(row + 16 * (Count - 1), last), sums[Count - 1]);
  }
  for (size_t c = 0; c < Count; ++c) {
    write<Numbers>(out + 16 * c, c + 1 < Count ? 16 : last, Numbers::round(sums[c]));
  }
}

template <typename Numbers>
void all_rows(const float* x, size_t in, const typename Numbers::Type* matrix, size_t stride,
              size_t count, typename Numbers::Type* out) {
  size_t o = 0;
  for (; o + 16 * kAtOnce <= count; o += 16 * kAtOnce) {
    by_rows<Numbers, kAtOnce>(x, in, matrix + o, stride, 16, out + o);
  }
  for (; o < count; o += 16) {
    by_rows<Numbers, 1>(x, in, matrix + o, stride, count - o < 16 ? count - o : 16, out + o);
  }
}

// matrix [out, in]: each result is the product of two vectors.
template <typename Numbers, size_t Count>
HMT_INLINE void by_columns(const float* x, size_t in, const typename Numbers::Type* matrix,
                           size_t stride, float* results) {
  F16v sums[Count];
  for (F16v& sum : sums) sum = zero();
  for (size_t i = 0; i < in; i += 16) {
    const size_t count = in - i < 16 ? in - i : 16;
    const F16v numbers = load(x + i);
    for (size_t c = 0; c < Count; ++c) {
      sums[c] = fma(numbers, read<Numbers>(matrix + c * stride + i, count), sums[c]);
    }
  }
  for (size_t c = 0; c < Count; ++c) results[c] = total(sums[c]);
}

template <typename Numbers>
void all_columns(const float* x, size_t in, const typename Numbers::Type* matrix, size_t stride,
                 size_t count, typename Numbers::Type* out) {
  for (size_t o = 0; o < count; o += 16) {
    const size_t some = count - o < 16 ? count - o : 16;
    float results[16] = {};
    size_t c = 0;
    for (; c + kAtOnce <= some; c += kAtOnce) {
      by_columns<Numbers, kAtOnce>(x, in, matrix + (o + c) * stride, stride, results + c);
    }
    for (; c < some; ++c) {
      by_columns<Numbers, 1>(x, in, matrix + (o + c) * stride, stride, results + c);
    }
    write<Numbers>(out + o, some, Numbers::round(load(results)));
  }
}

template <typename Numbers>
void multiply_as(const HeadProducts& p, size_t begin, size_t end, float* work) {
  using Type = typename Numbers::Type;
  for (size_t i = p.in; i < head_work(p.in); ++i) work[i] = 0.0f;
  for (size_t h = begin; h < end; ++h) {
    const Type* matrix = static_cast<const Type*>(p.matrix) + h * p.head_stride;
    for (size_t t = 0; t < p.tokens; ++t) {
      const Type* x =
          static_cast<const Type*>(p.x) + t * p.x_token_stride + h * p.x_head_stride;
      Type* out = static_cast<Type*>(p.result) + (t * p.heads + h) * p.out;
      for (size_t i = 0; i < p.in; i += 16) {
        store(work + i, read<Numbers>(x + i, p.in - i < 16 ? p.in - i : 16));
      }
      if (p.transposed) {
        all_columns<Numbers>(work, p.in, matrix, p.stride, p.out, out);
      } else {
        all_rows<Numbers>(work, p.in, matrix, p.stride, p.out, out);
      }
    }
  }
}

void multiply(const HeadProducts& products, size_t begin, size_t end, float* work) {
  with_numbers(products.type, [&](auto numbers) {
    multiply_as<decltype(numbers)>(products, begin, end, work);
  });
}

}  // namespace

const HeadKernels head_kernels = {multiply};

}  // namespace hmt::HMT_ISA
