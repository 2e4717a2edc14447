#include "fused/sampling.h"

#include <algorithm>
#include <cmath>

#include "base/scratch.h"
#include "fused/descending.h"

namespace hmt {
namespace {

size_t blocks_of(size_t count) { return (count + kScoreBlock - 1) / kScoreBlock; }

const SamplingKernels& kernels() { return active(sampling_kernels_tables()); }

// Memory for choosing among `count` scores.  What is not touched costs nothing.
struct Room {
  explicit Room(size_t count)
      : scratch(4 * Scratch::round(count * sizeof(float)) +
                2 * Scratch::round(count * sizeof(uint64_t)) +
                2 * Scratch::round(blocks_of(count) * sizeof(float)) +
                Scratch::round(blocks_of(count) * sizeof(double)) +
                Scratch::round(Descending::kBuckets * sizeof(uint32_t))),
        scores(scratch.take<float>(count)),
        weights(scratch.take<float>(count)),
        chosen_weights(scratch.take<float>(count)),
        chosen(scratch.take<uint32_t>(count)),
        items(scratch.take<uint64_t>(count)),
        spread(scratch.take<uint64_t>(count)),
        tops(scratch.take<float>(blocks_of(count))),
        best_tops(scratch.take<float>(blocks_of(count))),
        sums(scratch.take<double>(blocks_of(count))),
        ends(scratch.take<uint32_t>(Descending::kBuckets)) {}

