// Convolutions over time, the gated delta rule and state spaces, with the state of sequences.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding/owned.h"
#include "recurrent/recurrent.h"
#include "recurrent/state_space.h"

namespace hmt::binding {

void bind_recurrent(nb::module_& m) {
  m.def("causal_conv", [](Address x, int type, size_t channels, size_t width, size_t stride,
                          Address weight, Address bias, Address tails, size_t slot_stride,
                          Address out, bool gated, const std::vector<size_t>& numbers, size_t threads) {
    const std::vector<StateRun> runs = state_runs(numbers);
    const CausalConv conv{static_cast<DType>(type), channels, width, at<const void>(x), stride,
                          at<const float>(weight), at<const float>(bias), at<float>(tails),
                          slot_stride, at<void>(out), gated};
    Kernel kernel;
    causal_conv(conv, {runs.data(), runs.size()}, threads);
  });
  m.def("gated_delta_rule",
        [](Address qkv, int type, size_t tokens, std::tuple<size_t, size_t, size_t, size_t> sizes,
           bool by_channel, float bound, float most_rate, Address decay, Address rate,
           Address decay_scale, Address decay_bias, Address states, size_t slot_stride,
           Address out, Address work, const std::vector<size_t>& numbers, size_t threads) {
          const std::vector<StateRun> runs = state_runs(numbers);
          const auto [key_heads, heads, key_dim, value_dim] = sizes;
          const DeltaRule rule{static_cast<DType>(type), tokens, key_heads, heads, key_dim,
                               value_dim, by_channel, bound, most_rate, at<const void>(qkv),
                               at<const void>(decay), at<const void>(rate),
                               at<const float>(decay_scale), at<const float>(decay_bias),
                               at<float>(states), slot_stride, at<void>(out), at<float>(work)};
          Kernel kernel;
          gated_delta_rule(rule, {runs.data(), runs.size()}, threads);
        });
  m.def("time_steps", [](Address raw, int type, size_t tokens, size_t heads, Address bias,
                         Address decay_scale, float shortest, float longest, Address step,
                         Address decay, size_t threads) {
    const TimeSteps steps{static_cast<DType>(type), heads, at<const void>(raw),
                          at<const float>(bias), at<const float>(decay_scale), shortest, longest,
                          at<float>(step), at<float>(decay)};
    Kernel kernel;
    time_steps(steps, tokens, threads);
  });
  m.def("state_space_scan",
        [](int type, std::tuple<size_t, size_t, size_t, size_t> sizes, Address x, size_t x_stride,
           Address keys, size_t key_stride, Address queries, size_t query_stride, Address decay,
           Address step, Address skip, Address states, size_t slot_stride, Address out,
           const std::vector<size_t>& numbers, size_t threads) {
          const std::vector<StateRun> runs = state_runs(numbers);
          const auto [groups, heads, state_dim, head_dim] = sizes;
          const StateSpaceScan scan{static_cast<DType>(type), groups, heads, state_dim, head_dim,
                                    at<const void>(x), x_stride, at<const void>(keys), key_stride,
                                    at<const void>(queries), query_stride, at<const float>(decay),
                                    at<const float>(step), at<const float>(skip),
                                    at<float>(states), slot_stride, at<void>(out)};
          Kernel kernel;
          state_space_scan(scan, {runs.data(), runs.size()}, threads);
        });
  m.def("selective_scan",
        [](int type, std::tuple<size_t, size_t> sizes,
           const std::vector<std::tuple<Address, size_t>>& rows,
           const std::vector<Address>& constants, Address states, size_t slot_stride, Address out,
           const std::vector<size_t>& numbers, size_t threads) {
          const std::vector<StateRun> runs = state_runs(numbers);
          const auto rows_at = [&](size_t i) {
            return StridedRows{at<const void>(std::get<0>(rows[i])), std::get<1>(rows[i])};
          };
          const SelectiveScan scan{static_cast<DType>(type), std::get<0>(sizes), std::get<1>(sizes),
                                   rows_at(0), rows_at(1), rows_at(2), rows_at(3),
                                   at<const float>(constants[0]), at<const float>(constants[1]),
                                   at<const float>(constants[2]), at<float>(states), slot_stride,
                                   at<void>(out)};
          Kernel kernel;
          selective_scan(scan, {runs.data(), runs.size()}, threads);
        });
}

}  // namespace hmt::binding
