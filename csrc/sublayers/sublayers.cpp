#include "sublayers/sublayers.h"

#include "base/scratch.h"
#include "fused/norm.h"
#include "fused/rotary.h"
#include "linear/inputs.h"

namespace hmt {
namespace {

char* offset(void* numbers, size_t count, DType type) {
  return static_cast<char*>(numbers) + count * bytes_of(type);
}

// The caller's memory, or where it gave none, this thread's.
class Workspace {
 public:
  Workspace(void* given, size_t count, DType type)
      : scratch_(given == nullptr ? count * bytes_of(type) : 0),
        data_(given == nullptr ? scratch_.take<char>(count * bytes_of(type))
                               : static_cast<char*>(given)) {}
  char* data() const { return data_; }

 private:
  Scratch scratch_;
  char* data_;
};

// A norm of whole tokens whose rows follow each other without a gap.
Norm norm_rows(const NormWeight& weight, DType type, size_t tokens, size_t width, const void* x,
               void* out, void* residual) {
  return {type,  tokens, 1,     width,         x,           width,      0,
          out,   width,  0,     weight.weight, weight.type, weight.eps, weight.offset,
          residual};
}

// A norm of `heads` heads from head `first` on, in place.
void norm_heads(const NormWeight& weight, DType type, size_t tokens, size_t row, size_t first,
                size_t heads, size_t dim, void* all, size_t threads) {
  char* x = offset(all, first * dim, type);
  rms_norm({type, tokens, heads, dim, x, row, dim, x, row, dim, weight.weight, weight.type,
            weight.eps, weight.offset, nullptr},
           threads);
}

// The norm of x (after it was added to the residual, where there is one), times all projections.
// Where all of these take int8 activations in one form, the norm writes them while it has the row at
// hand.
void normed_linear(const Norm& norm, const std::vector<Projection>& projections, const Matrix& out,
                   size_t threads) {
  bool codes_only = true;
  const auto form = [](const Projection& p) { return code_form(p.weight->scale_columns); };
  for (const Projection& p : projections) {
    codes_only = codes_only && p.weight->int8_activations && form(p) == form(projections[0]);
  }
  const ConstMatrix normed{norm.out, norm.type, norm.tokens, norm.width, norm.out_token_stride};
  if (!codes_only) {
    rms_norm(norm, threads);
    return linear(projections.data(), projections.size(), normed, out, threads);
  }
  linear_of_codes(
      projections.data(), projections.size(), normed, out,
      [&](const CodeRows& rows) { rms_norm_quantize(norm, rows, threads); }, threads);
}

}  // namespace

void attention_inputs(const AttentionInputs& layer, const ConstMatrix& hidden, const Angles& angles,
                      void* workspace, void* heads, size_t threads) {
  const DType type = hidden.type;
  const size_t tokens = hidden.rows, dim = layer.dim;
  const Workspace own(workspace, tokens * hidden.columns, type);
  const size_t row = (layer.heads + 2 * layer.kv_heads) * dim;
  const Norm norm = norm_rows(layer.norm, type, tokens, hidden.columns, hidden.data, own.data(),
                              nullptr);
  normed_linear(norm, layer.projections, {heads, type, tokens, row, row}, threads);
  if (layer.head_norms) {
    norm_heads(layer.query_norm, type, tokens, row, 0, layer.heads, dim, heads, threads);
    norm_heads(layer.key_norm, type, tokens, row, layer.heads, layer.kv_heads, dim, heads, threads);
  }
  char* key = offset(heads, layer.heads * dim, type);
  const Heads groups[2] = {{layer.heads, dim, heads, row, dim, heads, row, dim},
                           {layer.kv_heads, dim, key, row, dim, key, row, dim}};
  rotate({type, tokens, angles.turned, angles.cos, angles.sin, false, groups, 2}, threads);
}

size_t workspace_width(const FeedForward& layer) {
  size_t both = 0;
  for (const Projection& p : layer.gate_up) both += p.weight->rows;
  // The norm's result, later that of `down`; gate and up; their product.
  return layer.down.weight->rows + both + both / 2;
}

void feed_forward(const FeedForward& layer, DType type, size_t tokens, void* hidden, const void* x,
                  void* workspace, size_t threads) {
  const size_t width = layer.down.weight->rows, inner = layer.down.weight->columns;
  const Workspace own(workspace, tokens * workspace_width(layer), type);
  char* narrow = own.data();
  char* gate_up = offset(narrow, tokens * width, type);
  char* product = offset(gate_up, tokens * 2 * inner, type);
  // A norm adds its x to the residual first; without an x it reads hidden itself.
  const Norm norm = norm_rows(layer.norm, type, tokens, width, x == nullptr ? hidden : x, narrow,
                              x == nullptr ? nullptr : hidden);
  normed_linear(norm, layer.gate_up, {gate_up, type, tokens, 2 * inner, 2 * inner}, threads);
  gated({type, layer.activation, tokens, inner, gate_up, 2 * inner, offset(gate_up, inner, type),
         2 * inner, product, inner},
        threads);
  linear(&layer.down, 1, {product, type, tokens, inner, inner},
         {narrow, type, tokens, width, width}, threads);
  if (layer.has_post_norm) {
    rms_norm(norm_rows(layer.post_norm, type, tokens, width, narrow, narrow, nullptr), threads);
  }
  add(type, tokens * width, narrow, hidden, threads);
}

}  // namespace hmt
