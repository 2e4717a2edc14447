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

// A run with few rows is cut into at most so many tiles and chunks, none shorter than kLeastChunk
// positions: enough for the threads of a large machine, and at most a few MiB of partial results.
constexpr size_t kItemsPerRun = 128;
// Heads that are computed together, page by page, where that leaves so many chunks.  On 16 Intel
// cores, of pages in memory: 4 heads read bf16 at 75% of the RAM rate, 2 or 8 at 71%, 1 at 66%.
constexpr size_t kHeadsTogether = 4;
constexpr size_t kLeastItems = 64;
// Chunks that are merged at a time: all heads of 128 chunks are 2 MiB, for which the others would
// wait if whoever comes last merged them all.
constexpr size_t kMergedChunks = 8;
constexpr size_t kLeastChunk = 256;
// Products below which one thread is as fast: some microseconds.
constexpr size_t kLeastShared = size_t{1} << 17;
// Numbers that are written to pages by one thread, as waking another takes longer.
constexpr size_t kLeastAppend = size_t{32} << 10;

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// A tile with the chunks of its positions.
struct Task {
  Tile tile;
  size_t chunk, chunks;  // positions in a chunk, and their number (1 where nothing is seen)
  size_t first_item;
  float* partials;                 // of all chunks, where there are several
  std::atomic<uint32_t>* pending;  // of each group of chunks: not computed yet; and groups
  size_t groups() const { return ceil_div(chunks, kMergedChunks); }
};

size_t partial_floats(const Tile& tile) {
  return tile.heads * tile.rows * (padded_width(tile.pages->layout) + 2);
}

Partial partial_at(float* memory, const Tile& tile) {
  const size_t rows = tile.heads * tile.rows;
  float* tops = memory + rows * padded_width(tile.pages->layout);
  return {memory, tops, tops + rows};
}

class Plan {
 public:
  Plan(const Pages& pages, const PagedRun* runs, size_t count, const HeadRows& query,
       size_t q_heads, const AttentionOptions& options) {
    const size_t heads = pages.layout.heads, group = q_heads / heads;
    for (size_t i = 0; i < count; ++i) {
      const size_t rows = runs[i].length * group, tiles = ceil_div(rows, kTileRows);
      // The last tiles see most and come first, so that none is left when the others are done.
      for (size_t t = tiles; t-- > 0;) {
        const size_t first = t * kTileRows, some = std::min(kTileRows, rows - first);
        Tile tile{&pages, runs + i, &query, &options, 0, 1, group, first, some, 0, 0};
        see(tile);
        const size_t most = tiles * ceil_div(tile.end - tile.begin, kLeastChunk);
        size_t each = std::min({heads, kTileRows / some, kHeadsTogether});
        while (each > 1 && most * ceil_div(heads, each) < kLeastItems) each = ceil_div(each, 2);
        for (; tile.kv_head < heads; tile.kv_head += each) {
          tile.heads = std::min(each, heads - tile.kv_head);
          add(tile, std::max<size_t>(1, kItemsPerRun / (tiles * ceil_div(heads, each))));
        }
      }
    }
  }

  size_t items() const { return items_; }
  size_t products() const { return products_; }
  size_t bytes() const {
    return Scratch::round(floats_ * sizeof(float)) + counts_ * sizeof(std::atomic<uint32_t>);
  }

