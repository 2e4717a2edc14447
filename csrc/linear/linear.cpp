// Linear layers: prepares activations once for all weights, then shares out ranges of rows.
#include "linear/linear.h"

#include <algorithm>
#include <vector>

#include "base/scratch.h"
#include "base/thread_pool.h"
#include "linear/inputs.h"

namespace hmt {
namespace {

// Weights of one range of rows: enough work to pay for handing it out, little enough to balance.
constexpr size_t kRangeBytes = size_t{96} << 10;
// Tokens that a range of rows is multiplied with at a time, so that its results stay in L2.  With
// 1024 tokens 32 rows times 512 tokens gave 414 GFLOP/s in bf16 and 783 GOP/s in int8, where 16
// times 256 gave 387 and 702 (4096 x 4096, two Zen 4 cores).
constexpr size_t kTokenChunk = 512;
constexpr size_t kRowsForMany = 32;

// Rows of a projection, and where its results go.
struct Part {
  const Projection* projection;
  const uint8_t* arranged;
  size_t arranged_bytes;
  size_t rows_per_range;
  size_t first_range;
  size_t first_column;  // of `out`
};

size_t rows_per_range(const Weight& w, size_t tokens, size_t threads) {
  const bool panels = w.packing == Packing::kPanels;
  if (tokens >= kTokenBlock) {
    // Four panels share a tile of tokens, two where that leaves too few ranges to balance.
    return panels && w.rows >= 64 * 4 * threads ? 64 : kRowsForMany;
  }
  const bool bytes = w.code == Code::kInt8 || w.code == Code::kFp8;
  const size_t half_bytes = panels ? 1 : bytes ? 2 : 4;
  const size_t row_bytes = std::max<size_t>(1, w.columns * half_bytes / 2);
  return std::clamp<size_t>(kRangeBytes / row_bytes / kPanelRows, 1, 16) * kPanelRows;
}

void multiply_range(const Part& part, const Inputs& all, size_t first, size_t end,
                    const Matrix& out) {
  const Weight& weight = *part.projection->weight;
  const LinearKernels& kernels = linear_kernels(weight);
  const TokenKernels& tokens = active(token_kernels_tables());
  const size_t rows = end - first;
  Scratch scratch(std::min(all.tokens, kTokenChunk) * rows * sizeof(float));
  float* results = scratch.take<float>(std::min(all.tokens, kTokenChunk) * rows);
  const size_t width = bytes_of(out.type);
  for (size_t begin = 0; begin < all.tokens; begin += kTokenChunk) {
    Inputs some = slice(all, begin, std::min(kTokenChunk, all.tokens - begin));
    some.arranged = part.arranged == nullptr
                        ? nullptr
                        : part.arranged + begin / kTokenBlock * part.arranged_bytes;
    kernels.multiply(weight, some, first, end, results, rows);
    for (size_t t = 0; t < some.tokens; ++t) {
      char* target = static_cast<char*>(out.data) +
                     ((begin + t) * out.stride + part.first_column + first) * width;
      const auto* bias = static_cast<const char*>(part.projection->bias);
      if (bias != nullptr) bias += first * bytes_of(part.projection->bias_type);
      tokens.narrow(results + t * rows, bias, part.projection->bias_type, rows, target, out.type);
    }
  }
}

Needs needs_of(const Projection* projections, size_t count, const ConstMatrix& x) {
  Needs needs;
  for (size_t i = 0; i < count; ++i) needs.add(*projections[i].weight, x);
  return needs;
}

void multiply(const Projection* projections, size_t count, const Inputs& inputs, Needs& needs,
              Scratch& scratch, const Matrix& out, size_t threads) {
  std::vector<Part> parts;
  size_t ranges = 0, column = 0;
  for (size_t i = 0; i < count; ++i) {
    const Weight& weight = *projections[i].weight;
    const size_t rows = rows_per_range(weight, inputs.tokens, threads);
    Part part{projections + i, nullptr, 0, rows, ranges, column};
    part.arranged = needs.arranged(i, weight, inputs, part.arranged_bytes, scratch, threads);
    ranges += (weight.rows + part.rows_per_range - 1) / part.rows_per_range;
    column += weight.rows;
    parts.push_back(part);
  }
  share(ranges, 1, threads, [&](size_t begin, size_t end) {
    for (size_t range = begin; range < end; ++range) {
      size_t i = parts.size() - 1;
      while (parts[i].first_range > range) --i;
      const Part& part = parts[i];
      const size_t first = (range - part.first_range) * part.rows_per_range;
      const size_t last = std::min(first + part.rows_per_range, part.projection->weight->rows);
      multiply_range(part, inputs, first, last, out);
    }
  });
}

}  // namespace

void linear(const Projection* projections, size_t count, const ConstMatrix& x, const Matrix& out,
            size_t threads) {
  if (x.rows == 0) return;
  Needs needs = needs_of(projections, count, x);
  Scratch scratch(needs.bytes(x));
  const Inputs inputs = prepare(x, needs, scratch, threads);
  multiply(projections, count, inputs, needs, scratch, out, threads);
}

void linear_of_codes(const Projection* projections, size_t count, const ConstMatrix& x,
                     const Matrix& out, const std::function<void(const CodeRows&)>& write,
                     size_t threads) {
  if (x.rows == 0) return;
  Needs needs = needs_of(projections, count, x);
  Scratch scratch(needs.bytes(x));
  const CodeRows rows = code_rows(x, scratch);
  write(rows);
  multiply(projections, count, inputs_of(x, rows), needs, scratch, out, threads);
}

void dequantize(const Weight& weight, size_t first, const Matrix& out, size_t threads) {
  const LinearKernels& kernels = linear_kernels(weight);
  const TokenKernels& tokens = active(token_kernels_tables());
  const size_t columns = std::max<size_t>(1, weight.columns);
  const size_t grain = std::max<size_t>(1, (size_t{32} << 10) / columns);
  const size_t width = bytes_of(out.type);
  share(out.rows, grain, threads, [&](size_t begin, size_t end) {
    Scratch scratch(weight.columns * sizeof(float));
    float* row = scratch.take<float>(weight.columns);
    for (size_t r = begin; r < end; ++r) {
      char* target = static_cast<char*>(out.data) + r * out.stride * width;
      if (out.type == DType::kF32) {
        kernels.decode(weight, first + r, 1, reinterpret_cast<float*>(target));
        continue;
      }
      kernels.decode(weight, first + r, 1, row);
      tokens.narrow(row, nullptr, DType::kF32, weight.columns, target, out.type);
    }
  });
}

void quantize_tokens(const ConstMatrix& x, int8_t* codes, size_t code_stride, float* scales,
                     int32_t* sums, size_t sum_stride, size_t threads) {
  const TokenKernels& kernels = active(token_kernels_tables());
  const size_t grain = std::max<size_t>(1, (size_t{64} << 10) / std::max<size_t>(1, x.columns));
  share(x.rows, grain, threads, [&](size_t begin, size_t end) {
    Scratch scratch(x.columns * sizeof(float));
    float* numbers = scratch.take<float>(x.columns);
    for (size_t t = begin; t < end; ++t) {
      const char* row = static_cast<const char*>(x.data) + t * x.stride * bytes_of(x.type);
      const float* values = reinterpret_cast<const float*>(row);
      if (x.type != DType::kF32) {
        kernels.widen(row, x.type, x.columns, numbers);
        values = numbers;
      }
      scales[t] = kernels.quantize(values, x.columns, codes + t * code_stride, code_stride,
                                   sums == nullptr ? nullptr : sums + t * sum_stride);
    }
  });
}

}  // namespace hmt
