#include "recurrent/recurrent.h"

#include "fused/float_convert.h"

namespace hmt::HMT_ISA {
namespace {

constexpr float kEps = 1e-6f;  // of the length of queries and keys
constexpr size_t kWidest = 64;  // taps of a convolution
constexpr size_t kRegisters = kDeltaColumns / 16;

HMT_INLINE F16v sigmoid(F16v x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

// Row `at` of a run's tokens, or, where that is negative, of those before it.
template <typename Numbers>
HMT_INLINE F16v row_at(const CausalConv& p, const StateRun& run, ptrdiff_t at, size_t c,
                       size_t count) {
  if (at >= 0) {
    const size_t token = run.offset + static_cast<size_t>(at);
    return read<Numbers>(static_cast<const typename Numbers::Type*>(p.x) + token * p.stride + c,
                         count);
  }
  if (run.begins) return zero();
  const size_t row = p.width - 1 - static_cast<size_t>(-at);
  return read<F32Numbers>(p.tails + run.slot * p.slot_stride + row * p.channels + c, count);
}

// Tap by tap those of `count` channels, `width` of each.  With constants, and without a condition
// inside, compilers shuffle registers: number by number this took most of a token's time.
template <size_t Width>
HMT_INLINE void turn_taps(const float* weight, float (*taps)[16]) {
  for (size_t lane = 0; lane < 16; ++lane) {
    for (size_t i = 0; i < Width; ++i) taps[i][lane] = weight[lane * Width + i];
  }
}

HMT_INLINE void turn_taps(const float* weight, size_t width, size_t count, float (*taps)[16]) {
  if (count == 16 && width == 4) return turn_taps<4>(weight, taps);
  if (count == 16 && width == 3) return turn_taps<3>(weight, taps);
  for (size_t i = 0; i < width; ++i) {
    for (size_t lane = 0; lane < 16; ++lane) {
      taps[i][lane] = lane < count ? weight[lane * width + i] : 0.0f;
    }
  }
}

template <typename Numbers>
void conv_lanes(const CausalConv& p, const StateRun& run, size_t first, size_t last, size_t c,
                size_t count) {
  using Type = typename Numbers::Type;
  const ptrdiff_t before = static_cast<ptrdiff_t>(p.width) - 1;
  float taps[kWidest][16];
  turn_taps(p.weight + c * p.width, p.width, count, taps);
  const F16v bias = p.bias ? read<F32Numbers>(p.bias + c, count) : zero();
  for (size_t t = first; t < last; ++t) {
    F16v total = bias;
    for (ptrdiff_t i = 0; i <= before; ++i) {
      const ptrdiff_t at = static_cast<ptrdiff_t>(t) - before + i;
      total = fma(row_at<Numbers>(p, run, at, c, count), load(taps[i]), total);
    }
    if (p.gated) total = mul(total, sigmoid(total));
    Type* out = static_cast<Type*>(p.out) + (run.offset + t) * p.channels + c;
    write<Numbers>(out, count, Numbers::round(total));
  }
}

void conv(const CausalConv& p, const StateRun& run, size_t first, size_t last, size_t begin,
          size_t end) {
  with_numbers(p.type, [&](auto numbers) {
    for (size_t c = begin; c < end; c += 16) {
      conv_lanes<decltype(numbers)>(p, run, first, last, c, end - c < 16 ? end - c : 16);
    }
  });
}

void conv_tail(const CausalConv& p, const StateRun& run, size_t begin, size_t end) {
  if (run.stays() == 0) return;
  with_numbers(p.type, [&](auto numbers) {
    using Numbers = decltype(numbers);
    const ptrdiff_t before = static_cast<ptrdiff_t>(p.width) - 1;
    for (size_t c = begin; c < end; c += 16) {
      const size_t count = end - c < 16 ? end - c : 16;
      for (ptrdiff_t i = 0; i < before; ++i) {  // each row comes from a later one
        const ptrdiff_t at = static_cast<ptrdiff_t>(run.stays()) - before + i;
        float* row = p.tails + run.slot * p.slot_stride + static_cast<size_t>(i) * p.channels + c;
        write<F32Numbers>(row, count, row_at<Numbers>(p, run, at, c, count));
      }
    }
  });
}

// x [count] with length 1, times `scale`.
template <typename Numbers>
HMT_INLINE void unit(const typename Numbers::Type* x, size_t count, float scale, float* out) {
  F16v squares = zero();
  for (size_t i = 0; i < count; i += 16) {
    const F16v some = read<Numbers>(x + i, count - i < 16 ? count - i : 16);
    squares = fma(some, some, squares);
  }
  const F16v factor = set1(scale / std::sqrt(sum(squares) + kEps));
  for (size_t i = 0; i < count; i += 16) {
    const size_t some = count - i < 16 ? count - i : 16;
    write<F32Numbers>(out + i, some, mul(read<Numbers>(x + i, some), factor));
  }
}

// What is left of a state: `scale` is exp(decay_scale), and x what it goes with.
HMT_INLINE float stays_of(const DeltaRule& p, float scale, float x) {
  if (p.bound != 0.0f) return ::expf(p.bound / (1.0f + ::expf(-scale * x)));
  const float softplus = (x > 0.0f ? x : 0.0f) + ::log1pf(::expf(x > 0.0f ? -x : x));
  return ::expf(-scale * softplus);
}

// The same of sixteen.
HMT_INLINE F16v stays_of(const DeltaRule& p, F16v scale, F16v x) {
  if (p.bound != 0.0f) return exp(mul(set1(p.bound), sigmoid(mul(scale, x))));
  // log(1 + y) = 2 artanh(y / (2 + y)), which also where y is small has all digits; y / (2 + y) is
  // at most 1/3.
  const F16v y = exp(sub(zero(), abs(x)));
  const F16v s = div(y, add(set1(2.0f), y));
  const F16v square = mul(s, s);
  F16v series = set1(1.0f / 15.0f);
  for (float odd = 13.0f; odd > 0.0f; odd -= 2.0f) {
    series = fma(series, square, set1(1.0f / odd));
  }
  const F16v softplus = fma(add(s, s), series, max(x, zero()));
  return exp(sub(zero(), mul(scale, softplus)));
}

template <typename Numbers>
void inputs_as(const DeltaRule& p, size_t begin, size_t end) {
  using Type = typename Numbers::Type;
  const float scale = 1.0f / std::sqrt(static_cast<float>(p.key_dim));
  for (size_t t = begin; t < end; ++t) {
    const Type* qkv = static_cast<const Type*>(p.qkv) + t * p.row();
    float* out = p.work + t * p.work_row();
    for (size_t h = 0; h < p.key_heads; ++h) {
      const size_t at = h * p.key_dim;
      unit<Numbers>(qkv + at, p.key_dim, scale, out + at);
      unit<Numbers>(qkv + p.keys() + at, p.key_dim, 1.0f, out + p.keys() + at);
    }
    const Type* decay = static_cast<const Type*>(p.decay) + t * p.heads;
    const Type* rate = static_cast<const Type*>(p.rate) + t * p.heads;
    float* stays = out + 2 * p.keys();
    float* learns = stays + p.decays();
    for (size_t h = 0; h < p.heads; h += 16) {
      const size_t some = p.heads - h < 16 ? p.heads - h : 16;
      const F16v most = set1(p.most_rate);
      write<F32Numbers>(learns + h, some, mul(most, sigmoid(read<Numbers>(rate + h, some))));
      if (p.by_channel) continue;
      float lanes[16];
      store(lanes, add(read<Numbers>(decay + h, some), read<F32Numbers>(p.decay_bias + h, some)));
      for (size_t i = 0; i < some; ++i) {
        stays[h + i] = stays_of(p, ::expf(p.decay_scale[h + i]), lanes[i]);
      }
    }
  }
}

void delta_inputs(const DeltaRule& rule, size_t begin, size_t end) {
  with_numbers(rule.type, [&](auto numbers) {
    inputs_as<decltype(numbers)>(rule, begin, end);
  });
}

void delta_decays(const DeltaRule& p, size_t begin, size_t end) {
  with_numbers(p.type, [&](auto numbers) {
    using Numbers = decltype(numbers);
    using Type = typename Numbers::Type;
    for (size_t i = begin; i < end; ++i) {
      const size_t head = i % p.heads;
      const Type* decay = static_cast<const Type*>(p.decay) + i * p.key_dim;
      const float* bias = p.decay_bias + head * p.key_dim;
      float* out = p.work + i / p.heads * p.work_row() + 2 * p.keys() + head * p.key_dim;
      const F16v scale = set1(::expf(p.decay_scale[head]));
      for (size_t c = 0; c < p.key_dim; c += 16) {
        const size_t some = p.key_dim - c < 16 ? p.key_dim - c : 16;
        const F16v x = add(read<Numbers>(decay + c, some), read<F32Numbers>(bias + c, some));
        write<F32Numbers>(out + c, some, stays_of(p, scale, x));
      }
    }
  });
}

// `Count` registers of columns; the last one has 16 if `Whole`, else `last`.
template <typename Numbers, size_t Count, bool Whole, bool ByChannel>
void delta_columns(const DeltaRule& p, const StateRun& run, size_t head, size_t column,
                   size_t last, float* aside) {
  using Type = typename Numbers::Type;
  const size_t key_head = head / (p.heads / p.key_heads);
  float* state = p.states + run.slot * p.slot_stride + head * p.key_dim * p.value_dim + column;
  const auto lanes = [&](size_t c) __attribute__((always_inline)) {
    return Whole || c + 1 < Count ? size_t{16} : last;
  };
  // The first draft goes from the state to what is aside, the next ones stay there.
  const float* from = state;
  float* to = state;
  size_t from_row = p.value_dim, to_row = p.value_dim;
  if (run.begins) {
    if (run.stays() == 0) {
      from = to = aside;
      from_row = to_row = kDeltaColumns;
    }
    for (size_t i = 0; i < p.key_dim; ++i) {
      for (size_t c = 0; c < Count; ++c) {
        write<F32Numbers>(to + i * to_row + 16 * c, lanes(c), zero());
      }
    }
  }
  for (size_t t = run.offset; t < run.offset + run.length; ++t) {
    if (t >= run.offset + run.stays()) {
      to = aside;
      to_row = kDeltaColumns;
    }
    const float* work = p.work + t * p.work_row();
    const float* query = work + key_head * p.key_dim;
    const float* key = query + p.keys();
    const float* decays = work + 2 * p.keys() + (ByChannel ? head * p.key_dim : head);
    const F16v stays = set1(decays[0]), learns = set1(work[2 * p.keys() + p.decays() + head]);
    const Type* value = static_cast<const Type*>(p.qkv) + t * p.row() + 2 * p.keys() +
                        head * p.value_dim + column;
    F16v known[Count], result[Count];
    for (F16v& one : known) one = zero();
    for (size_t i = 0; i < p.key_dim; ++i) {
      const F16v k = set1(ByChannel ? decays[i] * key[i] : key[i]);
      for (size_t c = 0; c < Count; ++c) {
        known[c] = fma(k, read<F32Numbers>(from + i * from_row + 16 * c, lanes(c)), known[c]);
      }
    }
    for (size_t c = 0; c < Count; ++c) {
      const F16v left = ByChannel ? known[c] : mul(stays, known[c]);
      known[c] = mul(learns, sub(read<Numbers>(value + 16 * c, lanes(c)), left));
      result[c] = zero();
    }
    for (size_t i = 0; i < p.key_dim; ++i) {
      const F16v k = set1(key[i]), q = set1(query[i]), g = ByChannel ? set1(decays[i]) : stays;
      for (size_t c = 0; c < Count; ++c) {
        const F16v before = read<F32Numbers>(from + i * from_row + 16 * c, lanes(c));
        const F16v numbers = fma(k, known[c], mul(g, before));
        write<F32Numbers>(to + i * to_row + 16 * c, lanes(c), numbers);
        result[c] = fma(q, numbers, result[c]);
      }
    }
    from = to;
    from_row = to_row;
    Type* out = static_cast<Type*>(p.out) + (t * p.heads + head) * p.value_dim + column;
    for (size_t c = 0; c < Count; ++c) {
      write<Numbers>(out + 16 * c, lanes(c), Numbers::round(result[c]));
    }
  }
}

template <bool ByChannel>
void delta_as(const DeltaRule& p, const StateRun& run, size_t head, size_t begin, size_t end,
              float* aside) {
  with_numbers(p.type, [&](auto numbers) {
    using Numbers = decltype(numbers);
    if (end - begin == 16 * kRegisters) {
      delta_columns<Numbers, kRegisters, true, ByChannel>(p, run, head, begin, 16, aside);
      return;
    }
    for (size_t c = begin; c < end; c += 16) {
      const size_t last = end - c < 16 ? end - c : 16;
      delta_columns<Numbers, 1, false, ByChannel>(p, run, head, c, last, aside);
    }
  });
}

void delta(const DeltaRule& p, const StateRun& run, size_t head, size_t begin, size_t end,
           float* aside) {
  p.by_channel ? delta_as<true>(p, run, head, begin, end, aside)
               : delta_as<false>(p, run, head, begin, end, aside);
}

void convert(DType from_type, const void* from, DType to_type, void* to, size_t count) {
  with_numbers(from_type, [&](auto given) {
    with_numbers(to_type, [&](auto wanted) {
      using From = decltype(given);
      using To = decltype(wanted);
      for (size_t i = 0; i < count; i += 16) {
        const size_t some = count - i < 16 ? count - i : 16;
        const auto* source = static_cast<const typename From::Type*>(from) + i;
        const F16v numbers = To::round(read<From>(source, some));
        write<To>(static_cast<typename To::Type*>(to) + i, some, numbers);
      }
    });
  });
}

}  // namespace

const RecurrentKernels recurrent_kernels = {conv, conv_tail, delta_inputs, delta_decays,
                                             delta, convert};

}  // namespace hmt::HMT_ISA
