// State spaces: recurrent layers whose state decays, takes a token in, and is read.
//
// As with the kernels of recurrent.h, no result depends on how a prompt is divided: each number of
// the state goes through the same operations for one token after the other, also where a kernel has
// several tokens at hand.
#pragma once

#include "recurrent/recurrent.h"

namespace hmt {

// step[t, h] = softplus(raw[t, h] + bias[h]), within [shortest, longest];
// decay[t, h] = exp(-exp(decay_scale[h]) step[t, h])
//
// raw           [tokens, heads] of `type`, contiguous
// step, decay   f32 [tokens, heads]
struct TimeSteps {
  DType type;
  size_t heads;
  const void* raw;
  const float* bias;
  const float* decay_scale;
  float shortest, longest;
  float* step;
  float* decay;
};

// For each token and head, with its state S [state_dim, head_dim], key k, query q and x:
//   S = decay S + k (step x);  out = q S + skip x
//
// x              [tokens, heads, head_dim] of `type`, tokens `x_stride` numbers apart
// keys, queries  [tokens, groups, state_dim] of `type`, tokens `key_stride`, `query_stride` apart
// decay, step    f32 [tokens, heads]; step may be null, which is 1
// skip           f32 [heads], or null, which is 0
// states         f32 [slots, heads, state_dim, head_dim], slots `slot_stride` numbers apart
// out            [tokens, heads, head_dim] of `type`, contiguous
struct StateSpaceScan {
  DType type;
  size_t groups, heads, state_dim, head_dim;
  const void* x;
  size_t x_stride;
  const void* keys;
  size_t key_stride;
  const void* queries;
  size_t query_stride;
  const float* decay;
  const float* step;
  const float* skip;
  float* states;
  size_t slot_stride;
  void* out;
};

struct StridedRows {
  const void* data;
  size_t stride;  // numbers from a row to the next
};

// For each token and channel, with its state h [state_dim], the token's key k and query q:
//   step = softplus(raw + bias);  h = exp(-exp(decay_scale) step) h + k (step x);  out = q h + skip x
//
// x, raw         rows of [channels] of `type`
// keys, queries  rows of [state_dim] of `type`
// bias, skip     f32 [channels]
// decay_scale    f32 [channels, state_dim]; state_dim is at most kRows
// states         f32 [slots, state_dim, channels], slots `slot_stride` numbers apart
// out            [tokens, channels] of `type`, contiguous
struct SelectiveScan {
  DType type;
  size_t channels, state_dim;
  StridedRows x, raw, keys, queries;
  const float* bias;
  const float* decay_scale;
  const float* skip;
  float* states;
  size_t slot_stride;
  void* out;
};

constexpr size_t kRows = 256;  // of the state, whose keys and queries are widened at a time
constexpr size_t kScanColumns = 64;  // of a head's state, which a thread takes at a time

void time_steps(const TimeSteps& steps, size_t tokens, size_t threads);
void state_space_scan(const StateSpaceScan& scan, StateRuns runs, size_t threads);
void selective_scan(const SelectiveScan& scan, StateRuns runs, size_t threads);

struct StateSpaceKernels {
  // Tokens [begin, end).
  void (*steps)(const TimeSteps& steps, size_t begin, size_t end);
  // Columns [begin, end) of a head's state, for all tokens of one run.
  // aside   f32 [state_dim, kScanColumns], for states behind drafts; may be null without these
  void (*scan)(const StateSpaceScan& scan, const StateRun& run, size_t head, size_t begin,
               size_t end, float* aside);
  // Up to 16 channels from `channel` on, for all tokens of one run.
  void (*selective)(const SelectiveScan& scan, const StateRun& run, size_t channel, size_t count);
};
HMT_TABLES(StateSpaceKernels, state_space_kernels)

}  // namespace hmt
