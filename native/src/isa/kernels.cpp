// All kernels for one instruction set; CMakeLists.txt compiles this file and sampling.cpp once per set.
// Nothing here may instantiate a template of the standard library: the linker would keep one copy of
// it for all paths, possibly the one with instructions this CPU lacks.
#include "isa/attention.h"
#include "isa/gqa.h"
#include "isa/kda.h"
#include "isa/moe.h"
#include "isa/norms.h"
#include "isa/residuals.h"
#include "isa/sampling.h"

#define MP_STRING_OF(name) #name
#define MP_STRING(name) MP_STRING_OF(name)

namespace milepost {
namespace MP_ISA {

// FNV-1a over sums of products of all sizes, cancellations and denormals among them.
uint32_t probe() {
#if defined(MP_DOT)
  uint32_t state = 1, hash = 2166136261u;
  const auto next = [&state] { return state = state * 1664525u + 1013904223u; };
  for (int round = 0; round < 64; round++) {
    __m512 sum = _mm512_setzero_ps();
    for (int step = 0; step < 16; step++) {
      uint32_t x[kLanes], y[kLanes];
      for (int i = 0; i < kLanes; i++) {
        // Any sign and fraction, exponents within 2^+-24, or, in some rounds, near the smallest.
        const uint32_t low = round % 8 == 7 ? 0x20002000u : 0x33803380u;
        x[i] = (next() & 0x8FFF8FFFu) % 0x10000000u + low + (next() & 0x80008000u);
        y[i] = (next() & 0x0BFF0BFFu) + low;
      }
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x), (__m512bh)_mm512_loadu_si512(y));
    }
    uint32_t lanes[kLanes];
    _mm512_storeu_si512(lanes, _mm512_castps_si512(sum));
    for (uint32_t lane : lanes) hash = (hash ^ lane) * 16777619u;
  }
  return hash == 0 ? 1 : hash;
#else
  return 0;
#endif
}

const KernelTable kernel_table = {MP_STRING(MP_ISA), kFused, probe, pack, pack_coded, linear, rms_norm, store_latents, attend, gqa_begin, gqa_end, rotate, kda, moe, add_shared, gate, mix, sample, log_probabilities, gumbel_noise};

const KernelTable& table() { return kernel_table; }

}  // namespace MP_ISA
}  // namespace milepost
