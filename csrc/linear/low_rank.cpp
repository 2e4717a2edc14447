#include "linear/low_rank.h"

#include "base/scratch.h"
#include "base/thread_pool.h"
#include "fused/grain.h"

namespace hmt {
namespace {

// Ranks and columns of a row that a thread takes at once: of one row, several can be busy.
constexpr size_t kRanks = 8, kColumns = 512;

struct Row {
  const LowRank* adapter;
  size_t row;
  float* low;  // [rank]
};

size_t pieces(size_t count, size_t size) { return (count + size - 1) / size; }

}  // namespace

void add_low_rank(const ConstMatrix& x, const Matrix& out, const LowRank* adapters, size_t count,
                  size_t threads) {
  const LowRankKernels& kernels = active(low_rank_kernels_tables());
  size_t total = 0, most = 0, numbers = 0;
  for (size_t a = 0; a < count; ++a) {
    total += adapters[a].count;
    numbers += adapters[a].count * adapters[a].rank;
    most = adapters[a].rank > most ? adapters[a].rank : most;
  }
  Scratch scratch(Scratch::round(total * sizeof(Row)) + Scratch::round(numbers * sizeof(float)));
  Row* rows = scratch.take<Row>(total);
  float* low = scratch.take<float>(numbers);
  for (size_t a = 0, at = 0; a < count; ++a) {
    for (size_t i = 0; i < adapters[a].count; ++i, low += adapters[a].rank) {
      rows[at++] = {&adapters[a], static_cast<size_t>(adapters[a].rows[i]), low};
    }
  }
  const size_t downs = pieces(most, kRanks), ups = pieces(out.columns, kColumns);
  share(total * downs, rows_per_grain(kRanks * x.columns), threads, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Row& row = rows[i / downs];
      const size_t first = i % downs * kRanks, rank = row.adapter->rank;
      if (first >= rank) continue;
      const char* from = static_cast<const char*>(x.data) + row.row * x.stride * bytes_of(x.type);
      kernels.down(*row.adapter, from, x.type, x.columns, first,
                   first + kRanks < rank ? first + kRanks : rank, row.low);
    }
  });
  share(total * ups, rows_per_grain(most * kColumns), threads, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Row& row = rows[i / ups];
      const size_t first = i % ups * kColumns;
      char* to = static_cast<char*>(out.data) + row.row * out.stride * bytes_of(out.type);
      kernels.up(*row.adapter, row.low, to, out.type, out.columns, first,
                 first + kColumns < out.columns ? first + kColumns : out.columns);
    }
  });
}

}  // namespace hmt
