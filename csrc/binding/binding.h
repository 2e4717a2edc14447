// hmt._native: the kernels for Python, which passes addresses and sizes and keeps the memory.
// Nothing is checked here; hmt.kernels.cpu is the only caller and checks shapes and strides.
// Every call that computes counts its time, and releases the GIL unless it is over within
// microseconds.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "base/clock.h"
#include "base/dtype.h"
#include "linear/linear.h"

namespace hmt::binding {

namespace nb = nanobind;
using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Put in front of a call's work.
struct Kernel {
  nb::gil_scoped_release unlocked;
  KernelTime time;
};

// One per area of csrc/; module.cpp calls them all.
void bind_base(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_fused(nb::module_& m);
void bind_recurrent(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_sublayers(nb::module_& m);
void bind_stack(nb::module_& m);
void bind_disk(nb::module_& m);

// items: Weights, or tuples (Weight, address of the bias, its type).  Borrows the Weights.
std::vector<Projection> projections_of(nb::tuple items);

}  // namespace hmt::binding
