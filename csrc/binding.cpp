// hmt._native: the kernels for Python, which passes addresses and sizes and keeps the memory.
// Nothing is checked here; hmt.kernels.cpu is the only caller and checks shapes and strides.
#include <nanobind/nanobind.h>

#include "kernels.h"
#include "thread_pool.h"

namespace nb = nanobind;
using Address = std::uintptr_t;
using std::size_t;

namespace {

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

hmt::Encoded encoded(int code, Address data, Address scales, size_t columns, size_t tile_rows,
                     size_t tile_columns) {
  return {static_cast<hmt::Code>(code), at<const void>(data), at<const float>(scales), columns,
          tile_rows,                    tile_columns};
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Compiled kernels of HMT on raw addresses.  Every call releases the GIL.";
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;

  m.def("threads", [] { return hmt::ThreadPool::instance().threads(); }, Unlocked());
  m.def(
      "set_threads", [](size_t threads) { hmt::ThreadPool::instance().set_threads(threads); },
      Unlocked());
  m.def(
      "quantize_tokens",
      [](Address x, size_t tokens, size_t columns, Address codes, Address scales) {
        hmt::quantize_tokens(at<const float>(x), tokens, columns, at<int8_t>(codes),
                             at<float>(scales));
      },
      Unlocked());
  m.def(
      "linear_int8",
      [](Address x, size_t tokens, Address weights, Address scales, size_t rows, size_t columns,
         Address out, size_t threads) {
        hmt::linear_int8(at<const float>(x), tokens, at<const int8_t>(weights),
                         at<const float>(scales), rows, columns, at<float>(out), threads);
      },
      Unlocked());
  m.def(
      "linear_int4",
      [](Address x, size_t tokens, Address weights, Address scales, size_t rows, size_t columns,
         size_t group, Address out, size_t threads) {
        hmt::linear_int4(at<const float>(x), tokens, at<const uint8_t>(weights),
                         at<const float>(scales), rows, columns, group, at<float>(out), threads);
      },
      Unlocked());
  m.def(
      "linear_float",
      [](Address x, size_t tokens, int code, Address data, Address scales, size_t columns,
         size_t tile_rows, size_t tile_columns, size_t rows, Address out, size_t threads) {
        hmt::linear_float(at<const float>(x), tokens,
                          encoded(code, data, scales, columns, tile_rows, tile_columns), rows,
                          at<float>(out), threads);
      },
      Unlocked());
  m.def(
      "linear_bf16",
      [](Address x, size_t tokens, Address weights, size_t rows, size_t columns, Address out,
         size_t threads) {
        hmt::linear_bf16(at<const float>(x), tokens, at<const uint16_t>(weights), rows, columns,
                         at<float>(out), threads);
      },
      Unlocked());
  m.def(
      "dequantize",
      [](int code, Address data, Address scales, size_t columns, size_t tile_rows,
         size_t tile_columns, size_t first, size_t rows, Address out, size_t threads) {
        hmt::dequantize(encoded(code, data, scales, columns, tile_rows, tile_columns), first, rows,
                        at<float>(out), threads);
      },
      Unlocked());
  m.def(
      "sum_words",
      [](Address words, size_t count) { return hmt::sum_words(at<const uint64_t>(words), count); },
      Unlocked());
}
