// Decoder layers in one call.
#include "sublayers/stack.h"

#include <nanobind/stl/vector.h>

#include "binding/owned_sublayers.h"

namespace hmt::binding {
namespace {

class OwnedSparseLayer {
 public:
  // inputs: see SparseLayer; experts: a list of OwnedExpert, each at the index that is its id
  // shared: empty, or (whether it is gated, its activation, its down projection as for projections_of)
  OwnedSparseLayer(nb::tuple norm, nb::tuple inputs, size_t top_k, bool renormalise,
                   int activation, nb::list experts, nb::tuple shared)
      : inputs_(inputs),
        kept_(experts),
        down_(nb::len(shared) == 0 ? nb::tuple() : nb::cast<nb::tuple>(shared[2])),
        layer_{norm_weight(norm), inputs_.all(), top_k, renormalise,
               static_cast<Activation>(activation), {}, std::nullopt} {
    for (nb::handle item : experts) {
      layer_.experts.push_back(nb::cast<const OwnedExpert&>(item).get());
    }
    if (nb::len(shared) == 0) return;
    layer_.shared = SharedExpert{nb::cast<bool>(shared[0]),
                                 static_cast<Activation>(nb::cast<int>(shared[1])), down_.all()[0]};
  }

  const SparseLayer& get() const { return layer_; }

 private:
  OwnedProjections inputs_;
  nb::list kept_;  // what the experts refer to
  OwnedProjections down_;
  SparseLayer layer_;
};

class OwnedAttentionLayer {
 public:
  // options: (scale, window, softcap, address of sinks)
  OwnedAttentionLayer(nb::handle inputs, size_t angles, nb::handle pages, size_t place,
                      nb::tuple options, nb::tuple output, nb::tuple post_norm)
      : inputs_(nb::borrow(inputs)),
        output_(output),
        layer_{nb::cast<const OwnedAttentionInputs&>(inputs).get(),
               angles,
               nb::cast<const PageSet&>(pages).of(place),
               {nb::cast<float>(options[0]), nb::cast<size_t>(options[1]),
                nb::cast<float>(options[2]), at<const float>(nb::cast<Address>(options[3]))},
               output_.all()[0],
               nb::len(post_norm) > 0,
               norm_weight(post_norm)} {}

  const AttentionLayer& get() const { return layer_; }

 private:
  nb::object inputs_;  // what the layer refers to
  OwnedProjections output_;
  AttentionLayer layer_;
};

// given: (first, count) for each
Spans spans_of(nb::tuple given) {
  Spans spans;
  for (nb::handle item : given) {
    auto span = nb::borrow<nb::tuple>(item);
    spans.push_back({nb::cast<size_t>(span[0]), nb::cast<size_t>(span[1])});
  }
  return spans;
}

class OwnedDeltaWeights {
 public:
  // spans: of Q, K and V, of gates, of rates and of decays
  // through: the projections behind those of gates and of decays; () where there is none
  // heads: (key heads, heads, key_dim, value_dim, by channel, bound, most rate)
  // constants: addresses of the convolution's weight, of decays' scales and of their biases
  OwnedDeltaWeights(nb::tuple norm, nb::tuple inputs, nb::tuple spans, nb::tuple through,
                    nb::tuple heads, size_t taps, nb::tuple constants, nb::tuple out_norm,
                    int activation, bool tiled, nb::tuple output)
      : inputs_(inputs),
        through_gate_(nb::cast<nb::tuple>(through[0])),
        through_decay_(nb::cast<nb::tuple>(through[1])),
        output_(output) {
    layer_.norm = norm_weight(norm);
    layer_.inputs = inputs_.all();
    layer_.qkv = spans_of(nb::cast<nb::tuple>(spans[0]));
    layer_.gate = spans_of(nb::cast<nb::tuple>(spans[1]));
    layer_.rate = spans_of(nb::cast<nb::tuple>(spans[2]));
    layer_.decay = spans_of(nb::cast<nb::tuple>(spans[3]));
    if (!through_gate_.all().empty()) layer_.through_gate = through_gate_.all()[0];
    if (!through_decay_.all().empty()) layer_.through_decay = through_decay_.all()[0];
    const auto size = [&](size_t i) { return nb::cast<size_t>(heads[i]); };
    DeltaRule& rule = layer_.rule;
    rule.key_heads = size(0);
    rule.heads = size(1);
    rule.key_dim = size(2);
    rule.value_dim = size(3);
    rule.by_channel = nb::cast<bool>(heads[4]);
    rule.bound = nb::cast<float>(heads[5]);
    rule.most_rate = nb::cast<float>(heads[6]);
    const auto constant = [&](size_t i) { return at<const float>(nb::cast<Address>(constants[i])); };
    CausalConv& conv = layer_.conv;
    conv.channels = rule.row();
    conv.width = taps;
    conv.weight = constant(0);
    conv.gated = true;
    rule.decay_scale = constant(1);
    rule.decay_bias = constant(2);
    layer_.out_norm = norm_weight(out_norm);
    layer_.activation = static_cast<Activation>(activation);
    layer_.tiled = tiled;
    layer_.output = output_.all()[0];
  }

