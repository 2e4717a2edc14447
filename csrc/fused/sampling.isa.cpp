#include "fused/sampling.h"

#include "fused/activations.h"
#include "fused/float_convert.h"

namespace hmt::HMT_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

// The largest of up to sixteen numbers and more; lanes that do not exist count as -infinity.
float top_of(const float* x, size_t count) {
  F16v tops[4] = {set1(-kInfinity), set1(-kInfinity), set1(-kInfinity), set1(-kInfinity)};
  size_t i = 0;
  for (; i + 64 <= count; i += 64) {
    for (size_t k = 0; k < 4; ++k) tops[k] = max(load(x + i + 16 * k), tops[k]);
  }
  for (; i + 16 <= count; i += 16) tops[0] = max(load(x + i), tops[0]);
  float top = largest(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
  for (; i < count; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// The sum of e^(x - top), added up in f32 by lanes: count is a few thousand at most.
double sum_exp(const float* x, size_t count, float top) {
  const F16v tops = set1(top);
  F16v sums[2] = {zero(), zero()};
  size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    sums[0] = add(sums[0], exp_full(sub(load(x + i), tops)));
    sums[1] = add(sums[1], exp_full(sub(load(x + i + 16), tops)));
  }
  for (; i < count; i += 16) {
    float lanes[16];
    for (size_t k = 0; k < 16; ++k) lanes[k] = i + k < count ? x[i + k] : -kInfinity;
    sums[0] = add(sums[0], exp_full(sub(load(lanes), tops)));
  }
  return sum(add(sums[0], sums[1]));
}

// Zero where all numbers are finite, else NaN: zero times any other is.
float trouble(const float* x, size_t count) {
  F16v total = zero();
  size_t i = 0;
  for (; i + 16 <= count; i += 16) total = add(total, mul(load(x + i), zero()));
  float rest = sum(total);
  for (; i < count; ++i) rest += x[i] * 0.0f;
  return rest;
}

void survey(const float* scores, size_t count, Survey* found) {
  // Pieces that stay in L1 between finding their largest and adding up their exponentials.
  constexpr size_t kPiece = 2048;
  float top = -kInfinity;
  double total = 0.0;
  size_t best_piece = 0;
  *found = {};
  for (size_t i = 0; i < count; i += kPiece) {
    const size_t here = count - i < kPiece ? count - i : kPiece;
    if (trouble(scores + i, here) != 0.0f) return;
    const float piece_top = top_of(scores + i, here);
    if (piece_top > top) {
      total *= static_cast<double>(__builtin_expf(top - piece_top));
      top = piece_top;
      best_piece = i;
    }
    total += sum_exp(scores + i, here, top);
  }
  size_t first = best_piece;
  while (scores[first] != top) ++first;
  *found = {top, first, static_cast<double>(top) + __builtin_log(total), true};
}

void temper(const float* scores, size_t count, float top, float temperature, float* out) {
  const F16v tops = set1(top), temperatures = set1(temperature);
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    store(out + i, div(sub(load(scores + i), tops), temperatures));
  }
  for (; i < count; ++i) out[i] = (scores[i] - top) / temperature;
}

void block_tops(const float* scores, size_t count, float* tops) {
  for (size_t b = 0; b * kScoreBlock < count; ++b) {
    const size_t rest = count - b * kScoreBlock;
    tops[b] = top_of(scores + b * kScoreBlock, rest < kScoreBlock ? rest : kScoreBlock);
  }
}

// Eight at a time, in the vector types of GCC and clang, on every instruction set alike.
using Float8 = float __attribute__((vector_size(32)));
using Double8 = double __attribute__((vector_size(64)));
using Bits8 = uint64_t __attribute__((vector_size(64)));

// In f64 so that the result is e^x rounded once, in all but one of a thousand cases: seeded draws
// then do not depend on who computed the weights.  x = n ln 2 + r, and Taylor's series of e^r up to
// r^10 / 10!.
HMT_INLINE void weigh_eight(const float* x, float* weights) {
  Float8 narrow;
  std::memcpy(&narrow, x, sizeof narrow);
  narrow = narrow > -110.0f ? narrow : Float8{} - 110.0f;
  const Double8 wide = __builtin_convertvector(narrow, Double8);
  constexpr double kShift = 0x1.8p52;
  const Double8 shifted = wide * 1.4426950408889634 + kShift;  // n in its low bits
  const Double8 n = shifted - kShift;
  const Double8 r = (wide - n * 6.93147180369123816490e-1) - n * 1.90821492927058770002e-10;
  Double8 p = r * (1.0 / 3628800) + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const Bits8 power = ((Bits8)shifted + 1023) << 52;
  narrow = __builtin_convertvector(p * (Double8)power, Float8);
  std::memcpy(weights, &narrow, sizeof narrow);
}

void weigh(const float* x, size_t count, float* weights) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) weigh_eight(x + i, weights + i);
  if (i < count) {
    float lanes[8] = {};
    std::memcpy(lanes, x + i, (count - i) * sizeof *x);
    weigh_eight(lanes, lanes);
    std::memcpy(weights + i, lanes, (count - i) * sizeof *x);
  }
}

}  // namespace

const SamplingKernels sampling_kernels = {survey, temper, block_tops, weigh};

}  // namespace hmt::HMT_ISA
