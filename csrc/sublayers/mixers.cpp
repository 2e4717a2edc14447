#include "sublayers/mixers.h"

#include <algorithm>
#include <cstring>

#include "base/scratch.h"
#include "base/thread_pool.h"
#include "fused/grain.h"
#include "fused/norm.h"
#include "sublayers/normed.h"

namespace hmt {
namespace {

// Pieces of memory for some tokens, all of one type.
class Rows {
 public:
  // numbers: of a token, over all pieces; pieces: how many at most
  Rows(DType type, size_t tokens, size_t numbers, size_t pieces)
      : row_(tokens * bytes_of(type)), scratch_(row_ * numbers + pieces * Scratch::round(1)) {}

  char* take(size_t width) { return scratch_.take<char>(row_ * width); }

 private:
  size_t row_;  // bytes of one number of each token
  Scratch scratch_;
};

size_t count_of(const Spans& spans) {
  size_t count = 0;
  for (const Span& span : spans) count += span.count;
  return count;
}

// The numbers of all spans: where they are if that is one span, else, or if rows may have no gap, in
// `room`.
ConstMatrix gather(const ConstMatrix& all, const Spans& spans, bool without_gaps, char* room) {
  const size_t width = bytes_of(all.type), count = count_of(spans);
  const auto* from = static_cast<const char*>(all.data);
  if (spans.size() == 1 && (!without_gaps || all.rows == 1)) {
    return {from + spans[0].first * width, all.type, all.rows, count, all.stride};
  }
  char* to = room;
  for (size_t t = 0; t < all.rows; ++t) {
    for (const Span& span : spans) {
      std::memcpy(to, from + (t * all.stride + span.first) * width, span.count * width);
      to += span.count * width;
    }
  }
  return const_rows(room, all.type, all.rows, count);
}

// x through another projection, if there is one.
ConstMatrix through(const std::optional<Projection>& projection, const ConstMatrix& x, char* room,
                    size_t threads) {
  if (!projection) return x;
  const size_t outputs = projection->weight->rows;
  linear(&*projection, 1, x, rows(room, x.type, x.rows, outputs), threads);
  return const_rows(room, x.type, x.rows, outputs);
}

size_t outputs_of(const std::optional<Projection>& projection) {
  return projection ? projection->weight->rows : 0;
}

// out [tokens, heads, dim] times the sigmoid of what lies behind each query of `heads`.
void gate_heads(const AttentionInputs& inputs, DType type, size_t tokens, const char* heads,
                char* out, size_t threads) {
  const size_t width = bytes_of(type), dim = inputs.dim, out_row = inputs.heads * dim;
  share(tokens, rows_per_grain(out_row), threads, [&](size_t begin, size_t end) {
    for (size_t t = begin; t < end; ++t) {
      char* own = out + t * out_row * width;
      const char* gate = heads + (t * inputs.row() + dim) * width;
      gated({type, Activation::kSigmoid, inputs.heads, dim, gate, inputs.query_stride(), own, dim,
             own, dim},
            1);
    }
  });
}

// The runs of a step with what is pending before each: tokens of the recurrence, which are more.
struct PendingRuns {
  explicit PendingRuns(StateRuns given) {
    for (size_t r = 0; r < given.count; ++r) {
      StateRun run = given.runs[r];
      run.offset += pending;
      run.length += run.pending;
      pending += run.pending;
      runs.push_back(run);
    }
  }

