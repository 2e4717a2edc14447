// Experts in one call, and for a device that asks.
#include <nanobind/stl/tuple.h>

#include "binding/owned.h"
#include "experts/service.h"

namespace hmt::binding {
namespace {

// Keeps the Python objects whose memory the service reads.
class OwnedService {
 public:
  // layers: tuples (experts, addresses of x, chosen, scales, total, asked, answered, cut)
  OwnedService(nb::tuple layers, int type, size_t columns, size_t hidden, size_t top_k,
               int activation)
      : layers_(layers),
        service_(served(layers), static_cast<DType>(type), columns, hidden, top_k,
                 static_cast<Activation>(activation)) {}

  ExpertService& get() { return service_; }

 private:
  static std::vector<ServedLayer> served(nb::tuple layers) {
    std::vector<ServedLayer> all;
    for (nb::handle item : layers) {
      const auto layer = nb::cast<nb::tuple>(item);
      const auto address = [&](size_t i) { return nb::cast<Address>(layer[i]); };
      ServedLayer made;
      for (nb::handle expert : nb::cast<nb::list>(layer[0])) {
        made.experts.push_back(nb::cast<const OwnedExpert&>(expert).get());
      }
      made.mail = {at<const void>(address(1)),     at<const int64_t>(address(2)),
                   at<const float>(address(3)),    at<const int32_t>(address(7)),
                   at<float>(address(4)),          at<const uint32_t>(address(5)),
                   at<uint32_t>(address(6))};
      all.push_back(std::move(made));
    }
    return all;
  }

  nb::tuple layers_;
  ExpertService service_;
};

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<OwnedExpert>(m, "Expert", "The weights of one expert; borrows their memory.")
      .def(nb::init<int64_t, nb::tuple>());
  nb::class_<OwnedService>(m, "ExpertService", "Experts for a device that asks; see service.h.")
      .def(nb::init<nb::tuple, int, size_t, size_t, size_t, int>())
      .def("begin",
           [](OwnedService& service, uint32_t number, size_t tokens, size_t threads,
              double patience_s) { service.get().begin(number, tokens, threads, patience_s); })
      .def("end", [](OwnedService& service) {
        nb::gil_scoped_release unlocked;  // the service counts its time itself
        const Served s = service.get().end();
        return std::make_tuple(s.complete, s.experts, s.waited_s, s.computed_s);
      });
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
