#include "experts/batch.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/thread_pool.h"
#include "linear/block_shapes.h"
#include "linear/inputs.h"

namespace hmt {
namespace {

// Weights of one item: enough to pay for handing it out, little enough to balance.
constexpr size_t kItemBytes = size_t{96} << 10;
// Rows of an item with many tokens: its results stay in L2.
constexpr size_t kManyTokensRows = 64;
constexpr size_t kMostRows = 256;
// Tokens that an item's rows are multiplied with at a time.
constexpr size_t kTokenChunk = 256;
constexpr size_t kPrepareTokens = 4;

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

size_t arranged_bytes(const Weight& weight, size_t tokens, DType type) {
  return linear_kernels(weight).arranged_bytes(weight, tokens, type == DType::kBF16);
}

void await(const std::atomic<uint32_t>& done, uint32_t wanted) {
  for (uint32_t tries = 0; done.load(std::memory_order_acquire) < wanted; ++tries) {
    // A thread that does not run while others compute may need this CPU.
    if (tries >= 4096) std::this_thread::yield();
#ifdef HMT_X86
    else __builtin_ia32_pause();
#endif
  }
}

void finish(std::atomic<uint32_t>& done) { done.fetch_add(1, std::memory_order_release); }

const char* bias_at(const Projection& projection, size_t row) {
  const auto* bias = static_cast<const char*>(projection.bias);
  return bias == nullptr ? nullptr : bias + row * bytes_of(projection.bias_type);
}

// Tokens [begin, begin + count) of an expert, with what was arranged for them.
template <typename Arranged>
Inputs chunk_of(const Weight& weight, const Inputs& all, const Arranged& arranged, size_t begin,
                size_t count) {
  Inputs some = inputs_of(weight, slice(all, begin, count));
  some.arranged = arranged.block_bytes == 0
                      ? nullptr
                      : arranged.memory + begin / kTokenBlock * arranged.block_bytes;
  return some;
}

}  // namespace

size_t Batch::bytes(const ExpertCall& call, const Share& share) {
  const DType type = call.x->type;
  const Expert& e = *share.expert;
  const size_t blocks = ceil_div(share.count, kTokenBlock), width = bytes_of(type);
  size_t arranged = 0;
  for (const Projection* p : {&e.gate, &e.up, &e.down}) {
    arranged += Scratch::round(blocks * arranged_bytes(*p->weight, share.count, type));
  }
  // Rows of several experts are one piece, so rounding it up is counted more often than needed.
  return arranged + InputRows::bytes(share.count, call.x->columns, call.x_forms) +
         InputRows::bytes(share.count, call.width, call.product_forms) +
         Scratch::round(share.count * call.width * width) +
         Scratch::round(share.count * call.hidden * width);
}

size_t Batch::thread_bytes(const ExpertCall& call) {
  const size_t results = kTokenChunk * kMostRows * sizeof(float);
  const size_t columns = std::max(call.x->columns, call.width);
  return 2 * results + Scratch::round(columns * sizeof(float));
}

Batch::Batch(const ExpertCall& call, const Share* shares, size_t count, bool first, bool last,
             Scratch& scratch)
    : call_(call),
      shares_(shares),
      count_(count),
      first_pair_(shares[0].first),
      pairs_(shares[count - 1].first + shares[count - 1].count - first_pair_),
      first_(first),
      last_(last),
      gathered_(pairs_, call.x->columns, call.x_forms, call.x->type, scratch),
      products_(pairs_, call.width, call.product_forms, call.x->type, scratch),
      product_numbers_(scratch.take<char>(pairs_ * call.width * bytes_of(call.x->type))),
      outputs_(scratch.take<char>(pairs_ * call.hidden * bytes_of(call.x->type))),
      progress_(count) {
  plan_rows();
  parts_.reserve(count);
  for (size_t i = 0; i < count; ++i) parts_.push_back(make_part(shares[i], scratch));
  reduced_ = std::vector<std::atomic<uint32_t>>(ceil_div(call.hidden, reduce_rows_));
  if (first) prepare_items_ = static_cast<uint32_t>(ceil_div(call.x->rows, kPrepareTokens));
  enqueue();
}

void Batch::plan_rows() {
  size_t expand = 1, reduce = 1, most = 0;
  for (size_t i = 0; i < count_; ++i) {
    const Expert& e = *shares_[i].expert;
    expand = std::max(expand, row_bytes(*e.gate.weight) + row_bytes(*e.up.weight));
    reduce = std::max(reduce, row_bytes(*e.down.weight));
    most = std::max(most, shares_[i].count);
  }
  const size_t limit = most < kTokenBlock ? kMostRows : kManyTokensRows;
  const auto rows_of = [&](size_t bytes, size_t all_rows) {
    size_t rows = std::clamp(kItemBytes / bytes / kPanelRows * kPanelRows, kPanelRows, limit);
    // Four items a thread keep all of them busy until the end.
    while (rows > kPanelRows && count_ * ceil_div(all_rows, rows) < 4 * call_.threads) {
      rows = ceil_div(rows / 2, kPanelRows) * kPanelRows;
    }
    return rows;
  };
  expand_rows_ = rows_of(expand, call_.width);
  reduce_rows_ = rows_of(reduce, call_.hidden);
}

Batch::Part Batch::make_part(const Share& share, Scratch& scratch) const {
  const Expert& e = *share.expert;
  const size_t blocks = ceil_div(share.count, kTokenBlock);
  Part part{};
  part.expert = &e;
  part.first = share.first - first_pair_;
  part.count = share.count;
  part.gathered = share.count != call_.x->rows;
  part.x = part.gathered ? gathered_.view(part.first, part.count)
                         : call_.tokens.view(0, part.count);
  part.product = products_.view(part.first, part.count);
  part.product.columns = e.down.weight->columns;
  const auto arranged = [&](const Weight& weight) {
    Arranged made;
    made.block_bytes = arranged_bytes(weight, share.count, call_.x->type);
    if (made.block_bytes != 0) made.memory = scratch.take<uint8_t>(blocks * made.block_bytes);
    return made;
  };
  part.gate = arranged(*e.gate.weight);
  part.up = same_arrangement(*e.gate.weight, *e.up.weight) ? part.gate : arranged(*e.up.weight);
  part.down = arranged(*e.down.weight);
  const bool gathers =
      part.gathered || part.gate.block_bytes != 0 || part.up.block_bytes != 0;
  part.gather_items = gathers ? static_cast<uint32_t>(blocks) : 0;
  part.expand_items = static_cast<uint32_t>(ceil_div(e.gate.weight->rows, expand_rows_));
  part.round_items = static_cast<uint32_t>(blocks);
  part.reduce_items = static_cast<uint32_t>(ceil_div(call_.hidden, reduce_rows_));
  return part;
}

void Batch::append(Step step, size_t part, uint32_t items) {
  if (items == 0) return;
  segments_.push_back({step, part, items_});
  items_ += items;
}

void Batch::enqueue() {
  // A step comes so much later than the one before it that this one is done by then, even where a
  // thread lost its CPU for a while; what it reads is still in L2 or L3.
  const size_t lag = 2 + ceil_div(4 * call_.threads, std::max<size_t>(1, parts_[0].expand_items));
  append(Step::kPrepare, 0, prepare_items_);
  append(Step::kGather, 0, parts_[0].gather_items);
  for (size_t i = 0; i < count_ + lag + 1; ++i) {
    if (i + 1 < count_) append(Step::kGather, i + 1, parts_[i + 1].gather_items);
    if (i < count_) append(Step::kExpand, i, parts_[i].expand_items);
    if (i >= lag && i - lag < count_) append(Step::kRound, i - lag, parts_[i - lag].round_items);
    if (i > lag) append(Step::kReduce, i - lag - 1, parts_[i - lag - 1].reduce_items);
  }
}

void Batch::run() {
  share(call_.threads, 1, call_.threads, [this](size_t, size_t) { drain(); });
}

void Batch::drain() {
  Scratch scratch(thread_bytes(call_));
  const size_t results = kTokenChunk * kMostRows;
  const Worker worker{scratch.take<float>(results), scratch.take<float>(results),
                      scratch.take<float>(std::max(call_.x->columns, call_.width))};
  size_t at = 0;
  while (true) {
    const size_t item = next_.fetch_add(1, std::memory_order_relaxed);
    if (item >= items_) return;
    while (at + 1 < segments_.size() && segments_[at + 1].first_item <= item) ++at;
    const Segment& segment = segments_[at];
    run_item(segment.step, segment.part, item - segment.first_item, worker);
  }
}

void Batch::run_item(Step step, size_t index, size_t item, const Worker& worker) {
  const Part& part = parts_[index];
  Progress& progress = progress_[index];
  switch (step) {
    case Step::kPrepare:
      prepare(item, worker);
      return finish(prepared_);
    case Step::kGather:
      await(prepared_, prepare_items_);
      gather(part, item);
      return finish(progress.gathered);
    case Step::kExpand:
      await(prepared_, prepare_items_);
      await(progress.gathered, part.gather_items);
      expand(part, item, worker);
      return finish(progress.expanded);
    case Step::kRound:
      await(progress.expanded, part.expand_items);
      round(part, item, worker);
      return finish(progress.rounded);
    case Step::kReduce:
      await(progress.rounded, part.round_items);
      reduce(part, item, worker);
      // Whoever comes last sees what all others wrote.
      if (reduced_[item].fetch_add(1, std::memory_order_acq_rel) + 1 == count_) add_up(item);
      return;
  }
}

void Batch::prepare(size_t item, const Worker& worker) {
  const ConstMatrix& x = *call_.x;
  const size_t end = std::min(x.rows, (item + 1) * kPrepareTokens);
  for (size_t t = item * kPrepareTokens; t < end; ++t) {
    const char* row = static_cast<const char*>(x.data) + t * x.stride * bytes_of(x.type);
    call_.tokens.fill(t, row, worker.wide);
  }
}

void Batch::gather(const Part& part, size_t block) {
  const size_t first = block * kTokenBlock, end = std::min(part.count, first + kTokenBlock);
  if (part.gathered) {
    for (size_t i = part.first + first; i < part.first + end; ++i) {
      gathered_.copy(i, call_.tokens, call_.grouping->tokens[first_pair_ + i]);
    }
  }
  const auto arrange = [&](const Projection& projection, const Arranged& arranged) {
    if (arranged.block_bytes == 0) return;
    linear_kernels(*projection.weight)
        .arrange(*projection.weight, inputs_of(*projection.weight, part.x), block,
                 arranged.memory + block * arranged.block_bytes);
  };
  arrange(part.expert->gate, part.gate);
  if (part.up.memory != part.gate.memory) arrange(part.expert->up, part.up);
}

void Batch::expand(const Part& part, size_t item, const Worker& worker) {
  const TokenKernels& tokens = active(token_kernels_tables());
  const ExpertKernels& kernels = active(expert_kernels_tables());
  const Projection &gate = part.expert->gate, &up = part.expert->up;
  const DType type = call_.x->type;
  const size_t first = item * expand_rows_;
  const size_t end = std::min(first + expand_rows_, gate.weight->rows), rows = end - first;
  const auto multiply = [&](const Projection& projection, const Inputs& some, float* out) {
    linear_kernels(*projection.weight).multiply(*projection.weight, some, first, end, out, rows);
    if (projection.bias == nullptr) return;
    for (size_t t = 0; t < some.tokens; ++t) {
      tokens.narrow(out + t * rows, bias_at(projection, first), projection.bias_type, rows,
                    out + t * rows, DType::kF32);
    }
  };
  const Pieces pieces(part.count, kTokenChunk);
  for (size_t i = 0; i < pieces.count; ++i) {
    const size_t begin = pieces.begin(i), count = pieces.begin(i + 1) - begin;
    multiply(gate, chunk_of(*gate.weight, part.x, part.gate, begin, count), worker.gate);
    multiply(up, chunk_of(*up.weight, part.x, part.up, begin, count), worker.up);
    for (size_t t = 0; t < count; ++t) {
      char* out = product_numbers_ +
                  ((part.first + begin + t) * call_.width + first) * bytes_of(type);
      kernels.gated(worker.gate + t * rows, worker.up + t * rows, rows, call_.activation, out,
                    type);
    }
  }
}

void Batch::round(const Part& part, size_t block, const Worker& worker) {
  const size_t first = block * kTokenBlock, end = std::min(part.count, first + kTokenBlock);
  // An expert narrower than others leaves its products' ends to those before it.
  const size_t width = bytes_of(call_.x->type), known = part.expert->gate.weight->rows;
  for (size_t i = part.first + first; i < part.first + end; ++i) {
    std::memset(product_numbers_ + (i * call_.width + known) * width, 0,
                (call_.width - known) * width);
    products_.fill(i, product_numbers_ + i * call_.width * bytes_of(call_.x->type), worker.wide);
  }
  const Weight& down = *part.expert->down.weight;
  if (part.down.block_bytes != 0) {
    linear_kernels(down).arrange(down, inputs_of(down, part.product), block,
                                 part.down.memory + block * part.down.block_bytes);
  }
}

void Batch::reduce(const Part& part, size_t item, const Worker& worker) {
  const TokenKernels& tokens = active(token_kernels_tables());
  const Projection& down = part.expert->down;
  const DType type = call_.x->type;
  const size_t first = item * reduce_rows_;
  const size_t end = std::min(first + reduce_rows_, call_.hidden), rows = end - first;
  const Pieces pieces(part.count, kTokenChunk);
  for (size_t i = 0; i < pieces.count; ++i) {
    const size_t begin = pieces.begin(i);
    const Inputs some = chunk_of(*down.weight, part.product, part.down, begin,
                                 pieces.begin(i + 1) - begin);
    linear_kernels(*down.weight).multiply(*down.weight, some, first, end, worker.gate, rows);
    for (size_t t = 0; t < some.tokens; ++t) {
      char* out = outputs_ + ((part.first + begin + t) * call_.hidden + first) * bytes_of(type);
      tokens.narrow(worker.gate + t * rows, bias_at(down, first), down.bias_type, rows, out, type);
    }
  }
}

void Batch::add_up(size_t item) {
  const ExpertSum& sum = *call_.sum;
  const ExpertKernels& kernels = active(expert_kernels_tables());
  const DType type = call_.x->type;
  const size_t first = item * reduce_rows_;
  const size_t rows = std::min(first + reduce_rows_, call_.hidden) - first;
  if (first_ && sum.fresh) {
    for (size_t t = 0; t < call_.x->rows; ++t) {
      std::memset(sum.total + t * sum.stride + first, 0, rows * sizeof(float));
    }
  }
  const Grouping& grouping = *call_.grouping;
  for (size_t i = 0; i < pairs_; ++i) {
    const size_t pair = first_pair_ + i;
    kernels.add_scaled(sum.total + grouping.tokens[pair] * sum.stride + first,
                       outputs_ + (i * call_.hidden + first) * bytes_of(type), type,
                       grouping.scales[pair], rows);
  }
  if (!last_ || sum.result.data == nullptr) return;
  for (size_t t = 0; t < call_.x->rows; ++t) {
    active(token_kernels_tables())
        .narrow(sum.total + t * sum.stride + first, nullptr, DType::kF32, rows,
                static_cast<char*>(sum.result.data) +
                    (t * sum.result.stride + first) * bytes_of(sum.result.type),
                sum.result.type);
  }
}

}  // namespace hmt
