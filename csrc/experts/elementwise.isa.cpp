// Activations of experts, and the sum of their outputs.
#include "experts/kernels.h"
#include "fused/activations.h"
#include "fused/numbers.h"

namespace hmt::HMT_ISA {
namespace {

template <Activation kActivation>
HMT_INLINE F16v activate(F16v x) {
  if (kActivation == Activation::kSilu) return silu(x);
  if (kActivation == Activation::kGelu) return gelu(x);
  return gelu_tanh(x);
}

template <typename Numbers, Activation kActivation>
void gated_as(const float* gate, const float* up, size_t count, void* out) {
  auto* numbers = static_cast<typename Numbers::Type*>(out);
  for (size_t i = 0; i < count; i += 16) {
    const size_t here = count - i < 16 ? count - i : 16;
    const F16v rounded = Numbers::round(read<F32Numbers>(gate + i, here));
    const F16v active = Numbers::round(activate<kActivation>(rounded));
    const F16v product = mul(active, Numbers::round(read<F32Numbers>(up + i, here)));
    write<Numbers>(numbers + i, here, Numbers::round(product));
  }
}

void gated(const float* gate, const float* up, size_t count, Activation activation, void* out,
           DType type) {
  with_numbers(type, [&](auto numbers) {
    using Numbers = decltype(numbers);
    switch (activation) {
      case Activation::kSilu:
        return gated_as<Numbers, Activation::kSilu>(gate, up, count, out);
      case Activation::kGelu:
        return gated_as<Numbers, Activation::kGelu>(gate, up, count, out);
      case Activation::kGeluTanh:
        return gated_as<Numbers, Activation::kGeluTanh>(gate, up, count, out);
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
