#include "recurrent/state_space.h"

#include "base/scratch.h"
#include "base/thread_pool.h"
#include "fused/grain.h"

namespace hmt {

void time_steps(const TimeSteps& steps, size_t tokens, size_t threads) {
  const StateSpaceKernels& kernels = active(state_space_kernels_tables());
  // A logarithm and two powers for each number.
  share(tokens, rows_per_grain(16 * steps.heads), threads, [&](size_t begin, size_t end) {
    kernels.steps(steps, begin, end);
  });
}

void state_space_scan(const StateSpaceScan& scan, StateRuns runs, size_t threads) {
  const StateSpaceKernels& kernels = active(state_space_kernels_tables());
  const size_t parts = (scan.head_dim + kScanColumns - 1) / kScanColumns;
  const size_t each = scan.heads * parts;  // of a run
  const size_t numbers = 2 * scan.state_dim * kScanColumns;
  share(each * runs.count, rows_per_grain(numbers), threads, [&](size_t begin, size_t end) {
    Scratch scratch(has_drafts(runs) ? scan.state_dim * kScanColumns * sizeof(float) : 0);
    float* aside = scratch.take<float>(0);
    for (size_t i = begin; i < end; ++i) {
      const size_t head = i % each / parts, first = i % parts * kScanColumns;
      const size_t last = first + kScanColumns;
      kernels.scan(scan, runs.runs[i / each], head, first,
                   last < scan.head_dim ? last : scan.head_dim, aside);
    }
  });
}

void selective_scan(const SelectiveScan& scan, StateRuns runs, size_t threads) {
  const StateSpaceKernels& kernels = active(state_space_kernels_tables());
  const size_t each = (scan.channels + 15) / 16;  // of a run
  // A power for each number of the state, of every token, and some for each run.
  const size_t grain = rows_per_grain(16 * 16 * scan.state_dim);
  share(each * runs.count, grain, threads, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const size_t channel = i % each * 16, left = scan.channels - channel;
      kernels.selective(scan, runs.runs[i / each], channel, left < 16 ? left : 16);
    }
  });
}

}  // namespace hmt
