// Weights that lie row-major: bf16, f16, f32, fp8 tiles, int8 per row or per group.
#include "linear/kernels.h"
#include "linear/gemv_rows.h"
#include "linear/gemm_rows.h"
#include "linear/rows_minima.h"
#include "linear/rows_decode.h"
#if defined(HMT_AMX)
#include "linear/rows_few_tiles.h"
#endif

namespace hmt::HMT_ISA {
namespace {

void decode(const Weight& w, size_t first, size_t count, float* out) {
  const size_t width = segment_width(w), segments = (w.columns + width - 1) / width;
  for (size_t row = first; row < first + count; ++row) {
    const RowScales scales(w, row);
    const float* minima = row_minima(w, row);
    for (size_t s = 0; s < segments; ++s) {
      const size_t begin = s * width, left = w.columns - begin;
      const F16v scale = set1(scales[s]), minimum = set1(minima == nullptr ? 0.0f : minima[s]);
      float* target = out + (row - first) * w.columns + begin;
      with_code(w.code, [&](auto code) {
        const F16v unit = set1(unit_of(code.value));
        each_16<code.value>(address_of(w, row, begin), left < width ? left : width,
                            [&](F16v codes, size_t i, size_t n) {
                              float lanes[16];
                              F16v numbers = mul(mul(codes, unit), scale);
                              if (minima != nullptr) numbers = add(numbers, minimum);
                              store(lanes, numbers);
                              std::memcpy(target + i, lanes, n * sizeof(float));
                            });
      });
    }
  }
}

// Whether tiles of bf16 multiply: then whatever the number of tokens, as sums have another order.
bool in_tiles(const Weight& w, bool bf16) {
#if defined(HMT_AMX)
  return bf16 && !w.int8_activations && w.code != Code::kF32 && w.code != Code::kF16;
#else
  (void)w, (void)bf16;
  return false;
#endif
}

// Tokens from which on they lie in lanes.
size_t many_tokens(const Weight& w, bool bf16) {
  if (in_tiles(w, bf16)) return 0;
  if (!w.int8_activations) return static_cast<size_t>(-1);
  // Where that is faster, measured on Zen 4: sums of short groups weigh on few tokens.
#if defined(HMT_AMX)
  return 6;  // tiles multiply 16 tokens in the time that weights take to arrive
#else
  return segment_width(w) == w.columns ? 13 : 10;
#endif
}

// Calls call(Math()) with what a weight and activations are multiplied in where tokens lie in lanes.
template <typename Call>
void with_math(const Weight& w, Call call) {
#if defined(HMT_AMX)
  if (!w.int8_activations) return call(PairMath());
#endif
  (void)w;
  call(CodeMath());
}

size_t arranged_bytes(const Weight& w, size_t tokens, bool bf16) {
  if (tokens < many_tokens(w, bf16)) return 0;
  size_t bytes = 0;
  with_math(w, [&](auto math) { bytes = arranged_size<decltype(math)>(w); });
  return bytes;
}

void arrange(const Weight& w, const Inputs& in, size_t block, uint8_t* arranged) {
  with_math(w, [&](auto math) { arrange_tokens<decltype(math)>(w, in, block, arranged); });
}

void multiply(const Weight& w, const Inputs& in, size_t first_row, size_t end_row, float* out,
              size_t out_stride) {
  if (in.arranged == nullptr) return multiply_few(w, in, first_row, end_row, out, out_stride);
#if defined(HMT_AMX)
  if (!w.int8_activations && in.tokens <= kTokenBlock) {
    return multiply_few_with_tiles(w, in, first_row, end_row, out, out_stride);
  }
#endif
  with_math(w, [&](auto math) {
    multiply_many<decltype(math)>(w, in, first_row, end_row, out, out_stride);
  });
}

}  // namespace

const LinearKernels row_kernels = {arranged_bytes, arrange, multiply, decode};

}  // namespace hmt::HMT_ISA
