#include "sublayers/stack.h"

#include <algorithm>

#include "base/scratch.h"
#include "fused/norm.h"
#include "fused/routing.h"

namespace hmt {
namespace {

Matrix rows(void* data, DType type, size_t tokens, size_t width) {
  return {data, type, tokens, width, width};
}
ConstMatrix const_rows(const void* data, DType type, size_t tokens, size_t width) {
  return {data, type, tokens, width, width};
}

// x [tokens, width] = what attention adds.
void attend_layer(const AttentionLayer& layer, const StackStep& step, char* x, size_t threads) {
  const DType type = step.type;
  const AttentionInputs& inputs = layer.inputs;
  const size_t tokens = step.tokens, dim = inputs.dim, width = bytes_of(type);
  const size_t row = (inputs.heads + 2 * inputs.kv_heads) * dim, out_row = inputs.heads * dim;
  Scratch scratch(Scratch::round(tokens * row * width) + Scratch::round(tokens * out_row * width));
  char* heads = scratch.take<char>(tokens * row * width);
  char* out = scratch.take<char>(tokens * out_row * width);
  attention_inputs(inputs, const_rows(step.hidden, type, tokens, step.width),
                   step.angles[layer.angles], heads, threads);
  const char* key = heads + out_row * width;
  const char* value = key + inputs.kv_heads * dim * width;
  append(layer.pages, step.runs, step.run_count, {key, type, row, dim}, {value, type, row, dim},
         threads);
  attend(layer.pages, step.runs, step.run_count, {heads, type, row, dim}, inputs.heads,
         layer.options, {out, type, nullptr}, threads);
  linear(&layer.output, 1, const_rows(out, type, tokens, out_row),
         rows(x, type, tokens, step.width), threads);
  if (!layer.has_post_norm) return;
  const NormWeight& norm = layer.post_norm;
  rms_norm({type, tokens, 1, step.width, x, step.width, 0, x, step.width, 0, norm.weight,
            norm.type, norm.eps, norm.offset, nullptr},
           threads);
}

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

// Returns how many experts were read.  `uses` are those of this layer.
size_t sparse_layer(const SparseLayer& layer, const StackStep& step, const char* x, int64_t* uses,
                    size_t threads) {
  const DType type = step.type;
  const size_t tokens = step.tokens, width = step.width, count = layer.experts.size();
  const size_t bytes = tokens * width * bytes_of(type), choices = tokens * layer.top_k;
  Scratch scratch(2 * Scratch::round(bytes) + Scratch::round(tokens * count * bytes_of(type)) +
                  Scratch::round(choices * sizeof(int64_t)) +
                  Scratch::round(choices * sizeof(float)) +
                  Scratch::round(tokens * width * sizeof(float)));
  char* normed = scratch.take<char>(bytes);
  char* result = scratch.take<char>(bytes);
  char* logits = scratch.take<char>(tokens * count * bytes_of(type));
  int64_t* ids = scratch.take<int64_t>(choices);
  float* scales = scratch.take<float>(choices);
  float* total = scratch.take<float>(tokens * width);
  rms_norm({type, tokens, 1, width, x, width, 0, normed, width, 0, layer.norm.weight,
            layer.norm.type, layer.norm.eps, layer.norm.offset, step.hidden},
           threads);
  const ConstMatrix input = const_rows(normed, type, tokens, width);
  linear(&layer.router, 1, input, rows(logits, type, tokens, count), threads);
  route({type, tokens, count, layer.top_k, logits, count, false, nullptr, 1, 1, layer.renormalise,
         1.0f, ids, scales},
        threads);
  const std::vector<Expert> experts = chosen_experts(layer, ids, choices);
  for (const Expert& expert : experts) ++uses[expert.id];
  routed_experts(experts.data(), experts.size(), {ids, scales, layer.top_k}, input,
                 layer.activation, {total, width, true, rows(result, type, tokens, width)},
                 threads);
  add(type, tokens * width, result, step.hidden, threads);
  return experts.size();
}

}  // namespace

size_t run_stack(const std::vector<StackLayer>& layers, const StackStep& step, size_t threads) {
  const size_t bytes = step.tokens * step.width * bytes_of(step.type);
  Scratch scratch(bytes);
  char* x = scratch.take<char>(bytes);
  size_t experts = 0;
  int64_t* uses = step.uses;
  for (const StackLayer& layer : layers) {
    attend_layer(layer.attention, step, x, threads);
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
