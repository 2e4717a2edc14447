#include "binding/binding.h"

namespace hmt::binding {

void bind_fused(nb::module_&) {}

}  // namespace hmt::binding
