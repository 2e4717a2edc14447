// Which CPUs this process may compute on: its affinity mask, its cgroup's quota, and which CPUs are
// threads of one physical core.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace hmt {

struct Core {
  std::vector<int> cpus;  // hardware threads of it that we may use, ascending
  std::size_t node;       // 0 up to Topology::nodes, in the order of NUMA nodes that we may use
};

struct Topology {
  std::vector<Core> cores;  // node after node; never empty
  std::size_t nodes = 1;
  double quota = 0.0;  // CPUs' worth of time that cgroups grant us; 0: no limit

  // Threads that can compute at once: physical cores, or the whole CPUs of the quota if fewer.  A
  // second thread on a core brings little to kernels that keep its vector units or memory busy, and
  // one thread more than the quota has all of them stopped for the rest of a period.
  std::size_t threads() const;

  // The index in `cores` of the core that `cpu` belongs to; cores.size() when it is not ours.
  std::size_t core_of(int cpu) const;
};

// CPUs in the calling thread's affinity mask, ascending.
std::vector<int> allowed_cpus();

// From the files of Linux below `root` ("" for the real ones), for a mask of `cpus`.  What cannot
// be read counts as a machine without SMT, NUMA and quota.
Topology read_topology(const std::string& root, const std::vector<int>& cpus);

}  // namespace hmt
