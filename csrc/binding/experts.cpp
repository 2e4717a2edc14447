#include "binding/binding.h"

namespace hmt::binding {

void bind_experts(nb::module_&) {}

}  // namespace hmt::binding
