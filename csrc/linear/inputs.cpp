#include "linear/inputs.h"

#include <algorithm>
#include <cstring>

#include "base/thread_pool.h"

namespace hmt {
namespace {

constexpr size_t kPad = 64;
constexpr size_t kRowsAtATime = 8;  // that a thread copies or widens

size_t blocks(size_t tokens) { return (tokens + kTokenBlock - 1) / kTokenBlock; }
size_t scales_of(size_t columns, size_t form) {
  const size_t width = kScaleColumns[form];
  return width == 0 ? 1 : (columns + width - 1) / width;
}

// Copies rows to a padded stride where they have not got one.
template <typename T>
const T* pad_rows(const ConstMatrix& x, size_t stride, Scratch& scratch, size_t threads) {
  T* rows = scratch.take<T>(x.rows * stride);
  share(x.rows, kRowsAtATime, threads, [&](size_t begin, size_t end) {
    for (size_t t = begin; t < end; ++t) {
      std::memcpy(rows + t * stride, static_cast<const T*>(x.data) + t * x.stride,
                  x.columns * sizeof(T));
      std::memset(rows + t * stride + x.columns, 0, (stride - x.columns) * sizeof(T));
    }
  });
  return rows;
}

}  // namespace

// An odd number of cache lines of codes, so that the rows of a tile of tokens do not all fall into
// the same set of the L1 cache.
size_t padded(size_t columns) { return ((columns + kPad - 1) / kPad | 1) * kPad; }

bool same_arrangement(const Weight& a, const Weight& b) {
  return a.code == b.code && a.packing == b.packing && a.tile_columns == b.tile_columns &&
         a.int8_activations == b.int8_activations && a.scale_columns == b.scale_columns &&
         a.columns == b.columns &&
         (a.zeros == nullptr) == (b.zeros == nullptr) &&
         (a.minima == nullptr) == (b.minima == nullptr);
}

void Needs::add(const Weight& weight, const ConstMatrix& x) {
  (weight.int8_activations ? codes[code_form(weight.scale_columns)] : numbers) = true;
  if (last_ == nullptr || !same_arrangement(*last_, weight)) {
    const bool bf16 = x.type == DType::kBF16;
    const size_t each = linear_kernels(weight).arranged_bytes(weight, x.rows, bf16);
    arranged_bytes_ += Scratch::round(each * blocks(x.rows));
  }
  last_ = &weight;
}

size_t Needs::bytes(const ConstMatrix& x) const {
  const size_t stride = padded(x.columns);
  size_t total = arranged_bytes_;
  if (numbers) total += Scratch::round(x.rows * stride * 4) + Scratch::round(x.rows * stride * 2);
  for (size_t form = 0; form < kCodeForms; ++form) {
    if (codes[form]) total += code_bytes(x.rows, x.columns, stride, form);
  }
  return total;
}

CodeRows code_rows(size_t tokens, size_t columns, size_t stride, size_t form, Scratch& scratch) {
  const size_t scales = scales_of(columns, form);
  CodeRows rows{};
  rows.codes = scratch.take<int8_t>(tokens * stride);
  rows.stride = stride;
  rows.scales = scratch.take<float>(tokens * scales);
  rows.sums = scratch.take<int32_t>(tokens * stride / 16);
  rows.scale_columns = kScaleColumns[form];
  rows.scale_stride = scales;
  return rows;
}

size_t code_bytes(size_t tokens, size_t columns, size_t stride, size_t form) {
  return Scratch::round(tokens * stride) + Scratch::round(tokens * scales_of(columns, form) * 4) +
         Scratch::round(tokens * stride / 16 * 4);
}

void set_codes(const CodeRows& rows, Inputs& inputs) {
  inputs.forms[code_form(rows.scale_columns)] = {rows.codes, rows.scales, rows.sums,
                                                 rows.scale_stride};
}

Inputs inputs_of(const Weight& weight, const Inputs& all) {
  if (!weight.int8_activations) return all;
  Inputs chosen = all;
  const TokenCodes& form = all.forms[code_form(weight.scale_columns)];
  chosen.codes = form.codes;
  chosen.scales = form.scales;
  chosen.sums = form.sums;
  chosen.scale_stride = form.scale_stride;
  return chosen;
}

Inputs prepare(const ConstMatrix& x, const Needs& needs, Scratch& scratch, size_t threads) {
  const size_t stride = padded(x.columns);
  Inputs inputs{x.rows, x.columns, stride};
  for (size_t form = 0; form < kCodeForms; ++form) {
    if (!needs.codes[form]) continue;
    const CodeRows rows = code_rows(x.rows, x.columns, stride, form, scratch);
    quantize_tokens(x, rows, threads);
    set_codes(rows, inputs);
  }
  if (needs.numbers) {
    if (x.type == DType::kBF16) inputs.bf16 = pad_rows<uint16_t>(x, stride, scratch, threads);
    float* numbers = scratch.take<float>(x.rows * stride);
    const TokenKernels& kernels = active(token_kernels_tables());
    share(x.rows, kRowsAtATime, threads, [&](size_t begin, size_t end) {
      for (size_t t = begin; t < end; ++t) {
        const char* row = static_cast<const char*>(x.data) + t * x.stride * bytes_of(x.type);
        kernels.widen(row, x.type, x.columns, numbers + t * stride);
        std::memset(numbers + t * stride + x.columns, 0, (stride - x.columns) * sizeof(float));
      }
    });
    inputs.f32 = numbers;
  }
  return inputs;
}

const uint8_t* Needs::arranged(size_t index, const Weight& weight, const Inputs& inputs,
                               size_t& block_bytes, Scratch& scratch, size_t threads) {
  if (index == 0) last_ = nullptr;
  if (last_ == nullptr || !same_arrangement(*last_, weight)) {
    const LinearKernels& kernels = linear_kernels(weight);
    last_bytes_ = kernels.arranged_bytes(weight, inputs.tokens, inputs.bf16 != nullptr);
    uint8_t* memory = nullptr;
    if (last_bytes_ != 0) {
      memory = scratch.take<uint8_t>(last_bytes_ * blocks(inputs.tokens));
      const Inputs mine = inputs_of(weight, inputs);
      share(blocks(inputs.tokens), 1, threads, [&](size_t begin, size_t end) {
        for (size_t b = begin; b < end; ++b) {
          kernels.arrange(weight, mine, b, memory + b * last_bytes_);
        }
      });
    }
    last_arranged_ = memory;
  }
  last_ = &weight;
  block_bytes = last_bytes_;
  return last_arranged_;
}

Inputs slice(const Inputs& all, size_t begin, size_t tokens) {
  Inputs some = all;
  some.tokens = tokens;
  if (all.f32 != nullptr) some.f32 += begin * all.stride;
  if (all.bf16 != nullptr) some.bf16 += begin * all.stride;
  for (TokenCodes& form : some.forms) {
    if (form.codes == nullptr) continue;
    form.codes += begin * all.stride;
    form.scales += begin * form.scale_stride;
    form.sums += begin * all.stride / 16;
  }
  return some;
}

}  // namespace hmt
