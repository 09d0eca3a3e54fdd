// Experts behind both routers, shared experts, output gates, rotary positions, mixes of sources.
#include "check/buffers.h"
#include "check/cases.h"
#include "check/weights.h"
#include "common/dispatch.h"
#include "common/threads.h"

namespace milepost::check {
namespace {

constexpr int64_t kRows = 37;
constexpr Glu kActivations[] = {{}, {4.0f, 0.0f}, {4.0f, 25.0f}};

// Every third row far from zero, every fifth denormal.
Array spread(int64_t rows, int64_t width, uint32_t seed, Type type, float large) {
  Array a(rows, width, type, 3);
  Random random(seed);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t column = 0; column < width; column++)
      a.set(row, column, random.value() * (row % 3 == 2 ? large : row % 5 == 4 ? 1e-39f : 1.0f));
  return a;
}

// Gate and up as two products of the same rows, through every activation.
std::string activations(Report& report, Type type) {
  std::string all;
  const int64_t n = 39, k = 21;
  const Weight weight(Array::random(2 * n, k, 81, type), n, k, type, true);
  for (const Glu& glu : kActivations) {
    Array x = spread(kRows, k, 80, type, 1e4f), y(kRows, n, type, 1), alone(1, n, type);
    LinearArgs args{};
    args.x = x.view();
    args.rows = kRows;
    args.weight = weight.packed;
    args.y = y.view();
    args.glu = glu;
    kernels().linear(args);
    report.expect(is_finite(y.values(), type), "not finite");
    for (int64_t row = 0; row < kRows; row++) {
      args.x = x.from(row);
      args.rows = 1;
      args.y = alone.view();
      kernels().linear(args);
      report.expect(alone.values() == y.values(row, row + 1), "a row alone differs");
    }
    all += y.values();
  }
  return all;
}

struct Bank {
  Bank(int64_t count, int64_t width, int64_t inner, Type type, bool coded) {
    for (int64_t e = 0; e < count; e++) {
      const uint32_t seed = uint32_t(2 * e);
      if (coded) {
        coded_weights.emplace_back(Coding::mxfp4, inner, width, kMxfp4Group, true, 300 + seed);
        gate_up.push_back(coded_weights.back().packed);
        coded_weights.emplace_back(Coding::mxfp4, width, inner, kMxfp4Group, false, 301 + seed);
        down.push_back(coded_weights.back().packed);
      } else {
        weights.emplace_back(Array::random(2 * inner, width, 30 + seed, type), inner, width, type, true);
        gate_up.push_back(weights.back().packed);
        weights.emplace_back(Array::random(width, inner, 31 + seed, type), width, inner, type);
        down.push_back(weights.back().packed);
      }
    }
  }
  std::vector<Weight> weights;
  std::vector<CodedWeight> coded_weights;
  std::vector<Packed> gate_up, down;
};

struct Layer {
  int64_t count, per_token, width, inner;
  bool coded, softmax, renormalize, shared, gate, residual;
  Glu glu;
};

std::string experts(Report& report, Type type, const Layer& layer) {
  const Bank bank(layer.count, layer.width, layer.inner, type, layer.coded);
  Array x = Array::random(kRows, layer.width, 26, type, 1.0f, 0.0f, 3);
  Array logits = spread(kRows, layer.count, 27, Type::f32, 60.0f);
  Array bias = Array::random(1, layer.count, 28, Type::f32, 0.2f);
  Array residual = Array::random(kRows, layer.width, 29, type, 1.0f, 0.0f, 1);
  Array shared = Array::random(kRows, layer.width, 24, type, 1.0f, 0.0f, 2);
  Array gate = spread(kRows, 1, 25, Type::f32, 1e4f), y(kRows, layer.width, type, 2), alone(1, layer.width, type);
  MoeArgs args{};
  args.bias = layer.softmax ? nullptr : bias.floats();
  args.width = layer.width;
  args.inner = layer.inner;
  args.num_experts = layer.count;
  args.experts_per_token = layer.per_token;
  args.renormalize = layer.renormalize;
  args.scaling = 2.4f;
  args.gate_up = bank.gate_up.data();
  args.down = bank.down.data();
  args.glu = layer.glu;
  const auto run = [&](int64_t row, int64_t rows, Array& out) {
    args.rows = rows;
    args.x = x.from(row);
    args.logits = logits.from(row);
    if (layer.shared) args.shared = shared.from(row);
    if (layer.gate) args.shared_gate = gate.from(row);
    if (layer.residual) args.residual = residual.from(row);
    args.y = out.view();
    kernels().moe(args);
  };
  run(0, kRows, y);
  report.expect(is_finite(y.values(), type), "not finite");
  for (int64_t row = 0; row < kRows; row += 4) {
    run(row, 1, alone);
    report.expect(alone.values() == y.values(row, row + 1), "a row alone differs");
  }
  const std::string whole = y.values();
  run(0, 0, y);
  report.expect(y.values() == whole, "a call without rows wrote something");
  return whole;
}

std::string add_shared(Report& report, Type type) {
  const int64_t width = 21;
  std::string all;
  for (bool gated : {false, true}) {
    Array x = spread(kRows, width, 90, type, 100.0f), shared = spread(kRows, width, 91, type, 100.0f);
    Array gate = spread(kRows, 1, 92, Type::f32, 1e4f), residual = Array::random(kRows, width, 93, type);
    AddSharedArgs args{};
    args.x = x.view();
    args.shared = shared.view();
    args.residual = args.y = residual.view();
    if (gated) args.gate = gate.view();
    args.rows = kRows;
    args.width = width;
    kernels().add_shared(args);
    report.expect(is_finite(residual.values(), type), "not finite");
    all += residual.values();
  }
  return all;
}

std::string gate(Report& report, Type type) {
  const int64_t width = 21;
  Array x = spread(kRows, width, 94, type, 100.0f), by = spread(kRows, width, 95, type, 1e4f), y(kRows, width, type, 3);
  kernels().gate(GateArgs{x.view(), by.view(), y.view(), kRows, width});
  report.expect(is_finite(y.values(), type), "not finite");
  Array alone(1, width, type);
  kernels().gate(GateArgs{x.from(36), by.from(36), alone.view(), 1, width});
  report.expect(alone.values() == y.values(36, 37), "a row alone differs");
  return y.values();
}

std::string mix(Report& report, Type type) {
  std::string all;
  for (int64_t count : {int64_t(1), int64_t(2), int64_t(9)}) {
    const int64_t width = 21;
    std::vector<Array> arrays;
    for (int64_t s = 0; s < count; s++) arrays.push_back(spread(kRows, width, uint32_t(70 + s), type, 1e4f));
    Array query = Array::random(1, width, 69, Type::f32, 4.0f), y(kRows, width, type, 3), alone(1, width, type);
    std::vector<Rows> sources;
    for (Array& array : arrays) sources.push_back(array.view());
    kernels().mix(MixArgs{sources.data(), count, kRows, width, query.floats(), 1e-5f, y.view()});
    report.expect(is_finite(y.values(), type), "not finite");
    sources.clear();
    for (Array& array : arrays) sources.push_back(array.from(20));
    kernels().mix(MixArgs{sources.data(), count, 1, width, query.floats(), 1e-5f, alone.view()});
    report.expect(alone.values() == y.values(20, 21), "a row alone differs");
    all += y.values();
  }
  return all;
}

// All of a head, and its last part; neighbours and halves. The table of angles is made up.
std::string rotate(Report& report, Type type) {
  std::string all;
  for (int64_t width : {int64_t(12), int64_t(41)})
    for (bool interleaved : {false, true}) {
      const int64_t heads = 3, half = width == 12 ? 6 : 17;
      Array x = spread(kRows, heads * width, 96, type, 1e4f), y(kRows, heads * width, type, 3);
      Array cosines = Array::random(kRows, half, 97), sines = Array::random(kRows, half, 98);
      RotateArgs args{x.view(), y.view(), kRows, heads, width, half, interleaved, 1.5f, cosines.floats(), sines.floats()};
      kernels().rotate(args);
      report.expect(is_finite(y.values(), type), "not finite");
      Array alone(1, heads * width, type);
      args.x = x.from(33);
      args.y = alone.view();
      args.rows = 1;
      args.cosines += 33 * half;
      args.sines += 33 * half;
      kernels().rotate(args);
      report.expect(alone.values() == y.values(33, 34), "a row alone differs");
      all += y.values();
    }
  return all;
}

}  // namespace

