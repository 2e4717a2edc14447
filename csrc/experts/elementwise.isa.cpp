// Activations of experts, and the sum of their outputs.
#include "experts/kernels.h"
#include "fused/activations.h"
#include "fused/float_convert.h"

namespace hmt::HMT_ISA {
namespace {

// x = f(x) for `count` numbers.
template <typename Function>
HMT_INLINE void change(float* x, size_t count, Function f) {
  for (size_t i = 0; i < count; i += 16) {
    const size_t here = count - i < 16 ? count - i : 16;
    write<F32Numbers>(x + i, here, f(read<F32Numbers>(x + i, here)));
  }
}

void activate(float* x, size_t count, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return change(x, count, [](F16v a) { return silu(a); });
    case Activation::kGelu:
      return change(x, count, [](F16v a) { return gelu(a); });
    case Activation::kGeluTanh:
      return change(x, count, [](F16v a) { return gelu_tanh(a); });
    case Activation::kClampedSwish:
      return change(x, count, [](F16v a) { return clamped_swish(a); });
    case Activation::kClampedSilu:
      return change(x, count, [](F16v a) { return clamped_silu(a); });
    case Activation::kRelu:
      return change(x, count, [](F16v a) { return relu(a); });
    case Activation::kSigmoid:
      return change(x, count, [](F16v a) { return sigmoid(a); });
  }
}

// In passes over numbers that are in L1: one loop for each activation and type took GCC minutes
// with sanitizers.
void gated(float* gate, const float* up, size_t count, Activation activation, void* out,
           DType type) {
  with_numbers(type, [&](auto numbers) {
    using Numbers = decltype(numbers);
    change(gate, count, [](F16v a) { return Numbers::round(a); });
    activate(gate, count, activation);
    const bool plus_one = activation == Activation::kClampedSwish;
    const bool bounded = activation == Activation::kClampedSilu;
    auto* values = static_cast<typename Numbers::Type*>(out);
    for (size_t i = 0; i < count; i += 16) {
      const size_t here = count - i < 16 ? count - i : 16;
      const F16v left = Numbers::round(read<F32Numbers>(gate + i, here));
      F16v right = Numbers::round(read<F32Numbers>(up + i, here));
      if (plus_one) right = Numbers::round(clamped_plus_one(right));
      if (bounded) right = clamped(right);
      write<Numbers>(values + i, here, Numbers::round(mul(left, right)));
    }
  });
}

void add_scaled(float* total, const void* x, DType type, float scale, size_t count) {
  const F16v factor = set1(scale);
  with_numbers(type, [&](auto numbers) {
    using Numbers = decltype(numbers);
    const auto* values = static_cast<const typename Numbers::Type*>(x);
    for (size_t i = 0; i < count; i += 16) {
      const size_t here = count - i < 16 ? count - i : 16;
      const F16v scaled = mul(read<Numbers>(values + i, here), factor);
      write<F32Numbers>(total + i, here, add(read<F32Numbers>(total + i, here), scaled));
    }
  });
}

}  // namespace

const ExpertKernels expert_kernels = {gated, add_scaled};

}  // namespace hmt::HMT_ISA
