// A tile of rows against a range of positions: scores, softmax as it goes, values.
#include <math.h>

#include "attention/codes.h"
#include "attention/operand_formats.h"
#include "attention/kernels.h"
#include "attention/lanes.h"
#include "attention/workspace.h"

namespace hmt::HMT_ISA {
namespace {

size_t work_bytes(const PageLayout& layout) {
  static uint8_t nowhere[1];
  return Work().place(layout, nowhere);
}

// Scores of positions [base, base + 64) become weights; sums and totals follow a greater top.
template <typename Form>
void weigh(const Tile& tile, const Partial& partial, const Block& block, const Work& work,
           size_t base) {
  const AttentionOptions& options = *tile.options;
  const size_t width = padded_width(tile.pages->layout);
  const float cap = options.softcap;
  const F16v scale = set1(cap != 0.0f ? options.scale / cap : options.scale);
  for (size_t r = 0; r < tile.rows; ++r) {
    const size_t first = work.first[r] > base ? work.first[r] - base : 0;
    const size_t after = work.after[r] > base ? work.after[r] - base : 0;
    F16v scores[kBlockPages];
    for (size_t c = 0; c < kBlockPages; ++c) {
      scores[c] = mul(Form::scores(block, work, r, c), scale);
      if (cap != 0.0f) scores[c] = mul(tanh_of(scores[c]), set1(cap));
    }
    if (first > 0 || after < kBlockTokens) {
      for (size_t c = 0; c < kBlockPages; ++c) {
        const size_t from = first > 16 * c ? first - 16 * c : 0;
        const size_t to = after > 16 * c ? after - 16 * c : 0;
        scores[c] = keep_lanes(scores[c], from < 16 ? from : 16, to < 16 ? to : 16);
      }
    }
    const float greatest_score =
        greatest(max(max(scores[0], scores[1]), max(scores[2], scores[3])));
    const float before = partial.tops[r], top = reference_of(greatest_score, before);
    F16v total = load(work.totals + 16 * r);
    if (top != before) {
      partial.tops[r] = top;
      if (before != kNone) {
        const float factor = weight_of(before - top);
        total = mul(total, set1(factor));
        multiply_row(partial.sums + r * width, width, factor);
      }
    }
    const F16v reference = set1(top == kNone ? 0.0f : top);
    for (F16v& number : scores) number = weight_of(sub(number, reference));
    Form::weights(block, work, r, scores);
    total = add(total, add(add(scores[0], scores[1]), add(scores[2], scores[3])));
    store(work.totals + 16 * r, total);
  }
}

void fetch_ahead(const uint8_t* begin, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) fetch(begin + i);
}

// The block of a head's pages that begins with page `first`, ready for products.
template <typename Form>
Block block_of(const OneHead& one, size_t first) {
  const Tile& tile = one.tile;
  const Work& work = one.work;
  const BlockPages own(tile, first, kBlockPages);
  const Ahead ahead = one.ahead(first, kBlockPages);
  const PageLayout& layout = tile.pages->layout;
  const size_t head = tile.kv_head, numbers = Form::kNumbers;
  const size_t key_bytes = kPageTokens * layout.key_dim * 4 / numbers;
  const size_t value_bytes = kPageTokens * padded_width(layout) * 4 / numbers;
  const bool keys_here = Form::keys_in_place(layout), values_here = Form::values_in_place(layout);
  Block block{};
  block.first = own.first;
  block.count = own.count;
  for (size_t i = 0; i < kBlockPages; ++i) {
    const size_t number = own.page(i);
    const uint8_t* page = page_at(tile, number);
    block.keys[i] = page + layout.key_at(head);
    block.key_scales[i] = page + layout.key_scales_at(head);
    block.value_scales[i] = page + layout.value_scales_at(head);
    const uint8_t* next = page_at(tile, ahead.page(i));
    if (keys_here) {
      block.key_ahead[i] = next + layout.key_at(ahead.head);
    } else {
      fetch_ahead(next + layout.key_at(ahead.head), layout.key_bytes());
      uint8_t* out = work.keys + (number - first) * key_bytes;
      if (own.has(i)) Form::keys(layout, page, head, out);
      block.keys[i] = out;
    }
    if (!own.has(i)) continue;
    const size_t seen = tile.end - number * kPageTokens;
    if (values_here) block.value_ahead[i] = next + layout.value_at(ahead.head);
    else if (!layout.latent) fetch_ahead(next + layout.value_at(ahead.head), layout.value_bytes());
    if (values_here && (seen >= kPageTokens || !Form::kHidesTokens)) {
      block.values[i] = page + layout.value_at(head);
    } else {
      uint8_t* out = work.values + i * value_bytes;
      Form::values(layout, page, block.keys[i], head, seen < kPageTokens ? seen : kPageTokens, out);
      block.values[i] = out;
    }
  }
  return block;
}

template <typename Form>
void attend_as(const Tile& tile, const Partial& partial, bool prepared, const Work& work) {
  for (size_t h = 0; h < tile.heads && !prepared; ++h) {
    const OneHead one(tile, partial, work, h);
    Form::load_query(one.tile, one.work);
  }
  for (size_t base = tile.begin / kBlockTokens * kBlockTokens; base < tile.end;
       base += kBlockTokens) {
    for (size_t h = 0; h < tile.heads; ++h) {
      const OneHead one(tile, partial, work, h);
      const Block block = block_of<Form>(one, base / kPageTokens);
      Form::score(one.tile, block, one.work);
      weigh<Form>(one.tile, one.partial, block, one.work, base);
      Form::mix(one.tile, block, one.work, one.partial.sums);
    }
  }
}

void attend_tile(const Tile& tile, const Partial& partial, bool prepared, const Work& work) {
  [[maybe_unused]] const PageLayout& layout = tile.pages->layout;
#if defined(HMT_AVX512_BF16)
  const bool bf16 = layout.encoding == PageEncoding::kBF16;
  if (bf16 && tile.query->type == DType::kBF16) {
    return attend_as<Bf16Pages>(tile, partial, prepared, work);
  }
#endif
#if defined(HMT_AVX512)
  const bool int8 = layout.encoding == PageEncoding::kInt8 && layout.key_dim <= kMostInt8Dim;
  if (int8) return attend_codes<Int8Codes>(tile, partial, prepared, work);
  // Numbers of bf16 stay nearly what they are, those of more bits would not.
  const bool int4 = layout.encoding == PageEncoding::kInt4 && !layout.latent;
  if (int4 && tile.query->type == DType::kBF16) {
    return attend_codes<Int4Codes>(tile, partial, prepared, work);
  }
#endif
  attend_as<FloatPages>(tile, partial, prepared, work);
}

void attend(const Tile& tile, const Partial& partial, bool prepared, uint8_t* memory) {
  Work work;
  work.place(tile.pages->layout, memory);
  begin_rows(tile, partial, work);
  if (tile.begin < tile.end) attend_tile(tile, partial, prepared, work);
  const size_t rows = tile.heads * tile.rows;
  for (size_t r = 0; r < rows; ++r) partial.totals[r] = sum(load(work.totals + 16 * r));
}

// Adds exp(score - log) of a page's positions, for scores that are not scaled yet (by 1 if they are).
HMT_INLINE void add_mass(const AttentionOptions& options, F16v scores, float scale, float log,
                         float* mass) {
  F16v scaled = mul(scores, set1(scale));
  if (options.softcap != 0.0f) scaled = mul(tanh_of(scaled), set1(options.softcap));
  *mass += sum(weight_of(sub(scaled, set1(log))));
}

// The keys of pages [first, first + count) of the tile's run, ready for products.
template <typename Form>
Block keys_of(const Tile& tile, size_t first, size_t count, const Work& work) {
  const PageLayout& layout = tile.pages->layout;
  const size_t last = tile.end / kPageTokens - 1, at = layout.key_at(tile.kv_head);
  const size_t bytes = kPageTokens * layout.key_dim * 4 / Form::kNumbers;
  Block block{};
  block.count = count;
  for (size_t i = 0; i < kBlockPages; ++i) {
    const size_t number = first + (i < count ? i : 0), ahead = first + kBlockPages + i;
    const uint8_t* page = page_at(tile, number);
    const uint8_t* next = page_at(tile, ahead <= last ? ahead : last) + at;
    block.keys[i] = page + at;
    if (Form::keys_in_place(layout)) {
      block.key_ahead[i] = next;
      continue;
    }
    fetch_ahead(next, layout.key_bytes());
    uint8_t* out = work.keys + (i < count ? i : 0) * bytes;
    if (i < count) Form::keys(layout, page, tile.kv_head, out);
    block.keys[i] = out;
  }
  return block;
}

template <typename Form>
void masses_as(const Tile& tile, const float* logs, float* masses, const Work& work) {
  const AttentionOptions& options = *tile.options;
  const float cap = options.softcap, scale = cap != 0.0f ? options.scale / cap : options.scale;
  const size_t begin = tile.begin / kPageTokens, end = tile.end / kPageTokens;
  Form::load_query(tile, work);
  for (size_t page = begin; page < end; page += kBlockPages) {
    const size_t count = end - page < kBlockPages ? end - page : kBlockPages;
    const Block block = keys_of<Form>(tile, page, count, work);
    Form::score(tile, block, work);
    for (size_t r = 0; r < tile.rows; ++r) {
      for (size_t c = 0; c < count; ++c) {
        add_mass(options, Form::scores(block, work, r, c), scale, logs[r], masses + page - begin + c);
      }
    }
  }
}

#if defined(HMT_AVX512)
template <typename Codes>
void masses_of_codes(const Tile& tile, const float* logs, float* masses, const Work& work) {
  const size_t begin = tile.begin / kPageTokens, end = tile.end / kPageTokens;
  const HeadPlaces places(tile.pages->layout, tile.kv_head);
  load_code_query<Codes>(tile, work);
  const CodeQuery query{work.query, work.query_starts, work.query_factors};
  for (size_t page = begin; page < end; page += kCodePages) {
    CodeBlock block{};
    block.count = end - page < kCodePages ? end - page : kCodePages;
    for (size_t i = 0; i < block.count; ++i) {
      const size_t ahead = page + kCodePages + i;
      const uint8_t* own = page_at(tile, page + i);
      const uint8_t* next = page_at(tile, ahead < end ? ahead : end - 1);
      block.keys[i] = own + places.keys;
      block.key_scales[i] = own + places.key_scales;
      block.ahead_of_keys[i] = next + places.keys;
      fetch_bytes(next + places.key_scales, places.key_scale_bytes);
    }
    score_codes<Codes>(query, tile.rows, tile.pages->layout.key_dim, block, work.scores);
    for (size_t r = 0; r < tile.rows; ++r) {
      for (size_t c = 0; c < block.count; ++c) {
        const F16v scores = load(work.scores + r * kCodeTokens + c * kPageTokens);
        add_mass(*tile.options, scores, 1.0f, logs[r], masses + page - begin + c);
      }
    }
  }
}
#endif

void masses(const Tile& tile, const float* logs, float* masses, uint8_t* memory) {
  Work work;
  const PageLayout& layout = tile.pages->layout;
  work.place(layout, memory);
#if defined(HMT_AVX512_BF16)
  if (layout.encoding == PageEncoding::kBF16 && tile.query->type == DType::kBF16) {
    return masses_as<Bf16Pages>(tile, logs, masses, work);
  }
#endif
#if defined(HMT_AVX512)
  if (layout.encoding == PageEncoding::kInt8 && layout.key_dim <= kMostInt8Dim) {
    return masses_of_codes<Int8Codes>(tile, logs, masses, work);
  }
#endif
  masses_as<FloatPages>(tile, logs, masses, work);
}

void merge(const Tile& tile, const Partial& all, const Partial& part) {
  const size_t width = padded_width(tile.pages->layout);
  const size_t rows = tile.heads * tile.rows;
  for (size_t first = 0; first < rows; first += 16) {
    const size_t some = rows - first < 16 ? rows - first : 16;
    float differences[2][16] = {}, kept[16], factors[16];
    for (size_t i = 0; i < some; ++i) {
      const float before = all.tops[first + i], other = part.tops[first + i];
      const float top = other > before ? other : before, reference = top == kNone ? 0.0f : top;
      differences[0][i] = before - reference;
      differences[1][i] = other - reference;
      all.tops[first + i] = top;
    }
    store(kept, weight_of(load(differences[0])));
    store(factors, weight_of(load(differences[1])));
    for (size_t i = 0; i < some; ++i) {
      const size_t r = first + i;
      float* sums = all.sums + r * width;
      const float* added = part.sums + r * width;
      for (size_t c = 0; c < width; c += 16) {
        const F16v scaled = mul(load(sums + c), set1(kept[i]));
        store(sums + c, fma(load(added + c), set1(factors[i]), scaled));
      }
      all.totals[r] = all.totals[r] * kept[i] + part.totals[r] * factors[i];
    }
  }
}

void finish(const Tile& tile, const Partial& partial, size_t q_heads,
            const AttentionResult& result) {
  const size_t value_dim = tile.pages->layout.value_dim, width = padded_width(tile.pages->layout);
  for (size_t r = 0; r < tile.heads * tile.rows; ++r) {
    const size_t row = tile.first_row + r % tile.rows;
    const size_t head = (tile.kv_head + r / tile.rows) * tile.group + row % tile.group;
    const size_t at = (tile.run->offset + row / tile.group) * q_heads + head;
    float top = partial.tops[r], total = partial.totals[r], factor = 1.0f;
    const float* sinks = tile.options->sinks;
    if (sinks != nullptr && sinks[head] != kNone) {
      const float sink = sinks[head], greater = sink > top ? sink : top;
      factor = weight_of(top - greater);
      total = total * factor + weight_of(sink - greater);
      top = greater;
    }
    float* sums = partial.sums + r * width;
    multiply_row(sums, width, total == 0.0f ? 0.0f : factor / total);
    const size_t bytes = result.type == DType::kF32 ? 4 : 2;
    narrow_row(sums, value_dim, static_cast<uint8_t*>(result.out) + at * value_dim * bytes,
               static_cast<int>(result.type));
    if (result.lse != nullptr) result.lse[at] = total == 0.0f ? kNone : top + ::logf(total);
  }
}

}  // namespace

const AttentionKernels attention_kernels = {work_bytes, attend, masses, merge, finish};

}  // namespace hmt::HMT_ISA
