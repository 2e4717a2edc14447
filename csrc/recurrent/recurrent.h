// Layers with recurrent state: a convolution over time, and the gated delta rule.
//
// Both go through a sequence token by token, whatever the number of tokens in a call, so no result
// depends on how a prompt is divided.  Threads share out channels, and heads with some columns of
// their matrices: a part of the state stays in the cache of one core for all tokens of a run.
#pragma once

#include <functional>

#include "base/dtype.h"
#include "base/isa.h"

namespace hmt {

using std::size_t;

// Tokens [offset, offset + length) of a call, of the sequence whose state is in a slot.  Where
// `begins`, the state counts as zero, whatever is there.  The slot's state becomes that before the
// last `drafts` tokens, whose results are those of the state behind them.
//
// pending   tokens of a journal that come before the run's and that the slot lacks: see StateJournal
struct StateRun {
  size_t slot, offset, length;
  bool begins;
  size_t drafts = 0, pending = 0;

  size_t stays() const { return length - drafts; }
};

struct StateRuns {
  const StateRun* runs;
  size_t count;
};

inline bool has_drafts(StateRuns runs) {
  for (size_t r = 0; r < runs.count; ++r) {
    if (runs.runs[r].drafts > 0) return true;
  }
  return false;
}

// Inputs of tokens that a slot's state lacks, f32 [slots, room, numbers]: of the last drafts of its
// sequence.  A run's `pending` first ones stay, and those of its own drafts take their place.
struct StateJournal {
  float* data;
  size_t room, numbers;

  float* row(size_t slot, size_t index) const { return data + (slot * room + index) * numbers; }
};

// out[t, c] = bias[c] plus the sum over i of weight[c, i] x[t - width + 1 + i, c], the bias first, then
// the oldest product; its silu if `gated`.
//
// x       [tokens, channels] of `type`, rows `stride` numbers apart
// weight  f32 [channels, width], contiguous
// bias    f32 [channels], or null, which is 0
// tails   f32 [slots, width - 1, channels], slots `slot_stride` numbers apart: what came before x
// out     [tokens, channels] of `type`, contiguous
struct CausalConv {
  DType type;
  size_t channels, width;
  const void* x;
  size_t stride;
  const float* weight;
  const float* bias;
  float* tails;
  size_t slot_stride;
  void* out;
  bool gated;
};

// For each token and head, with its state S [key_dim, value_dim], query q, key k and value v:
//   S = g S + k (b (v - g S k));  out = q S
//
// qkv     [tokens, 2 keys + values] of `type`, contiguous: queries, keys and values of all heads
// decay   [tokens, decays()] of `type`, contiguous; g is one number for a head or, `by_channel`, one
//         for each row of its state:
//           g = exp(-exp(decay_scale) softplus(decay + bias)), or, with a `bound` below 0,
//           g = exp(bound sigmoid(exp(decay_scale) (decay + bias)))
// rate    [tokens, heads], the same: b is most_rate times its sigmoid
// states  f32 [slots, heads, key_dim, value_dim], slots `slot_stride` numbers apart
// out     [tokens, heads, value_dim] of `type`, contiguous
// work    f32 [tokens, work_row()]
struct DeltaRule {
  DType type;
  size_t tokens, key_heads, heads, key_dim, value_dim;
  bool by_channel;
  float bound, most_rate;
  const void* qkv;
  const void* decay;
  const void* rate;
  const float* decay_scale;
  const float* decay_bias;
  float* states;
  size_t slot_stride;
  void* out;
  float* work;

  size_t keys() const { return key_heads * key_dim; }
  size_t values() const { return heads * value_dim; }
  size_t row() const { return 2 * keys() + values(); }
  size_t decays() const { return by_channel ? heads * key_dim : heads; }
  // Of a token: queries and keys of length 1, g and b.
  size_t work_row() const { return 2 * keys() + decays() + heads; }
};

// What a thread takes at a time.  Rows of thousands of channels are so many pages apart that 64
// channels of 512 tokens took ten times as long as whole rows.
constexpr size_t kConvTokens = 8, kConvChannels = 1024;
// With few tokens, which are no pages apart: so many that threads share what one would take 20
// microseconds for.
constexpr size_t kConvFewChannels = 512;
constexpr size_t kDeltaColumns = 64;  // of a head's matrix

void causal_conv(const CausalConv& conv, StateRuns runs, size_t threads);
// after   if given, called with a run and a head once that head's results of all tokens of the run are
//         there, on the thread that computed them
void gated_delta_rule(const DeltaRule& rule, StateRuns runs, size_t threads);
void gated_delta_rule(const DeltaRule& rule, StateRuns runs, size_t threads,
                      const std::function<void(const StateRun&, size_t)>& after);

struct RecurrentKernels {
  // Channels [begin, end) of tokens [first, last) of one run.
  void (*conv)(const CausalConv& conv, const StateRun& run, size_t first, size_t last,
               size_t begin, size_t end);
  // What stays of these channels once the run's tokens are computed.
  void (*conv_tail)(const CausalConv& conv, const StateRun& run, size_t begin, size_t end);
  // Queries, keys, b and, unless by channel, g of tokens [begin, end).
  void (*delta_inputs)(const DeltaRule& rule, size_t begin, size_t end);
  // By channel: g of heads [begin, end), those of all tokens counted.
  void (*delta_decays)(const DeltaRule& rule, size_t begin, size_t end);
  // Columns [begin, end) of a head's matrix, for all tokens of one run.
  // aside   f32 [key_dim, kDeltaColumns], for states behind drafts; may be null where there are none
  void (*delta)(const DeltaRule& rule, const StateRun& run, size_t head, size_t begin, size_t end,
                float* aside);
  // Numbers of one type as those of another.
  void (*convert)(DType from_type, const void* from, DType to_type, void* to, size_t count);
};
HMT_TABLES(RecurrentKernels, recurrent_kernels)

}  // namespace hmt
