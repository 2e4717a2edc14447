#include "recurrent/state_space.h"

#include "fused/activations.h"
#include "fused/float_convert.h"

namespace hmt::HMT_ISA {
namespace {

// Tokens for which a part of the state is read and written once, and its registers: as many sums as
// there are registers for.
constexpr size_t kTokens = 4;
#if defined(HMT_AVX512)
constexpr size_t kRegisters = 4;
#else
constexpr size_t kRegisters = 1;
#endif

template <typename Numbers>
void steps_as(const TimeSteps& p, size_t begin, size_t end) {
  using Type = typename Numbers::Type;
  for (size_t t = begin; t < end; ++t) {
    const Type* raw = static_cast<const Type*>(p.raw) + t * p.heads;
    for (size_t h = 0; h < p.heads; h += 16) {
      const size_t some = p.heads - h < 16 ? p.heads - h : 16;
      float lanes[16];
      store(lanes, add(read<Numbers>(raw + h, some), read<F32Numbers>(p.bias + h, some)));
      for (size_t i = 0; i < some; ++i) {
        const float x = lanes[i];
        float step = (x > 0.0f ? x : 0.0f) + ::log1pf(::expf(x > 0.0f ? -x : x));
        step = step < p.shortest ? p.shortest : step;
        step = step > p.longest ? p.longest : step;
        p.step[t * p.heads + h + i] = step;
        p.decay[t * p.heads + h + i] = ::expf(-::expf(p.decay_scale[h + i]) * step);
      }
    }
  }
}

void steps(const TimeSteps& p, size_t begin, size_t end) {
  with_numbers(p.type, [&](auto numbers) { steps_as<decltype(numbers)>(p, begin, end); });
}

// Columns of a state before and behind some tokens: rows, and numbers from one to the next.
struct Columns {
  const float* from;
  size_t from_row;
  float* to;
  size_t to_row;
};

// Some tokens of one head, in f32.
struct Inputs {
  float keys[kTokens][kRows], queries[kTokens][kRows];  // of some rows
};

template <typename Numbers>
HMT_INLINE void widen(const void* from, size_t first, size_t count, float* to) {
  const auto* numbers = static_cast<const typename Numbers::Type*>(from) + first;
  for (size_t i = 0; i < count; i += 16) {
    const size_t some = count - i < 16 ? count - i : 16;
    write<F32Numbers>(to + i, some, read<Numbers>(numbers + i, some));
  }
}

// `Tokens` tokens from `token` on, of `Count` registers of columns; the last register has 16 if
// `Whole`, else `last`.
template <typename Numbers, size_t Tokens, size_t Count, bool Whole>
HMT_INLINE void scan_tokens(const StateSpaceScan& p, const Columns& state, size_t token,
                            size_t head, size_t column, size_t last, Inputs& in) {
  using Type = typename Numbers::Type;
  const auto lanes = [&](size_t c) __attribute__((always_inline)) {
    return Whole || c + 1 < Count ? size_t{16} : last;
  };
  const size_t group = head / (p.heads / p.groups);
  F16v decay[Tokens], added[Tokens][Count], total[Tokens][Count];
  for (size_t t = 0; t < Tokens; ++t) {
    const Type* x = static_cast<const Type*>(p.x) + (token + t) * p.x_stride + head * p.head_dim;
    const size_t at = (token + t) * p.heads + head;
    const F16v step = set1(p.step ? p.step[at] : 1.0f);
    decay[t] = set1(p.decay[at]);
    for (size_t c = 0; c < Count; ++c) {
      added[t][c] = mul(step, read<Numbers>(x + column + 16 * c, lanes(c)));
      total[t][c] = zero();
    }
  }
  for (size_t first = 0; first < p.state_dim; first += kRows) {
    const size_t rows = p.state_dim - first < kRows ? p.state_dim - first : kRows;
    for (size_t t = 0; t < Tokens; ++t) {
      const size_t own = group * p.state_dim + first;
      widen<Numbers>(p.keys, (token + t) * p.key_stride + own, rows, in.keys[t]);
      widen<Numbers>(p.queries, (token + t) * p.query_stride + own, rows, in.queries[t]);
    }
    for (size_t i = 0; i < rows; ++i) {
      const float* from = state.from + (first + i) * state.from_row;
      float* to = state.to + (first + i) * state.to_row;
      F16v numbers[Count];
      for (size_t c = 0; c < Count; ++c) numbers[c] = read<F32Numbers>(from + 16 * c, lanes(c));
      for (size_t t = 0; t < Tokens; ++t) {
        const F16v k = set1(in.keys[t][i]), q = set1(in.queries[t][i]);
        for (size_t c = 0; c < Count; ++c) {
          numbers[c] = fma(k, added[t][c], mul(decay[t], numbers[c]));
          total[t][c] = fma(q, numbers[c], total[t][c]);
        }
      }
      for (size_t c = 0; c < Count; ++c) write<F32Numbers>(to + 16 * c, lanes(c), numbers[c]);
    }
  }
  for (size_t t = 0; t < Tokens; ++t) {
    const Type* x = static_cast<const Type*>(p.x) + (token + t) * p.x_stride + head * p.head_dim;
    Type* out = static_cast<Type*>(p.out) + ((token + t) * p.heads + head) * p.head_dim + column;
    for (size_t c = 0; c < Count; ++c) {
      F16v result = total[t][c];
      if (p.skip) {
        const F16v own = read<Numbers>(x + column + 16 * c, lanes(c));
        result = fma(set1(p.skip[head]), own, result);
      }
      write<Numbers>(out + 16 * c, lanes(c), Numbers::round(result));
    }
  }
}

template <typename Numbers, size_t Count, bool Whole>
void scan_columns(const StateSpaceScan& p, const StateRun& run, size_t head, size_t column,
                  size_t last, float* aside) {
  float* own = p.states + run.slot * p.slot_stride + head * p.state_dim * p.head_dim + column;
  const Columns stays{own, p.head_dim, own, p.head_dim};
  const Columns drafts{aside, kScanColumns, aside, kScanColumns};
  if (run.begins) {
    const Columns& first = run.stays() > 0 ? stays : drafts;
    for (size_t i = 0; i < p.state_dim; ++i) {
      for (size_t c = 0; c < Count; ++c) {
        write<F32Numbers>(first.to + i * first.to_row + 16 * c,
                          Whole || c + 1 < Count ? 16 : last, zero());
      }
    }
  }
  Inputs inputs;
  size_t token = run.offset;
  const auto scan_until = [&](size_t end, Columns state) {
    for (; token + kTokens <= end; token += kTokens) {
      scan_tokens<Numbers, kTokens, Count, Whole>(p, state, token, head, column, last, inputs);
      state.from = state.to, state.from_row = state.to_row;
    }
    for (; token < end; ++token) {
      scan_tokens<Numbers, 1, Count, Whole>(p, state, token, head, column, last, inputs);
      state.from = state.to, state.from_row = state.to_row;
    }
  };
  scan_until(run.offset + run.stays(), stays);
  if (run.drafts == 0) return;
  const bool aside_only = run.begins && run.stays() == 0;
  scan_until(run.offset + run.length,
             aside_only ? drafts : Columns{own, p.head_dim, aside, kScanColumns});
}

void scan(const StateSpaceScan& p, const StateRun& run, size_t head, size_t begin, size_t end,
          float* aside) {
  with_numbers(p.type, [&](auto numbers) {
    using Numbers = decltype(numbers);
    size_t c = begin;
    for (; c + 16 * kRegisters <= end; c += 16 * kRegisters) {
      scan_columns<Numbers, kRegisters, true>(p, run, head, c, 16, aside);
    }
    for (; c < end; c += 16) {
      scan_columns<Numbers, 1, false>(p, run, head, c, end - c < 16 ? end - c : 16, aside);
    }
  });
}

// log(1 + e^x) with a relative error of some 2^-23: 2 artanh(y / (2 + y)) for y = e^-|x|, whose
// argument is at most 1/3.
HMT_INLINE F16v softplus(F16v x) {
  const F16v power = exp_full(sub(zero(), abs(x)));
  const F16v s = div(power, add(set1(2.0f), power)), square = mul(s, s);
  F16v series = set1(1.0f / 15.0f);
  for (const float divisor : {13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) {
    series = fma(series, square, set1(1.0f / divisor));
  }
  return fma(add(s, s), series, max(x, zero()));
}

template <typename Numbers>
void selective_as(const SelectiveScan& p, const StateRun& run, size_t channel, size_t count) {
  using Type = typename Numbers::Type;
  const auto row = [](const StridedRows& rows, size_t token) __attribute__((always_inline)) {
    return static_cast<const Type*>(rows.data) + token * rows.stride;
  };
  // The first draft goes from the state to what is aside, the next ones stay there.
  float* own = p.states + run.slot * p.slot_stride + channel;
  float aside[kRows][16];
  const float* from = own;
  float* to = own;
  size_t from_row = p.channels, to_row = p.channels;
  if (run.begins && run.stays() == 0) {
    from = to = aside[0];
    from_row = to_row = 16;
  }
  float rates[kRows][16], keys[kRows], queries[kRows];
  for (size_t i = 0; i < p.state_dim; ++i) {
    float lanes[16] = {};
    for (size_t c = 0; c < count; ++c) lanes[c] = p.decay_scale[(channel + c) * p.state_dim + i];
    store(rates[i], sub(zero(), exp_full(load(lanes))));
    if (run.begins) write<F32Numbers>(to + i * to_row, count, zero());
  }
  const F16v bias = read<F32Numbers>(p.bias + channel, count);
  const F16v skip = read<F32Numbers>(p.skip + channel, count);
  for (size_t t = run.offset; t < run.offset + run.length; ++t) {
    if (t >= run.offset + run.stays()) {
      to = aside[0];
      to_row = 16;
    }
    widen<Numbers>(p.keys.data, t * p.keys.stride, p.state_dim, keys);
    widen<Numbers>(p.queries.data, t * p.queries.stride, p.state_dim, queries);
    const F16v x = read<Numbers>(row(p.x, t) + channel, count);
    const F16v step = softplus(add(read<Numbers>(row(p.raw, t) + channel, count), bias));
    const F16v added = mul(step, x);
    F16v total = zero();
    for (size_t i = 0; i < p.state_dim; ++i) {
      const F16v before = read<F32Numbers>(from + i * from_row, count);
      const F16v decay = exp_full(mul(load(rates[i]), step));
      const F16v number = fma(set1(keys[i]), added, mul(decay, before));
      write<F32Numbers>(to + i * to_row, count, number);
      total = fma(set1(queries[i]), number, total);
    }
    from = to;
    from_row = to_row;
    Type* out = static_cast<Type*>(p.out) + t * p.channels + channel;
    write<Numbers>(out, count, Numbers::round(fma(skip, x, total)));
  }
}

void selective(const SelectiveScan& p, const StateRun& run, size_t channel, size_t count) {
  with_numbers(p.type, [&](auto numbers) {
    selective_as<decltype(numbers)>(p, run, channel, count);
  });
}

}  // namespace

const StateSpaceKernels state_space_kernels = {steps, scan, selective};

}  // namespace hmt::HMT_ISA
