// What sublayers have in common: tokens in rows without gaps, and a norm with products of its result.
#pragma once

#include <vector>

#include "fused/norm.h"
#include "linear/linear.h"
#include "sublayers/sublayers.h"

namespace hmt {

inline Matrix rows(void* data, DType type, size_t tokens, size_t width) {
  return {data, type, tokens, width, width};
}
inline ConstMatrix const_rows(const void* data, DType type, size_t tokens, size_t width) {
  return {data, type, tokens, width, width};
}

// A norm of whole tokens whose rows follow each other without a gap.
Norm norm_rows(const NormWeight& weight, DType type, size_t tokens, size_t width, const void* x,
               void* out, void* residual);

// The norm of x (after it was added to the residual, where there is one), times all projections.
// Where all of these take int8 activations in one form, the norm writes them while it has the row at
// hand.
void normed_linear(const Norm& norm, const std::vector<Projection>& projections, const Matrix& out,
                   size_t threads);

}  // namespace hmt
