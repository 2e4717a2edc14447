#include "attention/index.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/scratch.h"
#include "base/thread_pool.h"

namespace hmt {
namespace {

using std::size_t;

// Scores that exist at once, of several tokens: as many as stay in a core's L2 beside the keys.
constexpr size_t kMostScores = size_t{1} << 19;
constexpr size_t kBits = 12, kBuckets = size_t{1} << kBits;

// Larger for a larger number, the same for both zeros; NaN above all.
uint32_t ordered(float value) {
  const float number = value + 0.0f;  // no negative zero
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  bits ^= static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u;
  return value != value ? 0xffffffffu : bits;
}

// The top_k largest of `count` numbers; whether one that is left out equals one that is not.
// counts [kBuckets], keys and items [count] are overwritten.
bool select(const float* scores, size_t count, size_t top_k, uint32_t* counts, uint32_t* keys,
            uint32_t* items, int64_t* chosen) {
  for (size_t i = 0; i < count; ++i) keys[i] = ordered(scores[i]);
  std::fill(counts, counts + kBuckets, 0u);
  for (size_t i = 0; i < count; ++i) ++counts[keys[i] >> (32 - kBits)];
  size_t bucket = kBuckets, above = 0;
  while (above + counts[bucket - 1] < top_k) above += counts[--bucket];
  --bucket;
  size_t inside = 0;
  for (size_t i = 0; i < count; ++i) {
    items[inside] = keys[i];
    inside += (keys[i] >> (32 - kBits)) == bucket;
  }
  const size_t wanted = top_k - above;  // of the bucket
  std::nth_element(items, items + wanted - 1, items + inside, std::greater<uint32_t>());
  const uint32_t least = items[wanted - 1];
  size_t equal = 0, room = wanted;  // `room` for those that equal the least
  for (size_t i = 0; i < inside; ++i) {
    equal += items[i] == least;
    room -= items[i] > least;
  }
  const bool tied = equal > room;
  for (size_t i = 0, place = 0; place < top_k; ++i) {
    const bool takes = keys[i] > least || (keys[i] == least && room > 0);
    room -= takes && keys[i] == least;
    chosen[place] = static_cast<int64_t>(i);
    place += takes;
  }
  return tied;
}

// Scores of the first counts[i] positions for token first + i, [tokens, stride].
void score_tokens(const IndexKeys& keys, const IndexQueries& queries, size_t first, size_t tokens,
                  const size_t* counts, float* scores, size_t stride, size_t threads) {
  const IndexKernels& kernels = active(index_kernels_tables());
  const size_t packed = Scratch::round(kernels.packed_bytes(keys, queries));
  const size_t decoded = kIndexBlock * keys.dim;
  Scratch scratch(tokens * packed);
  uint8_t* query = scratch.take<uint8_t>(tokens * packed);
  for (size_t t = 0; t < tokens; ++t) kernels.pack(keys, queries, first + t, query + t * packed);
  const size_t most = counts[tokens - 1], blocks = (most + kIndexBlock - 1) / kIndexBlock;
  share(blocks, 4, threads, [&](size_t begin, size_t end) {
    Scratch own(decoded * sizeof(float));
    float* work = own.take<float>(decoded);
    const uint8_t* rows[kIndexBlock];
    for (size_t block = begin; block < end; ++block) {
      const size_t at = block * kIndexBlock, last = std::min(most, at + kIndexBlock);
      kernels.rows(keys, at, last, work, rows);
      for (size_t t = 0; t < tokens; ++t) {
        if (counts[t] <= at) continue;
        kernels.score(keys, queries, query + t * packed, rows, std::min(counts[t], last) - at,
                      scores + t * stride + at);
      }
    }
  });
}

}  // namespace

void index_scores(const IndexKeys& keys, const IndexQueries& queries, size_t token, size_t count,
                  float* scores, size_t threads) {
  if (count > 0) score_tokens(keys, queries, token, 1, &count, scores, count, threads);
}

void index_topk(const IndexKeys& keys, const IndexQueries& queries, size_t start, size_t group,
                size_t top_k, int64_t* chosen, bool* tied, size_t threads) {
  const size_t most = (start + queries.tokens) / group;
  const size_t together = std::clamp<size_t>(kMostScores / std::max<size_t>(most, 1), 1,
                                             std::min<size_t>(queries.tokens, 64));
  Scratch scratch(Scratch::round(together * most * sizeof(float)) + 64 * together);
  float* scores = scratch.take<float>(together * most);
  size_t* counts = scratch.take<size_t>(together);
  for (size_t first = 0; first < queries.tokens; first += together) {
    const size_t tokens = std::min(together, queries.tokens - first);
    for (size_t t = 0; t < tokens; ++t) counts[t] = (start + first + t + 1) / group;
    score_tokens(keys, queries, first, tokens, counts, scores, most, threads);
    share(tokens, 1, threads, [&](size_t begin, size_t end) {
      Scratch own(Scratch::round(kBuckets * 4) + 2 * Scratch::round(most * 4));
      uint32_t* buckets = own.take<uint32_t>(kBuckets);
      uint32_t* ranks = own.take<uint32_t>(most);
      uint32_t* items = own.take<uint32_t>(most);
      for (size_t t = begin; t < end; ++t) {
        tied[first + t] = select(scores + t * most, counts[t], top_k, buckets, ranks, items,
                                 chosen + (first + t) * top_k);
      }
    });
  }
}

}  // namespace hmt
