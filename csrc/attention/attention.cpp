// Shares out attention: tiles of rows for each KV head, long contexts in chunks.
#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "attention/kernels.h"
#include "base/scratch.h"
#include "base/thread_pool.h"

namespace hmt {
namespace {

// Chunks of positions are leaves of a tree with eight branches, whose nodes begin at multiples of
// their size.  A row is summed up along it, so its bits depend neither on the other rows of its step
// nor on which thread computes which nodes.
constexpr size_t kBranchBits = 3;
// Nodes for each thread, so that none waits long for the last: a machine's cores are not equally fast.
constexpr size_t kItemsPerThread = 4;
// Heads that are computed together, page by page, where that leaves so many chunks.  On 16 Intel
// cores, of pages in memory: 4 heads read bf16 at 75% of the RAM rate, 2 or 8 at 71%, 1 at 66%.
constexpr size_t kHeadsTogether = 4;
constexpr size_t kLeastItems = 64;
// Products below which one thread is as fast: some microseconds.
constexpr size_t kLeastShared = size_t{1} << 17;
// Numbers that are written to pages by one thread, as waking another takes longer.
constexpr size_t kLeastAppend = size_t{32} << 10;

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

size_t partial_floats(const Tile& tile) {
  return ceil_div(tile.heads * tile.rows * (padded_width(tile.pages->layout) + 2), 16) * 16;
}

Partial partial_at(float* memory, const Tile& tile) {
  const size_t rows = tile.heads * tile.rows;
  float* tops = memory + rows * padded_width(tile.pages->layout);
  return {memory, tops, tops + rows};
}

// Positions of a node.
size_t node_tokens(size_t level) { return kChunkTokens << (kBranchBits * level); }

// A tile, and the nodes of one level that its positions are in: an item is one of them.
struct Task {
  Tile tile;
  size_t level = 0, first = 0, last = 0;
  size_t first_item = 0;
  float* partials = nullptr;                 // of all nodes, where there are several
  std::atomic<uint32_t>* pending = nullptr;  // of all nodes above: branches not computed yet

  size_t nodes() const { return last - first + 1; }
  // What an item is computed in: partials of each level up to its own, beside the kernel's memory.
  size_t work_floats() const { return (level + 1) * partial_floats(tile); }
  size_t work_bytes(size_t kernel_bytes) const {
    return Scratch::round(kernel_bytes) + Scratch::round(work_floats() * sizeof(float));
  }
  // Into at least `wanted` nodes, or the most there are, and then as few as that allows.
  void divide(size_t wanted) {
    for (level = 0; tile.end > node_tokens(level);) ++level;
    place();
    while (nodes() < wanted && level > 0) {
      --level;
      place();
    }
  }
  // Calls each(branches) for all nodes above those of the items, from level to level.
  template <typename Each>
  void above(const Each& each) const {
    for (size_t from = first, to = last; from != to; from >>= kBranchBits, to >>= kBranchBits) {
      for (size_t node = from >> kBranchBits; node <= to >> kBranchBits; ++node) {
        const size_t begin = node << kBranchBits, end = begin + (size_t{1} << kBranchBits);
        each(std::min(end, to + 1) - std::max(begin, from));
      }
    }
  }

 private:
  void place() {
    first = tile.begin / node_tokens(level);
    last = tile.begin == tile.end ? first : (tile.end - 1) / node_tokens(level);
  }
};

class Plan {
 public:
  Plan(const Pages& pages, const PagedRun* runs, size_t count, const HeadRows& query,
       size_t q_heads, const AttentionOptions& options, size_t threads) {
    const size_t heads = pages.layout.heads, group = q_heads / heads;
    for (size_t i = 0; i < count; ++i) {
      const size_t rows = runs[i].length * group, tiles = ceil_div(rows, kTileRows);
      // The last tiles see most and come first, so that none is left when the others are done.
      for (size_t t = tiles; t-- > 0;) {
        const size_t first = t * kTileRows, some = std::min(kTileRows, rows - first);
        Tile tile{&pages, runs + i, &query, &options, 0, 1, group, first, some, 0, 0, 0};
        see(tile);
        const size_t most = tiles * ceil_div(tile.end - tile.begin, kChunkTokens);
        size_t each = std::min({heads, kTileRows / some, kHeadsTogether});
        while (each > 1 && most * ceil_div(heads, each) < kLeastItems) each = ceil_div(each, 2);
        for (; tile.kv_head < heads; tile.kv_head += each) {
          tile.heads = std::min(each, heads - tile.kv_head);
          tasks_.push_back(Task{tile});
          products_ += products_of(tile);
        }
      }
    }
    if (products_ < kLeastShared) threads = 1;
    threads_ = threads;
    for (Task& task : tasks_) divide(task);
  }

  size_t items() const { return items_; }
  size_t threads() const { return threads_; }
  size_t item_bytes(size_t kernel_bytes) const {
    size_t most = 0;
    for (const Task& task : tasks_) most = std::max(most, task.work_bytes(kernel_bytes));
    return most;
  }
  size_t bytes() const {
    return Scratch::round(floats_ * sizeof(float)) + counts_ * sizeof(std::atomic<uint32_t>);
  }

