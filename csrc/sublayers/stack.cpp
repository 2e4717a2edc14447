#include "sublayers/stack.h"

#include <algorithm>

#include "base/scratch.h"
#include "fused/norm.h"
#include "fused/routing.h"
#include "sublayers/normed.h"

namespace hmt {
namespace {

// Of all experts, those that some token was sent to, in ascending order.
std::vector<Expert> chosen_experts(const SparseLayer& layer, const int64_t* ids, size_t count) {
  std::vector<int64_t> chosen(ids, ids + count);
  std::sort(chosen.begin(), chosen.end());
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  std::vector<Expert> experts;
  experts.reserve(chosen.size());
  for (int64_t id : chosen) experts.push_back(layer.experts[static_cast<size_t>(id)]);
  return experts;
}

// out [tokens, width] = the shared expert's result.  `gates` are its numbers of a token among the
// products of `inputs`, whose rows are `row` numbers apart.
void shared_expert(const SharedExpert& shared, const StackStep& step, const char* gates, size_t row,
                   char* out, size_t threads) {
  const DType type = step.type;
  const size_t tokens = step.tokens, bytes = bytes_of(type), inner = shared.down.weight->columns;
  Scratch scratch(tokens * inner * bytes);
  char* product = scratch.take<char>(tokens * inner * bytes);
  const char* gate = gates + (shared.gated ? bytes : 0);
  gated({type, shared.activation, tokens, inner, gate, row, gate + inner * bytes, row, product,
         inner},
        threads);
  linear(&shared.down, 1, const_rows(product, type, tokens, inner),
         rows(out, type, tokens, step.width), threads);
  if (!shared.gated) return;
  gated({type, Activation::kSigmoid, tokens, step.width, gates, row, out, step.width, out,
         step.width, true},
        threads);
}

// Returns how many experts were read.  `uses` are those of this layer.
size_t sparse_layer(const SparseLayer& layer, const StackStep& step, const char* x, int64_t* uses,
                    size_t threads) {
  const DType type = step.type;
  const size_t tokens = step.tokens, width = step.width, count = layer.experts.size();
  const size_t bytes = tokens * width * bytes_of(type), choices = tokens * layer.top_k;
  size_t row = 0;
  for (const Projection& projection : layer.inputs) row += projection.weight->rows;
  Scratch scratch(3 * Scratch::round(bytes) + Scratch::round(tokens * row * bytes_of(type)) +
                  Scratch::round(choices * sizeof(int64_t)) +
                  Scratch::round(choices * sizeof(float)) +
                  Scratch::round(tokens * width * sizeof(float)));
  char* normed = scratch.take<char>(bytes);
  char* result = scratch.take<char>(bytes);
  char* beside = scratch.take<char>(bytes);
  char* logits = scratch.take<char>(tokens * row * bytes_of(type));
  int64_t* ids = scratch.take<int64_t>(choices);
  float* scales = scratch.take<float>(choices);
  float* total = scratch.take<float>(tokens * width);
  rms_norm(norm_rows(layer.norm, type, tokens, width, x, normed, step.hidden), threads);
  const ConstMatrix input = const_rows(normed, type, tokens, width);
  linear(layer.inputs.data(), layer.inputs.size(), input, rows(logits, type, tokens, row), threads);
  route({type, tokens, count, layer.top_k, logits, row, false, nullptr, 1, 1, layer.renormalise,
         1.0f, ids, scales},
        threads);
  const std::vector<Expert> experts = chosen_experts(layer, ids, choices);
  for (const Expert& expert : experts) ++uses[expert.id];
  routed_experts(experts.data(), experts.size(), {ids, scales, layer.top_k}, input,
                 layer.activation, {total, width, true, rows(result, type, tokens, width)},
                 threads);
  if (layer.shared) {
    shared_expert(*layer.shared, step, logits + count * bytes_of(type), row, beside, threads);
    add(type, tokens * width, beside, result, threads);
  }
  add(type, tokens * width, result, step.hidden, threads);
  return experts.size();
}

std::vector<Projection*> mixer_projections(AttentionLayer& layer) {
  std::vector<Projection*> found;
  for (Projection& projection : layer.inputs.projections) found.push_back(&projection);
  found.push_back(&layer.output);
  return found;
}

std::vector<Projection*> mixer_projections(DeltaLayer& layer) {
  std::vector<Projection*> found;
  for (Projection& projection : layer.inputs) found.push_back(&projection);
  if (layer.through_gate) found.push_back(&*layer.through_gate);
  if (layer.through_decay) found.push_back(&*layer.through_decay);
  found.push_back(&layer.output);
  return found;
}

}  // namespace

std::vector<Projection*> projections_of(StackLayer& layer) {
  std::vector<Projection*> found =
      std::visit([](auto& mixer) { return mixer_projections(mixer); }, layer.mixer);
  if (auto* dense = std::get_if<FeedForward>(&layer.second)) {
    for (Projection& projection : dense->gate_up) found.push_back(&projection);
    found.push_back(&dense->down);
    return found;
  }
  auto& sparse = std::get<SparseLayer>(layer.second);
  for (Projection& projection : sparse.inputs) found.push_back(&projection);
  if (sparse.shared) found.push_back(&sparse.shared->down);
  return found;
}

size_t run_stack(const std::vector<StackLayer>& layers, const StackStep& step, size_t threads) {
  const size_t bytes = step.tokens * step.width * bytes_of(step.type);
  Scratch scratch(bytes);
  char* x = scratch.take<char>(bytes);
  size_t experts = 0;
  int64_t* uses = step.uses;
  for (const StackLayer& layer : layers) {
    std::visit([&](const auto& mixer) { mix(mixer, step, x, threads); }, layer.mixer);
    if (const auto* dense = std::get_if<FeedForward>(&layer.second)) {
      feed_forward(*dense, step.type, step.tokens, step.hidden, x, threads);
    } else {
      const auto& sparse = std::get<SparseLayer>(layer.second);
      experts += sparse_layer(sparse, step, x, uses, threads);
      uses += sparse.experts.size();
    }
  }
  return experts;
}

}  // namespace hmt
