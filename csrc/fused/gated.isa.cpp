#include "fused/gated.h"

#include "fused/activations.h"
#include "fused/float_convert.h"

namespace hmt::HMT_ISA {
namespace {

template <Activation kActivation>
HMT_INLINE F16v activate(F16v x) {
  if (kActivation == Activation::kSilu) return silu(x);
  if (kActivation == Activation::kGelu) return gelu(x);
  if (kActivation == Activation::kClampedSwish) return clamped_swish(x);
  if (kActivation == Activation::kClampedSilu) return clamped_silu(x);
  if (kActivation == Activation::kRelu) return relu(x);
  if (kActivation == Activation::kSigmoid) return sigmoid(x);
  return gelu_tanh(x);
}

template <typename Numbers, Activation kActivation>
HMT_INLINE F16v pass(F16v x) {
  if (kActivation == Activation::kClampedSwish) return Numbers::round(clamped_plus_one(x));
  if (kActivation == Activation::kClampedSilu) return clamped(x);
  return x;
}

template <typename Numbers, Activation kActivation>
void gate_rows(const Gated& call, size_t begin, size_t end) {
  using Type = typename Numbers::Type;
  for (size_t t = begin; t < end; ++t) {
    const Type* gate = static_cast<const Type*>(call.gate) + t * call.gate_stride;
    const Type* up = static_cast<const Type*>(call.up) + t * call.up_stride;
    Type* out = static_cast<Type*>(call.out) + t * call.out_stride;
    float first[16];
    store(first, read<Numbers>(gate, 1));
    const F16v only = set1(first[0]);
    for (size_t i = 0; i < call.width; i += 16) {
      const size_t count = call.width - i < 16 ? call.width - i : 16;
      const F16v numbers = call.one_gate ? only : read<Numbers>(gate + i, count);
      const F16v active = Numbers::round(activate<kActivation>(numbers));
      const F16v passed = pass<Numbers, kActivation>(read<Numbers>(up + i, count));
      const F16v product = mul(active, passed);
      write<Numbers>(out + i, count, Numbers::round(product));
    }
  }
}

void gated(const Gated& call, size_t begin, size_t end) {
  with_numbers(call.type, [&](auto numbers) {
    using Numbers = decltype(numbers);
    switch (call.activation) {
      case Activation::kSilu:
        return gate_rows<Numbers, Activation::kSilu>(call, begin, end);
      case Activation::kGelu:
        return gate_rows<Numbers, Activation::kGelu>(call, begin, end);
      case Activation::kGeluTanh:
        return gate_rows<Numbers, Activation::kGeluTanh>(call, begin, end);
      case Activation::kClampedSwish:
        return gate_rows<Numbers, Activation::kClampedSwish>(call, begin, end);
      case Activation::kClampedSilu:
        return gate_rows<Numbers, Activation::kClampedSilu>(call, begin, end);
      case Activation::kRelu:
        return gate_rows<Numbers, Activation::kRelu>(call, begin, end);
      case Activation::kSigmoid:
        return gate_rows<Numbers, Activation::kSigmoid>(call, begin, end);
    }
  });
}

}  // namespace

const GatedKernels gated_kernels = {gated};

}  // namespace hmt::HMT_ISA
