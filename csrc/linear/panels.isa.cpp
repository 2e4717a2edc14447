// Weights of 4 bits in panels of 16 rows: int4 groups, NVFP4, MXFP4.
#include "linear/kernels.h"
#include "simd/vec.h"

namespace hmt::HMT_ISA {
namespace {

// Twice the numbers of e2m1.
constexpr int8_t kDoubledE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

HMT_INLINE float from_e4m3(uint8_t code) {
  const uint32_t exponent = (code >> 3) & 15u;
  const uint32_t normal = exponent != 0;
  const auto mantissa = static_cast<int32_t>((code & 7u) + 8u * normal);
  const uint32_t sign = static_cast<uint32_t>(code & 128u) << 24;
  return static_cast<float>(mantissa) * from_bits(sign | (exponent + 118u - normal) << 23);
}

// A scale-like number (scale or minimum) at `index` of an array in the weight's scale type.
float number_at(const Weight& w, const void* array, size_t index) {
  uint16_t half[16] = {};
  float lanes[16];
  switch (w.scale_type) {
    case Scales::kF32:
      return static_cast<const float*>(array)[index];
    case Scales::kBF16:
      return bf16_to_float(static_cast<const uint16_t*>(array)[index]);
    case Scales::kF16:
      half[0] = static_cast<const uint16_t*>(array)[index];
      store(lanes, load_f16(half));
      return lanes[0];
    case Scales::kE4M3:
      return from_e4m3(static_cast<const uint8_t*>(array)[index]);
    case Scales::kE8M0: {
      const uint8_t exponent = static_cast<const uint8_t*>(array)[index];
      return exponent == 0 ? 0x1p-127f : from_bits(uint32_t{exponent} << 23);
    }
    default:
      return 1.0f;
  }
}

// Scale of integer codes: those of e2m1 are doubled.
float scale_at(const Weight& w, size_t row, size_t group) {
  const size_t groups = w.columns / w.tile_columns;
  const size_t index = (row / 16 * groups + group) * 16 + row % 16;
  const float scale = number_at(w, w.scales, index) * w.factor;
  return w.code == Code::kFp4 ? scale * 0.5f : scale;
}

uint8_t nibble_at(const Weight& w, size_t row, size_t column) {
  const size_t block = column / 32, in_block = column % 32, quad = in_block % 16 / 4;
  const size_t byte = (((row / 16 * (w.columns / 32) + block) * 4 + quad) * 16 + row % 16) * 4 + column % 4;
  const uint8_t pair = static_cast<const uint8_t*>(w.data)[byte];
  return in_block < 16 ? pair & 15 : pair >> 4;
}

int32_t code_at(const Weight& w, size_t row, size_t column) {
  const uint8_t nibble = nibble_at(w, row, column);
  if (w.code == Code::kFp4) return kDoubledE2M1[nibble];
  if (w.minima != nullptr) return nibble;
  if (w.zeros == nullptr) return nibble - 8;
  const size_t groups = w.columns / w.tile_columns;
  return nibble - w.zeros[(row / 16 * groups + column / w.tile_columns) * 16 + row % 16];
}

float minimum_at(const Weight& w, size_t row, size_t group) {
  if (w.minima == nullptr) return 0.0f;
  const size_t groups = w.columns / w.tile_columns;
  return number_at(w, w.minima, (row / 16 * groups + group) * 16 + row % 16);
}

void decode(const Weight& w, size_t first, size_t count, float* out) {
  for (size_t r = 0; r < count; ++r) {
    for (size_t c = 0; c < w.columns; ++c) {
      const size_t group = c / w.tile_columns;
      float number = static_cast<float>(code_at(w, first + r, c)) * scale_at(w, first + r, group);
      if (w.minima != nullptr) number += minimum_at(w, first + r, group);
      out[r * w.columns + c] = number;
    }
  }
}

size_t arranged_bytes(const Weight&, size_t, bool) { return 0; }
void arrange(const Weight&, const Inputs&, size_t, uint8_t*) {}

float dot_codes(const Weight& w, const Inputs& in, size_t token, size_t row) {
  const int8_t* x = in.codes + token * in.stride;
  float total = 0.0f;
  for (size_t group = 0; group < w.columns / w.tile_columns; ++group) {
    int32_t dot = 0, sum = 0;
    for (size_t c = group * w.tile_columns; c < (group + 1) * w.tile_columns; ++c) {
      dot += code_at(w, row, c) * x[c];
      sum += x[c];
    }
    total += static_cast<float>(dot) * scale_at(w, row, group);
    if (w.minima != nullptr) total += static_cast<float>(sum) * minimum_at(w, row, group);
  }
  return total * in.scales[token];
}

float dot_numbers(const Weight& w, const Inputs& in, size_t token, size_t row) {
  const float* x = in.f32 + token * in.stride;
  float total = 0.0f;
  for (size_t c = 0; c < w.columns; ++c) {
    const size_t group = c / w.tile_columns;
    const float number = static_cast<float>(code_at(w, row, c)) * scale_at(w, row, group);
    total += x[c] * (number + minimum_at(w, row, group));
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

const LinearKernels panel_kernels = {arranged_bytes, arrange, multiply, decode};

}  // namespace hmt::HMT_ISA
