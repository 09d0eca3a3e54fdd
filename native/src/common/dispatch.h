// Which instruction set serves this process.
#pragma once

#include <string>
#include <vector>

#include "common/types.h"

namespace milepost {

// Names of the paths this CPU can run, slowest first.
std::vector<std::string> available_isas();

const KernelTable& kernels();

// Throws std::invalid_argument if this build or this CPU lacks it.
void set_isa(const std::string& name);

}  // namespace milepost
