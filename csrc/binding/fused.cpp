// Norms, rotary positions, gated activations, routing, sampling.
#include "binding/binding.h"
#include "fused/gated.h"
#include "fused/grain.h"
#include "fused/heads.h"
#include "fused/norm.h"
#include "fused/rotary.h"
#include "fused/routing.h"
#include "fused/sampling.h"
#include "fused/streams.h"

namespace hmt::binding {
namespace {

DType type_of(int type) { return static_cast<DType>(type); }

// Work that is done within microseconds keeps the GIL: whoever takes a released one may keep it for
// a thousand times as long.
template <typename Work>
void compute(size_t numbers, Work work) {
  if (numbers <= kGrainNumbers) {
    KernelTime time;
    work();
  } else {
    Kernel kernel;
    work();
  }
}

// Rows: (tokens, heads, token stride, head stride) of x and (token stride, head stride) of out.
Norm norm_of(Address x, int type, size_t tokens, size_t heads, size_t width, size_t token_stride,
             size_t head_stride, Address out, size_t out_token_stride, size_t out_head_stride,
             Address weight, int weight_type, float eps, float offset, Address residual) {
  return {type_of(type), tokens, heads, width, at<const void>(x), token_stride, head_stride,
          at<void>(out), out_token_stride, out_head_stride, at<const void>(weight),
          type_of(weight_type), eps, offset, at<void>(residual)};
}

void bind_norm(nb::module_& m) {
  m.def("rms_norm", [](Address x, int type, size_t tokens, size_t heads, size_t width,
                       size_t token_stride, size_t head_stride, Address out,
                       size_t out_token_stride, size_t out_head_stride, Address weight,
                       int weight_type, float eps, float offset, Address residual,
                       size_t threads) {
    const Norm norm = norm_of(x, type, tokens, heads, width, token_stride, head_stride, out,
                              out_token_stride, out_head_stride, weight, weight_type, eps, offset,
                              residual);
    compute(tokens * heads * width, [&] { rms_norm(norm, threads); });
  });
  m.def("rms_norm_quantize",
        [](Address x, int type, size_t tokens, size_t width, size_t stride, Address out,
           Address weight, int weight_type, float eps, float offset, Address residual,
           Address codes, size_t code_stride, Address scales, Address sums, size_t threads) {
          const Norm norm = norm_of(x, type, tokens, 1, width, stride, width, out, width, width,
                                    weight, weight_type, eps, offset, residual);
          const CodeRows where{at<int8_t>(codes), code_stride, at<float>(scales),
                               at<int32_t>(sums), 0, 1};
          compute(tokens * width, [&] { rms_norm_quantize(norm, where, threads); });
        });
}

void bind_rotary(nb::module_& m) {
  m.def("rotate", [](Address x, int type, size_t tokens, size_t heads, size_t dim,
                     size_t token_stride, size_t head_stride, Address out, size_t out_token_stride,
                     size_t out_head_stride, Address cos, Address sin, size_t turned,
                     bool interleaved, size_t threads) {
    const Heads group{heads, dim, at<const void>(x), token_stride, head_stride, at<void>(out),
                      out_token_stride, out_head_stride};
    const Rotation rotation{type_of(type), tokens, turned, at<const float>(cos),
                            at<const float>(sin), interleaved, &group, 1};
    compute(tokens * heads * dim, [&] { rotate(rotation, threads); });
  });
  m.def("rotate_in_place", [](Address q, size_t q_heads, size_t q_token_stride,
                              size_t q_head_stride, Address k, size_t k_heads,
                              size_t k_token_stride, size_t k_head_stride, int type,
                              size_t tokens, size_t dim, Address cos, Address sin, size_t turned,
                              bool interleaved, size_t threads) {
    const Heads groups[2] = {{q_heads, dim, at<const void>(q), q_token_stride, q_head_stride,
                              at<void>(q), q_token_stride, q_head_stride},
                             {k_heads, dim, at<const void>(k), k_token_stride, k_head_stride,
                              at<void>(k), k_token_stride, k_head_stride}};
    const Rotation rotation{type_of(type), tokens, turned, at<const float>(cos),
                            at<const float>(sin), interleaved, groups, 2};
    compute(tokens * (q_heads + k_heads) * dim, [&] { rotate(rotation, threads); });
  });
}

void bind_heads(nb::module_& m) {
  m.def("multiply_heads", [](Address x, int type, size_t tokens, size_t heads, size_t in,
                             size_t token_stride, size_t head_stride, Address matrix, size_t out,
                             size_t matrix_head_stride, size_t stride, bool transposed,
                             Address result, size_t threads) {
    const HeadProducts products{type_of(type), tokens, heads, in, out, at<const void>(x),
                                token_stride, head_stride, at<const void>(matrix),
                                matrix_head_stride, stride, transposed, at<void>(result)};
    compute(tokens * heads * in * out, [&] { multiply_heads(products, threads); });
  });
}

void bind_gated(nb::module_& m) {
  m.def("gated", [](Address gate, size_t gate_stride, Address up, size_t up_stride, int type,
                    int activation, size_t tokens, size_t width, Address out, size_t out_stride,
                    bool one_gate, size_t threads) {
    const Gated call{type_of(type), static_cast<Activation>(activation), tokens, width,
                     at<const void>(gate), gate_stride, at<const void>(up), up_stride,
                     at<void>(out), out_stride, one_gate};
    compute(tokens * width, [&] { gated(call, threads); });
  });
}

void bind_routing(nb::module_& m) {
  m.def("route", [](Address logits, int type, size_t tokens, size_t experts, size_t stride,
                    size_t chosen, bool sigmoid, Address bias, size_t groups, size_t kept_groups,
                    bool renormalise, float factor, Address indices, Address scales,
                    size_t threads) {
    const Routing routing{type_of(type), tokens, experts, chosen, at<const void>(logits), stride,
                          sigmoid, at<const float>(bias), groups, kept_groups, renormalise, factor,
                          at<int64_t>(indices), at<float>(scales)};
    compute(8 * tokens * experts, [&] { route(routing, threads); });
  });
}

void bind_sampling(nb::module_& m) {
  // (all are finite, the first of the largest ones, logarithm of the sum of exponentials)
  m.def("survey", [](Address scores, size_t count) {
    Survey found;
    compute(count, [&] { found = survey(at<const float>(scores), count); });
    return nb::make_tuple(found.finite, found.first_top, found.log_sum_exp);
  });
  m.def("draw", [](Address scores, size_t count, double temperature, size_t top_k, double top_p,
                   double min_p, double uniform) {
    size_t index = 0;
    compute(count, [&] {
      index = draw(at<const float>(scores), count, {temperature, top_k, top_p, min_p, uniform});
    });
    return index;
  });
  m.def("largest", [](Address scores, size_t count, size_t wanted, Address indices) {
    compute(count, [&] {
      largest_scores(at<const float>(scores), count, wanted, at<int64_t>(indices));
    });
  });
}

void bind_streams(nb::module_& m) {
  m.def("mix_streams", [](Address products, Address base, Address scale, size_t tokens,
                          size_t streams, size_t iterations, float eps, Address read,
                          Address spread, Address mixed) {
    const StreamMixes call{tokens, streams, iterations, eps, at<const float>(products),
                           at<const float>(base), at<const float>(scale), at<float>(read),
                           at<float>(spread), at<float>(mixed)};
    compute(2 * tokens * streams * streams * iterations, [&] { mix_streams(call); });
  });
  m.def("read_streams", [](Address rows, int type, size_t tokens, size_t streams, size_t width,
                           Address weights, Address x, size_t threads) {
    const Streams call{type_of(type), tokens, streams, width, at<const void>(rows),
                       at<const float>(weights), nullptr, at<void>(x), nullptr};
    compute(tokens * streams * width, [&] { read_streams(call, threads); });
  });
  m.def("write_streams", [](Address rows, int type, size_t tokens, size_t streams, size_t width,
                            Address weights, Address mixed, Address x, Address out,
                            size_t threads) {
    const Streams call{type_of(type), tokens, streams, width, at<const void>(rows),
                       at<const float>(weights), at<const float>(mixed), at<void>(x),
                       at<void>(out)};
    compute(tokens * streams * streams * width, [&] { write_streams(call, threads); });
  });
}

}  // namespace

void bind_fused(nb::module_& m) {
  bind_norm(m);
  bind_rotary(m);
  bind_heads(m);
  bind_gated(m);
  bind_routing(m);
  bind_sampling(m);
  bind_streams(m);
}

}  // namespace hmt::binding
