#include "check/cases.h"

#include <algorithm>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "check/buffers.h"
#include "check/weights.h"
#include "common/dispatch.h"
#include "common/threads.h"

namespace milepost::check {
namespace {

// ---------------------------------------------------------------- products

std::string linear(Report& report, Type x_type, Type w_type, Type y_type, bool paired) {
  std::string all;
  const int64_t shapes[][3] = {{7, 3, 5}, {33, 48, 1}, {100, 131, 13}, {70, 65, 29}};
  for (const auto& shape : shapes) {
    const int64_t n = shape[0], k = shape[1], rows = shape[2];
    Array x = Array::random(rows, k, 1, x_type, 1.0f, 0.0f, 3), y(rows, n, y_type, 5);
    Array residual = Array::random(rows, n, 3, y_type);
    const Weight weight(Array::random(paired ? 2 * n : n, k, 2, w_type), n, k, w_type, paired);
    LinearArgs args{};
    args.x = x.view();
    args.rows = rows;
    args.weight = weight.packed;
    args.y = y.view();
    args.residual = residual.view();
    kernels().linear(args);
    const std::string whole = y.values();
    report.expect(is_finite(whole, y_type), "not finite");
    args.rows = 1;
    for (int64_t row = 0; row < rows; row++) {
      Array alone(1, n, y_type);
      args.x = x.from(row);
      args.y = alone.view();
      args.residual = residual.from(row);
      kernels().linear(args);
      report.expect(alone.values() == y.values(row, row + 1), "a row alone differs");
    }
    args.rows = 0;
    args.y = y.view();
    kernels().linear(args);
    report.expect(y.values() == whole, "a call without rows wrote something");
    all += whole;
  }
  return all;
}

std::string coded(Report& report, Coding coding, int64_t group, Type type, bool paired) {
  std::string all;
  const int64_t shapes[][3] = {{7, 3, 5}, {33, 48, 1}, {100, 131, 13}, {70, 65, 29}};
  for (const auto& shape : shapes) {
    const int64_t n = shape[0], rows = shape[2], k = coding == Coding::mxfp4 ? (shape[1] + 31) / 32 * 32 : shape[1];
    Array x = Array::random(rows, k, 1, type, 1.0f, 0.0f, 3), y(rows, n, type, 5);
    const CodedWeight weight(coding, n, k, group, paired, 2);
    LinearArgs args{};
    args.x = x.view();
    args.rows = rows;
    args.weight = weight.packed;
    args.y = y.view();
    kernels().linear(args);
    report.expect(is_finite(y.values(), type), "not finite");
    for (int64_t row = 0; row < rows; row++) {
      Array alone(1, n, type);
      args.x = x.from(row);
      args.y = alone.view();
      args.rows = 1;
      kernels().linear(args);
      report.expect(alone.values() == y.values(row, row + 1), "a row alone differs");
    }
    all += y.values();
  }
  return all;
}

std::string grouped(Report& report, Type type) {
  const int64_t groups = 3, n = 20, k = 17, rows = 6;
  Array x = Array::random(rows, groups * k, 4, type), y(rows, groups * n);
  const Weight weight(Array::random(groups * n, k, 5, type), n, k, type, false, groups);
  LinearArgs args{};
  args.x = x.view();
  args.x_group = k;
  args.rows = rows;
  args.weight = weight.packed;
  args.y = y.view();
  args.y_group = n;
  kernels().linear(args);
  report.expect(is_finite(y.values(), Type::f32), "not finite");
  return y.values();
}

// Sets "flush denormals" for this thread, as some libraries do.
class Flushing {
 public:
#if defined(__x86_64__)
  Flushing() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~Flushing() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  Flushing() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | 1ull << 24));
  }
  ~Flushing() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

std::string denormals(Report& report) {
  const int64_t size = 40;
  Array x(3, size), identity(size, size), y(3, size);
  for (int64_t row = 0; row < 3; row++)
    for (int64_t i = 0; i < size; i++) x.set(row, i, from_bits(uint32_t(1 + 977 * i + row)));
  for (int64_t row = 0; row < size; row++)
    for (int64_t i = 0; i < size; i++) identity.set(row, i, row == i ? 1.0f : 0.0f);
  const Weight weight(identity, size, size, Type::f32);
  LinearArgs args{};
  args.x = x.view();
  args.rows = 3;
  args.weight = weight.packed;
  args.y = y.view();
  {
    const Flushing flushing;
    kernels().linear(args);
  }
  report.expect(y.values() == x.values(), "denormals were flushed");
  return y.values();
}

// ---------------------------------------------------------------- norms and pages

