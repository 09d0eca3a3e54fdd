// Memory of packed weights.
#pragma once

#include <cstddef>
#include <memory>

namespace milepost {

// At least `bytes`, aligned to 64; given back when the last owner goes. Weights lie one behind the other in pages of
// 2 MiB where the system has them: they are read from end to end in every step, through such pages at up to twice
// the speed. Throws std::bad_alloc.
std::shared_ptr<void> weight_memory(size_t bytes);

}  // namespace milepost
