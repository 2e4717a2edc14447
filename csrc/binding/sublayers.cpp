// Chains of kernels that a decoder layer runs in one call.
#include "sublayers/sublayers.h"

#include <vector>

#include "binding/binding.h"

namespace hmt::binding {
namespace {

// Projections with their own copies of the descriptions of their weights.
class OwnedProjections {
 public:
  explicit OwnedProjections(nb::tuple items) {
    for (const Projection& p : projections_of(items)) {
      weights_.push_back(*p.weight);
      projections_.push_back(p);
    }
    for (size_t i = 0; i < weights_.size(); ++i) projections_[i].weight = &weights_[i];
  }
  OwnedProjections(const OwnedProjections&) = delete;
  OwnedProjections& operator=(const OwnedProjections&) = delete;

  const std::vector<Projection>& all() const { return projections_; }

 private:
  std::vector<Weight> weights_;
  std::vector<Projection> projections_;
};

// given: empty, or (address of the weight, its type, eps, offset)
NormWeight norm_weight(nb::tuple given) {
  if (nb::len(given) == 0) return {nullptr, DType::kF32, 0, 0};
  return {at<const void>(nb::cast<Address>(given[0])), static_cast<DType>(nb::cast<int>(given[1])),
          nb::cast<float>(given[2]), nb::cast<float>(given[3])};
}

class OwnedAttentionInputs {
 public:
  OwnedAttentionInputs(nb::tuple projections, size_t heads, size_t kv_heads, size_t dim,
                       nb::tuple norm, nb::tuple query_norm, nb::tuple key_norm)
      : projections_(projections),
        layer_{norm_weight(norm),       projections_.all(),      heads, kv_heads, dim,
               nb::len(query_norm) > 0, norm_weight(query_norm), norm_weight(key_norm)} {}

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

}  // namespace

void bind_sublayers(nb::module_& m) {
  nb::class_<OwnedAttentionInputs>(m, "AttentionInputs", "What attention begins with; borrows.")
      .def(nb::init<nb::tuple, size_t, size_t, size_t, nb::tuple, nb::tuple, nb::tuple>());
  m.def("attention_inputs", [](const OwnedAttentionInputs& layer, Address hidden, int type,
                               size_t tokens, size_t width, Address cos, Address sin,
                               size_t turned, Address workspace, Address heads, size_t threads) {
    Kernel kernel;
    attention_inputs(layer.get(),
                     {at<const void>(hidden), static_cast<DType>(type), tokens, width, width},
                     {at<const float>(cos), at<const float>(sin), turned}, at<void>(workspace),
                     at<void>(heads), threads);
  });
  nb::class_<OwnedFeedForward>(m, "FeedForward", "A gated feed-forward layer; borrows.")
      .def(nb::init<nb::tuple, int, nb::tuple, nb::tuple, nb::tuple>())
      .def_prop_ro("workspace_width",
                   [](const OwnedFeedForward& layer) { return workspace_width(layer.get()); });
  m.def("feed_forward", [](const OwnedFeedForward& layer, int type, size_t tokens, Address hidden,
                           Address x, Address workspace, size_t threads) {
    Kernel kernel;
    feed_forward(layer.get(), static_cast<DType>(type), tokens, at<void>(hidden),
                 at<const void>(x), at<void>(workspace), threads);
  });
}

}  // namespace hmt::binding
