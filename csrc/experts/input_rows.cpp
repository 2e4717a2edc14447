#include "experts/input_rows.h"

#include <cstring>

#include "linear/inputs.h"

namespace hmt {
namespace {

size_t padded_row(size_t columns) { return (columns + 63) / 64 * 64; }

}  // namespace

size_t InputRows::bytes(size_t rows, size_t columns, const Forms& forms) {
  const size_t stride = padded_row(columns);
  size_t total = 0;
  if (forms.numbers) total += Scratch::round(rows * stride * 4) + Scratch::round(rows * stride * 2);
  for (size_t form = 0; form < kCodeForms; ++form) {
    if (forms.codes[form]) total += code_bytes(rows, columns, stride, form);
  }
  return total;
}

InputRows::InputRows(size_t rows, size_t columns, const Forms& forms, DType type, Scratch& scratch)
    : columns_(columns), stride_(padded_row(columns)), type_(type) {
  if (forms.numbers) {
    f32_ = scratch.take<float>(rows * stride_);
    if (type == DType::kBF16) bf16_ = scratch.take<uint16_t>(rows * stride_);
  }
  for (size_t form = 0; form < kCodeForms; ++form) {
    if (forms.codes[form]) codes_[form] = code_rows(rows, columns, stride_, form, scratch);
  }
}

void InputRows::fill(size_t row, const void* x, float* wide) const {
  const TokenKernels& kernels = active(token_kernels_tables());
  if (f32_ != nullptr) wide = f32_ + row * stride_;
  if (type_ != DType::kF32 || f32_ != nullptr) kernels.widen(x, type_, columns_, wide);
  const float* numbers = type_ == DType::kF32 ? static_cast<const float*>(x) : wide;
  if (f32_ != nullptr) std::memset(wide + columns_, 0, (stride_ - columns_) * sizeof *wide);
  if (bf16_ != nullptr) {
    uint16_t* target = bf16_ + row * stride_;
    std::memcpy(target, x, columns_ * sizeof *target);
    std::memset(target + columns_, 0, (stride_ - columns_) * sizeof *target);
  }
  for (const CodeRows& codes : codes_) {
    if (codes.codes != nullptr) codes.fill(row, numbers, columns_);
  }
}

void InputRows::copy(size_t row, const InputRows& from, size_t from_row) const {
  const auto copy_row = [&](auto* to, const auto* source, size_t width) {
    if (to != nullptr) {
      std::memcpy(to + row * width, source + from_row * width, width * sizeof *to);
    }
  };
  copy_row(f32_, from.f32_, stride_);
  copy_row(bf16_, from.bf16_, stride_);
  const auto copy_codes = [&](const CodeRows& to, const CodeRows& source) {
    copy_row(to.codes, source.codes, stride_);
    copy_row(to.scales, source.scales, to.scale_stride);
    copy_row(to.sums, source.sums, stride_ / 16);
  };
  for (size_t form = 0; form < kCodeForms; ++form) copy_codes(codes_[form], from.codes_[form]);
}

Inputs InputRows::view(size_t first, size_t count) const {
  Inputs all{0, columns_, stride_};
  all.f32 = f32_;
  all.bf16 = bf16_;
  for (const CodeRows& codes : codes_) {
    if (codes.codes != nullptr) set_codes(codes, all);
  }
  return slice(all, first, count);
}

}  // namespace hmt
