#include "fused/norm.h"

#include "base/scratch.h"
#include "base/thread_pool.h"
#include "fused/grain.h"

namespace hmt {

void rms_norm(const Norm& norm, size_t threads) {
  const NormKernels& kernels = active(norm_kernels_tables());
  share(norm.tokens, rows_per_grain(norm.heads * norm.width), threads,
        [&](size_t begin, size_t end) { kernels.rms_norm(norm, begin, end, nullptr); });
}

void rms_norm_quantize(const Norm& norm, const CodeRows& codes, size_t threads) {
  const NormKernels& kernels = active(norm_kernels_tables());
  share(norm.tokens, rows_per_grain(norm.width), threads, [&](size_t begin, size_t end) {
    Scratch scratch(norm.width * sizeof(float));
    float* wide = scratch.take<float>(norm.width);
    for (size_t t = begin; t < end; ++t) {
      kernels.rms_norm(norm, t, t + 1, wide);
      codes.fill(t, wide, norm.width);
    }
  });
}

void add(DType type, size_t count, const void* x, void* sum, size_t threads) {
  const NormKernels& kernels = active(norm_kernels_tables());
  share(count, kGrainNumbers, threads, [&](size_t begin, size_t end) {
    const size_t at = begin * bytes_of(type);
    kernels.add(type, end - begin, static_cast<const char*>(x) + at, static_cast<char*>(sum) + at);
  });
}

}  // namespace hmt
