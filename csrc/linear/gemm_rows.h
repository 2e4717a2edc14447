// Multiplies a range of rows with many tokens; see rows_lanes.h for how both lie.  Only for
// rows.isa.cpp.
#pragma once

#include "base/scratch.h"
#include "linear/rows_token_tile.h"
#include "linear/rows_minima.h"
#if defined(HMT_AMX)
#include "linear/rows_amx.h"
#endif

namespace hmt::HMT_ISA {
namespace {

HMT_INLINE size_t round_16(size_t count) { return (count + 15) / 16 * 16; }

// A block of 16 tokens: lines, then, where the Math wants them, a line for each segment of what its
// sums begin with, then, where there are minima, a line for each segment of its `segment_sum`s.
template <typename Math>
size_t sums_line(const Cut& cut, size_t segment) {
  return cut.lines + (Math::kOffset ? cut.segments : 0) + segment;
}
template <typename Math>
size_t arranged_size(const Weight& w) {
  const Cut cut(w, Math::kPerLine, Math::kRoundLines);
  return kLine * sums_line<Math>(cut, w.minima == nullptr ? 0 : cut.segments);
}

// 16 lines of a block of tokens, from a run of their columns; fewer columns end in zeros.
template <typename Math>
HMT_INLINE void arrange_lines(const Inputs& in, size_t first, size_t column, size_t columns,
                              uint32_t* lines) {
  const auto* begin = Math::tokens(in) + first * in.stride + column;
  constexpr size_t kBytes = sizeof *begin, kAll = 16 * Math::kPerLine;
  const size_t tokens = in.tokens - first < kTokenBlock ? in.tokens - first : kTokenBlock;
  const uint32_t* starts[16];
  alignas(64) uint32_t rows[16][16];
  if (kBytes * Math::kPerLine == 4 && tokens == 16 && columns == kAll) {
    for (size_t t = 0; t < 16; ++t) {
      starts[t] = reinterpret_cast<const uint32_t*>(begin + t * in.stride);
    }
  } else {
    std::memset(rows, 0, sizeof rows);
    for (size_t t = 0; t < 16; ++t) starts[t] = rows[t];
    for (size_t t = 0; t < tokens; ++t) {
      if constexpr (kBytes * Math::kPerLine == 4) {
        std::memcpy(rows[t], begin + t * in.stride, columns * kBytes);
      } else {
        Math::pack(Code::kInt8, reinterpret_cast<const uint8_t*>(begin + t * in.stride), columns,
                   reinterpret_cast<uint8_t*>(rows[t]));
      }
    }
  }
  transpose_16(starts, lines);
}

template <typename Math>
HMT_KERNEL void arrange_tokens(const Weight& w, const Inputs& in, size_t block, uint8_t* arranged) {
  const Cut cut(w, Math::kPerLine, Math::kRoundLines);
  const size_t first = block * kTokenBlock;
  alignas(64) uint32_t some[256];
  for (size_t s = 0; s < cut.segments; ++s) {
    const size_t count = cut.count(s), all = cut.lines_of(count);
    for (size_t line = 0; line < all; line += 16) {
      const size_t column = line * cut.per_line, room = 16 * cut.per_line;
      const size_t left = column < count ? count - column : 0;
      uint8_t* out = arranged + (s * cut.segment_lines + line) * kLine;
      const bool whole = all - line >= 16;
      uint32_t* lines = whole ? reinterpret_cast<uint32_t*>(out) : some;
      arrange_lines<Math>(in, first, cut.begin(s) + column, left < room ? left : room, lines);
      if (!whole) std::memcpy(out, some, (all - line) * kLine);
    }
    if (Math::kOffset) {
      int32_t excess[16] = {};
      for (size_t t = 0; t < 16 && first + t < in.tokens; ++t) {
        excess[t] = -128 * sum_of_codes(in, first + t, cut.begin(s), count);
      }
      std::memcpy(arranged + (cut.lines + s) * kLine, excess, sizeof excess);
    }
    if (w.minima != nullptr) {
      float sums[16] = {};
      for (size_t t = 0; t < 16 && first + t < in.tokens; ++t) {
        sums[t] = segment_sum(w, in, first + t, s);
      }
      std::memcpy(arranged + sums_line<Math>(cut, s) * kLine, sums, sizeof sums);
    }
  }
}

// What is under way while a range of rows is multiplied.
template <typename Math>
struct Range {
  const Weight& w;
  const Cut cut;
  size_t first_row, rows, padded;  // padded to a multiple of 16
  const uint8_t* arranged;
  size_t arranged_bytes, blocks;
  uint8_t* packed;  // [padded] rows of kRowBytes
  float* scales;    // [padded, kBlockLines]: of the pieces, where there are several segments
  float* minima;    // the same, where there are minima, else null
  float* partial;   // [blocks, padded, 16]: sums of a segment so far, as Math::Sum
  float* totals;    // the same: of segments with their scales, where there are several

