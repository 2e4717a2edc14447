#include "experts/experts.h"

#include <nanobind/stl/pair.h>

#include <utility>
#include <vector>

#include "binding/binding.h"

namespace hmt::binding {
namespace {

// An expert with its own copies of the descriptions of its weights.
class OwnedExpert {
 public:
  // biases: for gate, up and down (address or 0, type)
  OwnedExpert(int64_t id, const Weight& gate, const Weight& up, const Weight& down,
              nb::tuple biases)
      : weights_{gate, up, down}, id_(id) {
    for (size_t i = 0; i < 3; ++i) {
      const auto [address, type] = nb::cast<std::pair<Address, int>>(biases[i]);
      biases_[i] = {nullptr, at<const void>(address), static_cast<DType>(type)};
    }
  }

  Expert get() const {
    const auto with = [&](size_t i) {
      return Projection{&weights_[i], biases_[i].bias, biases_[i].bias_type};
    };
    return {id_, with(0), with(1), with(2)};
  }

 private:
  Weight weights_[3];
  Projection biases_[3];
  int64_t id_;
};

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<OwnedExpert>(m, "Expert", "The weights of one expert; borrows their memory.")
      .def(nb::init<int64_t, const Weight&, const Weight&, const Weight&, nb::tuple>());
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
