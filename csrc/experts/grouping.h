// Tokens by expert.
#pragma once

#include <vector>

#include "experts/experts.h"

namespace hmt {

// The tokens of one expert: pairs [first, first + count).
struct Share {
  const Expert* expert;
  size_t first, count;
};

// All pairs of a token and one of its experts, in ascending order of experts, then of tokens.
struct Grouping {
  Grouping(const Expert* experts, size_t count, const ExpertChoice& routing, size_t tokens);

  std::vector<Share> shares;  // of experts that have tokens
  std::vector<uint32_t> tokens;
  std::vector<float> scales;
};

}  // namespace hmt
