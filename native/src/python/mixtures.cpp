// Experts, shared experts, output gates and residuals over depth: checks, and calls for the kernels.
#include <memory>

#include "common/dispatch.h"
#include "python/operations.h"
#include "python/tape.h"

namespace milepost {

using nb::handle;

namespace {

// Rows of the shape and type of `x`.
Tensor rows_like(handle object, const char* name, const Tensor& x) {
  const Tensor t = Tensor::from(object, name, 2, kFloats, 1);
  t.check_shape({x.shape[0], x.shape[1]});
  t.check_type(x.type());
  return t;
}

// Likewise, or, for None, `x` itself.
Tensor optional_tensor(handle object, const char* name, const Tensor& x) {
  return object.is_none() ? x : rows_like(object, name, x);
}

// What the shared experts of a row are multiplied by, or, for None, `x` itself.
Tensor optional_gate(handle object, const char* name, const Tensor& x) {
  if (object.is_none()) return x;
  const Tensor t = Tensor::from(object, name, 2, kF32, 1);
  t.check_shape({x.shape[0], 1});
  return t;
}

}  // namespace

void moe(handle x_object, handle logits, handle bias, const Experts& experts, int64_t experts_per_token,
         bool renormalize, float scaling, handle shared, handle residual, handle out, handle shared_gate,
         std::optional<float> beta, std::optional<float> linear_beta) {
  const Tensor x = Tensor::from(x_object, "x", 2, kFloats, 1);
  const Tensor l = Tensor::from(logits, "logits", 2, kF32, 1);
  const Tensor y = Tensor::from(out, "out", 2, kFloats, 1);
  const int64_t num_experts = int64_t(experts.down.size());
  x.check_shape({-1, experts.width});
  l.check_shape({x.shape[0], num_experts});
  y.check_shape({x.shape[0], x.shape[1]});
  y.check_type(x.type());
  if (y.overlaps(x)) bad_value("out", "must not overlap x");
  if (experts_per_token < 1 || experts_per_token > num_experts)
    bad_value("experts_per_token", "must lie in [1, " + std::to_string(num_experts) + "]");
  if (shared.is_none() && !shared_gate.is_none()) bad_value("shared_gate", "needs shared experts");
  MoeArgs args{};
  args.x = x.rows();
  args.logits = l.rows();
  if (!bias.is_none()) args.bias = vector_of(bias, "bias", num_experts);
  args.rows = x.shape[0];
  args.width = x.shape[1];
  args.inner = experts.inner;
  args.num_experts = num_experts;
  args.experts_per_token = experts_per_token;
  args.renormalize = renormalize;
  args.scaling = scaling;
  args.gate_up = experts.gate_up.data();
  args.down = experts.down.data();
  args.glu = glu_of(beta, linear_beta);
  const Tensor s = optional_tensor(shared, "shared", x), r = optional_tensor(residual, "residual", x);
  const Tensor g = optional_gate(shared_gate, "shared_gate", x);
  if (!shared.is_none()) args.shared = s.rows();
  if (!shared_gate.is_none()) args.shared_gate = g.rows();
  if (!residual.is_none()) args.residual = r.rows();
  args.y = y.rows();
  perform([args](const StepContext&) { kernels().moe(args); }, {}, {&x, &l, &s, &r, &g}, y,
          {x_object, logits, bias, shared, residual, out, shared_gate, nb::find(experts)});
}

void add_shared(handle x_object, handle shared, handle gate, handle residual, handle out) {
  const Tensor x = Tensor::from(x_object, "x", 2, kFloats, 1);
  const Tensor s = rows_like(shared, "shared", x), r = rows_like(residual, "residual", x);
  const Tensor y = rows_like(out, "out", x), g = optional_gate(gate, "gate", x);
  AddSharedArgs args{};
  args.x = x.rows();
  args.shared = s.rows();
  args.residual = r.rows();
  args.y = y.rows();
  if (!gate.is_none()) args.gate = g.rows();
  args.rows = x.shape[0];
  args.width = x.shape[1];
  perform([args](const StepContext&) { kernels().add_shared(args); }, {}, {&x, &s, &r, &g}, y,
          {x_object, shared, gate, residual, out});
}

void gate_values(handle x_object, handle gate, handle out) {
  const Tensor x = Tensor::from(x_object, "x", 2, kFloats, 1), y = rows_like(out, "out", x);
  const Tensor g = Tensor::from(gate, "gate", 2, kFloats, 1);
  g.check_shape({x.shape[0], x.shape[1]});
  if (y.overlaps(g)) bad_value("out", "must not overlap gate");
  const GateArgs args{x.rows(), g.rows(), y.rows(), x.shape[0], x.shape[1]};
  perform([args](const StepContext&) { kernels().gate(args); }, {}, {&x, &g}, y, {x_object, gate, out});
}

void mix_sources(nb::list source_list, handle query, float eps, handle out) {
  std::vector<handle> owners = {query, out};
  std::vector<Tensor> sources;
  for (handle object : source_list) {
    sources.push_back(sources.empty() ? Tensor::from(object, "sources", 2, kFloats, 1)
                                      : rows_like(object, "sources", sources[0]));
    owners.push_back(object);
  }
  if (sources.empty() || int64_t(sources.size()) > kMaxSources)
    bad_value("sources", "must be 1 to " + std::to_string(kMaxSources) + " tensors");
  const Tensor y = rows_like(out, "out", sources[0]);
  MixArgs args{};
  args.count = int64_t(sources.size());
  args.rows = y.shape[0];
  args.width = y.shape[1];
  args.query = vector_of(query, "query", args.width);
  args.eps = eps;
  args.y = y.rows();
  std::vector<const Tensor*> reads;
  const auto rows = std::make_shared<std::vector<Rows>>();
  for (const Tensor& source : sources) {
    if (y.overlaps(source)) bad_value("out", "must not overlap sources");
    reads.push_back(&source);
    rows->push_back(source.rows());
  }
  args.sources = rows->data();
  perform([args, rows](const StepContext&) { kernels().mix(args); }, {}, reads, y, owners);
}

}  // namespace milepost
