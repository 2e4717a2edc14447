// Token mixers, the first half of a layer: attention, and gated delta rules.
//
// Each is the chain of kernels that Python calls one by one, so results are the same to the bit.
#pragma once

#include <optional>
#include <vector>

#include "attention/attention.h"
#include "recurrent/recurrent.h"
#include "sublayers/sublayers.h"

namespace hmt {

// The tokens of a step: hidden [tokens, width] of `type` without gaps.
struct StackStep {
  DType type;
  size_t tokens, width;
  void* hidden;
  const PagedRun* runs;
  size_t run_count;
  const Angles* angles;
  StateRuns states;
  int64_t* uses;
};

// x = post_norm(output(attention(attention_inputs(hidden)))).  Where inputs are gated, attention's
// results are multiplied with the sigmoid of the gates before `output`.
struct AttentionLayer {
  AttentionInputs inputs;
  size_t angles;  // which of the call's angles turn its heads
  Pages pages;    // of heads as wide as inputs.dim
  AttentionOptions options;
  Projection output;
  bool has_post_norm;
  NormWeight post_norm;
};

// Some numbers of each row, neighbours.
struct Span {
  size_t first, count;
};
using Spans = std::vector<Span>;

// x = output(activation(gate) * out_norm(delta rule of the convolved qkv)).
//
// `inputs` of the norm of hidden lie side by side; the spans say which numbers of that row are
// Q, K and V, the gates, the rates and the decays, each in this order.  Gates and
// decays may have another projection behind theirs.
struct DeltaLayer {
  NormWeight norm;
  std::vector<Projection> inputs;
  Spans qkv, gate, rate, decay;
  std::optional<Projection> through_gate, through_decay;
  CausalConv conv;  // weight, bias, tails, slot_stride, channels, width, gated
  DeltaRule rule;   // all but type, tokens, qkv, decay, rate, out and work
  StateJournal journal;  // of rows of qkv, decays and rates, in this order
  NormWeight out_norm;  // [value_dim]
  Activation activation;
  // Gates, and inputs of `output`, are those of the first head of each key head, then of the second
  // of each, and so on.
  bool tiled;
  Projection output;
};

// x [tokens, width] = what the layer adds.
void mix(const AttentionLayer& layer, const StackStep& step, char* x, size_t threads);
void mix(const DeltaLayer& layer, const StackStep& step, char* x, size_t threads);

}  // namespace hmt
