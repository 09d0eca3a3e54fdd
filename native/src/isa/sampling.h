// From logits to tokens. A row's result depends on the row and its rule alone, and has the same bits in every
// instruction set: fp64 arithmetic without fused products, sums of integers, or sums in one fixed order.
#pragma once

#include "common/types.h"

namespace milepost {
namespace MP_ISA {

void sample(const SampleArgs& a);
void log_probabilities(const LogprobArgs& a);
// Standard Gumbel noise of ids 0 to count - 1.
void gumbel_noise(uint64_t key, int64_t count, double* out);

}  // namespace MP_ISA
}  // namespace milepost
