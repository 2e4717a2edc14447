// Activations in the forms that the kernels of one call ask for, each made once.
#pragma once

#include "base/scratch.h"
#include "linear/kernels.h"
#include "linear/linear.h"

namespace hmt {

inline const LinearKernels& linear_kernels(const Weight& weight) {
  switch (weight.packing) {
    case Packing::kRows: return active(row_kernels_tables());
    case Packing::kPanels: return active(panel_kernels_tables());
    case Packing::kBlocks: break;
  }
  return active(block_kernels_tables());
}

// True where both take what `arrange` made for either.
bool same_arrangement(const Weight& a, const Weight& b);

// What a call with some weights needs.
class Needs {
 public:
  void add(const Weight& weight, const ConstMatrix& x);

  // Bytes that `prepare` and `arranged` take from a Scratch.
  size_t bytes(const ConstMatrix& x) const;

  bool codes[kCodeForms] = {};  // by form
  bool numbers = false;

  // The arrangement for the call's weight `index`, made unless the weight before it has the same.
  const uint8_t* arranged(size_t index, const Weight& weight, const Inputs& inputs,
                          size_t& block_bytes, Scratch& scratch, size_t threads);

 private:
  size_t arranged_bytes_ = 0;
  const Weight* last_ = nullptr;
  const uint8_t* last_arranged_ = nullptr;
  size_t last_bytes_ = 0;
};

// Numbers or codes of a token, with zeros beyond the columns.
size_t padded(size_t columns);

Inputs prepare(const ConstMatrix& x, const Needs& needs, Scratch& scratch, size_t threads);

// Room for codes of x in a form, which the caller fills.
CodeRows code_rows(size_t tokens, size_t columns, size_t stride, size_t form, Scratch& scratch);
// Bytes that it takes.
size_t code_bytes(size_t tokens, size_t columns, size_t stride, size_t form);
// Lets inputs have codes.
void set_codes(const CodeRows& rows, Inputs& inputs);

// The same with the codes that `weight` is multiplied with.
Inputs inputs_of(const Weight& weight, const Inputs& all);

// Tokens [begin, begin + tokens), without `arranged`.
Inputs slice(const Inputs& all, size_t begin, size_t tokens);

}  // namespace hmt
