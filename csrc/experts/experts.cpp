#include "experts/experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "experts/batch.h"
#include "linear/block_shapes.h"

namespace hmt {
namespace {

// Memory of one batch, unless one expert alone needs more.  Intermediate results of 1000 pairs of
// tokens and experts with 2048 numbers take about 14 MB; more would leave the caches.
constexpr size_t kBatchBytes = size_t{16} << 20;

struct Range {
  size_t first, count, bytes;
};

std::vector<Range> split(const ExpertCall& call, const std::vector<Share>& shares) {
  std::vector<Range> ranges;
  for (size_t i = 0; i < shares.size(); ++i) {
    const size_t bytes = Batch::bytes(call, shares[i]);
    if (ranges.empty() || ranges.back().bytes + bytes > kBatchBytes) ranges.push_back({i, 0, 0});
    ++ranges.back().count;
    ranges.back().bytes += bytes;
  }
  return ranges;
}

// The sum of no experts.
void add_nothing(const ExpertSum& sum, size_t tokens) {
  const TokenKernels& kernels = active(token_kernels_tables());
  const size_t columns = sum.result.columns;
  for (size_t t = 0; t < tokens; ++t) {
    float* total = sum.total + t * sum.stride;
    if (sum.fresh) std::memset(total, 0, columns * sizeof *total);
    if (sum.result.data == nullptr) continue;
    kernels.narrow(total, nullptr, DType::kF32, columns,
                   static_cast<char*>(sum.result.data) +
                       t * sum.result.stride * bytes_of(sum.result.type),
                   sum.result.type);
  }
}

size_t scale_bytes(Scales type) {
  switch (type) {
    case Scales::kF32:
      return 4;
    case Scales::kBF16:
    case Scales::kF16:
      return 2;
    case Scales::kE4M3:
    case Scales::kE8M0:
      return 1;
    case Scales::kNone:
      break;
  }
  return 0;
}

template <typename T>
void advance(const T*& memory, size_t bytes) {
  if (memory == nullptr) return;
  memory = reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(memory) + bytes);
}

// Lets a weight begin `blocks` of 32 columns, and as many groups as are in them, later in memory.
// Of ggml's blocks they are whole ones.
void skip_blocks(Weight& w, size_t blocks) {
  if (w.packing == Packing::kBlocks) {
    const BlockShape shape = block_shape(w.code);
    const size_t own = blocks * kPanelBlock / shape.numbers;
    advance(w.data, own * shape.words() * sizeof(uint32_t) * kPanelRows);
    if (shape.takes_scale()) advance(w.scales, own * sizeof(uint16_t) * kPanelRows);
    return;
  }
  const size_t numbers = blocks * kPanelBlock / w.tile_columns * kPanelRows;
  advance(w.data, blocks * kPanelBlock * kPanelRows / 2);
  advance(w.scales, numbers * scale_bytes(w.scale_type));
  advance(w.minima, numbers * scale_bytes(w.scale_type));
  advance(w.zeros, numbers);
}

}  // namespace

Expert rest_of(const Expert& expert, size_t skipped, Weight (&weights)[3]) {
  Expert rest = expert;
  Projection* projections[] = {&rest.gate, &rest.up, &rest.down};
  for (size_t i = 0; i < 3; ++i) {
    Projection& projection = *projections[i];
    Weight& w = weights[i] = *projection.weight;
    projection.weight = &w;
    if (i == 2) {
      if (w.panel_columns == 0) w.panel_columns = w.columns;
      w.columns -= skipped;
      skip_blocks(w, skipped / kPanelBlock);
    } else {
      const size_t columns = w.panel_columns != 0 ? w.panel_columns : w.columns;
      w.rows -= skipped;
      skip_blocks(w, skipped / kPanelRows * (columns / kPanelBlock));
      if (projection.bias != nullptr) {
        const auto* bias = static_cast<const char*>(projection.bias);
        projection.bias = bias + skipped * bytes_of(projection.bias_type);
      }
    }
  }
  return rest;
}

void routed_experts(const Expert* experts, size_t count, const ExpertChoice& routing,
                    const ConstMatrix& x, Activation activation, const ExpertSum& sum,
                    size_t threads) {
  const Grouping grouping(experts, count, routing, x.rows);
  if (grouping.shares.empty()) return add_nothing(sum, x.rows);
  ExpertCall call{};
  call.routing = &routing;
  call.x = &x;
  call.activation = activation;
  call.sum = &sum;
  call.threads = std::max<size_t>(1, threads);
  call.hidden = grouping.shares[0].expert->down.weight->rows;
  call.grouping = &grouping;
  for (const Share& share : grouping.shares) {
    call.x_forms.add(*share.expert->gate.weight);
    call.x_forms.add(*share.expert->up.weight);
    call.product_forms.add(*share.expert->down.weight);
    call.width = std::max(call.width, share.expert->gate.weight->rows);
  }
  const size_t token_bytes = InputRows::bytes(x.rows, x.columns, call.x_forms);
  const std::vector<Range> ranges = split(call, grouping.shares);
  size_t most = 0;
  for (const Range& range : ranges) most = std::max(most, range.bytes);
  {
    // Grows the caller's memory once for all that follows.
    Scratch all(token_bytes + most + Batch::thread_bytes(call) + 1024);
  }
  Scratch scratch(token_bytes);
  call.tokens = InputRows(x.rows, x.columns, call.x_forms, x.type, scratch);
  for (const Range& range : ranges) {
    Scratch memory(range.bytes);
    const bool first = &range == &ranges.front(), last = &range == &ranges.back();
    Batch batch(call, grouping.shares.data() + range.first, range.count, first, last, memory);
    batch.run();
  }
}

}  // namespace hmt
