#include "experts/input_rows.h"

#include <cstring>

#include "linear/inputs.h"

namespace hmt {
namespace {

size_t padded(size_t columns) { return (columns + 63) / 64 * 64; }

}  // namespace

size_t InputRows::bytes(size_t rows, size_t columns, const Forms& forms) {
  const size_t stride = padded(columns);
  size_t total = 0;
  if (forms.numbers) total += Scratch::round(rows * stride * 4) + Scratch::round(rows * stride * 2);
  if (forms.codes) {
    total += Scratch::round(rows * stride) + Scratch::round(rows * 4) +
             Scratch::round(rows * stride / 16 * 4);
  }
  return total;
}

InputRows::InputRows(size_t rows, size_t columns, const Forms& forms, DType type, Scratch& scratch)
    : columns_(columns), stride_(padded(columns)), type_(type) {
  if (forms.numbers) {
    f32_ = scratch.take<float>(rows * stride_);
    if (type == DType::kBF16) bf16_ = scratch.take<uint16_t>(rows * stride_);
  }
  if (forms.codes) {
    codes_ = scratch.take<int8_t>(rows * stride_);
    scales_ = scratch.take<float>(rows);
    sums_ = scratch.take<int32_t>(rows * stride_ / 16);
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
  if (codes_ != nullptr) {
    scales_[row] = kernels.quantize(numbers, columns_, codes_ + row * stride_, stride_,
                                    sums_ + row * stride_ / 16);
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
  copy_row(codes_, from.codes_, stride_);
  copy_row(scales_, from.scales_, 1);
  copy_row(sums_, from.sums_, stride_ / 16);
}

Inputs InputRows::view(size_t first, size_t count) const {
  const Inputs all{0, columns_, stride_, f32_, bf16_, codes_, scales_, sums_, nullptr};
  return slice(all, first, count);
}

}  // namespace hmt