std::string rms_norm(Report& report, Type type) {
  std::string all;
  for (int64_t width : {1, 37, 64}) {
    Array x = Array::random(19, width, 6, type, 1.0f, 0.0f, 3), y(19, width, type, 1);
    Array weight = Array::random(1, width, 7, Type::f32, 0.2f, 1.0f);
    NormArgs args{x.view(), y.view(), weight.floats(), 19, width, 1e-5f};
    kernels().rms_norm(args);
    const std::string whole = y.values();
    report.expect(is_finite(whole, type), "not finite");
    Array alone(1, width, type);
    args.x = x.from(18);
    args.y = alone.view();
    args.rows = 1;
    kernels().rms_norm(args);
    report.expect(alone.values() == y.values(18, 19), "a row alone differs");
    all += whole;
  }
  return all;
}

// Where the tokens of one sequence lie: pages of 16 in an order of their own.
struct Places {
  static constexpr int64_t kUnit = 16, kPages = 24;
  std::vector<int64_t> table, pages, offsets;
  std::vector<int64_t> starts;
  explicit Places(int64_t tokens) {
    for (int64_t page = 0; page * kUnit < tokens; page++) table.push_back((page * 7 + 3) % kPages);
    for (int64_t t = 0; t < tokens; t++) {
      pages.push_back(table[size_t(t / kUnit)]);
      offsets.push_back(t % kUnit);
    }
    starts = {0, int64_t(table.size())};
  }
};

constexpr int64_t kTokens = 290;  // longer than a tile of 256 keys
const std::vector<std::vector<int64_t>> kCuts = {{kTokens}, {1, 2, 30, 222, 1, 34}};

std::string latents(Report& report, Type type) {
  const int64_t width = 20, latent = 13, heads = 3;
  const Places places(kTokens);
  Array x = Array::random(kTokens, width, 8, type, 1.0f, 0.0f, 2), query = Array::random(kTokens, heads * width, 9);
  Array weight = Array::random(1, latent, 10, Type::f32, 0.2f, 1.0f);
  std::string results[2];
  for (size_t way = 0; way < 2; way++) {
    Array pages(Places::kPages * Places::kUnit, width, type), out(kTokens, heads * latent);
    int64_t first = 0;
    for (int64_t count : kCuts[way]) {
      StoreLatentsArgs store{x.from(first), weight.floats(), count, width, latent, 1e-6f,
                             static_cast<char*>(pages.view().data), Places::kUnit * width, width,
                             places.pages.data() + first, places.offsets.data() + first};
      kernels().store_latents(store);
      const Span span{0, count, first};
      AttentionArgs args{};
      args.query = query.floats() + first * heads * width;
      args.out = out.floats() + first * heads * latent;
      args.heads = heads;
      args.kv_heads = 1;
      args.width = width;
      args.value_width = latent;
      args.scale = 0.3f;
      args.keys = args.values = Pages{static_cast<char*>(pages.view().data), Places::kUnit * width, width, 0};
      args.shared = true;
      args.type = type;
      args.match_unit = Places::kUnit;
      args.num_spans = 1;
      args.spans = &span;
      args.table = places.table.data();
      args.table_starts = places.starts.data();
      kernels().attend(args);
      first += count;
    }
    report.expect(is_finite(out.values(), Type::f32), "not finite");
    results[way] = out.values();
  }
  report.expect(results[0] == results[1], "cuts change bits");
  return results[0];
}

// Every head expands keys and values of its own from latents.
std::string expanded(Report& report, Type type) {
  const int64_t heads = 3, nope = 12, shared = 8, latent = 24, value = 10, width = nope + shared, entry = latent + shared;
  const Places places(kTokens);
  Array query = Array::random(kTokens, heads * width, 50), rows = Array::random(kTokens, entry, 51, type);
  const Weight key(Array::random(heads * nope, latent, 52, type, 0.3f), nope, latent, type, false, heads);
  const Weight values(Array::random(heads * value, latent, 53, type, 0.3f), value, latent, type, false, heads);
  Array pages(Places::kPages * Places::kUnit, entry, type);
  for (int64_t t = 0; t < kTokens; t++)
    std::memcpy(pages.view().at(places.pages[size_t(t)] * Places::kUnit + places.offsets[size_t(t)]), rows.view().at(t),
                size_t(entry * item_bytes(type)));
  std::string results[2];
  for (size_t way = 0; way < 2; way++) {
    Array out(kTokens, heads * value);
    int64_t first = 0;
    for (int64_t count : kCuts[way]) {
      const Span span{0, count, first};
      AttentionArgs args{};
      args.query = query.floats() + first * heads * width;
      args.out = out.floats() + first * heads * value;
      args.heads = args.kv_heads = heads;
      args.width = width;
      args.value_width = value;
      args.scale = 0.2f;
      args.keys = args.values = Pages{static_cast<char*>(pages.view().data), Places::kUnit * entry, entry, 0};
      args.type = type;
      args.match_unit = Places::kUnit;
      args.num_spans = 1;
      args.spans = &span;
      args.table = places.table.data();
      args.table_starts = places.starts.data();
      args.expand_key = &key.packed;
      args.expand_value = &values.packed;
      kernels().attend(args);
      first += count;
    }
    report.expect(is_finite(out.values(), Type::f32), "not finite");
    results[way] = out.values();
  }
  report.expect(results[0] == results[1], "cuts change bits");
  return results[0];
}

