// Weights in blocks of ggml's types (Packing::kBlocks).
#include "linear/blocks_float.h"
#include "linear/blocks_int8.h"
#include "linear/blocks_lookup.h"
#if defined(HMT_AMX)
#include "linear/blocks_amx.h"
#endif

namespace hmt::HMT_ISA {
namespace {

// 32-bit integers for a token; see arrange_token.
size_t arranged_words(const Weight& w) {
  size_t words = 0;
  with_block_type(w.code, [&](auto type) { words = FormOf<decltype(type)>::kArranged; });
  return words * activation_blocks(w.columns);
}

size_t arranged_bytes(const Weight& w, size_t, bool) {
  return w.int8_activations ? arranged_words(w) * sizeof(int32_t) * kTokenBlock : 0;
}

void arrange(const Weight& w, const Inputs& in, size_t block, uint8_t* arranged) {
  const size_t words = arranged_words(w);
  with_block_type(w.code, [&](auto type) {
    using Type = decltype(type);
    for (size_t i = 0; i < kTokenBlock && block * kTokenBlock + i < in.tokens; ++i) {
      arrange_token<FormOf<Type>>(in, block * kTokenBlock + i, Type::kShape.offset,
                                  reinterpret_cast<int32_t*>(arranged) + i * words);
    }
  });
}

void multiply(const Weight& w, const Inputs& in, size_t first_row, size_t end_row, float* out,
              size_t stride) {
  const BlockCall call{w, in, reinterpret_cast<const int32_t*>(in.arranged),
                       activation_blocks(w.columns),
                       w.scale_columns == 32 ? size_t{8} : size_t{1}};
  with_block_type(w.code, [&](auto type) {
    using Type = decltype(type);
    using Form = FormOf<Type>;
    if (!w.int8_activations) {
      return multiply_float_blocks<Type>(w, in, first_row, end_row, out, stride);
    }
#if defined(HMT_VBMI)
    if constexpr (Lookup<Type>::kHas) {
      if (in.tokens == 1) return multiply_one_token_by_lookup<Type>(call, first_row, end_row, out);
    }
#endif
    if (in.tokens == 1) return multiply_one_token<Type>(call, first_row, end_row, out);
    // As a pointer, so that types of one form share the rest.
    void (*const unpack_some)(const Weight&, size_t, size_t, size_t, Unpacked<Form>*) =
        unpack<Type>;
#if defined(HMT_AMX)
    if (in.tokens >= kAmxBlockTokens) {
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
