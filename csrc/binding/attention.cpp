#include "binding/binding.h"

namespace hmt::binding {

void bind_attention(nb::module_&) {}

}  // namespace hmt::binding
