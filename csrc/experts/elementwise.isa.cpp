// Activations of experts, and the sum of their outputs.
#include "experts/kernels.h"
#include "simd/vec.h"

namespace hmt::HMT_ISA {
namespace {

struct F32 {
  using Stored = float;
  static HMT_INLINE F16v read(const float* p) { return load(p); }
  static HMT_INLINE void write(float* p, F16v a) { store(p, a); }
};
struct BF16 {
  using Stored = uint16_t;
  static HMT_INLINE F16v read(const uint16_t* p) { return load_bf16(p); }
  static HMT_INLINE void write(uint16_t* p, F16v a) { store_bf16(p, a); }
};
struct F16 {
  using Stored = uint16_t;
  static HMT_INLINE F16v read(const uint16_t* p) { return load_f16(p); }
  static HMT_INLINE void write(uint16_t* p, F16v a) { store_f16(p, a); }
};

template <typename Type>
HMT_INLINE F16v rounded(F16v a) {
  typename Type::Stored lanes[16];
  Type::write(lanes, a);
  return Type::read(lanes);
}

struct Silu {
  static HMT_INLINE F16v of(F16v x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }
};

// x Phi(x), with erfc so that nothing cancels in the left tail: fractional error 1.2e-7 (W. H. Press
// et al., Numerical Recipes, erfcc).
struct Gelu {
  static HMT_INLINE F16v of(F16v x) {
    const F16v near = min(abs(x), set1(20.0f));  // beyond, the tail is 0; infinity times it is not
    const F16v z = mul(near, set1(0.70710678f));
    const F16v t = div(set1(1.0f), fma(z, set1(0.5f), set1(1.0f)));
    F16v p = set1(0.17087277f);
    p = fma(p, t, set1(-0.82215223f));
    p = fma(p, t, set1(1.48851587f));
    p = fma(p, t, set1(-1.13520398f));
    p = fma(p, t, set1(0.27886807f));
    p = fma(p, t, set1(-0.18628806f));
    p = fma(p, t, set1(0.09678418f));
    p = fma(p, t, set1(0.37409196f));
    p = fma(p, t, set1(1.00002368f));
    p = fma(p, t, set1(-1.26551223f));
    const F16v tail = mul(mul(t, exp(sub(p, mul(z, z)))), set1(0.5f));  // Phi(-|x|)
    // x Phi(x) = max(x, 0) - |x| Phi(-|x|); max returns its second operand where x is not a number.
    return sub(max(zero(), x), mul(near, tail));
  }
};

// 0.5 (1 + tanh(u)) is 1 / (1 + e^(-2 u)).
struct GeluTanh {
  static HMT_INLINE F16v of(F16v x) {
    const F16v cubed = mul(mul(x, x), x);
    const F16v u = mul(fma(cubed, set1(0.044715f), x), set1(0.79788456f));
    return div(x, add(set1(1.0f), exp(mul(u, set1(-2.0f)))));
  }
};

template <typename Type, typename Function>
HMT_INLINE void gated_16(const float* gate, const float* up, typename Type::Stored* out) {
  const F16v act = rounded<Type>(Function::of(rounded<Type>(load(gate))));
  Type::write(out, mul(act, rounded<Type>(load(up))));
}

template <typename Type, typename Function>
void gated_as(const float* gate, const float* up, size_t count, void* out) {
  using Stored = typename Type::Stored;
  auto* numbers = static_cast<Stored*>(out);
  size_t i = 0;
  for (; i + 16 <= count; i += 16) gated_16<Type, Function>(gate + i, up + i, numbers + i);
  if (i < count) {
    float g[16] = {}, u[16] = {};
    Stored rest[16];
    std::memcpy(g, gate + i, (count - i) * sizeof *g);
    std::memcpy(u, up + i, (count - i) * sizeof *u);
    gated_16<Type, Function>(g, u, rest);
    std::memcpy(numbers + i, rest, (count - i) * sizeof *rest);
  }
}

template <typename Function>
void gated_with(const float* gate, const float* up, size_t count, void* out, DType type) {
  switch (type) {
    case DType::kF32:
      return gated_as<F32, Function>(gate, up, count, out);
    case DType::kBF16:
      return gated_as<BF16, Function>(gate, up, count, out);
    case DType::kF16:
      return gated_as<F16, Function>(gate, up, count, out);
  }
}

void gated(const float* gate, const float* up, size_t count, Activation activation, void* out,
           DType type) {
  switch (activation) {
    case Activation::kSilu:
      return gated_with<Silu>(gate, up, count, out, type);
    case Activation::kGelu:
      return gated_with<Gelu>(gate, up, count, out, type);
    case Activation::kGeluTanh:
      return gated_with<GeluTanh>(gate, up, count, out, type);
  }
}

template <typename Type>
void add_as(float* total, const void* x, float scale, size_t count) {
  const auto* numbers = static_cast<const typename Type::Stored*>(x);
  const F16v factor = set1(scale);
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    store(total + i, add(load(total + i), mul(Type::read(numbers + i), factor)));
  }
  if (i < count) {
    typename Type::Stored rest[16] = {};
    float lanes[16] = {};
    std::memcpy(rest, numbers + i, (count - i) * sizeof *rest);
    std::memcpy(lanes, total + i, (count - i) * sizeof *lanes);
    store(lanes, add(load(lanes), mul(Type::read(rest), factor)));
    std::memcpy(total + i, lanes, (count - i) * sizeof *lanes);
  }
}

void add_scaled(float* total, const void* x, DType type, float scale, size_t count) {
  switch (type) {
    case DType::kF32:
      return add_as<F32>(total, x, scale, count);
    case DType::kBF16:
      return add_as<BF16>(total, x, scale, count);
    case DType::kF16:
      return add_as<F16>(total, x, scale, count);
  }
}

}  // namespace

const ExpertKernels expert_kernels = {gated, add_scaled};

}  // namespace hmt::HMT_ISA
