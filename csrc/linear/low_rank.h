// Low-rank adapters (LoRA, arXiv 2106.09685): what they add to products of some rows.
//
// A row's result depends on nothing but that row and its adapter: each sum has one order, whatever
// the other rows and the threads.
#pragma once

#include "base/dtype.h"
#include "base/isa.h"

namespace hmt {

using std::size_t;

// One adapter, and the rows that have it.
struct LowRank {
  const int64_t* rows;
  size_t count;
  const void* down;  // [rank, columns of x]
  DType down_type;
  const void* up;  // [rank, columns of out]
  DType up_type;
  size_t rank;
  float scale;
};

// What adapters add to `columns` neighbouring numbers of rows, from `first` on.
struct AddedColumns {
  const LowRank* adapters;
  size_t count;
  size_t first, columns;
};

// out[row] = out[row] + scale * (up^T (down x[row])), in f32, rounded to out.type once, for the
// columns of each of `parts` and each row of its adapters.  No number gets two sums.
void add_low_rank(const ConstMatrix& x, const Matrix& out, const AddedColumns* parts, size_t count,
                  size_t threads);

struct LowRankKernels {
  // low[begin .. end) = down[begin .. end) . x
  void (*down)(const LowRank& adapter, const void* x, DType type, size_t columns, size_t begin,
               size_t end, float* low);
  // out[begin .. end) += scale * up[:, begin .. end)^T low, of `columns` in all
  void (*up)(const LowRank& adapter, const float* low, void* out, DType type, size_t columns,
             size_t begin, size_t end);
};
HMT_TABLES(LowRankKernels, low_rank_kernels)

}  // namespace hmt
