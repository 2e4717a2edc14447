// Chains of kernels that a decoder layer runs in one call.
#include "binding/owned_sublayers.h"

namespace hmt::binding {

void bind_sublayers(nb::module_& m) {
  nb::class_<OwnedAttentionInputs>(m, "AttentionInputs", "What attention begins with; borrows.")
      .def(nb::init<nb::tuple, size_t, size_t, size_t, nb::tuple, nb::tuple, nb::tuple, bool>());
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
}

}  // namespace hmt::binding
