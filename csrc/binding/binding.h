// hmt._native: the kernels for Python, which passes addresses and sizes and keeps the memory.
// Nothing is checked here; hmt.kernels.cpu is the only caller and checks shapes and strides.
// Every call that computes releases the GIL and counts its time.
#pragma once

#include <nanobind/nanobind.h>

#include "base/clock.h"
#include "base/dtype.h"

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
void bind_attention(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_disk(nb::module_& m);

}  // namespace hmt::binding
