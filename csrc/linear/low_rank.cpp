#include "linear/low_rank.h"

#include <algorithm>

#include "base/scratch.h"
#include "base/thread_pool.h"
#include "fused/grain.h"

namespace hmt {
namespace {

// Ranks and columns of a row that a thread takes at once: of one row, several can be busy.
constexpr size_t kRanks = 8, kColumns = 512;
// Rows for each thread from which on none of them is divided.
constexpr size_t kRowsEach = 4;

struct Row {
  const LowRank* adapter;
  const AddedColumns* part;
  size_t row;
  float* low;  // [rank]
};

size_t pieces(size_t count, size_t size) { return (count + size - 1) / size; }

}  // namespace

void add_low_rank(const ConstMatrix& x, const Matrix& out, const AddedColumns* parts, size_t count,
                  size_t threads) {
  const LowRankKernels& kernels = active(low_rank_kernels_tables());
  size_t total = 0, most = 0, numbers = 0, widest = 0;
  for (size_t p = 0; p < count; ++p) {
    widest = std::max(widest, parts[p].columns);
    for (size_t a = 0; a < parts[p].count; ++a) {
      const LowRank& adapter = parts[p].adapters[a];
      total += adapter.count;
      numbers += adapter.count * adapter.rank;
      most = std::max(most, adapter.rank);
    }
  }
  if (total == 0) return;
  Scratch scratch(Scratch::round(total * sizeof(Row)) + Scratch::round(numbers * sizeof(float)));
  Row* rows = scratch.take<Row>(total);
  float* low = scratch.take<float>(numbers);
  size_t at = 0;
  for (size_t p = 0; p < count; ++p) {
    for (size_t a = 0; a < parts[p].count; ++a) {
      const LowRank& adapter = parts[p].adapters[a];
      for (size_t i = 0; i < adapter.count; ++i, low += adapter.rank) {
        rows[at++] = {&adapter, parts + p, static_cast<size_t>(adapter.rows[i]), low};
      }
    }
  }
  const auto down = [&](const Row& row, size_t first, size_t end) {
    const char* from = static_cast<const char*>(x.data) + row.row * x.stride * bytes_of(x.type);
    kernels.down(*row.adapter, from, x.type, x.columns, first, end, row.low);
  };
  const auto up = [&](const Row& row, size_t first, size_t end) {
    char* to = static_cast<char*>(out.data) +
               (row.row * out.stride + row.part->first) * bytes_of(out.type);
    kernels.up(*row.adapter, row.low, to, out.type, row.part->columns, first, end);
  };
  if (total >= kRowsEach * threads) {  // whole rows are balanced, and threads meet once
    const size_t numbers_each = most * (x.columns + widest);
    share(total, rows_per_grain(numbers_each), threads, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        down(rows[i], 0, rows[i].adapter->rank);
        up(rows[i], 0, rows[i].part->columns);
      }
    });
    return;
  }
  const size_t downs = pieces(most, kRanks), ups = pieces(widest, kColumns);
  share(total * downs, rows_per_grain(kRanks * x.columns), threads, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Row& row = rows[i / downs];
      const size_t first = i % downs * kRanks, rank = row.adapter->rank;
      if (first < rank) down(row, first, std::min(first + kRanks, rank));
    }
  });
  share(total * ups, rows_per_grain(most * kColumns), threads, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Row& row = rows[i / ups];
      const size_t first = i % ups * kColumns, columns = row.part->columns;
      if (first < columns) up(row, first, std::min(first + kColumns, columns));
    }
  });
}

}  // namespace hmt
