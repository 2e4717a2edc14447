// Activations: rounded to int8, widened, narrowed.
#include "linear/kernels.h"
#include "simd/vec.h"

namespace hmt::HMT_ISA {
namespace {

float quantize(const float* x, size_t columns, int8_t* codes, size_t stride, int32_t* sums) {
  // Magnitudes compare like integers, and NaN above everything, so it ends up in the scale.
  uint32_t top = 0;
  for (size_t i = 0; i < columns; ++i) {
    const uint32_t magnitude = to_bits(x[i]) & 0x7fffffffu;
    top = magnitude > top ? magnitude : top;
  }
  const float scale = from_bits(top) / 127.0f;
  const float divisor = scale > 0.0f ? scale : 1.0f;
  for (size_t i = 0; i < columns; ++i) {
    float value = x[i] / divisor;
    value = value > -127.0f ? value : -127.0f;
    value = value < 127.0f ? value : 127.0f;
    // Rounds to the nearest integer, ties to even: at this size a float has no fraction bits.
    value = (value + 12582912.0f) - 12582912.0f;
    codes[i] = static_cast<int8_t>(static_cast<int32_t>(value));
  }
  for (size_t i = columns; i < stride; ++i) codes[i] = 0;
  if (sums != nullptr) {
    for (size_t block = 0; block < stride / 16; ++block) {
      int32_t total = 0;
      for (size_t i = 0; i < 16; ++i) total += codes[16 * block + i];
      sums[block] = total;
    }
  }
  return scale;
}

template <typename Load, typename One>
void widen_with(const uint16_t* x, size_t count, float* out, Load load_16, One) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) store(out + i, load_16(x + i));
  if (i < count) {
    uint16_t rest[16] = {};
    float lanes[16];
    std::memcpy(rest, x + i, (count - i) * sizeof *x);
    store(lanes, load_16(rest));
    std::memcpy(out + i, lanes, (count - i) * sizeof *out);
  }
}

void widen(const void* x, DType type, size_t count, float* out) {
  const auto* halves = static_cast<const uint16_t*>(x);
  switch (type) {
    case DType::kF32:
      std::memcpy(out, x, count * sizeof(float));
      return;
    case DType::kBF16:
      return widen_with(halves, count, out, [](const uint16_t* p) { return load_bf16(p); }, 0);
    case DType::kF16:
      return widen_with(halves, count, out, [](const uint16_t* p) { return load_f16(p); }, 0);
  }
}

void narrow(const float* x, const void* bias, DType bias_type, size_t count, void* out,
            DType type) {
  const size_t width = bytes_of(type), bias_width = bytes_of(bias_type);
  for (size_t i = 0; i < count; i += 16) {
    const size_t here = count - i < 16 ? count - i : 16;
    float lanes[16] = {}, added[16];
    std::memcpy(lanes, x + i, here * sizeof(float));
    F16v value = load(lanes);
    if (bias != nullptr) {
      widen(static_cast<const char*>(bias) + i * bias_width, bias_type, here, added);
      for (size_t k = here; k < 16; ++k) added[k] = 0.0f;
      value = add(value, load(added));
    }
    alignas(64) char rounded[64];
    if (type == DType::kF32) store(reinterpret_cast<float*>(rounded), value);
    if (type == DType::kBF16) store_bf16(reinterpret_cast<uint16_t*>(rounded), value);
    if (type == DType::kF16) store_f16(reinterpret_cast<uint16_t*>(rounded), value);
    std::memcpy(static_cast<char*>(out) + i * width, rounded, here * width);
  }
}

}  // namespace

const TokenKernels token_kernels = {quantize, widen, narrow};

}  // namespace hmt::HMT_ISA