  void place(Scratch& scratch) {
    float* next = scratch.take<float>(floats_);
    auto* pending = scratch.take<std::atomic<uint32_t>>(counts_);
    for (Task& task : tasks_) {
      if (task.chunks == 1) continue;
      task.partials = next;
      next += task.chunks * partial_floats(task.tile);
      task.pending = pending;
      const size_t groups = task.groups();
      for (size_t first = 0; first < task.chunks; first += kMergedChunks) {
        const size_t chunks = std::min(kMergedChunks, task.chunks - first);
        new (pending++) std::atomic<uint32_t>(static_cast<uint32_t>(chunks));
      }
      new (pending++) std::atomic<uint32_t>(static_cast<uint32_t>(groups));
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

  void add(const Tile& tile, size_t most_chunks) {
    const size_t span = tile.end - tile.begin;
    const size_t wanted = std::max<size_t>(1, std::min(most_chunks, ceil_div(span, kLeastChunk)));
    const size_t chunk =
        ceil_div(std::max<size_t>(1, ceil_div(span, wanted)), kBlockTokens) * kBlockTokens;
    const size_t chunks = std::max<size_t>(1, ceil_div(span, chunk));
    tasks_.push_back({tile, chunk, chunks, items_, nullptr, nullptr});
    items_ += chunks;
    const PageLayout& layout = tile.pages->layout;
    products_ += tile.heads * tile.rows * span * (layout.key_dim + layout.value_dim);
    if (chunks == 1) return;
    floats_ += chunks * partial_floats(tile);
    counts_ += tasks_.back().groups() + 1;
  }

  std::vector<Task> tasks_;
  size_t items_ = 0, floats_ = 0, counts_ = 0, products_ = 0;
};

// The partials of chunks [first, end), those that are `step` apart, become that of the first one.
Partial merge_chunks(const Task& task, size_t first, size_t end, size_t step) {
  std::vector<Partial> parts;
  for (size_t i = first; i < end; i += step) {
    parts.push_back(partial_at(task.partials + i * partial_floats(task.tile), task.tile));
  }
  active(attention_kernels_tables()).merge(task.tile, parts.data(), parts.size());
  return parts[0];
}

bool comes_last(std::atomic<uint32_t>& pending) {
  return pending.fetch_sub(1, std::memory_order_acq_rel) == 1;
}

void compute(const Task& task, size_t chunk, size_t q_heads, const AttentionResult& result,
             size_t work_bytes) {
  const AttentionKernels& kernels = active(attention_kernels_tables());
  Tile tile = task.tile;
  tile.begin += chunk * task.chunk;
  tile.end = std::min(tile.end, tile.begin + task.chunk);
  const size_t floats = partial_floats(tile);
  Scratch scratch(work_bytes + Scratch::round(floats * sizeof(float)));
  uint8_t* work = scratch.take<uint8_t>(work_bytes);
  if (task.chunks == 1) {
    const Partial partial = partial_at(scratch.take<float>(floats), tile);
    kernels.attend(tile, partial, work);
    kernels.finish(tile, partial, q_heads, result);
    return;
  }
  kernels.attend(tile, partial_at(task.partials + chunk * floats, tile), work);
  // Whoever comes last merges: the chunks of a group, and then groups, always in the order of
  // positions.
  const size_t group = chunk / kMergedChunks, first = group * kMergedChunks;
  if (!comes_last(task.pending[group])) return;
  merge_chunks(task, first, std::min(task.chunks, first + kMergedChunks), 1);
  if (!comes_last(task.pending[task.groups()])) return;
  kernels.finish(task.tile, merge_chunks(task, 0, task.chunks, kMergedChunks), q_heads, result);
}

}  // namespace

void attend(const Pages& pages, const PagedRun* runs, size_t count, const HeadRows& query,
            size_t q_heads, const AttentionOptions& options, const AttentionResult& result,
            size_t threads) {
  Plan plan(pages, runs, count, query, q_heads, options);
  const PageLayout& layout = pages.layout;
  const size_t work = Scratch::round(active(attention_kernels_tables()).work_bytes(layout));
  const size_t tile = kTileRows * (padded_width(layout) + 2) * sizeof(float);
  // Grows this thread's memory while nothing of it is in use: `compute` needs some on top.
  { Scratch room(plan.bytes() + work + tile + 1024); }
  Scratch scratch(plan.bytes() + 128);
  plan.place(scratch);
  if (plan.products() < kLeastShared) threads = 1;
  share(plan.items(), 1, threads, [&](size_t begin, size_t end) {
    for (size_t item = begin; item < end; ++item) {
      const Task& task = plan.task_of(item);
      compute(task, item - task.first_item, q_heads, result, work);
    }
  });
}

void page_masses(const Pages& pages, const PagedRun& run, size_t count, const HeadRows& query,
                 size_t q_heads, const AttentionOptions& options, const float* logs, float* masses,
                 size_t threads) {
  constexpr size_t kPages = kLeastChunk / kPageTokens;  // of an item
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
                          last * kPageTokens};
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