  void place(Scratch& scratch) {
    float* next = scratch.take<float>(floats_);
    auto* pending = scratch.take<std::atomic<uint32_t>>(counts_);
    for (Task& task : tasks_) {
      if (task.nodes() == 1) continue;
      task.partials = next;
      next += task.nodes() * partial_floats(task.tile);
      task.pending = pending;
      task.above([&](size_t branches) {
        new (pending++) std::atomic<uint32_t>(static_cast<uint32_t>(branches));
      });
    }
  }

  const Task& task_of(size_t item) const {
    const auto after = std::upper_bound(
        tasks_.begin(), tasks_.end(), item,
        [](size_t wanted, const Task& task) { return wanted < task.first_item; });
    return *(after - 1);
  }

 private:
  // Which positions the tile's rows see.
  static void see(Tile& tile) {
    const size_t window = tile.options->window, start = tile.run->start;
    const size_t first = start + tile.first_row / tile.group;  // position of the first row
    const size_t seen = window != 0 && first + 1 > window ? first + 1 - window : 0;
    tile.begin = seen / kPageTokens * kPageTokens;
    tile.end = std::min(start + (tile.first_row + tile.rows - 1) / tile.group + 1, tile.run->seen);
    tile.begin = std::min(tile.begin, tile.end);
  }

  static size_t products_of(const Tile& tile) {
    const PageLayout& layout = tile.pages->layout;
    return tile.heads * tile.rows * (tile.end - tile.begin) * (layout.key_dim + layout.value_dim);
  }

  // By what share of all products the task has.
  void divide(Task& task) {
    const auto share = static_cast<double>(products_of(task.tile)) /
                       static_cast<double>(std::max<size_t>(1, products_));
    const auto wanted = share * static_cast<double>(threads_ * kItemsPerThread);
    task.divide(threads_ == 1 ? 1 : static_cast<size_t>(wanted) + 1);
    task.first_item = items_;
    items_ += task.nodes();
    if (task.nodes() == 1) return;
    floats_ += task.nodes() * partial_floats(task.tile);
    task.above([&](size_t) { ++counts_; });
  }

  std::vector<Task> tasks_;
  size_t items_ = 0, floats_ = 0, counts_ = 0, products_ = 0, threads_ = 1;
};

// One thread's node, computed chunk after chunk.
struct NodeSum {
  const Tile& tile;
  uint8_t* work;
  float* branches;  // partials of each level below: of a branch that is not its node's first
  bool prepared = false;

