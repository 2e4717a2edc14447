#include "fused/routing.h"

#include "fused/activations.h"
#include "fused/float_convert.h"
#include "fused/ranks.h"

namespace hmt::HMT_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

template <typename Numbers>
void widen_row(const void* row, size_t count, float* out) {
  const auto* x = static_cast<const typename Numbers::Type*>(row);
  for (size_t i = 0; i < count; i += 16) {
    store(out + i, read<Numbers>(x + i, count - i < 16 ? count - i : 16));
  }
}

// scores = sigmoid(logits), ranked = scores + bias.
void sigmoid_row(const float* logits, const float* bias, size_t count, float* scores,
                 float* ranked) {
  for (size_t i = 0; i < count; i += 16) store(scores + i, sigmoid(load(logits + i)));
  for (size_t i = 0; i < count; ++i) {
    if (logits[i] != logits[i]) scores[i] = logits[i];
    ranked[i] = scores[i] + bias[i];
  }
}

// The largest logit and the sum of e^(logit - largest); NaN where softmax is.
float softmax_sum(const float* logits, size_t count, float& top) {
  top = -kInfinity;
  bool number = true;
  for (size_t i = 0; i < count; ++i) {
    top = logits[i] > top ? logits[i] : top;
    number &= logits[i] < kInfinity;  // neither NaN nor infinity
  }
  if (!number || top == -kInfinity) return __builtin_nanf("");
  F16v total = zero();
  size_t i = 0;
  for (; i + 16 <= count; i += 16) total = add(total, exp_full(sub(load(logits + i), set1(top))));
  if (i < count) {
    float lanes[16];
    for (size_t k = 0; k < 16; ++k) lanes[k] = i + k < count ? logits[i + k] - top : -kInfinity;
    total = add(total, exp_full(load(lanes)));
  }
  return sum(total);
}

// How a group ranks: by its best, or by the sum of its two best.
float group_value(const float* ranked, size_t count, bool two) {
  uint64_t ranks[2];
  Largest best(ranks, two && count > 1 ? 2 : 1);
  for (size_t i = 0; i < count; ++i) best.offer(rank_of(ranked[i], i));
  const float first = ranked[best.index(0)];
  return two && count > 1 ? first + ranked[best.index(1)] : first;
}

void choose(const Routing& r, const float* ranked, float* groups, uint64_t* ranks,
            int64_t* indices) {
  const size_t width = r.experts / r.groups;
  if (r.groups > 1) {
    Largest best(ranks, r.kept_groups);
    for (size_t g = 0; g < r.groups; ++g) {
      best.offer(rank_of(group_value(ranked + g * width, width, r.sigmoid), g));
    }
    for (size_t g = 0; g < r.groups; ++g) groups[g] = 0.0f;
    for (size_t k = 0; k < r.kept_groups; ++k) groups[best.index(k)] = 1.0f;
  } else {
    groups[0] = 1.0f;
  }
  Largest best(ranks, r.chosen);
  for (size_t g = 0; g < r.groups; ++g) {
    if (groups[g] == 0.0f) continue;
    for (size_t i = g * width; i < (g + 1) * width; ++i) best.offer(rank_of(ranked[i], i));
  }
  for (size_t k = 0; k < r.chosen; ++k) indices[k] = static_cast<int64_t>(best.index(k));
}

void scale(const Routing& r, const float* values, float top, float total, const int64_t* indices,
           float* scales) {
  for (size_t k = 0; k < r.chosen; k += 16) {
    const size_t count = r.chosen - k < 16 ? r.chosen - k : 16;
    float lanes[16] = {};
    for (size_t i = 0; i < count; ++i) lanes[i] = values[indices[k + i]];
    if (!r.sigmoid) store(lanes, div(exp_full(sub(load(lanes), set1(top))), set1(total)));
    std::memcpy(scales + k, lanes, count * sizeof(float));
  }
  if (r.renormalise) {
    float chosen = 0.0f;
    for (size_t k = 0; k < r.chosen; ++k) chosen += scales[k];
    if (r.sigmoid) chosen += 1e-20f;
    for (size_t k = 0; k < r.chosen; ++k) scales[k] /= chosen;
  }
  for (size_t k = 0; k < r.chosen; ++k) scales[k] *= r.factor;
}

void route(const Routing& r, size_t begin, size_t end, float* work, uint64_t* ranks) {
  float* logits = work;
  float* scores = logits + r.experts + 16;
  float* groups = scores + r.experts + 16;
  for (size_t t = begin; t < end; ++t) {
    const char* row = static_cast<const char*>(r.logits) + t * r.stride * bytes_of(r.type);
    with_numbers(r.type, [&](auto numbers) {
      widen_row<decltype(numbers)>(row, r.experts, logits);
    });
    int64_t* indices = r.indices + t * r.chosen;
    float top = 0.0f, total = 1.0f;
    if (r.sigmoid) {
      // The logits' place is taken by what is ranked.
      sigmoid_row(logits, r.bias, r.experts, scores, logits);
    } else {
      total = softmax_sum(logits, r.experts, top);
    }
    choose(r, logits, groups, ranks, indices);
    scale(r, r.sigmoid ? scores : logits, top, total, indices, r.scales + t * r.chosen);
  }
}

}  // namespace

const RoutingKernels routing_kernels = {route};

}  // namespace hmt::HMT_ISA