std::string gqa(Report& report, Type type) {
  const int64_t heads = 6, kv_heads = 2, dim = 40, half = 10;
  const Places places(kTokens);
  Array query_gate = Array::random(kTokens, heads * 2 * dim, 11, type, 1.0f, 0.0f, 3);
  Array key = Array::random(kTokens, kv_heads * dim, 12, type), value = Array::random(kTokens, kv_heads * dim, 13, type);
  Array query_norm = Array::random(1, dim, 14, Type::f32, 0.2f, 1.0f), key_norm = Array::random(1, dim, 15, Type::f32, 0.2f, 1.0f);
  Array cosines = Array::random(kTokens, half, 16), sines = Array::random(kTokens, half, 17);
  std::string results[2];
  for (size_t way = 0; way < 2; way++) {
    Array pages(Places::kPages * Places::kUnit, kv_heads * 2 * dim, type), out(kTokens, heads * dim, type);
    int64_t first = 0;
    for (int64_t count : kCuts[way]) {
      Array query(count, heads * dim), mixed(count, heads * dim);
      GqaArgs args{};
      args.gated = true;
      args.query_gate = query_gate.from(first);
      args.key = key.from(first);
      args.value = value.from(first);
      args.out = out.from(first);
      args.query_norm = query_norm.floats();
      args.key_norm = key_norm.floats();
      args.eps = 1e-6f;
      args.rows = count;
      args.heads = heads;
      args.kv_heads = kv_heads;
      args.head_dim = dim;
      args.half_rotary = half;
      args.cosines = cosines.floats() + first * half;
      args.sines = sines.floats() + first * half;
      args.query = query.floats();
      args.mixed = mixed.floats();
      args.values = Pages{static_cast<char*>(pages.view().data), Places::kUnit * kv_heads * 2 * dim, kv_heads * 2 * dim, 2 * dim};
      args.keys = args.values;
      args.keys.data += dim * item_bytes(type);
      args.write_pages = places.pages.data() + first;
      args.write_offsets = places.offsets.data() + first;
      const Span span{0, count, first};
      AttentionArgs attention{};
      attention.query = query.floats();
      attention.out = mixed.floats();
      attention.heads = heads;
      attention.kv_heads = kv_heads;
      attention.width = attention.value_width = dim;
      attention.scale = 0.158f;
      attention.keys = args.keys;
      attention.values = args.values;
      attention.type = type;
      attention.match_unit = Places::kUnit;
      attention.num_spans = 1;
      attention.spans = &span;
      attention.table = places.table.data();
      attention.table_starts = places.starts.data();
      kernels().gqa_begin(args);
      kernels().attend(attention);
      kernels().gqa_end(args);
      first += count;
    }
    report.expect(is_finite(out.values(), type), "not finite");
    results[way] = out.values();
  }
  report.expect(results[0] == results[1], "cuts change bits");
  return results[0];
}

// ---------------------------------------------------------------- recurrence

struct RecurrentShape {
  int64_t key_heads, heads, key_dim, value_dim;
  bool scalar_decay, bounded;
};

