#include "sublayers/sublayers.h"

#include "base/scratch.h"
#include "base/thread_pool.h"
#include "fused/norm.h"
#include "fused/rotary.h"
#include "linear/inputs.h"
#include "sublayers/normed.h"

namespace hmt {
namespace {

char* offset(void* numbers, size_t count, DType type) {
  return static_cast<char*>(numbers) + count * bytes_of(type);
}

// Memory that a call needs meanwhile: the thread's own, which it keeps, or where that would be too
// much to keep, a mapping.  All threads touch its huge pages at once: those that come to a page that
// is being made wait for it.  (96 MB, as 512 tokens of a layer of Llama 8B need in f32, took two
// threads 65 ms to touch as pages of 4 KiB where they wrote, 10 ms so; and 4 ms to give back, 0.2.)
class Workspace {
 public:
  Workspace(size_t count, DType type, size_t threads)
      : bytes_(count * bytes_of(type)), scratch_(bytes_ <= kMostKept ? bytes_ : 0) {
    if (bytes_ <= kMostKept) {
      data_ = scratch_.take<char>(bytes_);
      return;
    }
    own_ = Memory(bytes_);
    data_ = reinterpret_cast<char*>(own_.data());
    share((bytes_ + Memory::kHuge - 1) / Memory::kHuge, 1, threads, [&](size_t begin, size_t end) {
      for (size_t page = begin; page < end; ++page) data_[page * Memory::kHuge] = 0;
    });
  }
  char* data() const { return data_; }

 private:
  static constexpr size_t kMostKept = size_t{32} << 20;
  size_t bytes_;
  Scratch scratch_;
  Memory own_;
  char* data_;
};

// A norm of `heads` heads, `stride` numbers apart, from number `first` of a row on; in place.
void norm_heads(const NormWeight& weight, DType type, size_t tokens, size_t row, size_t first,
                size_t heads, size_t stride, size_t dim, void* all, size_t threads) {
  char* x = offset(all, first, type);
  rms_norm({type, tokens, heads, dim, x, row, stride, x, row, stride, weight.weight, weight.type,
            weight.eps, weight.offset, nullptr},
           threads);
}

}  // namespace

Norm norm_rows(const NormWeight& weight, DType type, size_t tokens, size_t width, const void* x,
               void* out, void* residual) {
  return {type,  tokens, 1,     width,         x,           width,      0,
          out,   width,  0,     weight.weight, weight.type, weight.eps, weight.offset,
          residual};
}

void normed_linear(const Norm& norm, const std::vector<Projection>& projections, const Matrix& out,
                   size_t threads) {
  bool codes_only = true;
  const auto form = [](const Projection& p) { return code_form(p.weight->scale_columns); };
  for (const Projection& p : projections) {
    codes_only = codes_only && p.weight->int8_activations && form(p) == form(projections[0]);
    codes_only = codes_only && p.added == nullptr;  // adapters take the numbers themselves
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

void attention_inputs(const AttentionInputs& layer, const ConstMatrix& hidden, const Angles& angles,
                      void* heads, size_t threads) {
  const DType type = hidden.type;
  const size_t tokens = hidden.rows, dim = layer.dim;
  const Workspace own(tokens * hidden.columns, type, threads);
  const size_t row = layer.row(), stride = layer.query_stride();
  const Norm norm = norm_rows(layer.norm, type, tokens, hidden.columns, hidden.data, own.data(),
                              nullptr);
  normed_linear(norm, layer.projections, {heads, type, tokens, row, row}, threads);
  if (layer.head_norms) {
    norm_heads(layer.query_norm, type, tokens, row, 0, layer.heads, stride, dim, heads, threads);
    norm_heads(layer.key_norm, type, tokens, row, layer.heads * stride, layer.kv_heads, dim, dim,
               heads, threads);
  }
  char* key = offset(heads, layer.heads * stride, type);
  const Heads groups[2] = {{layer.heads, dim, heads, row, stride, heads, row, stride},
                           {layer.kv_heads, dim, key, row, dim, key, row, dim}};
  rotate({type, tokens, angles.turned, angles.cos, angles.sin, false, groups, 2}, threads);
}

void feed_forward(const FeedForward& layer, DType type, size_t tokens, void* hidden, const void* x,
                  size_t threads) {
  const size_t width = layer.down.weight->rows, inner = layer.down.weight->columns;
  // The norm's result, later that of `down`; gate and up; their product.
  const Workspace own(tokens * (width + 3 * inner), type, threads);
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
