// The Python module.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdio>

#include "common/dispatch.h"
#include "common/threads.h"
#include "python/operations.h"
#include "python/tape.h"

namespace milepost {
namespace {

using nb::handle;

std::string numerics_id() {
  // Raise the number with every change to an order of sums, a rounding, a polynomial or a tile size.
  std::string id = std::string("milepost-2-") + (kernels().fused ? "fused" : "unfused");
  if (const uint32_t probe = kernels().probe()) {
    char text[16];
    std::snprintf(text, sizeof(text), "-dot-%08x", unsigned(probe));
    id += text;
  }
  return id;
}

void set_threads(int count) {
  if (count < 1 || count > 256) bad_value("count", "must lie in [1, 256]");
  nb::gil_scoped_release release;
  set_num_threads(count);
}

}  // namespace

NB_MODULE(_native, m) {
  using namespace nb::literals;
  m.def("available_isas", available_isas);
  m.def("isa", [] { return std::string(kernels().isa); });
  m.def("set_isa", set_isa, "name"_a);
  m.def("numerics_id", numerics_id);
  m.def("num_threads", num_threads);
  m.def("set_num_threads", set_threads, "count"_a);

  nb::class_<PackedWeight>(m, "PackedWeight")
      .def_prop_ro("num_bytes", [](const PackedWeight& w) { return w.view().bytes(); })
      .def_prop_ro("out_features", [](const PackedWeight& w) { return w.view().n; })
      .def_prop_ro("in_features", [](const PackedWeight& w) { return w.view().k; })
      .def_prop_ro("groups", [](const PackedWeight& w) { return w.view().groups; })
      .def_prop_ro("first_not_finite", &PackedWeight::first_not_finite)
      .def("tobytes", &PackedWeight::bytes);
  m.def("pack", [](handle weight, bool paired) { return new PackedWeight(weight, paired); }, "weight"_a,
        "paired"_a = false, nb::rv_policy::take_ownership);
  m.def("pack_parts",
        [](nb::list parts, bool paired, int threads) { return new PackedWeight(parts, paired, threads); }, "parts"_a,
        "paired"_a = false, "threads"_a = 1, nb::rv_policy::take_ownership);
  m.def("pack_integers",
        [](handle values, handle scales, int bits, int64_t group, bool paired) {
          return new PackedWeight(values, scales, bits, group, paired);
        },
        "values"_a, "scales"_a, "bits"_a, "group"_a, "paired"_a = false, nb::rv_policy::take_ownership);
  m.def("pack_mxfp4",
        [](handle packed, handle scales, bool paired) { return new PackedWeight(packed, scales, paired); }, "packed"_a,
        "scales"_a, "paired"_a = false, nb::rv_policy::take_ownership);
  nb::class_<Experts>(m, "Experts").def(nb::init<nb::list, nb::list>(), "gate_up"_a, "down"_a);
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<nb::list, nb::handle, nb::handle, nb::handle, nb::list>(), "spans"_a, "page_tables"_a, "write_pages"_a,
           "write_offsets"_a, "expanded"_a = nb::list());
  nb::class_<RecurrentPlan>(m, "RecurrentPlan")
      .def(nb::init<nb::list, nb::list, nb::list, nb::list>(), "spans"_a, "initial_slots"_a, "running_slots"_a,
           "exports"_a);

  nb::class_<Tape>(m, "Tape")
      .def(nb::init<>())
      .def("start", &Tape::start)
      .def("stop", &Tape::stop, "result"_a.none() = nb::none())
      .def_prop_ro("is_complete", &Tape::is_complete)
      .def_prop_ro("num_calls", &Tape::num_calls)
      .def("run", &Tape::run, "ids"_a, "attention"_a.none(), "recurrent"_a.none());

  m.def("linear", linear, "x"_a, "weight"_a, "out"_a, "residual"_a.none() = nb::none(),
        "beta"_a.none() = nb::none(), "linear_beta"_a.none() = nb::none());
  m.def("rms_norm", rms_norm, "x"_a, "weight"_a, "eps"_a, "out"_a);
  m.def("store_latents", store_latents, "x"_a, "weight"_a, "eps"_a, "pages"_a, "plan"_a);
  m.def("attend", attend, "query"_a, "pages"_a, "plan"_a, "value_width"_a, "scale"_a, "out"_a);
  m.def("attend_latents", attend_latents, "query"_a, "absorb_key"_a, "absorb_value"_a, "pages"_a, "plan"_a, "scale"_a,
        "out"_a, "expand_key"_a.none() = nb::none());
  m.def("kda_mixer", kda_mixer, "raw"_a, "decay"_a, "beta"_a, "gate"_a, "conv"_a, "decay_log"_a, "dt_bias"_a, "norm"_a,
        "eps"_a, "lower_bound"_a.none(), "tails"_a, "states"_a, "plan"_a, "out"_a);
  m.def("gdn_mixer", gdn_mixer, "raw"_a, "decay"_a, "beta"_a, "gate"_a, "conv"_a, "decay_log"_a, "dt_bias"_a, "norm"_a,
        "eps"_a, "tails"_a, "states"_a, "plan"_a, "out"_a);
  m.def("gqa_mixer", gqa_mixer, "query_gate"_a, "key"_a, "value"_a, "query_norm"_a, "key_norm"_a, "eps"_a,
        "inverse_frequencies"_a, "pages"_a, "plan"_a, "out"_a);
  m.def("rotate_heads", rotate_heads, "x"_a, "num_heads"_a, "inverse_frequencies"_a, "amplitude"_a, "interleaved"_a,
        "plan"_a, "out"_a);
  m.def("store_keys_values", store_keys_values, "key"_a, "value"_a, "key_norm"_a, "eps"_a, "inverse_frequencies"_a,
        "pages"_a, "plan"_a);
  m.def("moe", moe, "x"_a, "logits"_a, "bias"_a.none(), "experts"_a, "experts_per_token"_a, "renormalize"_a, "scaling"_a,
        "shared"_a.none(), "residual"_a.none(), "out"_a, "shared_gate"_a.none() = nb::none(),
        "beta"_a.none() = nb::none(), "linear_beta"_a.none() = nb::none());
  m.def("add_shared", add_shared, "x"_a, "shared"_a, "gate"_a.none(), "residual"_a, "out"_a);
  m.def("gate_values", gate_values, "x"_a, "gate"_a, "out"_a);
  m.def("mix_sources", mix_sources, "sources"_a, "query"_a, "eps"_a, "out"_a);
  m.def("embed", embed, "ids"_a, "table"_a, "out"_a);

  m.def("sample", sample, "logits"_a, "rules"_a);
  m.def("log_probabilities", log_probabilities, "logits"_a, "ids"_a, "values"_a, "best"_a);
  m.def("gumbel_noise", gumbel_noise, "key"_a, "count"_a);
}

}  // namespace milepost
