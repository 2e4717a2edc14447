// Threads, instruction sets, time, memory bandwidth.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "base/bandwidth.h"
#include "base/isa.h"
#include "base/peak.h"
#include "base/thread_pool.h"
#include "base/topology.h"
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

// Adds 1 to each of `count` bytes, so that it shows which were visited and how often.
void count_visits(Address bytes, std::size_t count, std::size_t grain, std::size_t threads) {
  uint8_t* visits = at<uint8_t>(bytes);
  share(count, grain, threads, [visits](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) visits[i] = static_cast<uint8_t>(visits[i] + 1);
  });
}

Topology topology_below(const std::string& root, const std::vector<int>& cpus) {
  return read_topology(root, cpus.empty() ? allowed_cpus() : cpus);
}

// [(hardware threads, node)] of each core
std::vector<std::pair<std::vector<int>, std::size_t>> cores_of(const Topology& topology) {
  std::vector<std::pair<std::vector<int>, std::size_t>> cores;
  for (const Core& core : topology.cores) cores.emplace_back(core.cpus, core.node);
  return cores;
}

void bind_threads(nb::module_& m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  m.def(
      "threads", [] { return ThreadPool::instance().threads(); }, Unlocked(),
      "Threads that compute, the caller's included.");
  m.def(
      "set_threads", [](std::size_t threads) { ThreadPool::instance().set_threads(threads); },
      nb::arg("threads"), Unlocked(),
      "0: as many as physical cores that the calling thread may use, or as its cgroup's quota.");
  m.def(
      "watch_for", [](int64_t microseconds) { ThreadPool::watch_for(microseconds); },
      nb::arg("microseconds"),
      "How long workers watch for more work before they sleep; 0: as long as usual.");
  m.def(
      "pin_caller", [](bool pinned) { ThreadPool::instance().pin_caller(pinned); },
      nb::arg("pinned"), Unlocked(),
      "Keep the calling thread on the core that it is on, or let it move again.");
  m.def(
      "share_test", count_visits, nb::arg("bytes"), nb::arg("count"), nb::arg("grain"),
      nb::arg("threads"), Unlocked(), "Add 1 to each byte, on the pool: for tests and timing.");
  nb::class_<Topology>(m, "Topology", "CPUs that a process may use, from the files below `root`.")
      .def("__init__",
           [](Topology* self, const std::string& root, const std::vector<int>& cpus) {
             new (self) Topology(topology_below(root, cpus));
           },
           nb::arg("root") = "", nb::arg("cpus") = std::vector<int>())
      .def_prop_ro("cores", cores_of, "[(its hardware threads that we may use, node)]")
      .def_ro("nodes", &Topology::nodes, "NUMA nodes with a CPU that we may use.")
      .def_ro("quota", &Topology::quota, "CPUs that cgroups grant; 0: no limit.")
      .def_prop_ro("threads", &Topology::threads, "Threads that can compute at once.");
}

double measure_peak(const std::string& kind, std::size_t threads, double seconds) {
  if (kind == "int8") return peak_ops(PeakOf::kInt8, threads, seconds);
  if (kind == "bf16") return peak_ops(PeakOf::kBF16, threads, seconds);
  if (kind == "f32") return peak_ops(PeakOf::kF32, threads, seconds);
  throw std::invalid_argument("int8, bf16 or f32, not " + kind);
}

}  // namespace

void bind_base(nb::module_& m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  bind_threads(m);
  m.def("isas", runnable, "Instruction sets that this machine runs, ascending.");
  m.def("isa", [] { return name_of(isa()); });
  m.def("set_isa", choose);
  m.def("kernel_seconds", &KernelTime::seconds);
  m.def(
      "sum_words",
      [](Address words, std::size_t count) { return sum_words(at<const uint64_t>(words), count); },
      Unlocked());
  m.def("peak_ops", measure_peak, Unlocked());
}

}  // namespace hmt::binding
