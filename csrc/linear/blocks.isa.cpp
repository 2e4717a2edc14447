// Weights in blocks of ggml's types (Packing::kBlocks).
#include "linear/blocks_float.h"
#include "linear/blocks_int8.h"
#include "linear/blocks_lookup.h"
#if defined(HMT_AMX)
#include "linear/blocks_amx.h"
#include "linear/blocks_folded.h"
#endif

namespace hmt::HMT_ISA {
namespace {

// What a token is arranged to, in 32-bit integers: see arrange_token, and where a type's numbers come
// in an order of their own, the codes in that order from `codes` on.  An odd number of cache lines,
// as rows of a tile of tokens must not all fall into one set of the L1 cache.
struct Arrangement {
  size_t codes, words;
};
template <typename Type>
Arrangement arrangement(const Weight& w) {
  const size_t blocks = activation_blocks(w.columns), words = FormOf<Type>::kArranged * blocks;
  if (!Lookup<Type>::kHas) return {words, words};
  const size_t codes = (words + 15) / 16 * 16;
  return {codes, ((codes + kActivationBlock / 4 * blocks) / 16 | 1) * 16};
}

#if defined(HMT_AMX)
// Tokens of a call from which on blocks are folded.  16 Xeon cores took 0.75 ms for 16 tokens times
// [14336, 4096] of Q4_K, 1.11 for 32 and 1.77 for 64; without tiles 0.60, 1.02 and 1.81, on a machine
// that was an eighth faster.
constexpr size_t kFoldedTokens = 24;
static_assert(kFoldedTokens <= kFewestOfPieces, "or a piece may have fewer");
template <typename Type>
constexpr bool folds(size_t tokens) {
  return planes_of(Type::kCode) != 0 && tokens >= kFoldedTokens;
}
#endif

size_t arranged_bytes(const Weight& w, size_t tokens, bool) {
  (void)tokens;
  size_t words = 0;
  if (w.int8_activations) {
    with_block_type(w.code, [&](auto type) {
      using Type = decltype(type);
      words = arrangement<Type>(w).words;
#if defined(HMT_AMX)
      if (folds<Type>(tokens)) {
        words = activation_blocks(w.columns) * TokenTile::bytes(FormOf<Type>::kMinima) / 64;
      }
#endif
    });
  }
  return words * sizeof(int32_t) * kTokenBlock;
}

void arrange(const Weight& w, const Inputs& in, size_t block, uint8_t* arranged) {
  with_block_type(w.code, [&](auto type) {
    using Type = decltype(type);
#if defined(HMT_AMX)
    if constexpr (planes_of(Type::kCode) != 0) {
      if (folds<Type>(in.tokens)) return arrange_tiles<Type>(in, block, arranged);
    }
#endif
    const Arrangement each = arrangement<Type>(w);
    auto* words = reinterpret_cast<int32_t*>(arranged);
    for (size_t i = 0; i < kTokenBlock && block * kTokenBlock + i < in.tokens; ++i) {
      const size_t token = block * kTokenBlock + i;
      int32_t* mine = words + i * each.words;
      arrange_token<FormOf<Type>>(in, token, Type::kShape.offset, mine);
#if defined(HMT_VBMI)
      if constexpr (Lookup<Type>::kHas) {
        reorder<Lookup<Type>::kOrder>(in.codes + token * in.stride, w.columns,
                                      reinterpret_cast<int8_t*>(mine + each.codes));
      }
#endif
    }
  });
}

template <typename Type>
BlockCall block_call(const Weight& w, const Inputs& in) {
  const auto* arranged = reinterpret_cast<const int32_t*>(in.arranged);
  const size_t blocks = activation_blocks(w.columns);
  const size_t scales = w.scale_columns == 32 ? size_t{8} : size_t{1};
  const Arrangement each = arrangement<Type>(w);
  if (Lookup<Type>::kUnpacks || (Lookup<Type>::kHas && in.tokens == 1)) {
    const auto* codes = reinterpret_cast<const int8_t*>(arranged + each.codes);
    return {w, in, codes, 4 * each.words, arranged, each.words, blocks, scales};
  }
  return {w, in, in.codes, in.stride, arranged, each.words, blocks, scales};
}

void multiply(const Weight& w, const Inputs& in, size_t first_row, size_t end_row, float* out,
              size_t stride) {
  with_block_type(w.code, [&](auto type) {
    using Type = decltype(type);
    using Form = FormOf<Type>;
    if (!w.int8_activations) {
      return multiply_float_blocks<Type>(w, in, first_row, end_row, out, stride);
    }
    const BlockCall call = block_call<Type>(w, in);
    // As a pointer, so that types of one form share the rest.
    void (*unpack_some)(const Weight&, size_t, size_t, size_t, Unpacked<Form>*) = unpack<Type>;
#if defined(HMT_VBMI)
    if constexpr (Lookup<Type>::kHas) {
      if (in.tokens == 1) return multiply_one_token_by_lookup<Type>(call, first_row, end_row, out);
    }
    if constexpr (Lookup<Type>::kUnpacks) unpack_some = unpack_by_lookup<Type>;
#endif
    if (in.tokens == 1) return multiply_one_token<Type>(call, first_row, end_row, out);
#if defined(HMT_AMX)
    if constexpr (planes_of(Type::kCode) != 0) {
      if (folds<Type>(in.tokens)) return multiply_folded<Type>(call, first_row, end_row, out, stride);
    } else if (in.tokens >= kAmxBlockTokens) {
      return multiply_amx_blocks<Form>(call, unpack_some, first_row, end_row, out, stride);
    }
#endif
    multiply_int8_blocks<Form>(call, unpack_some, first_row, end_row, out, stride);
  });
}

void decode(const Weight& w, size_t first, size_t count, float* out) {
  with_block_type(w.code, [&](auto type) {
    for (size_t done = 0; done < count;) {
      const size_t row = first + done, rest = kPanelRows - row % kPanelRows;
      const size_t some = count - done < rest ? count - done : rest;
      decode_panel<decltype(type)>(w, row, some, out + done * w.columns);
      done += some;
    }
  });
}

}  // namespace

const LinearKernels block_kernels = {arranged_bytes, arrange, multiply, decode};

}  // namespace hmt::HMT_ISA
