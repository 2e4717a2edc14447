#include "binding/binding.h"

NB_MODULE(_native, m) {
  m.doc() = "Compiled kernels of HMT on raw addresses.  Calls that compute release the GIL.";
  // A process that ends with an engine still open ends with a Ring, too.
  nanobind::set_leak_warnings(false);
  hmt::binding::bind_base(m);
  hmt::binding::bind_linear(m);
  hmt::binding::bind_fused(m);
  hmt::binding::bind_recurrent(m);
  hmt::binding::bind_attention(m);
  hmt::binding::bind_experts(m);
  hmt::binding::bind_sublayers(m);
  hmt::binding::bind_stack(m);
  hmt::binding::bind_disk(m);
}
