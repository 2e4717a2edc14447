#include "experts/grouping.h"

namespace hmt {

Grouping::Grouping(const Expert* experts, size_t count, const ExpertChoice& routing,
                   size_t token_count) {
  if (count == 0) return;
  constexpr uint32_t kNone = ~uint32_t{0};
  std::vector<uint32_t> place(static_cast<size_t>(experts[count - 1].id) + 1, kNone);
  for (size_t e = 0; e < count; ++e) {
    place[static_cast<size_t>(experts[e].id)] = static_cast<uint32_t>(e);
  }
  const size_t choices = token_count * routing.top_k;
  const auto place_of = [&](size_t choice) {
    const auto id = static_cast<size_t>(routing.experts[choice]);
    return id < place.size() ? place[id] : kNone;
  };

  std::vector<size_t> next(count + 1, 0);  // counts, then where the next pair of an expert goes
  for (size_t choice = 0; choice < choices; ++choice) {
    const uint32_t e = place_of(choice);
    if (e != kNone) ++next[e + 1];
  }
  for (size_t e = 0; e < count; ++e) {
    if (next[e + 1] > 0) shares.push_back({experts + e, next[e], next[e + 1]});
    next[e + 1] += next[e];
  }
  tokens.resize(next[count]);
  scales.resize(next[count]);
  for (size_t choice = 0; choice < choices; ++choice) {
    const uint32_t e = place_of(choice);
    if (e == kNone) continue;
    tokens[next[e]] = static_cast<uint32_t>(choice / routing.top_k);
    scales[next[e]++] = routing.scales[choice];
  }
}

}  // namespace hmt
