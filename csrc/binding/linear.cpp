#include "linear/linear.h"

#include "binding/owned.h"
#include "linear/gguf.h"
#include "linear/low_rank.h"
#include "experimental/msd.h"
#include "linear/pack.h"

namespace hmt::binding {
namespace {

Weight make_weight(int code, int packing, size_t rows, size_t columns, Address data,
                   int scale_type, Address scales, size_t tile_rows, size_t tile_columns,
                   Address zeros, Address minima, float factor, bool int8_activations,
                   size_t scale_columns, Address grid) {
  return {static_cast<Code>(code), static_cast<Packing>(packing), rows, columns,
          at<const void>(data), static_cast<Scales>(scale_type), at<const void>(scales), tile_rows,
          tile_columns, at<const uint8_t>(zeros), at<const void>(minima), factor,
          int8_activations, scale_columns, 0, at<const uint32_t>(grid)};
}

}  // namespace

std::vector<Projection> projections_of(nb::tuple items) {
  std::vector<Projection> projections;
  projections.reserve(nb::len(items));
  for (nb::handle item : items) {
    if (nb::isinstance<nb::tuple>(item)) {
      auto three = nb::borrow<nb::tuple>(item);
      projections.push_back({nb::cast<const Weight*>(three[0]),
                             at<const void>(nb::cast<Address>(three[1])),
                             static_cast<DType>(nb::cast<int>(three[2]))});
    } else {
      projections.push_back({nb::cast<const Weight*>(item), nullptr, DType::kF32});
    }
  }
  return projections;
}

void bind_linear(nb::module_& m) {
  nb::class_<Weight>(m, "Weight", "A weight as csrc/linear/weight.h describes it; borrows memory.")
      .def_ro("rows", &Weight::rows)
      .def_ro("columns", &Weight::columns);
  m.def("make_weight", make_weight);
  m.def("linear", [](nb::tuple items, Address x, int type, size_t tokens, size_t columns,
                     size_t stride, Address out, int out_type, size_t out_stride, size_t threads) {
    const std::vector<Projection> projections = projections_of(items);
    Kernel kernel;
    linear(projections.data(), projections.size(),
           {at<const void>(x), static_cast<DType>(type), tokens, columns, stride},
           {at<void>(out), static_cast<DType>(out_type), tokens, 0, out_stride}, threads);
  });
  nb::class_<LowRanks>(m, "LowRanks", "Adapters of some rows; borrows memory.")
      .def(nb::init<>())
      .def("add", [](LowRanks& all, Address rows, size_t count, Address down, int down_type,
                     Address up, int up_type, size_t rank, float scale) {
        all.adapters.push_back({at<const int64_t>(rows), count, at<const void>(down),
                                static_cast<DType>(down_type), at<const void>(up),
                                static_cast<DType>(up_type), rank, scale});
      });
  m.def("add_low_rank", [](const LowRanks& all, Address x, int type, size_t tokens, size_t columns,
                           size_t stride, Address out, int out_type, size_t out_columns,
                           size_t out_stride, size_t threads) {
    Kernel kernel;
    const AddedColumns part{all.adapters.data(), all.adapters.size(), 0, out_columns};
    add_low_rank({at<const void>(x), static_cast<DType>(type), tokens, columns, stride},
                 {at<void>(out), static_cast<DType>(out_type), tokens, out_columns, out_stride},
                 &part, 1, threads);
  });
  m.def("msd_linear", [](const Weight& weight, Address x, int type, size_t tokens, size_t stride,
                         Address out, int out_type, size_t out_stride, size_t threads) {
    Kernel kernel;
    msd_linear(weight,
               {at<const void>(x), static_cast<DType>(type), tokens, weight.columns, stride},
               {at<void>(out), static_cast<DType>(out_type), tokens, weight.rows, out_stride},
               threads);
  });
  m.def("dequantize", [](const Weight& weight, size_t first, size_t rows, Address out,
                         int out_type, size_t threads) {
    Kernel kernel;
    dequantize(weight, first,
               {at<void>(out), static_cast<DType>(out_type), rows, weight.columns, weight.columns},
               threads);
  });
  m.def("quantize_tokens", [](Address x, int type, size_t tokens, size_t columns, size_t stride,
                              Address codes, Address scales, size_t threads) {
    Kernel kernel;
    quantize_tokens({at<const void>(x), static_cast<DType>(type), tokens, columns, stride},
                    {at<int8_t>(codes), columns, at<float>(scales), nullptr, 0, 1}, threads);
  });
  m.def("pack_gguf", [](Address blocks, size_t rows, size_t count, size_t bytes, size_t turned,
                        size_t taken_at, size_t taken_bytes, Address data, Address scales,
                        Address minima, size_t threads) {
    Kernel kernel;
    pack_gguf({at<const uint8_t>(blocks), rows, count, bytes, turned, taken_at, taken_bytes,
               at<uint8_t>(data), at<uint8_t>(scales), at<uint8_t>(minima)},
              threads);
  });
  m.def("pack_panels", [](Address codes, size_t rows, size_t columns, size_t stride, bool paired,
                          Address panels) {
    Kernel kernel;
    pack_panels(at<const uint8_t>(codes), rows, columns, stride, paired, at<uint8_t>(panels));
  });
  m.def("pack_awq", [](Address words, size_t rows, size_t columns, size_t stride, Address panels,
                       size_t threads) {
    Kernel kernel;
    pack_awq(at<const uint32_t>(words), rows, columns, stride, at<uint8_t>(panels), threads);
  });
}

}  // namespace hmt::binding