  size_t line_of(size_t block, size_t row) const { return (block * padded + row) * 16; }

  // Sums of 16 tokens over a segment times one row's minimum.
  HMT_INLINE F16v minimum_part(size_t block, size_t segment, float minimum) const {
    const uint8_t* line = arranged + block * arranged_bytes + sums_line<Math>(cut, segment) * kLine;
    return mul(load(reinterpret_cast<const float*>(line)), set1(minimum));
  }
  // `total` of a row and block with the part of the minimum of piece `p`.
  HMT_INLINE F16v with_minimum(F16v total, size_t block, size_t row, size_t p,
                               size_t segment) const {
    if (minima == nullptr) return total;
    return add(total, minimum_part(block, segment, minima[row * kBlockLines + p]));
  }
};

// Fetches the weights of the next block of columns, a few with each tile that is multiplied: rows
// lie too far apart for the processor to foresee them.
class Ahead {
 public:
  // `tiles`: how often `some` will be called
  Ahead(const Weight& w, size_t first_row, size_t rows, const Piece& last, size_t tiles) {
    const size_t each = bytes_of(w.code), column = last.column + last.count;
    const size_t left = w.columns - column, columns = left < kMost / each ? left : kMost / each;
    next_ = address_of(w, first_row, column);
    stride_ = w.columns * each;
    row_bytes_ = columns * each;
    rows_ = columns == 0 ? 0 : rows;
    each_time_ = (rows_ * ((row_bytes_ + kLine - 1) / kLine) + tiles - 1) / tiles;
  }
  HMT_INLINE void some() {
    for (size_t i = 0; i < each_time_ && rows_ > 0; ++i) {
      __builtin_prefetch(next_ + offset_, 0, 2);
      offset_ += kLine;
      if (offset_ < row_bytes_) continue;
      offset_ = 0;
      next_ += stride_;
      --rows_;
    }
  }