  // states: (address, numbers of a slot) of tails and of matrices, and (address, room of a slot,
  // numbers) of the journal, 0 where there is none
  DeltaLayer with(nb::tuple states) const {
    const auto tails = nb::cast<nb::tuple>(states[0]), matrices = nb::cast<nb::tuple>(states[1]);
    const auto journal = nb::cast<nb::tuple>(states[2]);
    DeltaLayer layer = layer_;
    layer.conv.tails = at<float>(nb::cast<Address>(tails[0]));
    layer.conv.slot_stride = nb::cast<size_t>(tails[1]);
    layer.rule.states = at<float>(nb::cast<Address>(matrices[0]));
    layer.rule.slot_stride = nb::cast<size_t>(matrices[1]);
    layer.journal = {at<float>(nb::cast<Address>(journal[0])), nb::cast<size_t>(journal[1]),
                     nb::cast<size_t>(journal[2])};
    return layer;
  }

 private:
  OwnedProjections inputs_, through_gate_, through_decay_, output_;
  DeltaLayer layer_{};
};

class OwnedDeltaLayer {
 public:
  OwnedDeltaLayer(nb::handle weights, nb::tuple states)
      : weights_(nb::borrow(weights)),
        layer_(nb::cast<const OwnedDeltaWeights&>(weights).with(states)) {}

  const DeltaLayer& get() const { return layer_; }

 private:
  nb::object weights_;  // what the layer refers to
  DeltaLayer layer_;
};

// What adapters add in a step to some projections of layers, counted as in projections_of, layer
// after layer.
class StackAdapters {
 public:
  // given: (place, LowRanks) of each
  explicit StackAdapters(nb::tuple given) : kept_(given) {
    for (nb::handle item : given) {
      auto one = nb::borrow<nb::tuple>(item);
      added_.push_back({nb::cast<size_t>(one[0]), &nb::cast<const LowRanks&>(one[1]).adapters});
    }
  }

  struct Added {
    size_t place;
    const std::vector<LowRank>* adapters;
  };
  const std::vector<Added>& added() const { return added_; }

 private:
  nb::tuple kept_;  // what is added
  std::vector<Added> added_;
};

// While it lives, projections have what is added.
class Adapting {
 public:
  Adapting(const std::vector<Projection*>& projections, const StackAdapters& adapters)
      : projections_(projections), adapters_(adapters) {
    for (const auto& [place, added] : adapters.added()) projections.at(place)->added = added;
  }
  ~Adapting() {
    for (const auto& each : adapters_.added()) projections_.at(each.place)->added = nullptr;
  }
  Adapting(const Adapting&) = delete;
  Adapting& operator=(const Adapting&) = delete;

