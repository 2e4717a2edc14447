#include "linear/gguf.h"

#include "linear/gguf_blocks.h"
#include "linear/weight.h"

namespace hmt::HMT_ISA {
namespace {

// Where row `row` of a weight was published.
size_t published_row(const GgmlRows& rows, size_t row) {
  if (rows.turned == 0) return row;
  const size_t half = rows.turned / 2, within = row % rows.turned;
  return row - within + within % half * 2 + within / half;
}

// Row `lane` of a panel: 16 bytes of pairs for each 32 numbers.
HMT_INLINE void write_panel(const uint8_t* pairs, size_t blocks, size_t lane, uint8_t* panel) {
  for (size_t b = 0; b < blocks; ++b, panel += kPanelRows * 16) {
    for (size_t j = 0; j < 4; ++j) {
      std::memcpy(panel + (j * kPanelRows + lane) * 4, pairs + 16 * b + 4 * j, 4);
    }
  }
}

template <typename Type>
HMT_INLINE void unpack_row(const GgmlRows& rows, size_t row) {
  using Scale = typename Type::Scale;
  constexpr size_t kBytes = Type::kNumbers / (Type::kPaired ? 2 : 1);
  const size_t count = rows.columns / Type::kNumbers, groups = count * Type::kGroups;
  const uint8_t* raw = rows.blocks + published_row(rows, row) * count * Type::kBytes;
  const size_t panel = row / kPanelRows, lane = row % kPanelRows;
  // Panels begin with those of 16 rows, whose groups lie side by side.
  const size_t first = Type::kPaired ? panel * groups * kPanelRows + lane : row * groups;
  constexpr size_t kStep = Type::kPaired ? kPanelRows : 1;
  auto* scales = static_cast<Scale*>(rows.scales) + first;
  auto* minima = Type::kMinima ? static_cast<Scale*>(rows.minima) + first : nullptr;
  uint8_t* data = rows.data + (Type::kPaired ? panel * kPanelRows : row) * rows.columns /
                                  (Type::kPaired ? 2 : 1);
  uint8_t codes[kBytes];
  Scale some[Type::kGroups], less[Type::kGroups];
  for (size_t b = 0; b < count; ++b, raw += Type::kBytes) {
    if constexpr (Type::kPaired) {
      Type::unpack(raw, codes, some, less);
      write_panel(codes, Type::kNumbers / kPanelBlock, lane,
                  data + b * (Type::kNumbers / 2) * kPanelRows);
    } else {
      Type::unpack(raw, data + b * Type::kNumbers, some, less);
    }
    for (size_t g = 0; g < Type::kGroups; ++g) {
      scales[(b * Type::kGroups + g) * kStep] = some[g];
      if (Type::kMinima) minima[(b * Type::kGroups + g) * kStep] = less[g];
    }
  }
}

// Zeros for the rows of the last panel that do not exist.
template <typename Type>
void clear_rest(const GgmlRows& rows) {
  if (!Type::kPaired || rows.rows % kPanelRows == 0) return;
  const size_t panel = rows.rows / kPanelRows, bytes = rows.columns / 2 * kPanelRows;
  const size_t numbers = rows.columns / Type::kNumbers * Type::kGroups * kPanelRows;
  std::memset(rows.data + panel * bytes, 0, bytes);
  using Scale = typename Type::Scale;
  std::memset(static_cast<Scale*>(rows.scales) + panel * numbers, 0, numbers * sizeof(Scale));
  if (!Type::kMinima) return;
  std::memset(static_cast<Scale*>(rows.minima) + panel * numbers, 0, numbers * sizeof(Scale));
}

template <typename Type>
__attribute__((noinline)) void unpack_rows(const GgmlRows& rows, size_t first, size_t count) {
  const size_t begin = first * kPanelRows, all = begin + count * kPanelRows;
  if (all > rows.rows) clear_rest<Type>(rows);
  for (size_t row = begin; row < (all < rows.rows ? all : rows.rows); ++row) {
    unpack_row<Type>(rows, row);
  }
}

void unpack(Ggml kind, const GgmlRows& rows, size_t first, size_t count) {
  switch (kind) {
    case Ggml::kQ4_0: return unpack_rows<Q4_0>(rows, first, count);
    case Ggml::kQ4_1: return unpack_rows<Q4_1>(rows, first, count);
    case Ggml::kQ5_0: return unpack_rows<Q5_0>(rows, first, count);
    case Ggml::kQ5_1: return unpack_rows<Q5_1>(rows, first, count);
    case Ggml::kQ8_0: return unpack_rows<Q8_0>(rows, first, count);
    case Ggml::kQ2_K: return unpack_rows<Q2_K>(rows, first, count);
    case Ggml::kQ3_K: return unpack_rows<Q3_K>(rows, first, count);
    case Ggml::kQ4_K: return unpack_rows<Q4_K>(rows, first, count);
    case Ggml::kQ5_K: return unpack_rows<Q5_K>(rows, first, count);
    case Ggml::kQ6_K: return unpack_rows<Q6_K>(rows, first, count);
    case Ggml::kIQ4_NL: return unpack_rows<IQ4_NL>(rows, first, count);
    case Ggml::kIQ4_XS: return unpack_rows<IQ4_XS>(rows, first, count);
    case Ggml::kMXFP4: return unpack_rows<MXFP4>(rows, first, count);
  }
}

}  // namespace

const GgmlKernels ggml_kernels = {unpack};

}  // namespace hmt::HMT_ISA
