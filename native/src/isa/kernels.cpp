// All kernels for one instruction set; CMakeLists.txt compiles this file once per set.
// Nothing here may instantiate a template of the standard library: the linker would keep one copy of
// it for all paths, possibly the one with instructions this CPU lacks.
#include "isa/attention.h"
#include "isa/kda.h"
#include "isa/moe.h"
#include "isa/norms.h"

#define MP_STRING_OF(name) #name
#define MP_STRING(name) MP_STRING_OF(name)

namespace milepost {
namespace MP_ISA {

const KernelTable kernel_table = {MP_STRING(MP_ISA), kFused, pack, linear, rms_norm, store_latents, attend, kda, moe};

const KernelTable& table() { return kernel_table; }

}  // namespace MP_ISA
}  // namespace milepost