  Scratch scratch;
  float* scores;          // tempered: 0 is the largest
  float* weights;         // of all scores
  float* chosen_weights;  // of what may be drawn, in the order of drawing
  uint32_t* chosen;       // and its indices
  uint64_t* items;
  uint64_t* spread;
  float* tops;       // the largest of each block
  float* best_tops;
  double* sums;      // of all weights before each block
  uint32_t* ends;
};

// Everything of at least `least`, skipping blocks that hold nothing of it.  Wants room.tops.
Descending at_least(const float* values, size_t count, float least, Room& room) {
  size_t found = 0;
  for (size_t b = 0; b < blocks_of(count); ++b) {
    if (!(room.tops[b] >= least)) continue;
    const size_t end = std::min(count, (b + 1) * kScoreBlock);
    for (size_t i = b * kScoreBlock; i < end; ++i) {  // without a branch: found <= i
      room.items[found] = ranked(values[i], i);
      found += values[i] >= least;
    }
  }
  return {room.items, found, room.spread, room.ends};
}

// Holds the `wanted` largest and those equal to the last of them, and few others: the wanted-th
// largest of the blocks' largest cannot be more than the wanted-th largest of all.
Descending candidates(const float* values, size_t count, size_t wanted, Room& room) {
  kernels().block_tops(values, count, room.tops);
  const size_t blocks = blocks_of(count);
  float least = -HUGE_VALF;
  if (wanted <= blocks) {
    float* const place = room.best_tops + wanted - 1;
    std::copy(room.tops, room.tops + blocks, room.best_tops);
    std::nth_element(room.best_tops, place, room.best_tops + blocks, std::greater<float>());
    least = *place;
  }
  return at_least(values, count, least, room);
}

// How many of the first weights together hold `share`.
size_t nucleus(const float* weights, size_t count, double share) {
  double held = 0.0;
  for (size_t i = 0; i < count; ++i) {
    held += weights[i];
    if (!(held - weights[i] < share)) return i;
  }
  return count;
}

// Fills room.chosen and room.chosen_weights; returns how many.
size_t choose_by_top_k(size_t count, const Draw& how, Room& room) {
  Descending order = candidates(room.scores, count, how.top_k, room);
  size_t size = 0;
  uint32_t last = 0;
  for (; size < order.size(); ++size) {
    const uint64_t item = order.at(size);
    if (size >= how.top_k && ranked_order(item) != last) break;
    last = ranked_order(item);
    room.chosen[size] = static_cast<uint32_t>(ranked_index(item));
    room.weights[size] = room.scores[room.chosen[size]];
  }
  kernels().weigh(room.weights, size, room.chosen_weights);
  if (how.top_p >= 1.0) return size;
  double total = 0.0;
  for (size_t i = 0; i < size; ++i) total += room.chosen_weights[i];
  return nucleus(room.chosen_weights, size, how.top_p * total);
}

// The same for top_p alone.
size_t choose_by_top_p(size_t count, const Draw& how, Room& room) {
  kernels().weigh(room.scores, count, room.weights);
  double sums[4] = {};
  for (size_t i = 0; i < count; ++i) sums[i % 4] += room.weights[i];
  const double total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  // All below this bound together hold less than 1 - top_p.
  const auto least = static_cast<float>(total * (1.0 - how.top_p) / static_cast<double>(count));
  kernels().block_tops(room.weights, count, room.tops);
  Descending order = at_least(room.weights, count, least, room);
  const double share = how.top_p * total;
  double held = 0.0;
  size_t size = 0;
  for (; size < order.size(); ++size) {
    const size_t index = ranked_index(order.at(size));
    const float weight = room.weights[index];
    held += weight;
    if (!(held - weight < share)) break;
    room.chosen[size] = static_cast<uint32_t>(index);
    room.chosen_weights[size] = weight;
  }
  return size;
}

size_t draw_chosen(size_t size, float least, double uniform, const Room& room) {
  size_t kept = 0;
  double total = 0.0;
  for (size_t i = 0; i < size; ++i) {
    if (!(room.scores[room.chosen[i]] >= least)) continue;
    room.chosen[kept] = room.chosen[i];
    room.chosen_weights[kept] = room.chosen_weights[i];
    total += room.chosen_weights[kept++];
  }
  if (kept == 0) return 0;
  const double point = uniform * total;
  double cumulated = 0.0;
  for (size_t i = 0; i < kept; ++i) {
    cumulated += room.chosen_weights[i];
    if (cumulated > point) return room.chosen[i];
  }
  return room.chosen[kept - 1];  // the product rounded up to the last sum
}

// Out of all scores of at least `least`, in the order of their indices.
size_t draw_any(size_t count, float least, double uniform, Room& room) {
  kernels().weigh(room.scores, count, room.weights);
  double total = 0.0;
  for (size_t b = 0; b < blocks_of(count); ++b) {
    room.sums[b] = total;
    const size_t end = std::min(count, (b + 1) * kScoreBlock);
    for (size_t i = b * kScoreBlock; i < end; ++i) {
      total += room.scores[i] >= least ? room.weights[i] : 0.0f;
    }
  }
  const double point = uniform * total;
  // The last block that begins at or before the point.
  const double* after = std::upper_bound(room.sums, room.sums + blocks_of(count), point);
  size_t i = static_cast<size_t>(after - room.sums - 1) * kScoreBlock;
  double cumulated = *(after - 1);
  for (; i < count; ++i) {
    if (room.scores[i] >= least) cumulated += room.weights[i];
    if (cumulated > point) return i;
  }
  // The product rounded up to the last sum.
  for (i = count; i > 1 && !(room.scores[i - 1] >= least);) --i;
  return i - 1;
}

}  // namespace

Survey survey(const float* scores, size_t count) {
  Survey found;
  kernels().survey(scores, count, &found);
  return found;
}

size_t draw(const float* scores, size_t count, const Draw& how) {
  Room room(count);
  kernels().block_tops(scores, count, room.tops);
  const float top = *std::max_element(room.tops, room.tops + blocks_of(count));
  // A temperature that f32 rounds to zero leaves only the largest, as a tiny one does.
  const auto temperature = static_cast<float>(std::clamp(how.temperature, 1e-45, 3e38));
  kernels().temper(scores, count, top, temperature, room.scores);
  const auto least = how.min_p > 0.0 ? static_cast<float>(std::log(how.min_p)) : -HUGE_VALF;
  if (how.top_k > 0 && how.top_k < count) {
    return draw_chosen(choose_by_top_k(count, how, room), least, how.uniform, room);
  }
  if (how.top_p < 1.0) {
    return draw_chosen(choose_by_top_p(count, how, room), least, how.uniform, room);
  }
  return draw_any(count, least, how.uniform, room);
}

size_t largest_scores(const float* scores, size_t count, size_t wanted, int64_t* indices) {
  wanted = std::min(wanted, count);
  if (wanted == 0) return 0;
  Room room(count);
  Descending order = candidates(scores, count, wanted, room);
  for (size_t i = 0; i < wanted && i < order.size(); ++i) {
    indices[i] = static_cast<int64_t>(ranked_index(order.at(i)));
  }
  return std::min(wanted, order.size());
}

}  // namespace hmt
