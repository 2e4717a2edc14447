// Attention over pages.
#include "attention/index.h"
#include "binding/owned.h"

namespace hmt::binding {
namespace {

PageSet make_pages(int encoding, size_t heads, size_t key_dim, size_t value_dim, bool latent,
                   Address data, size_t stride) {
  return {{{static_cast<PageEncoding>(encoding), heads, key_dim, value_dim, latent},
           at<uint8_t>(data), stride}};
}

// items: tuples (offset, length, start, address of an int64 table, positions seen or -1)
Runs make_runs(nb::tuple items) {
  Runs made;
  made.runs.reserve(nb::len(items));
  for (nb::handle item : items) {
    auto run = nb::borrow<nb::tuple>(item);
    made.runs.push_back({nb::cast<size_t>(run[0]), nb::cast<size_t>(run[1]),
                         nb::cast<size_t>(run[2]), at<const int64_t>(nb::cast<Address>(run[3])),
                         static_cast<size_t>(nb::cast<int64_t>(run[4]))});
  }
  return made;
}

HeadRows rows_at(Address data, int type, size_t token_stride, size_t head_stride) {
  return {at<const void>(data), static_cast<DType>(type), token_stride, head_stride};
}

// keys: (encoding, dim, address, bytes from page to page, address of an int64 table or 0)
IndexKeys index_keys(nb::tuple keys) {
  return {static_cast<PageEncoding>(nb::cast<int>(keys[0])), nb::cast<size_t>(keys[1]),
          at<const uint8_t>(nb::cast<Address>(keys[2])), nb::cast<size_t>(keys[3]),
          at<const int64_t>(nb::cast<Address>(keys[4]))};
}

// queries: (address, type, strides of tokens and heads, tokens, heads, address of weights, scale)
IndexQueries index_queries(nb::tuple queries) {
  return {rows_at(nb::cast<Address>(queries[0]), nb::cast<int>(queries[1]),
                  nb::cast<size_t>(queries[2]), nb::cast<size_t>(queries[3])),
          nb::cast<size_t>(queries[4]), nb::cast<size_t>(queries[5]),
          at<const float>(nb::cast<Address>(queries[6])), nb::cast<float>(queries[7])};
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<PageSet>(m, "Pages", "Pages as csrc/attention/pages.h describes; borrows memory.")
      .def_prop_ro("layer_bytes", [](const PageSet& set) { return set.pages.layout.page_bytes(); });
  nb::class_<Runs>(m, "Runs", "The runs of a step; borrows their tables.");
  m.def("make_pages", make_pages);
  m.def("make_runs", make_runs);
  m.def("append_pages", [](const PageSet& set, size_t layer, const Runs& runs, Address key,
                           int key_type, size_t key_stride, size_t key_head, Address value,
                           int value_type, size_t value_stride, size_t value_head,
                           size_t threads) {
    Kernel kernel;
    append(set.of(layer), runs.runs.data(), runs.runs.size(),
           rows_at(key, key_type, key_stride, key_head),
           rows_at(value, value_type, value_stride, value_head), threads);
  });
  // One call for the two, since a token of a layer always needs both.  heads: queries, keys and
  // values [tokens, q_heads + 2 * kv heads, dim], without gaps.
  m.def("append_attend_pages",
        [](const PageSet& set, size_t layer, const Runs& runs, Address heads, int type,
           size_t q_heads, float scale, size_t window, float softcap, Address sinks, Address out,
           size_t threads) {
          Kernel kernel;
          const Pages pages = set.of(layer);
          const size_t kv_heads = pages.layout.heads, dim = pages.layout.key_dim;
          const size_t row = (q_heads + 2 * kv_heads) * dim;
          const size_t width = dim * bytes_of(static_cast<DType>(type));
          const Address key = heads + q_heads * width, value = key + kv_heads * width;
          append(pages, runs.runs.data(), runs.runs.size(), rows_at(key, type, row, dim),
                 rows_at(value, type, row, dim), threads);
          attend(pages, runs.runs.data(), runs.runs.size(), rows_at(heads, type, row, dim), q_heads,
                 {scale, window, softcap, at<const float>(sinks)},
                 {at<void>(out), static_cast<DType>(type), nullptr}, threads);
        });
  m.def("attend_pages", [](const PageSet& set, size_t layer, const Runs& runs, Address query,
                           int type, size_t stride, size_t head_stride, size_t q_heads,
                           float scale, size_t window, float softcap, Address sinks, Address out,
                           int out_type, Address lse, size_t threads) {
    Kernel kernel;
    attend(set.of(layer), runs.runs.data(), runs.runs.size(),
           rows_at(query, type, stride, head_stride), q_heads,
           {scale, window, softcap, at<const float>(sinks)},
           {at<void>(out), static_cast<DType>(out_type), at<float>(lse)}, threads);
  });
  m.def("index_scores", [](nb::tuple keys, nb::tuple queries, size_t token, size_t count,
                           Address scores, size_t threads) {
    const IndexKeys where = index_keys(keys);
    const IndexQueries what = index_queries(queries);
    Kernel kernel;
    index_scores(where, what, token, count, at<float>(scores), threads);
  });
  m.def("index_topk", [](nb::tuple keys, nb::tuple queries, size_t start, size_t group,
                         size_t top_k, Address chosen, Address tied, size_t threads) {
    const IndexKeys where = index_keys(keys);
    const IndexQueries what = index_queries(queries);
    Kernel kernel;
    index_topk(where, what, start, group, top_k, at<int64_t>(chosen), at<bool>(tied), threads);
  });
  m.def("page_masses", [](const PageSet& set, size_t layer, const Runs& runs, size_t count,
                          Address query, int type, size_t stride, size_t head_stride,
                          size_t q_heads, float scale, float softcap, Address logs, Address masses,
                          size_t threads) {
    Kernel kernel;
    page_masses(set.of(layer), runs.runs.front(), count, rows_at(query, type, stride, head_stride),
                q_heads, {scale, 0, softcap, nullptr}, at<const float>(logs), at<float>(masses),
                threads);
  });
}

}  // namespace hmt::binding