 private:
  const std::vector<Projection*>& projections_;
  const StackAdapters& adapters_;
};

// layers: (AttentionLayer or DeltaLayer, FeedForward or SparseLayer)
class Stack {
 public:
  explicit Stack(nb::tuple layers) : kept_(layers) {
    for (nb::handle item : layers) {
      auto given = nb::borrow<nb::tuple>(item);
      StackLayer layer;
      if (nb::isinstance<OwnedAttentionLayer>(given[0])) {
        layer.mixer = nb::cast<const OwnedAttentionLayer&>(given[0]).get();
      } else {
        layer.mixer = nb::cast<const OwnedDeltaLayer&>(given[0]).get();
      }
      if (nb::isinstance<OwnedFeedForward>(given[1])) {
        layer.second = nb::cast<const OwnedFeedForward&>(given[1]).get();
      } else {
        layer.second = nb::cast<const OwnedSparseLayer&>(given[1]).get();
      }
      layers_.push_back(std::move(layer));
    }
    for (StackLayer& layer : layers_) {
      for (Projection* projection : projections_of(layer)) projections_.push_back(projection);
    }
  }

  // angles: a tuple of (address of cosines, of sines, numbers that turn)
  // states: of the runs, as for state_runs
  size_t run(const Runs& runs, nb::tuple angles, const std::vector<size_t>& states, Address hidden,
             int type, size_t tokens, size_t width, Address uses, const StackAdapters& adapters,
             size_t threads) {
    std::vector<Angles> turns;
    for (nb::handle item : angles) {
      auto given = nb::borrow<nb::tuple>(item);
      turns.push_back({at<const float>(nb::cast<Address>(given[0])),
                       at<const float>(nb::cast<Address>(given[1])), nb::cast<size_t>(given[2])});
    }
    const std::vector<StateRun> recurrent = state_runs(states);
    const Adapting adapting(projections_, adapters);
    Kernel kernel;
    return run_stack(layers_,
                     {static_cast<DType>(type), tokens, width, at<void>(hidden), runs.runs.data(),
                      runs.runs.size(), turns.data(), {recurrent.data(), recurrent.size()},
                      at<int64_t>(uses)},
                     threads);
  }

 private:
  nb::tuple kept_;  // what the layers refer to
  std::vector<StackLayer> layers_;
  std::vector<Projection*> projections_;  // of all layers
};

}  // namespace

void bind_stack(nb::module_& m) {
  nb::class_<OwnedSparseLayer>(m, "SparseLayer", "Routed experts behind a norm; borrows.")
      .def(nb::init<nb::tuple, nb::tuple, size_t, bool, int, nb::list, nb::tuple>());
  nb::class_<OwnedAttentionLayer>(m, "AttentionLayer", "Attention with projections; borrows.")
      .def(nb::init<nb::handle, size_t, nb::handle, size_t, nb::tuple, nb::tuple, nb::tuple>());
  nb::class_<OwnedDeltaWeights>(m, "DeltaWeights", "A delta rule with projections; borrows.")
      .def(nb::init<nb::tuple, nb::tuple, nb::tuple, nb::tuple, nb::tuple, size_t, nb::tuple,
                    nb::tuple, int, bool, nb::tuple>());
  nb::class_<OwnedDeltaLayer>(m, "DeltaLayer", "The same with where its states are.")
      .def(nb::init<nb::handle, nb::tuple>());
  m.def("delta_layer", [](const OwnedDeltaWeights& weights, nb::tuple states,
                          const std::vector<size_t>& numbers, Address hidden, int type,
                          size_t tokens, size_t width, Address out, size_t threads) {
    const DeltaLayer layer = weights.with(states);
    const std::vector<StateRun> runs = state_runs(numbers);
    StackStep step{};
    step.type = static_cast<DType>(type);
    step.tokens = tokens;
    step.width = width;
    step.hidden = at<void>(hidden);
    step.states = {runs.data(), runs.size()};
    Kernel kernel;
    mix(layer, step, at<char>(out), threads);
  });
  nb::class_<StackAdapters>(m, "StackAdapters", "What adapters add to layers; borrows memory.")
      .def(nb::init<nb::tuple>());
  nb::class_<Stack>(m, "Stack", "Decoder layers in one call; borrows their memory.")
      .def(nb::init<nb::tuple>())
      .def("run", &Stack::run);
}

}  // namespace hmt::binding
