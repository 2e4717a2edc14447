// Encoded weights as f32 numbers.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "thread_pool.h"

namespace hmt {
namespace {

constexpr size_t kGrainNumbers = size_t{32} << 10;  // about 10 us of work

size_t row_grain(size_t columns) { return std::max<size_t>(1, kGrainNumbers / columns); }

// e4m3fn: sign, 4 bits of exponent biased by 7, 3 of mantissa, no infinity.  The mantissa as an
// integer times a power of two, so that no denormal f32 occurs (a process may flush them).
inline __attribute__((always_inline)) float from_e4m3(uint8_t code) {
  const uint32_t exponent = (code >> 3) & 15u;
  const auto mantissa = static_cast<int32_t>((code & 7u) | (exponent > 0 ? 8u : 0u));
  const uint32_t power = (std::max(exponent, 1u) + 117u) << 23 | static_cast<uint32_t>(code & 128u) << 24;
  float factor;
  std::memcpy(&factor, &power, sizeof factor);
  return static_cast<float>(mantissa) * factor;
}

HMT_CLONES void int8_rows(const int8_t* codes, const float* scales, size_t begin, size_t end,
                          size_t columns, float* out) {
  for (size_t row = begin; row < end; ++row) {
    for (size_t i = row * columns; i < (row + 1) * columns; ++i) {
      out[i] = static_cast<float>(codes[i]) * scales[row];
    }
  }
}

HMT_CLONES void int4_rows(const uint8_t* codes, const float* scales, size_t begin, size_t end,
                          size_t columns, size_t group, float* out) {
  for (size_t g = begin * columns / group; g < end * columns / group; ++g) {
    const uint8_t* bytes = codes + g * group / 2;
    float* numbers = out + g * group;
    for (size_t i = 0; i < group / 2; ++i) {
      numbers[2 * i] = static_cast<float>(static_cast<int32_t>(bytes[i] & 15) - 8) * scales[g];
      numbers[2 * i + 1] = static_cast<float>(static_cast<int32_t>(bytes[i] >> 4) - 8) * scales[g];
    }
  }
}

HMT_CLONES void fp8_run(const uint8_t* codes, size_t count, float scale, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = from_e4m3(codes[i]) * scale;
}

}  // namespace

void dequantize_int8(const int8_t* codes, const float* scales, size_t rows, size_t columns,
                     float* out) {
  ThreadPool::instance().run(rows, row_grain(columns), [&](size_t begin, size_t end) {
    int8_rows(codes, scales, begin, end, columns, out);
  });
}

void dequantize_int4(const uint8_t* codes, const float* scales, size_t rows, size_t columns,
                     size_t group, float* out) {
  ThreadPool::instance().run(rows, row_grain(columns), [&](size_t begin, size_t end) {
    int4_rows(codes, scales, begin, end, columns, group, out);
  });
}

void dequantize_fp8(const uint8_t* codes, const float* scales, size_t first, size_t rows,
                    size_t columns, size_t tile_rows, size_t tile_columns, float* out) {
  const size_t tiles = (columns + tile_columns - 1) / tile_columns;
  ThreadPool::instance().run(rows, row_grain(columns), [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      const float* s = scales + (first + row) / tile_rows * tiles;
      for (size_t tile = 0; tile < tiles; ++tile) {
        const size_t at = tile * tile_columns;
        fp8_run(codes + row * columns + at, std::min(tile_columns, columns - at), s[tile],
                out + row * columns + at);
      }
    }
  });
}

}  // namespace hmt
