// Choosing a token by its score, out of vocabularies of a hundred thousand and more.
//
// Nothing sorts the vocabulary: the largest of each block of scores bound what can be chosen, and
// of what is left no more is sorted than is looked at.  One thread: a pass over 152 thousand scores
// takes about as long as waking another.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/isa.h"

namespace hmt {

using std::size_t;

// Scores whose largest one stands for them.
constexpr size_t kScoreBlock = 128;

// What is known of scores after one pass.
struct Survey {
  float top;
  size_t first_top;  // the first index that holds it
  double log_sum_exp;
  bool finite;  // all of them; otherwise nothing else is meant
};
Survey survey(const float* scores, size_t count);

struct Draw {
  double temperature;  // above 0
  size_t top_k;        // 0 for all
  double top_p;        // above 0, 1 for all
  double min_p;        // 0 for all
  double uniform;      // in [0, 1)
};

// A token with probability proportional to its weight e^((score - largest) / temperature), in f32,
// among those that top_k leaves (and those equal to the last of them); of these the fewest that
// hold top_p of the weight; of these the ones of at least min_p times the largest weight.
//
// `uniform` is a place in their cumulated weights (f64): largest first, equal ones by index, or by
// index alone where neither top_k nor top_p choose.  count > 0.
size_t draw(const float* scores, size_t count, const Draw& how);

// The indices of the `wanted` largest, largest first, equal ones by index.  Returns how many they
// are: `wanted`, or `count` if that is less.
size_t largest_scores(const float* scores, size_t count, size_t wanted, int64_t* indices);

struct SamplingKernels {
  void (*survey)(const float* scores, size_t count, Survey* found);
  // out[i] = (scores[i] - top) / temperature
  void (*temper)(const float* scores, size_t count, float top, float temperature, float* out);
  // The largest of each kScoreBlock.
  void (*block_tops)(const float* scores, size_t count, float* tops);
  // e^x of x <= 0, computed in f64 and rounded once.
  void (*weigh)(const float* x, size_t count, float* weights);
};
HMT_TABLES(SamplingKernels, sampling_kernels)

}  // namespace hmt
