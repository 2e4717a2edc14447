// Up to sixteen tokens with AMX tiles: weights stream through once, in tiles of 16 rows that are read
// where they lie or are brought to bf16 a few columns at a time.  Sums have the order of gemm_rows.h.
// Only for rows.isa.cpp.
#pragma once

#include "linear/gemm_rows.h"

namespace hmt::HMT_ISA {
namespace {

// 16 * kRowTiles rows; those beyond `rows` are zeros, and not written.
template <size_t kRowTiles>
struct FewTileRows {
  static constexpr size_t kRows = 16 * kRowTiles;
  // Columns that are brought to bf16 at a time, and a row of them: not a multiple of 4 KiB apart.
  static constexpr size_t kStaged = 64, kStagedBytes = kStaged * 2;
  static constexpr size_t kAhead = 512;

  const Weight& w;
  const Inputs& in;
  const Cut cut;
  size_t row, rows;
  alignas(64) uint8_t staged[2][kRows * kStagedBytes];  // by turns: stores end while tiles multiply
  alignas(64) float sums[kRowTiles][256], totals[kRowTiles][256];

  FewTileRows(const Weight& weight, const Inputs& inputs, size_t first, size_t end)
      : w(weight), in(inputs), cut(weight, PairMath::kPerLine, PairMath::kRoundLines), row(first),
        rows(end - first < kRows ? end - first : kRows) {
    if (rows < kRows) std::memset(staged, 0, sizeof staged);
  }

  // What will be read kAhead bytes later, in these rows or the next ones.
  HMT_INLINE void fetch_ahead(size_t column, size_t bytes) const {
    const size_t row_bytes = w.columns * bytes_of(w.code), offset = column * bytes_of(w.code);
    const size_t skip = offset + kAhead < row_bytes ? 0 : (kRows - 1) * row_bytes;
    const uint8_t* next = address_of(w, row, column) + kAhead + skip;
    for (size_t r = 0; r < rows; ++r, next += row_bytes) {
      for (size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(next + i);
    }
  }

  // 64 of them, in order.
  HMT_INLINE static void store_e4m3_as_bf16(const uint8_t* codes, uint8_t* out) {
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    __m512i low, high;
    e4m3_as_bf16(_mm512_loadu_si512(codes), low, high);
    _mm512_store_si512(out, _mm512_permutex2var_epi64(low, first, high));
    _mm512_store_si512(out + 64, _mm512_permutex2var_epi64(low, second, high));
  }

  // 32 columns of the rows times 16 lines of tokens.
  HMT_INLINE void step(const uint8_t* weights, size_t row_bytes, size_t line) const {
    _tile_loadd(6, in.arranged + line * kLine, 64);
    _tile_loadd(4, weights, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (kRowTiles == 1) return;
    _tile_loadd(5, weights + 16 * row_bytes, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
  }

  HMT_INLINE void stage(size_t column, size_t count, uint8_t* rows_of_bf16) {
    if (w.code == Code::kFp8 && count == kStaged && rows == kRows) {
      const uint8_t* codes = address_of(w, row, column);
      const size_t ahead = kAhead + (column + kAhead < w.columns ? 0 : (kRows - 1) * w.columns);
      uint8_t* out = rows_of_bf16;
      for (size_t r = 0; r < kRows; ++r, codes += w.columns, out += kStagedBytes) {
        __builtin_prefetch(codes + ahead);
        store_e4m3_as_bf16(codes, out);
      }
      return;
    }
    fetch_ahead(column, count * bytes_of(w.code));
    const size_t used = count * 2, all = (used + kLine - 1) / kLine * kLine;
    for (size_t r = 0; r < rows; ++r) {
      uint8_t* out = rows_of_bf16 + r * kStagedBytes;
      PairMath::pack(w.code, address_of(w, row + r, column), count, out);
      if (used < all) std::memset(out + used, 0, all - used);
    }
  }

  HMT_INLINE void sum_segment(size_t segment) {
    const size_t begin = cut.begin(segment), count = cut.count(segment);
    const size_t row_bytes = w.columns * 2;
    size_t line = segment * cut.segment_lines, column = 0;
    _tile_zero(0);
    if (kRowTiles == 2) _tile_zero(2);
    if (w.code == Code::kBF16 && rows == kRows) {
      for (; column + 32 <= count; column += 32, line += 16) {
        fetch_ahead(begin + column, 64);
        step(address_of(w, row, begin + column), row_bytes, line);
      }
    }
    const auto some = [&](size_t at) { return count - at < kStaged ? count - at : kStaged; };
    if (column < count) stage(begin + column, some(column), staged[0]);
    for (size_t turn = 0; column < count; column += kStaged, ++turn) {
      const size_t next = column + kStaged;
      if (next < count) stage(begin + next, some(next), staged[(turn + 1) % 2]);
      settle_tile_memory(staged);
      for (size_t i = 0; i < some(column); i += 32, line += 16) {
        step(staged[turn % 2] + 2 * i, kStagedBytes, line);
      }
    }
    _tile_stored(0, sums[0], 64);
    if (kRowTiles == 2) _tile_stored(2, sums[kRowTiles - 1], 64);
    settle_tile_memory();
  }

  // `out`: of the first row
  void multiply(float* out, size_t out_stride) {
    RowScales scales[kRows];
    for (size_t r = 0; r < rows; ++r) scales[r] = RowScales(w, row + r);
    for (size_t s = 0; s < cut.segments; ++s) {
      sum_segment(s);
      const uint8_t* minimum_line = in.arranged + sums_line<PairMath>(cut, s) * kLine;
      for (size_t r = 0; r < rows; ++r) {
        float* total = totals[r / 16] + r % 16 * 16;
        const F16v before = s == 0 ? zero() : load(total);
        const F16v scale = set1(scales[r][s] * PairMath::unit(w.code));
        F16v value = scaled(load(sums[r / 16] + r % 16 * 16), scale, before);
        const float* minima = row_minima(w, row + r);
        if (minima != nullptr) {
          const F16v sum = load(reinterpret_cast<const float*>(minimum_line));
          value = add(value, mul(sum, set1(minima[s])));
        }
        store(total, value);
      }
    }
    for (size_t r = 0; r < rows; ++r) {
      const float* total = totals[r / 16] + r % 16 * 16;
      for (size_t t = 0; t < in.tokens; ++t) out[t * out_stride + r] = total[t];
    }
  }
};

template <size_t kRowTiles>
HMT_KERNEL void multiply_few_tile_rows(const Weight& w, const Inputs& in, size_t row, size_t end_row,
                                       float* out, size_t out_stride) {
  FewTileRows<kRowTiles>(w, in, row, end_row).multiply(out, out_stride);
}

// See LinearKernels::multiply.
inline void multiply_few_with_tiles(const Weight& w, const Inputs& in, size_t first_row,
                                    size_t end_row, float* out, size_t out_stride) {
  const Tiles tiles;
  for (size_t row = first_row; row < end_row;) {
    float* target = out + (row - first_row);
    if (end_row - row > 16) multiply_few_tile_rows<2>(w, in, row, end_row, target, out_stride);
    else multiply_few_tile_rows<1>(w, in, row, end_row, target, out_stride);
    row += end_row - row > 16 ? 32 : 16;
  }
}

}  // namespace
}  // namespace hmt::HMT_ISA