  std::vector<StateRun> runs;
  size_t pending = 0;
};

// Numbers of the tokens of `given`, behind those of a journal where there are some: in `room` then.
//
// first   where they begin in rows of the journal
ConstMatrix behind_pending(const ConstMatrix& given, const PendingRuns& all,
                           const StateJournal& journal, size_t first, char* room) {
  if (all.pending == 0) return given;
  const RecurrentKernels& kernels = active(recurrent_kernels_tables());
  const size_t width = bytes_of(given.type), count = given.columns;
  const char* from = static_cast<const char*>(given.data);
  char* to = room;
  for (const StateRun& run : all.runs) {
    for (size_t n = 0; n < run.pending; ++n, to += count * width) {
      kernels.convert(DType::kF32, journal.row(run.slot, n) + first, given.type, to, count);
    }
    for (size_t n = run.pending; n < run.length; ++n, to += count * width) {
      std::memcpy(to, from, count * width);
      from += given.stride * width;
    }
  }
  return const_rows(room, given.type, given.rows + all.pending, count);
}

// Leave the numbers of drafts in the journal, once nothing of it is pending any more.
void leave_drafts(const ConstMatrix& given, StateRuns runs, const StateJournal& journal,
                  size_t first) {
  const RecurrentKernels& kernels = active(recurrent_kernels_tables());
  for (size_t r = 0; r < runs.count; ++r) {
    const StateRun& run = runs.runs[r];
    // Without a journal, a run that does not advance is one of a rehearsal for a capture.
    for (size_t n = 0; n < std::min(run.drafts, journal.room); ++n) {
      const size_t token = run.offset + run.stays() + n;
      kernels.convert(given.type,
                      static_cast<const char*>(given.data) +
                          token * given.stride * bytes_of(given.type),
                      DType::kF32, journal.row(run.slot, n) + first, given.columns);
    }
  }
}

// product = activation(gate) times the norm of x, of a head's results of a run; gate and product are
// [tokens, heads, value_dim], and x the same of the run's own tokens; x and product without gaps.
void gate_results(const DeltaLayer& layer, DType type, const StateRun& run, size_t head,
                  const ConstMatrix& gate, const char* x, char* product) {
  const DeltaRule& sizes = layer.rule;
  const NormWeight& norm = layer.out_norm;
  const size_t dim = sizes.value_dim, row = sizes.values(), width = bytes_of(type);
  const size_t shared = sizes.heads / sizes.key_heads;
  const size_t place =
      layer.tiled ? head % shared * sizes.key_heads + head / shared : head;  // see `tiled`
  char* out = product + (run.offset * row + place * dim) * width;
  rms_norm({type, run.length, 1, dim, x + head * dim * width, row, dim, out,
            row, dim, norm.weight, norm.type, norm.eps, norm.offset, nullptr},
           1);
  const char* by =
      static_cast<const char*>(gate.data) + (run.offset * gate.stride + place * dim) * width;
  gated({type, layer.activation, run.length, dim, by, gate.stride, out, row, out, row}, 1);
}

}  // namespace

void mix(const AttentionLayer& layer, const StackStep& step, char* x, size_t threads) {
  const DType type = step.type;
  const AttentionInputs& inputs = layer.inputs;
  const size_t tokens = step.tokens, dim = inputs.dim, width = bytes_of(type);
  const size_t row = inputs.row(), out_row = inputs.heads * dim;
  Rows memory(type, tokens, row + out_row, 2);
  char* heads = memory.take(row);
  char* out = memory.take(out_row);
  attention_inputs(inputs, const_rows(step.hidden, type, tokens, step.width),
                   step.angles[layer.angles], heads, threads);
  const char* key = heads + inputs.heads * inputs.query_stride() * width;
  const char* value = key + inputs.kv_heads * dim * width;
  append(layer.pages, step.runs, step.run_count, {key, type, row, dim}, {value, type, row, dim},
         threads);
  attend(layer.pages, step.runs, step.run_count, {heads, type, row, inputs.query_stride()},
         inputs.heads, layer.options, {out, type, nullptr}, threads);
  if (inputs.gated) gate_heads(inputs, type, tokens, heads, out, threads);
  linear(&layer.output, 1, const_rows(out, type, tokens, out_row),
         rows(x, type, tokens, step.width), threads);
  if (!layer.has_post_norm) return;
  rms_norm(norm_rows(layer.post_norm, type, tokens, step.width, x, x, nullptr), threads);
}

void mix(const DeltaLayer& layer, const StackStep& step, char* x, size_t threads) {
  const DType type = step.type;
  const size_t tokens = step.tokens;
  size_t row = 0;
  for (const Projection& projection : layer.inputs) row += projection.weight->rows;
  DeltaRule rule = layer.rule;
  const size_t values = rule.values(), gates = count_of(layer.gate);
  const size_t decays = count_of(layer.decay);
  const size_t more_gates = outputs_of(layer.through_gate);
  const size_t more_decays = outputs_of(layer.through_decay);
  const PendingRuns all_runs(step.states);
  const StateRuns computed{all_runs.runs.data(), all_runs.runs.size()};
  const size_t count = tokens + all_runs.pending;
  const size_t journaled = rule.row() + rule.decays() + rule.heads;
  Rows memory(type, count,
              step.width + row + 2 * rule.row() + gates + more_gates + decays + more_decays +
                  rule.heads + 2 * values + (all_runs.pending > 0 ? journaled : 0),
              14);
  Scratch work(count * rule.work_row() * sizeof(float));

  char* projected = memory.take(row);
  const Norm norm = norm_rows(layer.norm, type, tokens, step.width, step.hidden,
                              memory.take(step.width), nullptr);
  normed_linear(norm, layer.inputs, rows(projected, type, tokens, row), threads);
  const ConstMatrix all = const_rows(projected, type, tokens, row);
  const ConstMatrix qkv = gather(all, layer.qkv, false, memory.take(rule.row()));
  const ConstMatrix gate = through(layer.through_gate,
                                   gather(all, layer.gate, false, memory.take(gates)),
                                   memory.take(more_gates), threads);
  const ConstMatrix decay = through(layer.through_decay,
                                    gather(all, layer.decay, true, memory.take(decays)),
                                    memory.take(more_decays), threads);
  const ConstMatrix rate = gather(all, layer.rate, true, memory.take(rule.heads));
  const ConstMatrix* parts[] = {&qkv, &decay, &rate};
  ConstMatrix given[3];
  for (size_t i = 0, first = 0; i < 3; first += parts[i++]->columns) {
    char* room = all_runs.pending > 0 ? memory.take(parts[i]->columns) : nullptr;
    given[i] = behind_pending(*parts[i], all_runs, layer.journal, first, room);
  }
  for (size_t i = 0, first = 0; i < 3; first += parts[i++]->columns) {
    leave_drafts(*parts[i], step.states, layer.journal, first);
  }

  CausalConv conv = layer.conv;
  conv.type = type;
  conv.x = given[0].data;
  conv.stride = given[0].stride;
  conv.out = memory.take(rule.row());
  causal_conv(conv, computed, threads);

  char* out = memory.take(values);
  rule.type = type;
  rule.tokens = count;
  rule.qkv = conv.out;
  rule.decay = given[1].data;
  rule.rate = given[2].data;
  rule.out = out;
  rule.work = work.take<float>(count * rule.work_row());
  char* product = memory.take(values);
  gated_delta_rule(rule, computed, threads, [&](const StateRun& run, size_t head) {
    const StateRun& own = step.states.runs[&run - computed.runs];
    const size_t before = (run.offset + run.pending) * values * bytes_of(type);
    gate_results(layer, type, own, head, gate, out + before, product);
  });
  linear(&layer.output, 1, const_rows(product, type, tokens, values),
         rows(x, type, tokens, step.width), threads);
}

}  // namespace hmt
