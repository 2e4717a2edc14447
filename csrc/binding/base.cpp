// Threads, instruction sets, time, memory bandwidth.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "base/bandwidth.h"
#include "base/isa.h"
#include "base/thread_pool.h"
#include "binding/binding.h"

namespace hmt::binding {
namespace {

std::vector<std::string> runnable() {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < kIsas; ++i) {
    if (runs(static_cast<Isa>(i))) names.emplace_back(name_of(static_cast<Isa>(i)));
  }
  return names;
}

void choose(const std::string& name) {
  for (std::size_t i = 0; i < kIsas; ++i) {
    if (name == name_of(static_cast<Isa>(i)) && runs(static_cast<Isa>(i))) {
      return set_isa(static_cast<Isa>(i));
    }
  }
  throw nb::value_error(("this machine does not run " + name).c_str());
}

}  // namespace

void bind_base(nb::module_& m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  m.def("threads", [] { return ThreadPool::instance().threads(); }, Unlocked());
  m.def(
      "set_threads", [](std::size_t threads) { ThreadPool::instance().set_threads(threads); },
      Unlocked());
  m.def("isas", runnable, "Instruction sets that this machine runs, ascending.");
  m.def("isa", [] { return name_of(isa()); });
  m.def("set_isa", choose);
  m.def("kernel_seconds", &KernelTime::seconds);
  m.def(
      "sum_words",
      [](Address words, std::size_t count) { return sum_words(at<const uint64_t>(words), count); },
      Unlocked());
}

}  // namespace hmt::binding
