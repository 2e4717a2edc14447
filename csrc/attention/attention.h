// Attention over keys and values in pages, and writing to them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/pages.h"
#include "base/dtype.h"

namespace hmt {

// Consecutive tokens of one sequence, at `offset` in the arrays of a step.  The first one stands at
// position `start`; position p is in page table[p / 16].  Tokens see the first `seen` positions at
// most, for parts of a context that lie elsewhere than the tokens themselves.
struct PagedRun {
  std::size_t offset, length, start;
  const int64_t* table;
  std::size_t seen = static_cast<std::size_t>(-1);
};

// Numbers [tokens, heads, dim]; strides in numbers, those of a row side by side.
struct HeadRows {
  const void* data;
  DType type;
  std::size_t token_stride, head_stride;
};

// Writes the tokens of all runs.  `value` is not read for latent layers.  Pages may not be shared
// by runs of a call.
void append(const Pages& pages, const PagedRun* runs, std::size_t count, const HeadRows& key,
            const HeadRows& value, std::size_t threads);

// scale     scores are query . key * scale
// window    position p sees (p - window, p]; 0 means all of 0 .. p
// softcap   scores become softcap * tanh(scores / softcap); 0 means they stay
// sinks     [q_heads] or null: a score that each row of the head also has, with no value
struct AttentionOptions {
  float scale;
  std::size_t window;
  float softcap;
  const float* sinks;
};

// out [tokens, q_heads, value_dim]; lse [tokens, q_heads] or null: the natural log of the sum of
// exponentials, the sink's included.
struct AttentionResult {
  void* out;
  DType type;
  float* lse;
};

// Causal attention of each run to its own positions, those of the run included.
// query [tokens, q_heads, key_dim]; q_heads is a multiple of the layout's heads.  A row that sees
// nothing has out 0 and lse -infinity (with a sink: the sink).
//
// Sums are f32.  Where the processor has VDPBF16PS and query and pages are bf16, products are made
// of bf16 numbers, weights rounded to bf16 before they meet values.  With VNNI, and pages of int8,
// or pages of int4 (not latent) and queries of bf16, queries are rounded to 15 bits and weights to
// 16 (with int4: 15).  A row's result depends on its position and what it sees, not on other rows of
// its run, other runs, the pages' places or `threads`: it is summed up along a tree of positions.
void attend(const Pages& pages, const PagedRun* runs, std::size_t count, const HeadRows& query,
            std::size_t q_heads, const AttentionOptions& options, const AttentionResult& result,
            std::size_t threads);

// masses[p]: what part of its attention the first token of `run` gives to page table[p], the mean
// over heads, for `count` whole pages that it sees.  logs [q_heads] are those of all that it sees.
// Of `options`, scale and softcap count.  Rounds as `attend` does, but for int4, which is exact.
void page_masses(const Pages& pages, const PagedRun& run, std::size_t count, const HeadRows& query,
                 std::size_t q_heads, const AttentionOptions& options, const float* logs,
                 float* masses, std::size_t threads);

}  // namespace hmt
