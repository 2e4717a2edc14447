#include "recurrent/recurrent.h"

#include "base/scratch.h"
#include "base/thread_pool.h"
#include "fused/grain.h"

namespace hmt {
namespace {

size_t pieces(size_t count, size_t each) { return (count + each - 1) / each; }
size_t least(size_t a, size_t b) { return a < b ? a : b; }

}  // namespace

void causal_conv(const CausalConv& conv, StateRuns runs, size_t threads) {
  const RecurrentKernels& kernels = active(recurrent_kernels_tables());
  size_t longest = 0;
  for (size_t r = 0; r < runs.count; ++r) {
    longest = runs.runs[r].length > longest ? runs.runs[r].length : longest;
  }
  const size_t blocks = pieces(longest, kConvTokens);
  const size_t width = blocks == 1 ? kConvFewChannels : kConvChannels;
  const size_t grain = blocks == 1 ? 1 : rows_per_grain(kConvChannels * conv.width);
  const size_t parts = pieces(conv.channels, width);
  share(runs.count * blocks * parts, grain, threads, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const StateRun& run = runs.runs[i / (blocks * parts)];
      const size_t token = i / parts % blocks * kConvTokens, channel = i % parts * width;
      const size_t last = least(channel + width, conv.channels);
      if (token < run.length) {
        kernels.conv(conv, run, token, least(token + kConvTokens, run.length), channel, last);
      }
      // All tokens of these channels are done, so that their tail may change.
      if (blocks == 1) kernels.conv_tail(conv, run, channel, last);
    }
  });
  if (blocks == 1) return;
  share(runs.count * parts, grain, threads, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const size_t channel = i % parts * width;
      kernels.conv_tail(conv, runs.runs[i / parts], channel, least(channel + width, conv.channels));
    }
  });
}

void gated_delta_rule(const DeltaRule& rule, StateRuns runs, size_t threads) {
  gated_delta_rule(rule, runs, threads, nullptr);
}

void gated_delta_rule(const DeltaRule& rule, StateRuns runs, size_t threads,
                      const std::function<void(const StateRun&, size_t)>& after) {
  const RecurrentKernels& kernels = active(recurrent_kernels_tables());
  share(rule.tokens, rows_per_grain(rule.work_row()), threads, [&](size_t begin, size_t end) {
    kernels.delta_inputs(rule, begin, end);
  });
  if (rule.by_channel) {
    // By head: one token has thousands of decays.
    share(rule.tokens * rule.heads, rows_per_grain(8 * rule.key_dim), threads,
          [&](size_t begin, size_t end) { kernels.delta_decays(rule, begin, end); });
  }
  // What comes after takes whole heads.
  const size_t parts = after ? 1 : pieces(rule.value_dim, kDeltaColumns);
  const size_t each = rule.heads * parts;  // of a run
  const size_t numbers = 2 * rule.key_dim * (after ? rule.value_dim : kDeltaColumns);
  share(each * runs.count, rows_per_grain(numbers), threads, [&](size_t begin, size_t end) {
    Scratch scratch(has_drafts(runs) ? rule.key_dim * kDeltaColumns * sizeof(float) : 0);
    float* aside = scratch.take<float>(0);
    for (size_t i = begin; i < end; ++i) {
      const StateRun& run = runs.runs[i / each];
      const size_t head = i % each / parts, first = i % parts * kDeltaColumns;
      const size_t last = after ? rule.value_dim : least(first + kDeltaColumns, rule.value_dim);
      for (size_t at = first; at < last; at += kDeltaColumns) {
        kernels.delta(rule, run, head, at, least(at + kDeltaColumns, last), aside);
      }
      if (after) after(run, head);
    }
  });
}

}  // namespace hmt
