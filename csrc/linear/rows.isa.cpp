// Weights that lie row-major: bf16, f16, f32, fp8 tiles, int8 per row or per group.
#include "linear/kernels.h"
#include "linear/gemv_rows.h"
#include "linear/gemm_rows.h"
#include "linear/rows_minima.h"
#include "linear/rows_decode.h"

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

// Tokens from which on they lie in lanes: where that is faster, measured on Zen 4.  Sums of short
// groups and the decoding of fp8 weigh on few tokens.
size_t many_tokens(const Weight& w, bool bf16) {
#if defined(HMT_AMX)
  // Tiles multiply 16 tokens in the time that weights take to arrive.
  if (w.int8_activations || (bf16 && w.code != Code::kF32 && w.code != Code::kF16)) return 6;
#endif
  (void)bf16;
  if (w.code == Code::kFp8) return 10;
  if (w.code == Code::kInt8) return segment_width(w) == w.columns ? 13 : 10;
#if defined(HMT_AVX512)
  return 17;
#else
  return 13;
#endif
}

// Calls call(Math()) with what a weight and activations are multiplied in.
template <typename Call>
void with_math(const Weight& w, bool bf16, Call call) {
  if (w.int8_activations) return call(CodeMath());
#if defined(HMT_AVX512_BF16)
  if (bf16 && w.code != Code::kF32 && w.code != Code::kF16) return call(PairMath());
#endif
  (void)bf16;
  call(FloatMath());
}

size_t arranged_bytes(const Weight& w, size_t tokens, bool bf16) {
  if (tokens < many_tokens(w, bf16)) return 0;
  size_t bytes = 0;
  with_math(w, bf16, [&](auto math) { bytes = arranged_size<decltype(math)>(w); });
  return bytes;
}

void arrange(const Weight& w, const Inputs& in, size_t block, uint8_t* arranged) {
  with_math(w, in.bf16 != nullptr, [&](auto math) {
    arrange_tokens<decltype(math)>(w, in, block, arranged);
  });
}

void multiply(const Weight& w, const Inputs& in, size_t first_row, size_t end_row, float* out,
              size_t out_stride) {
  if (in.arranged == nullptr) return multiply_few(w, in, first_row, end_row, out, out_stride);
  with_math(w, in.bf16 != nullptr, [&](auto math) {
    multiply_many<decltype(math)>(w, in, first_row, end_row, out, out_stride);
  });
}

}  // namespace

const LinearKernels row_kernels = {arranged_bytes, arrange, multiply, decode};

}  // namespace hmt::HMT_ISA
