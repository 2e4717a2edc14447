#include "base/topology.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

namespace hmt {
namespace {

// The file's first line; empty when it cannot be read.
std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "0-3,8" as numbers.
std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  std::istringstream parts(text);
  std::string part;
  while (std::getline(parts, part, ',')) {
    int first = 0, last = 0;
    const int found = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (found < 1) continue;
    for (int cpu = first; cpu <= (found == 2 ? last : first); ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

// NUMA node by CPU, as the kernel numbers them.
std::map<int, int> nodes_of_cpus(const std::string& root) {
  const std::string folder = root + "/sys/devices/system/node/";
  std::map<int, int> nodes;
  for (int node : parse_cpu_list(first_line(folder + "online"))) {
    const std::string file = folder + "node" + std::to_string(node) + "/cpulist";
    for (int cpu : parse_cpu_list(first_line(file))) nodes[cpu] = node;
  }
  return nodes;
}

// Number of the core's first hardware thread, whether or not we may use that one.
int leader_of(const std::string& root, int cpu) {
  const std::string folder =
      root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
  std::string list = first_line(folder + "core_cpus_list");
  if (list.empty()) list = first_line(folder + "thread_siblings_list");  // before Linux 5.3
  const std::vector<int> siblings = parse_cpu_list(list);
  return siblings.empty() ? cpu : siblings.front();
}

// CPUs granted by one cgroup's files; 0 where they set no limit or are not there.
double quota_of_v2(const std::string& folder) {
  double quota = 0, period = 0;
  // The quota is "max" where there is no limit.
  const std::string line = first_line(folder + "/cpu.max");
  return std::sscanf(line.c_str(), "%lf %lf", &quota, &period) == 2 && period > 0 ? quota / period
                                                                                  : 0;
}

double quota_of_v1(const std::string& folder) {
  double quota = 0, period = 0;
  const bool found =
      std::sscanf(first_line(folder + "/cpu.cfs_quota_us").c_str(), "%lf", &quota) == 1 &&
      std::sscanf(first_line(folder + "/cpu.cfs_period_us").c_str(), "%lf", &period) == 1;
  return found && quota > 0 && period > 0 ? quota / period : 0;  // -1: no limit
}

// The tightest quota of our cgroup and of those around it.
double cgroup_quota(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  double least = 0;
  const auto take = [&](double quota) {
    if (quota > 0 && (least == 0 || quota < least)) least = quota;
  };
  // In a container the path below may be that of the host, while the mount shows our own group.
  take(quota_of_v2(mount));
  take(quota_of_v1(mount + "/cpu"));
  std::ifstream membership(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(membership, line)) {  // hierarchy:controllers:path
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    for (; path.size() > 1; path.resize(std::max<std::size_t>(1, path.rfind('/')))) {
      if (controllers == ",,") take(quota_of_v2(mount + path));
      if (controllers.find(",cpu,") != std::string::npos) take(quota_of_v1(mount + "/cpu" + path));
      if (path.rfind('/') == std::string::npos) break;
    }
  }
  return least;
}

}  // namespace

std::size_t Topology::threads() const {
  if (quota <= 0 || quota >= static_cast<double>(cores.size())) return cores.size();
  return std::max<std::size_t>(1, static_cast<std::size_t>(quota));
}

std::size_t Topology::core_of(int cpu) const {
  for (std::size_t i = 0; i < cores.size(); ++i) {
    const std::vector<int>& cpus = cores[i].cpus;
    if (std::find(cpus.begin(), cpus.end(), cpu) != cpus.end()) return i;
  }
  return cores.size();
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  // Fails until the set is as large as the kernel's.
  for (int size = CPU_SETSIZE; size <= CPU_SETSIZE * 64; size *= 2) {
    cpu_set_t* set = CPU_ALLOC(size);
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(size);
    CPU_ZERO_S(bytes, set);
    if (sched_getaffinity(0, bytes, set) == 0) {
      for (int cpu = 0; cpu < size; ++cpu) {
        if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
      }
    }
    CPU_FREE(set);
    if (!cpus.empty()) return cpus;
  }
  const int count = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  for (int cpu = 0; cpu < count; ++cpu) cpus.push_back(cpu);
  return cpus;
}

Topology read_topology(const std::string& root, const std::vector<int>& cpus) {
  const std::map<int, int> node_of = nodes_of_cpus(root);
  // By node and first hardware thread, so that cores come out node after node.
  std::map<std::pair<int, int>, std::vector<int>> found;
  for (int cpu : cpus) {
    const auto node = node_of.find(cpu);
    found[{node == node_of.end() ? 0 : node->second, leader_of(root, cpu)}].push_back(cpu);
  }
  Topology topology;
  topology.quota = cgroup_quota(root);
  int last = found.empty() ? 0 : found.begin()->first.first;
  for (auto& [place, threads] : found) {
    if (place.first != last) ++topology.nodes;
    last = place.first;
    topology.cores.push_back({std::move(threads), topology.nodes - 1});
  }
  if (topology.cores.empty()) topology.cores.push_back({{0}, 0});
  return topology;
}

}  // namespace hmt
