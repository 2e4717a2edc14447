// Convolutions over time and the gated delta rule, with the state of sequences.
#include <nanobind/stl/vector.h>

#include "binding/binding.h"
#include "recurrent/recurrent.h"

namespace hmt::binding {
namespace {

// runs: (slot, offset, length, whether it begins), four numbers for each.
std::vector<StateRun> runs_of(const std::vector<size_t>& numbers) {
  std::vector<StateRun> runs;
  for (size_t i = 0; i + 3 < numbers.size(); i += 4) {
    runs.push_back({numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3] != 0});
  }
  return runs;
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  m.def("causal_conv", [](Address x, int type, size_t channels, size_t width, size_t stride,
                          Address weight, Address tails, size_t slot_stride, Address out,
                          bool gated, const std::vector<size_t>& numbers, size_t threads) {
    const std::vector<StateRun> runs = runs_of(numbers);
    const CausalConv conv{static_cast<DType>(type), channels, width, at<const void>(x), stride,
                          at<const float>(weight), at<float>(tails), slot_stride, at<void>(out),
                          gated};
    Kernel kernel;
    causal_conv(conv, {runs.data(), runs.size()}, threads);
  });
  m.def("gated_delta_rule",
        [](Address qkv, int type, size_t tokens, size_t key_heads, size_t heads, size_t key_dim,
           size_t value_dim, Address decay, Address rate, Address decay_scale, Address decay_bias,
           Address states, size_t slot_stride, Address out, Address work,
           const std::vector<size_t>& numbers, size_t threads) {
          const std::vector<StateRun> runs = runs_of(numbers);
          const DeltaRule rule{static_cast<DType>(type), tokens, key_heads, heads, key_dim,
                               value_dim, at<const void>(qkv), at<const void>(decay),
                               at<const void>(rate), at<const float>(decay_scale),
                               at<const float>(decay_bias), at<float>(states), slot_stride,
                               at<void>(out), at<float>(work)};
          Kernel kernel;
          gated_delta_rule(rule, {runs.data(), runs.size()}, threads);
        });
}

}  // namespace hmt::binding
