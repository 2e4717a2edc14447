// Which positions a token attends to: those that an indexer's heads score highest (DeepSeek-V3.2,
// arXiv 2512.02556, section 2.1).
//
// A score is the sum over heads of weight * max(scale * query . key, 0), in f32 and in one order,
// that of `kernels/reference/index_selection.py`, so that its bits are the same on every instruction
// set, for any number of threads, and whatever else a call computes: numbers of a row are added one
// after the other; of heads, lane i adds i, i + 16, i + 32 .., then lanes i and i + 8, 4, 2, 1.
// FMA is used where products are exact in f32, as those of two numbers of 16 or fp8 bits are.
//
// Sums lie across heads, so that rows are read as they lie.  64 heads make 32 products of each byte
// of a key in bf16, so arithmetic is the limit: two busy Intel cores with AVX-512 made 141 billion a
// second, 4.4 GB/s of keys, and 80 with VDPBF16PS, which also adds in another order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention.h"
#include "attention/pages.h"
#include "base/isa.h"

namespace hmt {

// Keys of positions: rows of `dim` numbers, 16 of them side by side in a page.  Position p is row
// p % 16 of page table[p / 16], or of page p / 16 where there is no table.  Not int4.
struct IndexKeys {
  PageEncoding encoding;
  std::size_t dim;
  const uint8_t* data;
  std::size_t stride;  // bytes, from page to page
  const int64_t* table;

  // Scales of int8 keys, f32 [16], come behind the rows.
  std::size_t row_bytes() const {
    return dim * (encoding == PageEncoding::kF32 ? 4 : encoding <= PageEncoding::kF16 ? 2 : 1);
  }
  const uint8_t* page(std::size_t position) const {
    const std::size_t number = position / kPageTokens;
    return data + (table ? static_cast<std::size_t>(table[number]) : number) * stride;
  }
  const uint8_t* row(std::size_t position) const {
    return page(position) + position % kPageTokens * row_bytes();
  }
};

// heads.data [tokens, count, keys.dim]; weights f32 [tokens, count].
struct IndexQueries {
  HeadRows heads;
  std::size_t tokens, count;
  const float* weights;
  float scale;
};

// scores f32 [count]: of the first `count` positions, for one token.
void index_scores(const IndexKeys& keys, const IndexQueries& queries, std::size_t token,
                  std::size_t count, float* scores, std::size_t threads);

// chosen int64 [tokens, top_k]: for each token the positions that it scores highest, ascending.  It
// sees the first (start + token + 1) / group positions, at least top_k.  Of equal scores the first
// are chosen; tied[token] says whether some of them were not.  NaN is above all numbers.
void index_topk(const IndexKeys& keys, const IndexQueries& queries, std::size_t start,
                std::size_t group, std::size_t top_k, int64_t* chosen, bool* tied,
                std::size_t threads);

// What index.cpp asks of the file that is compiled once per instruction set.
constexpr std::size_t kIndexBlock = 96;  // positions that are decoded together, whole pages
struct IndexKernels {
  std::size_t (*packed_bytes)(const IndexKeys& keys, const IndexQueries& queries);
  void (*pack)(const IndexKeys& keys, const IndexQueries& queries, std::size_t token, uint8_t* out);
  // rows[i]: f32 numbers of position begin + i, up to kIndexBlock of them, in `decoded` (as many
  // times keys.dim) or where they lie.
  void (*rows)(const IndexKeys& keys, std::size_t begin, std::size_t end, float* decoded,
               const uint8_t** rows);
  void (*score)(const IndexKeys& keys, const IndexQueries& queries, const uint8_t* packed,
                const uint8_t* const* rows, std::size_t count, float* scores);
};
HMT_TABLES(IndexKernels, index_kernels)

}  // namespace hmt