void add_mixtures(std::vector<Case>& cases) {
  const auto add = [&cases](const std::string& name, std::function<std::string(Report&)> run) {
    cases.push_back({name, std::move(run)});
  };
  // count, per token, width, inner, coded, softmax, renormalised, shared, gated, residual, activation
  const Layer sigmoid{5, 2, 20, 7, false, false, true, false, false, true, kActivations[0]};
  const Layer softmax{19, 3, 20, 7, false, true, true, true, true, true, kActivations[0]};
  const Layer latent{5, 5, 20, 7, false, false, true, false, false, false, kActivations[2]};
  const Layer packed{5, 2, 64, 32, true, true, false, true, false, true, kActivations[1]};
  for (Type type : {Type::f32, Type::bf16}) {
    const std::string end = std::string("-") + label(type);
    add("experts" + end, [=](Report& r) { return experts(r, type, sigmoid); });
    add("experts-softmax" + end, [=](Report& r) { return experts(r, type, softmax); });
    add("experts-latent" + end, [=](Report& r) { return experts(r, type, latent); });
    add("experts-mxfp4" + end, [=](Report& r) { return experts(r, type, packed); });
    add("activations" + end, [=](Report& r) { return activations(r, type); });
    add("add_shared" + end, [=](Report& r) { return add_shared(r, type); });
    add("gate" + end, [=](Report& r) { return gate(r, type); });
    add("rotate" + end, [=](Report& r) { return rotate(r, type); });
    add("mix" + end, [=](Report& r) { return mix(r, type); });
  }
}

}  // namespace milepost::check
