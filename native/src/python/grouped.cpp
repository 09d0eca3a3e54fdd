// Grouped-query attention, and its parts alone: checks, and calls for the kernels.
#include "common/dispatch.h"
#include "common/threads.h"
#include "python/operations.h"
#include "python/tape.h"

namespace milepost {

using nb::handle;

namespace {

// Grouped-query attention: norms, rotary positions, page writes, attention, output gate.
void run_gqa(GqaArgs args, const Tensor& pages, const Tensor& frequencies, AttentionPlan& plan) {
  AttentionArgs attention =
      attention_args(pages, plan, args.heads, args.head_dim, 1.0f / __builtin_sqrtf(float(args.head_dim)));
  attention.kv_heads = args.kv_heads;
  attention.width = args.head_dim;
  attention.keys = args.keys;
  attention.values = args.values;
  attention.shared = false;
  args.write_pages = plan.write_pages.data();
  args.write_offsets = plan.write_offsets.data();
  const RotaryTable& table = plan.rotary(frequencies.floats(), frequencies.shape[0]);
  args.cosines = table.cosines.data();
  args.sines = table.sines.data();
  float* query = scratch_of<float>(kMixed, 2 * args.rows * args.heads * args.head_dim);
  args.query = query;
  args.mixed = query + args.rows * args.heads * args.head_dim;
  attention.query = query;
  attention.out = query + args.rows * args.heads * args.head_dim;
  kernels().gqa_begin(args);
  kernels().attend(attention);
  kernels().gqa_end(args);
}

// What is stored, and where: pages hold per key-value head the value, then the key.
GqaArgs stored_args(const Tensor& key, const Tensor& value, const Tensor& pages, const Tensor& frequencies, float eps,
                    int64_t head_dim) {
  GqaArgs args{};
  args.key = key.rows();
  args.value = value.rows();
  args.eps = eps;
  args.rows = key.shape[0];
  args.kv_heads = key.shape[1] / head_dim;
  args.head_dim = head_dim;
  args.half_rotary = frequencies.shape[0];
  args.values = args.keys = pages_of(pages);
  args.keys.data += head_dim * item_bytes(pages.type());
  args.keys.head_stride = args.values.head_stride = 2 * head_dim;
  return args;
}

}  // namespace

void gqa_mixer(handle query_gate, handle key, handle value, handle query_norm, handle key_norm, float eps,
               handle frequencies, handle pages_object, AttentionPlan& plan, handle out) {
  const Tensor q = Tensor::from(query_gate, "query_gate", 2, kFloats, 1), k = Tensor::from(key, "key", 2, kFloats, 1);
  const Tensor v = Tensor::from(value, "value", 2, kFloats, 1), y = Tensor::from(out, "out", 2, kFloats, 1);
  // Per key-value head the value, then the key.
  const Tensor pages = Tensor::from(pages_object, "pages", 3, kFloats, 1);
  const Tensor qn = Tensor::from(query_norm, "query_norm", 1, kF32, 1);
  const Tensor f = Tensor::from(frequencies, "inverse_frequencies", 1, kF32, 1);
  const int64_t rows = plan.rows(), dim = qn.shape[0];
  if (dim < 1) bad_value("query_norm", "must not be empty");
  const int64_t kv_heads = k.shape[1] / dim, heads = y.shape[1] / dim;
  if (kv_heads < 1 || heads < kv_heads || heads % kv_heads != 0)
    bad_value("out", "must have a multiple of the key heads of query_norm's width");
  const bool gated = q.shape[1] != heads * dim;
  q.check_shape({rows, (gated ? 2 : 1) * heads * dim});
  k.check_shape({rows, kv_heads * dim});
  v.check_shape({rows, kv_heads * dim});
  y.check_shape({rows, heads * dim});
  pages.check_shape({-1, -1, kv_heads * 2 * dim});
  for (const Tensor* t : {&v, &pages}) t->check_type(k.type());
  if (2 * f.shape[0] > dim) bad_value("inverse_frequencies", "must not be more than half of a head");
  GqaArgs args = stored_args(k, v, pages, f, eps, dim);
  args.query_gate = q.rows();
  args.gated = gated;
  args.out = y.rows();
  args.query_norm = qn.floats();
  args.key_norm = vector_of(key_norm, "key_norm", dim);
  args.heads = heads;
  const auto call = [=](const StepContext& step) { run_gqa(args, pages, f, *step.attention); };
  perform(call, {nullptr, &plan, nullptr}, {&q, &k, &v}, y,
          {query_gate, key, value, query_norm, key_norm, frequencies, pages_object, out});
}

void rotate_heads(handle x_object, int64_t num_heads, handle frequencies, float amplitude, bool interleaved,
                  AttentionPlan& plan, handle out) {
  const Tensor x = Tensor::from(x_object, "x", 2, kFloats, 1), y = Tensor::from(out, "out", 2, kFloats, 1);
  const Tensor f = Tensor::from(frequencies, "inverse_frequencies", 1, kF32, 1);
  if (num_heads < 1 || x.shape[1] % num_heads != 0) bad_value("num_heads", "must divide a row of x");
  x.check_shape({plan.rows(), -1});
  y.check_shape({x.shape[0], x.shape[1]});
  y.check_type(x.type());
  if (y.overlaps(x)) bad_value("out", "must not overlap x");
  if (2 * f.shape[0] > x.shape[1] / num_heads) bad_value("inverse_frequencies", "must not be more than half of a head");
  RotateArgs args{};
  args.x = x.rows();
  args.y = y.rows();
  args.rows = x.shape[0];
  args.heads = num_heads;
  args.width = x.shape[1] / num_heads;
  args.half = f.shape[0];
  args.interleaved = interleaved;
  args.amplitude = amplitude;
  const auto call = [=](const StepContext& step) {
    const RotaryTable& table = step.attention->rotary(f.floats(), f.shape[0]);
    RotateArgs rows = args;
    rows.cosines = table.cosines.data();
    rows.sines = table.sines.data();
    kernels().rotate(rows);
  };
  perform(call, {nullptr, &plan, nullptr}, {&x}, y, {x_object, frequencies, out});
}

void store_keys_values(handle key, handle value, handle key_norm, float eps, handle frequencies, handle pages_object,
                       AttentionPlan& plan) {
  const Tensor k = Tensor::from(key, "key", 2, kFloats, 1), v = Tensor::from(value, "value", 2, kFloats, 1);
  const Tensor pages = Tensor::from(pages_object, "pages", 3, kFloats, 1);
  const Tensor norm = Tensor::from(key_norm, "key_norm", 1, kF32, 1);
  const Tensor f = Tensor::from(frequencies, "inverse_frequencies", 1, kF32, 1);
  const int64_t dim = norm.shape[0], kv_heads = dim < 1 ? 0 : k.shape[1] / dim;
  if (kv_heads < 1) bad_value("key_norm", "must not be longer than a row of keys");
  k.check_shape({plan.rows(), kv_heads * dim});
  v.check_shape({plan.rows(), kv_heads * dim});
  pages.check_shape({-1, -1, kv_heads * 2 * dim});
  for (const Tensor* t : {&v, &pages}) t->check_type(k.type());
  if (2 * f.shape[0] > dim) bad_value("inverse_frequencies", "must not be more than half of a head");
  GqaArgs args = stored_args(k, v, pages, f, eps, dim);  // without any query heads
  args.key_norm = norm.floats();
  const auto call = [=](const StepContext& step) {
    AttentionPlan& now = *step.attention;
    now.check(pages.shape[0], pages.shape[1]);
    const RotaryTable& table = now.rotary(f.floats(), f.shape[0]);
    GqaArgs rows = args;
    rows.write_pages = now.write_pages.data();
    rows.write_offsets = now.write_offsets.data();
    rows.cosines = table.cosines.data();
    rows.sines = table.sines.data();
    kernels().gqa_begin(rows);
  };
  perform(call, {nullptr, &plan, nullptr}, {&k, &v}, pages, {key, value, key_norm, frequencies, pages_object});
}

}  // namespace milepost
