// The operations: each checks its arguments, and hands the kernels a call that could run again (tape.h).
#include "python/operations.h"

#include <cstring>

#include "common/dispatch.h"
#include "common/threads.h"
#include "python/tape.h"

namespace milepost {
namespace {

using nb::handle;

// Last dimension dense; [rows, k] or, for grouped weights, [rows, groups, k].
struct GroupedRows {
  Tensor tensor;
  Rows rows;
  int64_t group;
};

GroupedRows grouped(handle object, const char* name, const Packed& w, int64_t width) {
  const Tensor t = Tensor::from(object, name, kAnyDims, kFloats, 1);
  const bool three = w.groups > 1 || t.ndim == 3;
  if (t.ndim != (three ? 3 : 2)) bad_value(name, three ? "must be [rows, groups, width]" : "must be [rows, width]");
  if (three) t.check_shape({-1, w.groups, width});
  else t.check_shape({-1, width});
  return {t, t.rows(), three ? t.strides[1] : 0};
}

}  // namespace

const float* vector_of(handle object, const char* name, int64_t size) {
  const Tensor t = Tensor::from(object, name, 1, kF32, 1);
  t.check_shape({size});
  return t.floats();
}

Glu glu_of(std::optional<float> beta, std::optional<float> linear_beta) {
  const auto check = [](const std::optional<float>& value, const char* name) {
    if (value.has_value() && !(*value > 0.0f && *value < __builtin_inff())) bad_value(name, "must be positive and finite");
  };
  check(beta, "beta");
  check(linear_beta, "linear_beta");
  if (linear_beta.has_value() && !beta.has_value()) bad_value("linear_beta", "needs a beta");
  return Glu{beta.value_or(0.0f), linear_beta.value_or(0.0f)};
}

void linear(handle x_object, const PackedWeight& weight, handle out_object, handle residual_object,
            std::optional<float> beta, std::optional<float> linear_beta) {
  const Packed& w = weight.view();
  const GroupedRows x = grouped(x_object, "x", w, w.k), y = grouped(out_object, "out", w, w.n);
  if (y.tensor.shape[0] != x.tensor.shape[0]) bad_value("out", "must have as many rows as x");
  if (y.tensor.overlaps(x.tensor)) bad_value("out", "must not overlap x");
  LinearArgs args{};
  args.x = x.rows;
  args.x_group = x.group;
  args.rows = x.tensor.shape[0];
  args.weight = w;
  args.y = y.rows;
  args.y_group = y.group;
  args.glu = glu_of(beta, linear_beta);
  if (args.glu.beta != 0.0f && !w.paired) bad_value("beta", "needs a weight of gate and up");
  Tensor r = x.tensor;
  if (!residual_object.is_none()) {
    if (w.groups > 1) bad_value("residual", "cannot be added to a grouped product");
    r = Tensor::from(residual_object, "residual", 2, kFloats, 1);
    r.check_shape({x.tensor.shape[0], w.n});
    r.check_type(y.tensor.type());
    args.residual = r.rows();
  }
  perform([args](const StepContext&) { kernels().linear(args); }, {}, {&x.tensor, &r}, y.tensor,
          {x_object, out_object, residual_object, nb::find(weight)});
}

void rms_norm(handle x_object, handle weight, float eps, handle out_object) {
  const Tensor x = Tensor::from(x_object, "x", 2, kFloats, 1), y = Tensor::from(out_object, "out", 2, kFloats, 1);
  y.check_shape({x.shape[0], x.shape[1]});
  y.check_type(x.type());
  const NormArgs args{x.rows(), y.rows(), vector_of(weight, "weight", x.shape[1]), x.shape[0], x.shape[1], eps};
  perform([args](const StepContext&) { kernels().rms_norm(args); }, {}, {&x}, y, {x_object, out_object, weight});
}

void store_latents(handle x_object, handle weight, float eps, handle pages_object, AttentionPlan& plan) {
  const Tensor x = Tensor::from(x_object, "x", 2, kFloats, 1);
  const Tensor pages = Tensor::from(pages_object, "pages", 3, kFloats, 1);
  const Tensor w = Tensor::from(weight, "weight", 1, kF32, 1);
  pages.check_type(x.type());
  pages.check_shape({-1, -1, x.shape[1]});
  if (w.shape[0] > x.shape[1]) bad_value("weight", "must not be longer than a row of x");
  x.check_shape({plan.rows(), -1});
  const auto call = [=](const StepContext& step) {
    const AttentionPlan& now = *step.attention;
    now.check(pages.shape[0], pages.shape[1]);
    kernels().store_latents(StoreLatentsArgs{x.rows(), w.floats(), x.shape[0], x.shape[1], w.shape[0], eps, pages.data,
                                             pages.strides[0], pages.strides[1], now.write_pages.data(),
                                             now.write_offsets.data()});
  };
  perform(call, {nullptr, &plan, nullptr}, {&x}, pages, {x_object, pages_object, weight});
}

Pages pages_of(const Tensor& pages) { return Pages{pages.data, pages.strides[0], pages.strides[1], 0}; }

AttentionArgs attention_args(const Tensor& pages, const AttentionPlan& plan, int64_t heads, int64_t value_width,
                             float scale) {
  if (value_width < 1 || value_width > pages.shape[2]) bad_value("value_width", "must lie within an entry of the pages");
  plan.check(pages.shape[0], pages.shape[1]);
  AttentionArgs args{};
  args.heads = heads;
  args.kv_heads = 1;
  args.width = pages.shape[2];
  args.value_width = value_width;
  args.scale = scale;
  args.keys = args.values = pages_of(pages);
  args.shared = true;
  args.type = pages.type();
  args.match_unit = pages.shape[1];
  args.num_spans = int64_t(plan.spans.size());
  args.spans = plan.spans.data();
  args.table = plan.table.data();
  args.table_starts = plan.table_starts.data();
  return args;
}

void attend(handle query_object, handle pages_object, AttentionPlan& plan, int64_t value_width, float scale,
            handle out_object) {
  const Tensor query = Tensor::from(query_object, "query", 3, kF32, 3);
  const Tensor pages = Tensor::from(pages_object, "pages", 3, kFloats, 1);
  const Tensor out = Tensor::from(out_object, "out", 3, kF32, 3);
  query.check_shape({plan.rows(), -1, pages.shape[2]});
  if (query.shape[1] < 1) bad_value("query", "must have a head");
  out.check_shape({plan.rows(), query.shape[1], value_width});
  const auto call = [=](const StepContext& step) {
    AttentionArgs args = attention_args(pages, *step.attention, query.shape[1], value_width, scale);
    args.query = query.floats();
    args.out = out.floats();
    kernels().attend(args);
  };
  perform(call, {nullptr, &plan, nullptr}, {&query}, out, {query_object, pages_object, out_object});
}

namespace {

float widened(const char* p, Type type) {
  uint32_t bits = 0;
  if (type == Type::f32) std::memcpy(&bits, p, 4);
  else std::memcpy(reinterpret_cast<char*>(&bits) + 2, p, 2);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// fp32 to the stored type, rounded to nearest even; NaN stays NaN.
void narrow(const float* x, int64_t count, Type type, char* target) {
  if (type == Type::f32) {
    std::memcpy(target, x, size_t(count) * 4);
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    const uint16_t high = uint16_t((nan ? bits | 0x00400000u : bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    std::memcpy(target + 2 * i, &high, 2);
  }
}

struct LatentInputs {
  Rows query, out;
  int64_t heads, query_width, width, latent;
  const Packed *absorb_key, *absorb_value, *expand_key;
};

// Rows [first, first + rows): query through the key expansion, latents, then through the value expansion.
void attend_absorbed(const LatentInputs& in, AttentionArgs args, int64_t first, int64_t rows) {
  const int64_t shared = in.width - in.latent;
  float* absorbed = scratch_of<float>(kMixed, rows * in.heads * (in.width + in.latent));
  float* mixed = absorbed + rows * in.heads * in.width;
  LinearArgs expand{};
  expand.x = Rows{in.query.at(first), in.query.type, in.query.stride};
  expand.x_group = in.query_width;
  expand.rows = rows;
  expand.weight = *in.absorb_key;
  expand.y = Rows{absorbed, Type::f32, in.heads * in.width};
  expand.y_group = in.width;
  kernels().linear(expand);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t head = 0; head < in.heads; head++)
      for (int64_t i = 0; i < shared; i++)
        absorbed[(row * in.heads + head) * in.width + in.latent + i] =
            widened(in.query.at(first + row, head * in.query_width + in.absorb_key->k + i), in.query.type);
  args.query = absorbed;
  args.out = mixed;
  kernels().attend(args);
  LinearArgs contract{};
  contract.x = Rows{mixed, Type::f32, in.heads * in.latent};
  contract.x_group = in.latent;
  contract.rows = rows;
  contract.weight = *in.absorb_value;
  contract.y = Rows{in.out.at(first), in.out.type, in.out.stride};
  contract.y_group = in.absorb_value->n;
  kernels().linear(contract);
}

// The same rows over keys and values that every head expands from the latents.
void attend_expanded(const LatentInputs& in, AttentionArgs args, int64_t first, int64_t rows) {
  const int64_t values = in.absorb_value->n, query_size = in.heads * in.query_width, out_size = in.heads * values;
  float* query = scratch_of<float>(kMixed, rows * (query_size + out_size));
  float* mixed = query + rows * query_size;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < query_size; i++) query[row * query_size + i] = widened(in.query.at(first + row, i), in.query.type);
  args.kv_heads = in.heads;
  args.width = in.query_width;
  args.value_width = values;
  args.shared = false;
  args.expand_key = in.expand_key;
  args.expand_value = in.absorb_value;
  args.query = query;
  args.out = mixed;
  kernels().attend(args);
  for (int64_t row = 0; row < rows; row++) narrow(mixed + row * out_size, out_size, in.out.type, in.out.at(first + row));
}

// Absorbed, or, for the spans the plan names, expanded.
void run_latents(const LatentInputs& in, const Tensor& pages, const AttentionPlan& plan, float scale) {
  for (char expanded : plan.expanded)
    if (expanded && in.expand_key == nullptr) bad_value("expand_key", "is missing, but the plan has expanded spans");
  AttentionArgs args = attention_args(pages, plan, in.heads, in.latent, scale);
  // Neighbours of one kind go together; their rows are counted from the first of them.
  for (size_t first = 0, end; first < plan.spans.size(); first = end) {
    for (end = first; end < plan.spans.size() && plan.expanded[end] == plan.expanded[first];) end++;
    Span* spans = scratch_of<Span>(kSpans, int64_t(end - first));
    const int64_t row = plan.spans[first].first_row;
    for (size_t s = first; s < end; s++)
      spans[s - first] = Span{plan.spans[s].first_row - row, plan.spans[s].end_row - row, plan.spans[s].position};
    args.num_spans = int64_t(end - first);
    args.spans = spans;
    args.table_starts = plan.table_starts.data() + first;
    (plan.expanded[first] ? attend_expanded : attend_absorbed)(in, args, row, plan.spans[end - 1].end_row - row);
  }
}

}  // namespace

void attend_latents(handle query_object, const PackedWeight& absorb_key, const PackedWeight& absorb_value,
                    handle pages_object, AttentionPlan& plan, float scale, handle out_object,
                    const PackedWeight* expand_key) {
  const Packed &key = absorb_key.view(), &value = absorb_value.view();
  const Tensor query = Tensor::from(query_object, "query", 2, kFloats, 1);
  const Tensor pages = Tensor::from(pages_object, "pages", 3, kFloats, 1);
  const Tensor out = Tensor::from(out_object, "out", 2, kFloats, 1);
  const int64_t rows = plan.rows(), heads = key.groups, width = pages.shape[2], latent = key.n;
  const int64_t shared = width - latent;
  if (value.groups != heads || value.k != latent || key.paired || value.paired)
    bad_value("absorb_value", "does not fit absorb_key");
  if (shared < 0) bad_value("pages", "entries are narrower than the latent");
  const int64_t query_width = key.k + shared;
  query.check_shape({rows, heads * query_width});
  out.check_shape({rows, heads * value.n});
  if (out.overlaps(query)) bad_value("out", "must not overlap query");
  LatentInputs in{query.rows(), out.rows(), heads, query_width, width, latent, &key, &value, nullptr};
  if (expand_key != nullptr) {
    in.expand_key = &expand_key->view();
    if (in.expand_key->groups != heads || in.expand_key->n != key.k || in.expand_key->k != latent || in.expand_key->paired ||
        in.expand_key->type != pages.type() || value.type != pages.type())
      bad_value("expand_key", "does not fit absorb_key and pages");
  }
  const auto call = [=](const StepContext& step) { run_latents(in, pages, *step.attention, scale); };
  perform(call, {nullptr, &plan, nullptr}, {&query}, out,
          {query_object, pages_object, out_object, nb::find(absorb_key), nb::find(absorb_value),
           expand_key == nullptr ? handle() : handle(nb::find(*expand_key))});
}

namespace {

// Pointers to the initial records of a step; copies where another sequence writes the slot.
void resolve_initial(const RecurrentPlan& plan, const KdaArgs& args, std::vector<RecurrentSequence>& sequences) {
  const int64_t item = item_bytes(args.raw.type);
  const int64_t tail_bytes = (args.taps - 1) * args.tail_row_stride * item;
  const int64_t state_bytes = args.heads * args.key_dim * args.value_dim * 4;
  const int64_t record = (state_bytes + tail_bytes + 63) / 64 * 64;
  sequences = plan.sequences;
  for (RecurrentSequence& s : sequences) {
    if (s.initial_slot < 0) continue;
    s.initial_state = args.states + s.initial_slot * args.state_slot_stride;
    s.initial_tail = args.tails + s.initial_slot * args.tail_slot_stride * item;
  }
  if (plan.endangered.empty()) return;
  char* copies = static_cast<char*>(scratch(kInitialStates, plan.endangered.size() * size_t(record)));
  for (size_t i : plan.endangered) {
    std::memcpy(copies, sequences[i].initial_state, size_t(state_bytes));
    for (int64_t row = 0; row < args.taps - 1; row++)
      std::memcpy(copies + state_bytes + row * args.tail_row_stride * item,
                  sequences[i].initial_tail + row * args.tail_row_stride * item, size_t(args.channels() * item));
    sequences[i].initial_state = reinterpret_cast<const float*>(copies);
    sequences[i].initial_tail = copies + state_bytes;
    copies += record;
  }
}

// What both recurrent mixers take, and what the shapes say about heads.
struct RecurrentInputs {
  handle raw, decay, beta, gate, conv, decay_log, dt_bias, norm, tails, states, out;
  bool scalar_decay;
};

KdaArgs recurrent_args(const RecurrentInputs& in, float eps, const RecurrentPlan& plan) {
  const Tensor r = Tensor::from(in.raw, "raw", 2, kFloats, 1), d = Tensor::from(in.decay, "decay", 2, kFloats, 1);
  const Tensor b = Tensor::from(in.beta, "beta", 2, kFloats, 1), g = Tensor::from(in.gate, "gate", 2, kFloats, 1);
  const Tensor c = Tensor::from(in.conv, "conv", 2, kF32, 2), y = Tensor::from(in.out, "out", 2, kFloats, 1);
  const Tensor t = Tensor::from(in.tails, "tails", 3, kFloats, 1), s = Tensor::from(in.states, "states", 4, kF32, 3);
  if (s.shape[1] < 1 || s.shape[2] < 1 || s.shape[3] < 1) bad_value("states", "must have heads, keys and values");
  KdaArgs args{};
  args.heads = s.shape[1];
  args.key_dim = s.shape[2];
  args.value_dim = s.shape[3];
  args.scalar_decay = in.scalar_decay;
  args.key_heads = args.heads;
  if (in.scalar_decay) {
    args.key_heads = (r.shape[1] - args.heads * args.value_dim) / (2 * args.key_dim);
    if (args.key_heads < 1 || args.heads % args.key_heads != 0)
      bad_value("raw", "must hold q and k of a divisor of the value heads");
  }
  const int64_t rows = plan.rows(), decays = args.heads * (in.scalar_decay ? 1 : args.key_dim);
  r.check_shape({rows, args.channels()});
  d.check_shape({rows, decays});
  b.check_shape({rows, args.heads});
  g.check_shape({rows, args.heads * args.value_dim});
  y.check_shape({rows, args.heads * args.value_dim});
  c.check_shape({-1, args.channels()});
  if (c.shape[0] < 1 || c.shape[0] > 64) bad_value("conv", "must have 1 to 64 taps");
  t.check_shape({-1, c.shape[0] - 1, args.channels()});
  t.check_type(r.type());
  if (t.shape[0] != s.shape[0]) bad_value("tails", "must have as many slots as states");
  args.raw = r.rows();
  args.decay = d.rows();
  args.beta = b.rows();
  args.gate = g.rows();
  args.out = y.rows();
  args.conv = c.floats();
  args.decay_log = vector_of(in.decay_log, "decay_log", args.heads);
  args.dt_bias = vector_of(in.dt_bias, "dt_bias", decays);
  args.norm = vector_of(in.norm, "norm", args.value_dim);
  args.taps = c.shape[0];
  args.eps = eps;
  args.scale = 1.0f / __builtin_sqrtf(float(args.key_dim));
  args.tails = t.data;
  args.tail_slot_stride = t.strides[0];
  args.tail_row_stride = t.strides[1];
  args.states = s.floats();
  args.state_slot_stride = s.strides[0];
  return args;
}

void run_recurrent(KdaArgs args, int64_t num_slots, const RecurrentPlan& plan) {
  plan.check(num_slots);
  thread_local std::vector<RecurrentSequence> sequences;  // keeps its memory from call to call
  resolve_initial(plan, args, sequences);
  args.num_sequences = int64_t(sequences.size());
  args.sequences = sequences.data();
  args.exports = plan.exports.data();
  kernels().kda(args);
}

void perform_recurrent(const RecurrentInputs& in, const KdaArgs& args, const RecurrentPlan& plan) {
  const Tensor raw = Tensor::from(in.raw, "raw", 2, kFloats, 1), decay = Tensor::from(in.decay, "decay", 2, kFloats, 1);
  const Tensor beta = Tensor::from(in.beta, "beta", 2, kFloats, 1), gate = Tensor::from(in.gate, "gate", 2, kFloats, 1);
  const Tensor out = Tensor::from(in.out, "out", 2, kFloats, 1);
  const int64_t num_slots = Tensor::from(in.states, "states", 4, kF32, 3).shape[0];
  perform([=](const StepContext& step) { run_recurrent(args, num_slots, *step.recurrent); }, {nullptr, nullptr, &plan},
          {&raw, &decay, &beta, &gate}, out,
          {in.raw, in.decay, in.beta, in.gate, in.conv, in.decay_log, in.dt_bias, in.norm, in.tails, in.states, in.out});
}

}  // namespace

void kda_mixer(handle raw, handle decay, handle beta, handle gate, handle conv, handle decay_log, handle dt_bias,
               handle norm, float eps, std::optional<float> lower_bound, handle tails, handle states,
               const RecurrentPlan& plan, handle out) {
  const RecurrentInputs in{raw, decay, beta, gate, conv, decay_log, dt_bias, norm, tails, states, out, false};
  KdaArgs args = recurrent_args(in, eps, plan);
  args.bounded = lower_bound.has_value();
  args.lower_bound = lower_bound.value_or(0.0f);
  perform_recurrent(in, args, plan);
}

void gdn_mixer(handle raw, handle decay, handle beta, handle gate, handle conv, handle decay_log, handle dt_bias,
               handle norm, float eps, handle tails, handle states, const RecurrentPlan& plan, handle out) {
  const RecurrentInputs in{raw, decay, beta, gate, conv, decay_log, dt_bias, norm, tails, states, out, true};
  KdaArgs args = recurrent_args(in, eps, plan);
  args.silu_gate = true;
  perform_recurrent(in, args, plan);
}

void embed(handle ids_object, handle table_object, handle out_object) {
  const Tensor ids = Tensor::from(ids_object, "ids", 1, kI64, 1);
  const Tensor table = Tensor::from(table_object, "table", 2, kFloats, 1);
  const Tensor out = Tensor::from(out_object, "out", 2, kFloats, 1);
  out.check_shape({ids.shape[0], table.shape[1]});
  out.check_type(table.type());
  const size_t bytes = size_t(table.shape[1] * item_bytes(table.type()));
  const auto call = [=](const StepContext& step) {
    for (int64_t i = 0; i < out.shape[0]; i++)
      if (step.ids[i] < 0 || step.ids[i] >= table.shape[0])
        bad_value("ids", "id " + std::to_string(step.ids[i]) + " is outside of " + std::to_string(table.shape[0]) + " rows");
    for (int64_t i = 0; i < out.shape[0]; i++) std::memcpy(out.rows().at(i), table.rows().at(step.ids[i]), bytes);
  };
  perform(call, {ids.integers(), nullptr, nullptr}, {}, out, {out_object, table_object});
}

}  // namespace milepost
