// Linear layers: prepares activations once for all weights, then shares out ranges of rows.
#include "linear/linear.h"

#include <algorithm>
#include <vector>

#include "base/scratch.h"
#include "base/thread_pool.h"
#include "linear/block_shapes.h"
#include "linear/inputs.h"

namespace hmt {
namespace {

// Weights of one range of rows: enough work to pay for handing it out, little enough to balance.
constexpr size_t kRangeBytes = size_t{96} << 10;
// The least of it: where all of a call's weights are so few that not every thread gets four ranges of
// more, threads wait for the last one longer than smaller ranges take to hand out.
constexpr size_t kLeastRangeBytes = size_t{16} << 10;
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

// `bytes`: of a range's weights, where there are few tokens.
size_t rows_per_range(const Weight& w, size_t tokens, size_t threads, size_t bytes) {
  const bool panels = w.packing != Packing::kRows;
  if (tokens >= kTokenBlock) {
    // Eight panels share tiles of tokens, four or two where that leaves too few ranges to balance.
    for (size_t rows = w.packing == Packing::kBlocks ? 128 : 64; panels && rows > kRowsForMany;) {
      if (w.rows >= rows * 4 * threads) return rows;
      rows /= 2;
    }
    return kRowsForMany;
  }
  const size_t each = std::max<size_t>(1, row_bytes(w));
  return std::clamp<size_t>(bytes / each / kPanelRows, 1, 16) * kPanelRows;
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
  const Pieces pieces(all.tokens, kTokenChunk);
  for (size_t i = 0; i < pieces.count; ++i) {
    const size_t begin = pieces.begin(i);
    Inputs some = inputs_of(weight, slice(all, begin, pieces.begin(i + 1) - begin));
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
  size_t ranges = 0, column = 0, bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    bytes += projections[i].weight->rows * row_bytes(*projections[i].weight);
  }
  bytes = std::clamp(bytes / (4 * std::max<size_t>(1, threads)), kLeastRangeBytes, kRangeBytes);
  for (size_t i = 0; i < count; ++i) {
    const Weight& weight = *projections[i].weight;
    const size_t rows = rows_per_range(weight, inputs.tokens, threads, bytes);
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

void add_adapters(const Projection* projections, size_t count, const ConstMatrix& x,
                  const Matrix& out, size_t threads) {
  std::vector<AddedColumns> parts;
  size_t column = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t columns = projections[i].weight->rows;
    if (const std::vector<LowRank>* added = projections[i].added) {
      parts.push_back({added->data(), added->size(), column, columns});
    }
    column += columns;
  }
  if (!parts.empty()) add_low_rank(x, out, parts.data(), parts.size(), threads);
}

}  // namespace

void linear(const Projection* projections, size_t count, const ConstMatrix& x, const Matrix& out,
            size_t threads) {
  if (x.rows == 0) return;
  Needs needs = needs_of(projections, count, x);
  Scratch scratch(needs.bytes(x));
  const Inputs inputs = prepare(x, needs, scratch, threads);
  multiply(projections, count, inputs, needs, scratch, out, threads);
  add_adapters(projections, count, x, out, threads);
}

void linear_of_codes(const Projection* projections, size_t count, const ConstMatrix& x,
                     const Matrix& out, const std::function<void(const CodeRows&)>& write,
                     size_t threads) {
  if (x.rows == 0) return;
  Needs needs = needs_of(projections, count, x);
  Scratch scratch(needs.bytes(x));
  const size_t form = code_form(projections[0].weight->scale_columns);
  const CodeRows rows = code_rows(x.rows, x.columns, padded(x.columns), form, scratch);
  write(rows);
  Inputs inputs{x.rows, x.columns, rows.stride};
  set_codes(rows, inputs);
  multiply(projections, count, inputs, needs, scratch, out, threads);
}

void dequantize(const Weight& weight, size_t first, const Matrix& out, size_t threads) {
  const LinearKernels& kernels = linear_kernels(weight);
  const TokenKernels& tokens = active(token_kernels_tables());
  const size_t columns = std::max<size_t>(1, weight.columns);
  // Rows that are unpacked together are asked for together.
  const size_t height = weight.packing == Packing::kBlocks ? kPanelRows : 1;
  const size_t before = first % height, pieces = (before + out.rows + height - 1) / height;
  const size_t grain = std::max<size_t>(1, (size_t{32} << 10) / (columns * height));
  const size_t width = bytes_of(out.type);
  share(pieces, grain, threads, [&](size_t begin, size_t end) {
    Scratch scratch(height * weight.columns * sizeof(float));
    float* numbers = scratch.take<float>(height * weight.columns);
    for (size_t piece = begin; piece < end; ++piece) {
      const size_t r = piece == 0 ? 0 : piece * height - before;
      const size_t rows = std::min((piece + 1) * height - before, out.rows) - r;
      const auto target = [&](size_t i) {
        return static_cast<char*>(out.data) + (r + i) * out.stride * width;
      };
      if (out.type == DType::kF32 && out.stride == weight.columns) {
        kernels.decode(weight, first + r, rows, reinterpret_cast<float*>(target(0)));
        continue;
      }
      kernels.decode(weight, first + r, rows, numbers);
      for (size_t i = 0; i < rows; ++i) {
        tokens.narrow(numbers + i * weight.columns, nullptr, DType::kF32, weight.columns, target(i),
                      out.type);
      }
    }
  });
}

void CodeRows::fill(size_t t, const float* x, size_t columns) const {
  const TokenKernels& kernels = active(token_kernels_tables());
  int8_t* out = codes + t * stride;
  int32_t* out_sums = sums == nullptr ? nullptr : sums + t * (stride / 16);
  if (scale_columns == 0) {
    scales[t] = kernels.quantize(x, columns, out, stride, out_sums);
    return;
  }
  if (scale_columns == 32) {
    return kernels.quantize_groups(x, columns, out, stride, out_sums, scales + t * scale_stride);
  }
  for (size_t at = 0, i = 0; at < columns; at += scale_columns, ++i) {
    const bool last = columns - at <= scale_columns;
    scales[t * scale_stride + i] =
        kernels.quantize(x + at, last ? columns - at : scale_columns, out + at,
                         last ? stride - at : scale_columns,
                         out_sums == nullptr ? nullptr : out_sums + at / 16);
  }
}

void quantize_tokens(const ConstMatrix& x, const CodeRows& rows, size_t threads) {
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
      rows.fill(t, values, x.columns);
    }
  });
}

}  // namespace hmt
