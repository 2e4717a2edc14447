// Activations, row by row, in the forms that the kernels of linear layers ask for.
#pragma once

#include "base/scratch.h"
#include "linear/kernels.h"
#include "linear/linear.h"

namespace hmt {

// What weights are multiplied with.
struct Forms {
  void add(const Weight& weight) {
    (weight.int8_activations ? codes[code_form(weight.scale_columns)] : numbers) = true;
  }

  bool codes[kCodeForms] = {};  // by form
  bool numbers = false;
};

class InputRows {
 public:
  // Bytes that `rows` rows take from a Scratch.
  static size_t bytes(size_t rows, size_t columns, const Forms& forms);

  InputRows() = default;

  // `rows` rows, not initialised; `type` is what they are made of.
  InputRows(size_t rows, size_t columns, const Forms& forms, DType type, Scratch& scratch);

  // Converts `columns` numbers at x; `wide` has room for them in f32.
  void fill(size_t row, const void* x, float* wide) const;

  void copy(size_t row, const InputRows& from, size_t from_row) const;

  // Rows [first, first + count), without `arranged`.
  Inputs view(size_t first, size_t count) const;

 private:
  size_t columns_ = 0, stride_ = 0;
  DType type_ = DType::kF32;
  float* f32_ = nullptr;
  uint16_t* bf16_ = nullptr;
  CodeRows codes_[kCodeForms] = {};  // those without memory are not asked for
};

}  // namespace hmt
