// Experts in one call.
#include "binding/owned.h"

namespace hmt::binding {
void bind_experts(nb::module_& m) {
  nb::class_<OwnedExpert>(m, "Expert", "The weights of one expert; borrows their memory.")
      .def(nb::init<int64_t, nb::tuple>());
  m.def("experts", [](nb::list items, Address chosen, Address scales, size_t top_k, Address x,
                      int type, size_t tokens, size_t columns, size_t stride, int activation,
                      Address total, bool fresh, Address result, int result_type, size_t hidden,
                      size_t threads) {
    std::vector<Expert> experts;
    experts.reserve(nb::len(items));
    for (nb::handle item : items) experts.push_back(nb::cast<const OwnedExpert&>(item).get());
    Kernel kernel;
    routed_experts(experts.data(), experts.size(),
                   {at<const int64_t>(chosen), at<const float>(scales), top_k},
                   {at<const void>(x), static_cast<DType>(type), tokens, columns, stride},
                   static_cast<Activation>(activation),
                   {at<float>(total), hidden, fresh,
                    {at<void>(result), static_cast<DType>(result_type), tokens, hidden, hidden}},
                   threads);
  });
}

}  // namespace hmt::binding
