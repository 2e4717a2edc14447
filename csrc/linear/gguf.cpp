#include "linear/gguf.h"

#include <algorithm>
#include <cstring>

#include "base/thread_pool.h"
#include "linear/weight.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace hmt {
namespace {

constexpr size_t kMostBytes = 256;  // of a block

// Where row `row` of a weight was published.
size_t published_row(const GgufRows& rows, size_t row) {
  if (rows.turned == 0) return row;
  const size_t half = rows.turned / 2, within = row % rows.turned;
  return row - within + within % half * 2 + within / half;
}

// Words [0, count) of sixteen rows, each `stride` bytes after the other, as [count, 16, 4].
void transpose(const uint8_t* const (&rows)[kPanelRows], size_t count, uint8_t* out) {
  size_t word = 0;
#ifdef __SSE2__
  for (; word + 4 <= count; word += 4) {
    for (size_t r = 0; r < kPanelRows; r += 4) {
      const auto line = [&](size_t i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r + i] + 4 * word));
      };
      const __m128i a = line(0), b = line(1), c = line(2), d = line(3);
      const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
      const __m128i ef = _mm_unpackhi_epi32(a, b), gh = _mm_unpackhi_epi32(c, d);
      const auto store = [&](size_t i, __m128i four) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + ((word + i) * kPanelRows + r) * 4), four);
      };
      store(0, _mm_unpacklo_epi64(ab, cd));
      store(1, _mm_unpackhi_epi64(ab, cd));
      store(2, _mm_unpacklo_epi64(ef, gh));
      store(3, _mm_unpackhi_epi64(ef, gh));
    }
  }
#endif
  for (; word < count; ++word) {
    for (size_t r = 0; r < kPanelRows; ++r) {
      std::memcpy(out + (word * kPanelRows + r) * 4, rows[r] + 4 * word, 4);
    }
  }
}

void pack_panel(const GgufRows& rows, size_t panel) {
  static constexpr uint8_t kNothing[kMostBytes] = {};
  const size_t width = rows.taken_bytes, taken = rows.minima == nullptr ? width : 2 * width;
  const size_t kept = rows.bytes - taken, first = panel * kPanelRows;
  const uint8_t* sources[kPanelRows];
  for (size_t r = 0; r < kPanelRows; ++r) {
    const bool exists = first + r < rows.rows;
    sources[r] = exists ? rows.blocks + published_row(rows, first + r) * rows.count * rows.bytes
                        : nullptr;
  }
  // Bytes after those that are taken out move up to those before them.
  uint8_t moved[kPanelRows][kMostBytes];
  const bool moves = rows.taken_at != 0 && rows.taken_at < kept;
  for (size_t b = 0; b < rows.count; ++b) {
    const uint8_t* lines[kPanelRows];
    for (size_t r = 0; r < kPanelRows; ++r) {
      const uint8_t* block = sources[r] == nullptr ? kNothing : sources[r] + b * rows.bytes;
      const size_t at = (panel * rows.count + b) * kPanelRows + r;
      if (width != 0) std::memcpy(rows.scales + at * width, block + rows.taken_at, width);
      if (rows.minima != nullptr) {
        std::memcpy(rows.minima + at * width, block + rows.taken_at + width, width);
      }
      lines[r] = rows.taken_at == 0 ? block + taken : block;
      if (!moves) continue;
      std::memcpy(moved[r], block, rows.taken_at);
      std::memcpy(moved[r] + rows.taken_at, block + rows.taken_at + taken, kept - rows.taken_at);
      lines[r] = moved[r];
    }
    transpose(lines, kept / 4, rows.data + (panel * rows.count + b) * kept * kPanelRows);
  }
}

}  // namespace

void pack_gguf(const GgufRows& rows, size_t threads) {
  constexpr size_t kBytes = size_t{1} << 17;  // enough work to hand out
  const size_t panel_bytes = std::max<size_t>(1, rows.count * rows.bytes * kPanelRows);
  share((rows.rows + kPanelRows - 1) / kPanelRows, std::max<size_t>(1, kBytes / panel_bytes),
        threads, [&](size_t begin, size_t end) {
          for (size_t panel = begin; panel < end; ++panel) pack_panel(rows, panel);
        });
}

}  // namespace hmt
