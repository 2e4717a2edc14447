// Chains of kernels that a decoder layer runs in one call.
#include "sublayers/sublayers.h"

#include "sublayers/stack.h"

#include "binding/owned.h"

namespace hmt::binding {
namespace {

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

class OwnedSparseLayer {
 public:
  // experts: a list of OwnedExpert, each at the index that is its id
  OwnedSparseLayer(nb::tuple norm, nb::tuple router, size_t top_k, bool renormalise,
                   int activation, nb::list experts)
      : router_(router),
        kept_(experts),
        layer_{norm_weight(norm), router_.all()[0], top_k, renormalise,
               static_cast<Activation>(activation), {}} {
    for (nb::handle item : experts) {
      layer_.experts.push_back(nb::cast<const OwnedExpert&>(item).get());
    }
  }

  const SparseLayer& get() const { return layer_; }

 private:
  OwnedProjections router_;
  nb::list kept_;  // what the experts refer to
  SparseLayer layer_;
};

// layers: (attention inputs, index of its angles, pages, place among these, (scale, window, softcap,
// address of sinks), output projection, post norm, FeedForward or SparseFeedForward)
class Stack {
 public:
  explicit Stack(nb::tuple layers) : kept_(layers) {
    for (nb::handle item : layers) {
      auto given = nb::borrow<nb::tuple>(item);
      auto options = nb::borrow<nb::tuple>(given[4]);
      const auto& output = nb::cast<const OwnedProjections&>(given[5]);
      auto post_norm = nb::borrow<nb::tuple>(given[6]);
      AttentionLayer attention{
          nb::cast<const OwnedAttentionInputs&>(given[0]).get(),
          nb::cast<size_t>(given[1]),
          nb::cast<const PageSet&>(given[2]).of(nb::cast<size_t>(given[3])),
          {nb::cast<float>(options[0]), nb::cast<size_t>(options[1]), nb::cast<float>(options[2]),
           at<const float>(nb::cast<Address>(options[3]))},
          output.all()[0],
          nb::len(post_norm) > 0,
          norm_weight(post_norm)};
      if (nb::isinstance<OwnedFeedForward>(given[7])) {
        layers_.push_back({attention, nb::cast<const OwnedFeedForward&>(given[7]).get()});
      } else {
        layers_.push_back({attention, nb::cast<const OwnedSparseLayer&>(given[7]).get()});
      }
    }
  }

  // angles: a tuple of (address of cosines, of sines, numbers that turn)
  size_t run(const Runs& runs, nb::tuple angles, Address hidden, int type, size_t tokens,
             size_t width, Address uses, size_t threads) const {
    std::vector<Angles> turns;
    for (nb::handle item : angles) {
      auto given = nb::borrow<nb::tuple>(item);
      turns.push_back({at<const float>(nb::cast<Address>(given[0])),
                       at<const float>(nb::cast<Address>(given[1])), nb::cast<size_t>(given[2])});
    }
    Kernel kernel;
    return run_stack(layers_,
                     {static_cast<DType>(type), tokens, width, at<void>(hidden), runs.runs.data(),
                      runs.runs.size(), turns.data(), at<int64_t>(uses)},
                     threads);
  }

 private:
  nb::tuple kept_;  // what the layers refer to
  std::vector<StackLayer> layers_;
};

}  // namespace

void bind_sublayers(nb::module_& m) {
  nb::class_<OwnedAttentionInputs>(m, "AttentionInputs", "What attention begins with; borrows.")
      .def(nb::init<nb::tuple, size_t, size_t, size_t, nb::tuple, nb::tuple, nb::tuple>());
  m.def("attention_inputs", [](const OwnedAttentionInputs& layer, Address hidden, int type,
                               size_t tokens, size_t width, Address cos, Address sin,
                               size_t turned, Address heads, size_t threads) {
    Kernel kernel;
    attention_inputs(layer.get(),
                     {at<const void>(hidden), static_cast<DType>(type), tokens, width, width},
                     {at<const float>(cos), at<const float>(sin), turned}, at<void>(heads), threads);
  });
  nb::class_<OwnedFeedForward>(m, "FeedForward", "A gated feed-forward layer; borrows.")
      .def(nb::init<nb::tuple, int, nb::tuple, nb::tuple, nb::tuple>());
  m.def("feed_forward", [](const OwnedFeedForward& layer, int type, size_t tokens, Address hidden,
                           Address x, size_t threads) {
    Kernel kernel;
    feed_forward(layer.get(), static_cast<DType>(type), tokens, at<void>(hidden),
                 at<const void>(x), threads);
  });
  nb::class_<OwnedProjections>(m, "Projections", "Weights and biases; borrows their memory.")
      .def(nb::init<nb::tuple>());
  nb::class_<OwnedSparseLayer>(m, "SparseLayer", "Routed experts behind a norm; borrows.")
      .def(nb::init<nb::tuple, nb::tuple, size_t, bool, int, nb::list>());
  nb::class_<Stack>(m, "Stack", "Decoder layers in one call; borrows their memory.")
      .def(nb::init<nb::tuple>())
      .def("run", &Stack::run);
}

}  // namespace hmt::binding
