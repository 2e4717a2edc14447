// Weights of 4 bits in panels of 16 rows: int4 groups, NVFP4, MXFP4.
#include "linear/panel_scales.h"
#include "linear/panels_int8.h"

namespace hmt::HMT_ISA {
namespace {

// A scale-like number (scale or minimum) of a row's group.
float number_at(const Weight& w, const void* array, size_t row, size_t group) {
  float lanes[16];
  store(lanes, group_numbers(w.scale_type, array, row / kPanelRows * groups_of(w) + group));
  return lanes[row % kPanelRows];
}

float scale_at(const Weight& w, size_t row, size_t group) {
  return number_at(w, w.scales, row, group) * code_factor(w);
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
  return w.minima == nullptr ? 0.0f : number_at(w, w.minima, row, group);
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
  if (w.int8_activations) return multiply_int8(w, in, first_row, end_row, out, out_stride);
  for (size_t row = first_row; row < end_row; ++row) {
    for (size_t t = 0; t < in.tokens; ++t) {
      out[t * out_stride + row - first_row] = dot_numbers(w, in, t, row);
    }
  }
}

}  // namespace

const LinearKernels panel_kernels = {arranged_bytes, arrange, multiply, decode};

}  // namespace hmt::HMT_ISA
