#include "recurrent/recurrent.h"

#include "base/thread_pool.h"
#include "fused/grain.h"

namespace hmt {

void causal_conv(const CausalConv& conv, StateRuns runs, size_t threads) {
  const RecurrentKernels& kernels = active(recurrent_kernels_tables());
  const size_t parts = (conv.channels + kConvChannels - 1) / kConvChannels;
  size_t tokens = 0;
  for (size_t r = 0; r < runs.count; ++r) tokens += runs.runs[r].length;
  const size_t numbers = kConvChannels * conv.width * (tokens / (runs.count ? runs.count : 1) + 1);
  share(parts * runs.count, rows_per_grain(numbers), threads, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const size_t first = i % parts * kConvChannels;
      const size_t last = first + kConvChannels;
      kernels.conv(conv, runs.runs[i / parts], first, last < conv.channels ? last : conv.channels);
    }
  });
}

void gated_delta_rule(const DeltaRule& rule, StateRuns runs, size_t threads) {
  const RecurrentKernels& kernels = active(recurrent_kernels_tables());
  share(rule.tokens, rows_per_grain(rule.work_row()), threads, [&](size_t begin, size_t end) {
    kernels.delta_inputs(rule, begin, end);
  });
  const size_t parts = (rule.value_dim + kDeltaColumns - 1) / kDeltaColumns;
  const size_t each = rule.heads * parts;  // of a run
  const size_t numbers = 2 * rule.key_dim * kDeltaColumns;
  share(each * runs.count, rows_per_grain(numbers), threads, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const size_t head = i % each / parts, first = i % parts * kDeltaColumns;
      const size_t last = first + kDeltaColumns;
      kernels.delta(rule, runs.runs[i / each], head, first,
                    last < rule.value_dim ? last : rule.value_dim);
    }
  });
}

}  // namespace hmt