 private:
  static constexpr size_t kMost = 4 * kBlockLines;
  const uint8_t* next_;
  size_t stride_, row_bytes_, rows_, each_time_, offset_ = 0;
};

template <typename Math>
HMT_INLINE typename Math::Sum no_sum() {
  if constexpr (Math::kInteger) return set1(int32_t{0});
  else return zero();
}
HMT_INLINE void save(float* p, F16v sum) { store(p, sum); }
HMT_INLINE void save(float* p, I16v sum) { store(reinterpret_cast<int32_t*>(p), sum); }
template <typename Math>
HMT_INLINE typename Math::Sum saved(const float* p) {
  if constexpr (Math::kInteger) return load(reinterpret_cast<const int32_t*>(p));
  else return load(p);
}
// A segment's sums with their scale, added to the segments before.
HMT_INLINE F16v scaled(F16v sum, F16v scale, F16v before) { return fma(sum, scale, before); }
HMT_INLINE F16v scaled(I16v sum, F16v scale, F16v before) {
  return add(before, mul(to_float(sum), scale));
}

template <typename Math, size_t kRows, size_t kBlocks>
HMT_KERNEL void multiply_tile(const Range<Math>& range, const Pieces& pieces, size_t block,
                              size_t row) {
  using Sum = typename Math::Sum;
  const uint8_t* weights = range.packed + row * kRowBytes;
  for (size_t p = 0; p < pieces.count; ++p) {
    const Piece& piece = pieces.piece[p];
    const uint8_t* lines[kBlocks];
    Sum sums[kRows][kBlocks];
    HMT_UNROLL
    for (size_t b = 0; b < kBlocks; ++b) {
      const uint8_t* arranged = range.arranged + (block + b) * range.arranged_bytes;
      lines[b] = arranged + piece.line * kLine;
      const uint8_t* excess = arranged + (range.cut.lines + piece.segment) * kLine;
      HMT_UNROLL
      for (size_t r = 0; r < kRows; ++r) {
        const float* before = range.partial + range.line_of(block + b, row + r);
        if (!piece.starts) sums[r][b] = saved<Math>(before);
        else if (Math::kOffset) sums[r][b] = saved<Math>(reinterpret_cast<const float*>(excess));
        else sums[r][b] = no_sum<Math>();
      }
    }
    for (size_t line = 0; line < piece.lines; ++line) {
      typename Math::Line x[kBlocks];
      HMT_UNROLL
      for (size_t b = 0; b < kBlocks; ++b) x[b] = Math::line(lines[b] + line * kLine);
      HMT_UNROLL
      for (size_t r = 0; r < kRows; ++r) {
        const auto four = Math::four(weights + r * kRowBytes + 4 * line);
        HMT_UNROLL
        for (size_t b = 0; b < kBlocks; ++b) sums[r][b] = Math::step(sums[r][b], x[b], four);
      }
    }
    weights += 4 * piece.lines;
    const bool fold = piece.ends && range.cut.segments > 1;
    HMT_UNROLL
    for (size_t r = 0; r < kRows; ++r) {
      const F16v scale = set1(fold ? range.scales[(row + r) * kBlockLines + p] : 0.0f);
      HMT_UNROLL
      for (size_t b = 0; b < kBlocks; ++b) {
        const size_t at = range.line_of(block + b, row + r);
        if (fold) {
          const F16v before = piece.segment == 0 ? zero() : load(range.totals + at);
          const F16v total = scaled(sums[r][b], scale, before);
          store(range.totals + at,
                range.with_minimum(total, block + b, row + r, p, piece.segment));
        } else {
          save(range.partial + at, sums[r][b]);
        }
      }
    }
  }
}

// All rows of the range with blocks [block, block + kBlocks).
template <typename Math, size_t kRows, size_t kBlocks>
HMT_INLINE void multiply_rows(const Range<Math>& range, const Pieces& pieces, size_t block,
                              Ahead& ahead) {
  for (size_t row = 0; row < range.padded; row += kRows) {
    ahead.some();
    multiply_tile<Math, kRows, kBlocks>(range, pieces, block, row);
  }
}

#if defined(HMT_AMX)
// As multiply_tile, with kRowTiles * 16 rows.  Sums that meet their scale here lie in `segment`.
template <typename Math, size_t kRowTiles, size_t kBlocks>
HMT_KERNEL void multiply_amx_tile(const Range<Math>& range, const Pieces& pieces, size_t block,
                                  size_t row) {
  const uint8_t* weights = range.packed + row * kRowBytes;
  for (size_t p = 0; p < pieces.count; ++p) {
    const Piece& piece = pieces.piece[p];
    const bool fold = piece.ends && range.cut.segments > 1;
    alignas(64) float segment[2][2][256];
    float* sums[2][2];
    const uint8_t* lines[kBlocks];
    for (size_t b = 0; b < kBlocks; ++b) {
      lines[b] = range.arranged + (block + b) * range.arranged_bytes + piece.line * kLine;
      for (size_t i = 0; i < kRowTiles; ++i) {
        float* kept = range.partial + range.line_of(block + b, row + 16 * i);
        sums[i][b] = fold && piece.starts ? segment[i][b] : kept;
      }
    }
    multiply_with_tiles<Math::kInteger, kRowTiles, kBlocks>(weights, kRowBytes, lines, piece.lines,
                                                            piece.starts, sums);
    weights += 4 * piece.lines;
    if (!fold) continue;
    for (size_t r = 0; r < 16 * kRowTiles; ++r) {
      const F16v scale = set1(range.scales[(row + r) * kBlockLines + p]);
      for (size_t b = 0; b < kBlocks; ++b) {
        float* total = range.totals + range.line_of(block + b, row + r);
        const F16v before = piece.segment == 0 ? zero() : load(total);
        const F16v sum = scaled(saved<Math>(sums[r / 16][b] + r % 16 * 16), scale, before);
        store(total, range.with_minimum(sum, block + b, row + r, p, piece.segment));
      }
    }
  }
}

template <typename Math>
void multiply_amx_blocks(const Range<Math>& range, const Pieces& pieces, Ahead& ahead) {
  const Tiles tiles;
  for (size_t block = 0; block < range.blocks; block += 2) {
    const bool two_blocks = range.blocks - block >= 2;
    for (size_t row = 0; row < range.padded; row += 32) {
      ahead.some();
      const bool two_rows = range.padded - row >= 32;
      if (two_blocks && two_rows) multiply_amx_tile<Math, 2, 2>(range, pieces, block, row);
      else if (two_blocks) multiply_amx_tile<Math, 1, 2>(range, pieces, block, row);
      else if (two_rows) multiply_amx_tile<Math, 2, 1>(range, pieces, block, row);
      else multiply_amx_tile<Math, 1, 1>(range, pieces, block, row);
    }
  }
}
#endif

template <typename Math>
void multiply_blocks(const Range<Math>& range, const Pieces& pieces) {
  const Piece& last = pieces.piece[pieces.count - 1];
  Ahead ahead(range.w, range.first_row, range.rows, last, range.blocks * range.padded / 24 + 1);
#if defined(HMT_AMX)
  if constexpr (Math::kRoundLines == 16) return multiply_amx_blocks(range, pieces, ahead);
#endif
#if defined(HMT_AVX512)
  // 24 registers of sums, 3 of tokens; a lone block takes 16 rows to hide the latency of its sums.
  for (size_t block = 0; block < range.blocks;) {
    const size_t left = range.blocks - block;
    if (left == 1) multiply_rows<Math, 16, 1>(range, pieces, block, ahead);
    else if (left == 2 || left == 4) multiply_rows<Math, 8, 2>(range, pieces, block, ahead);
    else multiply_rows<Math, 8, 3>(range, pieces, block, ahead);
    block += left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3;
  }
#else
  for (size_t block = 0; block < range.blocks; ++block) {
    multiply_rows<Math, 4, 1>(range, pieces, block, ahead);
  }
#endif
}

// Copies the weights of one block of columns, and looks up the scales of its pieces.
template <typename Math>
HMT_KERNEL void pack_weights(const Range<Math>& range, const Pieces& pieces) {
  const Weight& w = range.w;
  const float unit = Math::unit(w.code);
  for (size_t r = 0; r < range.rows; ++r) {
    const RowScales scales(w, range.first_row + r);
    const float* minima = row_minima(w, range.first_row + r);
    uint8_t* out = range.packed + r * kRowBytes;
    for (size_t p = 0; p < pieces.count; ++p) {
      const Piece& piece = pieces.piece[p];
      const size_t used = piece.count * (4 / Math::kPerLine), all = 4 * piece.lines;
      Math::pack(w.code, address_of(w, range.first_row + r, piece.column), piece.count, out);
      if (used < all) std::memset(out + used, 0, all - used);
      out += all;
      if (range.cut.segments > 1) range.scales[r * kBlockLines + p] = scales[piece.segment] * unit;
      if (range.minima != nullptr) range.minima[r * kBlockLines + p] = minima[piece.segment];
    }
  }
}

// Sums become results, [tokens, rows].
template <typename Math>
HMT_KERNEL void write_results(const Range<Math>& range, const Inputs& in, float* out,
                              size_t out_stride) {
  alignas(64) float lines[16][16], results[16][16];
  const uint32_t* starts[16];
  for (size_t r = 0; r < 16; ++r) starts[r] = reinterpret_cast<const uint32_t*>(lines[r]);
  for (size_t block = 0; block < range.blocks; ++block) {
    const size_t first = block * 16, tokens = in.tokens - first < 16 ? in.tokens - first : 16;
    float token_scales[16] = {};
    if (Math::kInteger) std::memcpy(token_scales, in.scales + first, tokens * sizeof(float));
    for (size_t row = 0; row < range.rows; row += 16) {
      const size_t rows = range.rows - row < 16 ? range.rows - row : 16;
      for (size_t r = 0; r < rows; ++r) {
        const size_t at = range.line_of(block, row + r);
        F16v value;
        if (range.cut.segments > 1) {
          value = load(range.totals + at);
        } else {
          const float scale = RowScales(range.w, range.first_row + row + r)[0];
          value = scaled(saved<Math>(range.partial + at), set1(scale * Math::unit(range.w.code)),
                         zero());
          const float* minima = row_minima(range.w, range.first_row + row + r);
          if (minima != nullptr) value = add(value, range.minimum_part(block, 0, minima[0]));
        }
        store(lines[r], Math::kInteger ? mul(value, load(token_scales)) : value);
      }
      for (size_t r = rows; r < 16; ++r) store(lines[r], zero());
      transpose_16(starts, reinterpret_cast<uint32_t*>(results[0]));
      for (size_t t = 0; t < tokens; ++t) {
        float* target = out + (first + t) * out_stride + row;
        if (rows == 16) store(target, load(results[t]));
        else std::memcpy(target, results[t], rows * sizeof(float));
      }
    }
  }
}

// See LinearKernels::multiply.
template <typename Math>
void multiply_many(const Weight& w, const Inputs& in, size_t first_row, size_t end_row, float* out,
                   size_t out_stride) {
  const Cut cut(w, Math::kPerLine, Math::kRoundLines);
  const size_t rows = end_row - first_row, padded = round_16(rows);
  const size_t blocks = (in.tokens + kTokenBlock - 1) / kTokenBlock;
  const size_t several = cut.segments > 1, sums = blocks * padded * 16;
  const size_t minima = w.minima != nullptr ? several : 0;
  Scratch scratch(padded * (kRowBytes + (several + minima) * kBlockLines * sizeof(float)) +
                  (1 + several) * sums * sizeof(float));
  Range<Math> range{w, cut, first_row, rows, padded, in.arranged, arranged_size<Math>(w), blocks,
                    scratch.take<uint8_t>(padded * kRowBytes),
                    scratch.take<float>(several * padded * kBlockLines),
                    minima ? scratch.take<float>(padded * kBlockLines) : nullptr,
                    scratch.take<float>(sums), scratch.take<float>(several * sums)};
  // Rows that do not exist are multiplied too, and their results left out.
  std::memset(range.packed + rows * kRowBytes, 0, (padded - rows) * kRowBytes);
  for (size_t i = rows * kBlockLines; i < several * padded * kBlockLines; ++i) {
    range.scales[i] = 0.0f;
    if (minima) range.minima[i] = 0.0f;
  }
  Pieces pieces;
  for (size_t segment = 0, line = 0; segment < cut.segments;) {
    pieces.fill(cut, segment, line);
    pack_weights(range, pieces);
    multiply_blocks(range, pieces);
  }
  write_results(range, in, out, out_stride);
}

}  // namespace
}  // namespace hmt::HMT_ISA
