// Descriptions that Python objects hold, with their own copies of the descriptions within.
#pragma once

#include <vector>

#include "attention/attention.h"
#include "binding/binding.h"
#include "experts/experts.h"
#include "recurrent/recurrent.h"

namespace hmt::binding {

// Projections with their own copies of the descriptions of their weights.
class OwnedProjections {
 public:
  explicit OwnedProjections(nb::tuple items) : projections_(projections_of(items)) {
    for (const Projection& p : projections_) weights_.push_back(*p.weight);
    for (size_t i = 0; i < weights_.size(); ++i) projections_[i].weight = &weights_[i];
  }
  OwnedProjections(const OwnedProjections&) = delete;
  OwnedProjections& operator=(const OwnedProjections&) = delete;

  // Valid as long as this is.
  const std::vector<Projection>& all() const { return projections_; }

 private:
  std::vector<Projection> projections_;
  std::vector<Weight> weights_;
};

// The adapters of a step's rows, as Python keeps them; borrows all memory.
struct LowRanks {
  std::vector<LowRank> adapters;
};

class OwnedExpert {
 public:
  // projections: gate, up and down, as for projections_of
  OwnedExpert(int64_t id, nb::tuple projections) : id_(id), projections_(projections) {}

  // Valid as long as this is.
  Expert get() const {
    const std::vector<Projection>& all = projections_.all();
    return {id_, all[0], all[1], all[2]};
  }

 private:
  int64_t id_;
  OwnedProjections projections_;
};

// The pages of all layers of one kind: layer i's extent begins i * page_bytes() after the first's.
struct PageSet {
  Pages pages;
  Pages of(size_t layer) const {
    return {pages.layout, pages.data + layer * pages.layout.page_bytes(), pages.stride};
  }
};

// The runs of a step with recurrent state: (slot, offset, length, whether it begins, drafts, pending)
// of each.
inline std::vector<StateRun> state_runs(const std::vector<size_t>& numbers) {
  std::vector<StateRun> runs;
  for (size_t i = 0; i + 5 < numbers.size(); i += 6) {
    runs.push_back({numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3] != 0,
                    numbers[i + 4], numbers[i + 5]});
  }
  return runs;
}

// The runs of a step; borrows their tables.
struct Runs {
  std::vector<PagedRun> runs;
};

}  // namespace hmt::binding
