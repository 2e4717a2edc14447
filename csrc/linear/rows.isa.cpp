// Weights that lie row-major: bf16, f16, f32, fp8 tiles, int8 per row or per group.
#include "linear/kernels.h"
#include "simd/vec.h"

namespace hmt::HMT_ISA {
namespace {

// e4m3fn: sign, 4 bits of exponent biased by 7, 3 of mantissa, no infinity.  Computed as mantissa
// times a power of two, so that no denormal f32 occurs (a process may flush them).
HMT_INLINE float from_e4m3(uint8_t code) {
  const uint32_t exponent = (code >> 3) & 15u;
  const uint32_t normal = exponent != 0;  // a normal number has a hidden 1 before its mantissa
  const auto mantissa = static_cast<int32_t>((code & 7u) + 8u * normal);
  const uint32_t sign = static_cast<uint32_t>(code & 128u) << 24;
  return static_cast<float>(mantissa) * from_bits(sign | (exponent + 118u - normal) << 23);
}

HMT_INLINE float f16_number(uint16_t half) {
  uint16_t lanes[16] = {half};
  float out[16];
  store(out, load_f16(lanes));
  return out[0];
}

float code_at(const Weight& w, size_t index) {
  switch (w.code) {
    case Code::kF32:
      return static_cast<const float*>(w.data)[index];
    case Code::kBF16:
      return bf16_to_float(static_cast<const uint16_t*>(w.data)[index]);
    case Code::kF16:
      return f16_number(static_cast<const uint16_t*>(w.data)[index]);
    case Code::kFp8:
      return from_e4m3(static_cast<const uint8_t*>(w.data)[index]);
    default:
      return static_cast<const int8_t*>(w.data)[index];
  }
}

float scale_at(const Weight& w, size_t row, size_t column) {
  if (w.scale_type == Scales::kNone) return w.factor;
  const size_t tiles = (w.columns + w.tile_columns - 1) / w.tile_columns;
  const size_t index = row / w.tile_rows * tiles + column / w.tile_columns;
  return static_cast<const float*>(w.scales)[index] * w.factor;
}

void decode(const Weight& w, size_t first, size_t count, float* out) {
  for (size_t r = 0; r < count; ++r) {
    for (size_t c = 0; c < w.columns; ++c) {
      const float code = code_at(w, (first + r) * w.columns + c);
      const bool plain = w.scale_type == Scales::kNone;
      out[r * w.columns + c] = plain ? code : code * scale_at(w, first + r, c);
    }
  }
}

size_t arranged_bytes(const Weight&, size_t, bool) { return 0; }
void arrange(const Weight&, const Inputs&, size_t, uint8_t*) {}

float dot_codes(const Weight& w, const Inputs& in, size_t token, size_t row) {
  const auto* codes = static_cast<const int8_t*>(w.data) + row * w.columns;
  const int8_t* x = in.codes + token * in.stride;
  float total = 0.0f;
  for (size_t begin = 0; begin < w.columns; begin += w.tile_columns) {
    const size_t end = begin + w.tile_columns < w.columns ? begin + w.tile_columns : w.columns;
    int32_t dot = 0;
    for (size_t c = begin; c < end; ++c) dot += codes[c] * x[c];
    total += static_cast<float>(dot) * scale_at(w, row, begin);
  }
  return total * in.scales[token];
}

float dot_numbers(const Weight& w, const Inputs& in, size_t token, size_t row) {
  const float* x = in.f32 + token * in.stride;
  float total = 0.0f;
  for (size_t c = 0; c < w.columns; ++c) {
    total += x[c] * code_at(w, row * w.columns + c) * scale_at(w, row, c);
  }
  return total;
}

void multiply(const Weight& w, const Inputs& in, size_t first_row, size_t end_row, float* out,
              size_t out_stride) {
  for (size_t row = first_row; row < end_row; ++row) {
    for (size_t t = 0; t < in.tokens; ++t) {
      out[t * out_stride + row - first_row] =
          w.int8_activations ? dot_codes(w, in, t, row) : dot_numbers(w, in, t, row);
    }
  }
}

}  // namespace

const LinearKernels row_kernels = {arranged_bytes, arrange, multiply, decode};

}  // namespace hmt::HMT_ISA