  // `sum` becomes the partial of the positions [begin, end) of a node.
  void add_up(size_t level, size_t begin, size_t end, const Partial& sum) {
    const AttentionKernels& kernels = active(attention_kernels_tables());
    if (level == 0) {
      Tile chunk = tile;
      chunk.begin = begin;
      chunk.end = end;
      kernels.attend(chunk, sum, prepared, work);
      prepared = true;
      return;
    }
    const size_t size = node_tokens(level - 1);
    const Partial other = partial_at(branches + (level - 1) * partial_floats(tile), tile);
    size_t next = std::min(end, (begin / size + 1) * size);
    add_up(level - 1, begin, next, sum);
    for (size_t at = next; at < end; at = next) {
      next = std::min(end, at + size);
      add_up(level - 1, at, next, other);
      kernels.merge(tile, sum, other);
    }
  }
};

bool comes_last(std::atomic<uint32_t>& pending) {
  return pending.fetch_sub(1, std::memory_order_acq_rel) == 1;
}

// The thread that computes a node's last branch adds all up, in the order of positions, and goes on to the
// node above.  Whether the whole task is done then.
bool climb(const Task& task, size_t node) {
  const auto partial = [&](size_t i, size_t shift) {
    const size_t leaf = std::max(task.first, i << shift);  // a node's partial is its first leaf's
    const size_t at = (leaf - task.first) * partial_floats(task.tile);
    return partial_at(task.partials + at, task.tile);
  };
  std::atomic<uint32_t>* pending = task.pending;
  for (size_t shift = 0; task.first >> shift != task.last >> shift; shift += kBranchBits) {
    const size_t above = shift + kBranchBits, parent = node >> above;
    const size_t first_parent = task.first >> above;
    if (!comes_last(pending[parent - first_parent])) return false;
    pending += (task.last >> above) - first_parent + 1;
    const size_t begin = std::max(parent << kBranchBits, task.first >> shift);
    const size_t end = std::min((parent + 1) << kBranchBits, (task.last >> shift) + 1);
    for (size_t i = begin + 1; i < end; ++i) {
      const AttentionKernels& kernels = active(attention_kernels_tables());
      kernels.merge(task.tile, partial(begin, shift), partial(i, shift));
    }
  }
  return true;
}

void compute(const Task& task, size_t item, size_t q_heads, const AttentionResult& result,
             size_t work_bytes) {
  Tile tile = task.tile;
  const size_t node = task.first + item, size = node_tokens(task.level);
  tile.begin = std::max(tile.begin, node * size);
  tile.fetched = tile.end = std::min(tile.end, (node + 1) * size);
  Scratch scratch(task.work_bytes(work_bytes));
  NodeSum sum{tile, scratch.take<uint8_t>(work_bytes), scratch.take<float>(task.work_floats())};
  const size_t floats = partial_floats(tile);
  const bool alone = task.nodes() == 1;
  float* memory = alone ? sum.branches + task.level * floats : task.partials + item * floats;
  sum.add_up(task.level, tile.begin, tile.end, partial_at(memory, tile));
  if (!alone && !climb(task, node)) return;
  const Partial all = partial_at(alone ? memory : task.partials, tile);
  active(attention_kernels_tables()).finish(task.tile, all, q_heads, result);
}

}  // namespace

void attend(const Pages& pages, const PagedRun* runs, size_t count, const HeadRows& query,
            size_t q_heads, const AttentionOptions& options, const AttentionResult& result,
            size_t threads) {
  Plan plan(pages, runs, count, query, q_heads, options, threads);
  const size_t work = active(attention_kernels_tables()).work_bytes(pages.layout);
  // Grows this thread's memory while nothing of it is in use: `compute` needs some on top.
  { Scratch room(plan.bytes() + plan.item_bytes(work) + 1024); }
  Scratch scratch(plan.bytes() + 128);
  plan.place(scratch);
  share(plan.items(), 1, plan.threads(), [&](size_t begin, size_t end) {
    for (size_t item = begin; item < end; ++item) {
      const Task& task = plan.task_of(item);
      compute(task, item - task.first_item, q_heads, result, work);
    }
  });
}

void page_masses(const Pages& pages, const PagedRun& run, size_t count, const HeadRows& query,
                 size_t q_heads, const AttentionOptions& options, const float* logs, float* masses,
                 size_t threads) {
  constexpr size_t kPages = kChunkTokens / kPageTokens;  // of an item
  const size_t heads = pages.layout.heads, group = q_heads / heads;
  const AttentionKernels& kernels = active(attention_kernels_tables());
  const size_t work_bytes = Scratch::round(kernels.work_bytes(pages.layout));
  std::fill(masses, masses + count, 0.0f);
  share(ceil_div(count, kPages), 1, threads, [&](size_t begin, size_t end) {
    Scratch scratch(work_bytes);
    uint8_t* work = scratch.take<uint8_t>(work_bytes);
    for (size_t item = begin; item < end; ++item) {
      const size_t first = item * kPages, last = std::min(count, first + kPages);
      for (size_t head = 0; head < heads; ++head) {
        for (size_t row = 0; row < group; row += kTileRows) {
          const Tile tile{&pages, &run, &query, &options, head, 1, group, row,
                          std::min(kTileRows, group - row), first * kPageTokens,
                          last * kPageTokens, last * kPageTokens};
          kernels.masses(tile, logs + head * group + row, masses + first, work);
        }
      }
      for (size_t page = first; page < last; ++page) masses[page] /= static_cast<float>(q_heads);
    }
  });
}

namespace {

HeadRows from_token(const HeadRows& rows, size_t token) {
  const size_t bytes = token * rows.token_stride * bytes_of(rows.type);
  return {static_cast<const char*>(rows.data) + bytes, rows.type, rows.token_stride,
          rows.head_stride};
}

// Tokens of a run that lie in one page.
struct Segment {
  const PagedRun* run;
  size_t first, end;
};

}  // namespace

void append(const Pages& pages, const PagedRun* runs, size_t count, const HeadRows& key,
            const HeadRows& value, size_t threads) {
  const PageLayout& layout = pages.layout;
  std::vector<Segment> segments;
  size_t tokens = 0;
  for (size_t i = 0; i < count; ++i) {
    const PagedRun& run = runs[i];
    tokens += run.length;
    for (size_t first = 0; first < run.length;) {
      const size_t room = kPageTokens - (run.start + first) % kPageTokens;
      const size_t end = std::min(run.length, first + room);
      segments.push_back({&run, first, end});
      first = end;
    }
  }
  const size_t width = std::max(layout.key_dim, layout.value_dim) + kInt4Group;
  const PageKernels& kernels = active(page_kernels_tables());
  const bool few = tokens * layout.heads * (layout.key_dim + layout.value_dim) < kLeastAppend;
  share(segments.size(), 1, few ? 1 : threads, [&](size_t begin, size_t end) {
    Scratch scratch(width * sizeof(float));
    float* row = scratch.take<float>(width);
    for (size_t i = begin; i < end; ++i) {
      const Segment& s = segments[i];
      const size_t position = s.run->start + s.first, token = s.run->offset + s.first;
      const auto number = static_cast<size_t>(s.run->table[position / kPageTokens]);
      uint8_t* page = pages.data + number * pages.stride;
      kernels.write(layout, page, position % kPageTokens, s.end - s.first, from_token(key, token),
                    layout.latent ? key : from_token(value, token), row);
    }
  });
}

}  // namespace hmt