std::string recurrence(Report& report, const RecurrentShape& shape, Type type) {
  const int64_t rows = 100, taps = 4, slots = 4, middle = 33;
  const int64_t decays = shape.heads * (shape.scalar_decay ? 1 : shape.key_dim);
  KdaArgs args{};
  args.key_heads = shape.key_heads;
  args.heads = shape.heads;
  args.key_dim = shape.key_dim;
  args.value_dim = shape.value_dim;
  const int64_t channels = args.channels(), values = shape.heads * shape.value_dim;
  Array raw = Array::random(rows, channels, 18, type, 1.0f, 0.0f, 3), decay = Array::random(rows, decays, 19, type, 2.0f);
  Array beta = Array::random(rows, shape.heads, 20, type), gate = Array::random(rows, values, 21, type);
  Array conv = Array::random(taps, channels, 22, Type::f32, 0.5f), decay_log = Array::random(1, shape.heads, 23);
  Array dt_bias = Array::random(1, decays, 24, Type::f32, 1.0f, -1.0f);
  Array norm = Array::random(1, shape.value_dim, 25, Type::f32, 0.1f, 1.0f);
  // Decays of exactly 0 and 1 among the others.
  for (int64_t i = 0; i < decays; i++) {
    decay.set(40, i, 1e4f);
    decay.set(41, i, -1e4f);
  }
  args.conv = conv.floats();
  args.decay_log = decay_log.floats();
  args.dt_bias = dt_bias.floats();
  args.norm = norm.floats();
  args.taps = taps;
  args.eps = 1e-5f;
  args.scale = 0.25f;
  args.lower_bound = -5.0f;
  args.bounded = shape.bounded;
  args.scalar_decay = args.silu_gate = shape.scalar_decay;
  const int64_t state = shape.heads * shape.key_dim * shape.value_dim;
  args.tail_row_stride = channels;
  args.tail_slot_stride = (taps - 1) * channels;
  args.state_slot_stride = state;
  args.num_sequences = 1;
  std::string results[2], records[2];
  const std::vector<std::vector<int64_t>> cuts = {{rows}, {1, 1, 31, 1, 2, 64}};
  for (size_t way = 0; way < 2; way++) {
    Array tails(slots * (taps - 1), channels, type), states(slots, state), out(rows, values, type);
    args.tails = static_cast<char*>(tails.view().data);
    args.states = states.floats();
    int64_t first = 0;
    for (int64_t count : cuts[way]) {
      const StateExport exported{middle - first, 1};
      RecurrentSequence sequence{Span{0, count, first}, first == 0 ? -1 : 0, 0, 0, 0, nullptr, nullptr};
      if (first < middle && middle <= first + count) sequence.end_export = 1;
      if (first != 0) {
        sequence.initial_tail = args.tails;
        sequence.initial_state = args.states;
      }
      args.raw = raw.from(first);
      args.decay = decay.from(first);
      args.beta = beta.from(first);
      args.gate = gate.from(first);
      args.out = out.from(first);
      args.sequences = &sequence;
      args.exports = &exported;
      kernels().kda(args);
      first += count;
    }
    report.expect(is_finite(out.values(), type), "not finite");
    results[way] = out.values();
    records[way] = states.values(0, 2) + tails.values(0, 2 * (taps - 1));
    report.expect(is_finite(states.values(0, 2), Type::f32), "states are not finite");
    report.expect(!is_finite(states.values(2, 3), Type::f32), "a slot nobody asked for was written");
  }
  report.expect(results[0] == results[1], "cuts change bits");
  report.expect(records[0] == records[1], "cuts change states");
  return results[0] + records[0];
}

}  // namespace

std::vector<Case> all_cases() {
  std::vector<Case> cases = {{"denormals", denormals}};
  const auto add = [&cases](const std::string& name, std::function<std::string(Report&)> run) {
    cases.push_back({name, std::move(run)});
  };
  for (bool paired : {false, true}) {
    const std::string name = paired ? "swiglu" : "linear";
    add(name + "-f32", [=](Report& r) { return linear(r, Type::f32, Type::f32, Type::f32, paired); });
    add(name + "-bf16", [=](Report& r) { return linear(r, Type::bf16, Type::bf16, Type::bf16, paired); });
    add(name + "-mixed", [=](Report& r) { return linear(r, Type::f32, Type::bf16, Type::f32, paired); });
  }
  for (Type type : {Type::f32, Type::bf16})
    for (bool paired : {false, true}) {
      const std::string end = std::string(paired ? "-swiglu-" : "-linear-") + label(type);
      add("int8" + end, [=](Report& r) { return coded(r, Coding::int8, 64, type, paired); });
      add("int4" + end, [=](Report& r) { return coded(r, Coding::int4, 32, type, paired); });
      add("mxfp4" + end, [=](Report& r) { return coded(r, Coding::mxfp4, kMxfp4Group, type, paired); });
    }
  for (Type type : {Type::f32, Type::bf16}) {
    const std::string end = std::string("-") + label(type);
    add("grouped" + end, [=](Report& r) { return grouped(r, type); });
    add("rms_norm" + end, [=](Report& r) { return rms_norm(r, type); });
    add("latents" + end, [=](Report& r) { return latents(r, type); });
    add("expanded" + end, [=](Report& r) { return expanded(r, type); });
    add("gqa" + end, [=](Report& r) { return gqa(r, type); });
    add("kda" + end, [=](Report& r) { return recurrence(r, {2, 2, 20, 20, false, false}, type); });
    add("kda-bounded" + end, [=](Report& r) { return recurrence(r, {2, 2, 16, 16, false, true}, type); });
    add("gdn" + end, [=](Report& r) { return recurrence(r, {2, 4, 16, 12, true, false}, type); });
  }
  add_mixtures(cases);
  add_sampling(cases);
  return cases;
}

}  // namespace milepost::check
