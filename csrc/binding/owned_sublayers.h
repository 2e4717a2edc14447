// Descriptions of sublayers that Python objects hold.
#pragma once

#include "binding/owned.h"
#include "sublayers/sublayers.h"

namespace hmt::binding {

// given: empty, or (address of the weight, its type, eps, offset)
inline NormWeight norm_weight(nb::tuple given) {
  if (nb::len(given) == 0) return {nullptr, DType::kF32, 0, 0};
  return {at<const void>(nb::cast<Address>(given[0])), static_cast<DType>(nb::cast<int>(given[1])),
          nb::cast<float>(given[2]), nb::cast<float>(given[3])};
}

class OwnedAttentionInputs {
 public:
  OwnedAttentionInputs(nb::tuple projections, size_t heads, size_t kv_heads, size_t dim,
                       nb::tuple norm, nb::tuple query_norm, nb::tuple key_norm, bool gated)
      : projections_(projections),
        layer_{norm_weight(norm),       projections_.all(),      heads, kv_heads, dim,
               nb::len(query_norm) > 0, norm_weight(query_norm), norm_weight(key_norm), gated} {}

  const AttentionInputs& get() const { return layer_; }

 private:
  OwnedProjections projections_;
  AttentionInputs layer_;
};

class OwnedFeedForward {
 public:
  OwnedFeedForward(nb::tuple gate_up, int activation, nb::tuple down, nb::tuple norm,
                   nb::tuple post_norm)
      : gate_up_(gate_up),
        down_(down),
        layer_{norm_weight(norm), gate_up_.all(),          static_cast<Activation>(activation),
               down_.all()[0],    nb::len(post_norm) > 0, norm_weight(post_norm)} {}

  const FeedForward& get() const { return layer_; }

 private:
  OwnedProjections gate_up_, down_;
  FeedForward layer_;
};

}  // namespace hmt::binding
