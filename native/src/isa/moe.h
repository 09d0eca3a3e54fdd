// Mixture of experts: router, one product per expert over the rows that chose it, and one fixed order of sums
// per token.
#pragma once

#include "isa/coded.h"

namespace milepost {
namespace MP_ISA {

// NaN is larger than everything, so that a row with one shows it.
inline bool larger(float x, float y) { return x > y || (x != x && y == y); }

// Numbers of the `count` largest keys, ascending; equal keys: the lowest numbers.
inline void choose_largest(const float* keys, int64_t num_keys, int64_t count, int64_t* ids) {
  int64_t found = 0;
  for (int64_t e = 0; e < num_keys; e++) {
    // Those found so far are in descending order.
    if (found == count && !larger(keys[e], keys[ids[count - 1]])) continue;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && larger(keys[e], keys[ids[at - 1]]); at--) ids[at] = ids[at - 1];
    ids[at] = e;
  }
  for (int64_t i = 1; i < count; i++) {
    const int64_t id = ids[i];
    int64_t at = i;
    for (; at > 0 && ids[at - 1] > id; at--) ids[at] = ids[at - 1];
    ids[at] = id;
  }
}

// Sigmoid router: the bias decides who is chosen, the unbiased scores how much each counts.
inline void route_sigmoid(const MoeArgs& a, const char* logits, int64_t* ids, float* weights, float* scores) {
  float* keys = scores + (a.num_experts + kLanes);
  for (int64_t e = 0; e < a.num_experts; e += kLanes) {
    const int64_t left = a.num_experts - e;
    const Vec score = sigmoid(load_part(logits + 4 * e, Type::f32, left));
    const Vec bias = load_part(reinterpret_cast<const char*>(a.bias + e), Type::f32, left);
    store_part(reinterpret_cast<char*>(scores + e), Type::f32, score, left);
    store_part(reinterpret_cast<char*>(keys + e), Type::f32, add(score, bias), left);
  }
  choose_largest(keys, a.num_experts, a.experts_per_token, ids);
  float total = 0.0f;
  for (int64_t i = 0; i < a.experts_per_token; i++) total += weights[i] = scores[ids[i]];
  for (int64_t i = 0; i < a.experts_per_token; i++)
    weights[i] = (a.renormalize ? weights[i] / (total + 1e-20f) : weights[i]) * a.scaling;
}

// Softmax router: the probabilities of the largest logits.
inline void route_softmax(const MoeArgs& a, const char* logits, int64_t* ids, float* weights, float* scores) {
  choose_largest(reinterpret_cast<const float*>(logits), a.num_experts, a.experts_per_token, ids);
  float largest = reinterpret_cast<const float*>(logits)[ids[0]];
  for (int64_t i = 1; i < a.experts_per_token; i++) {
    const float logit = reinterpret_cast<const float*>(logits)[ids[i]];
    if (logit > largest) largest = logit;
  }
  Vec sums = zero();
  for (int64_t e = 0; e < a.num_experts; e += kLanes) {
    const int64_t left = a.num_experts - e;
    char* score = reinterpret_cast<char*>(scores + e);
    store_part(score, Type::f32, exp(sub(load_part(logits + 4 * e, Type::f32, left), set1(largest))), left);
    sums = add(sums, load_part(score, Type::f32, left));
  }
  const float all = sum(sums);
  float total = 0.0f;
  for (int64_t i = 0; i < a.experts_per_token; i++) total += weights[i] = scores[ids[i]] / all;
  for (int64_t i = 0; i < a.experts_per_token; i++)
    weights[i] = (a.renormalize ? weights[i] / total : weights[i]) * a.scaling;
}

struct RouteJob {
  const MoeArgs* args;
  int64_t* ids;  // [row][choice], ascending
  float* weights;
};

inline void route_item(const void* job_pointer, int64_t item) {
  const RouteJob& job = *static_cast<const RouteJob*>(job_pointer);
  const MoeArgs& a = *job.args;
  float* scores = scratch_of<float>(kScores, 2 * (a.num_experts + kLanes));
  for (int64_t row = item * 16; row < a.rows && row < item * 16 + 16; row++) {
    int64_t* ids = job.ids + row * a.experts_per_token;
    float* weights = job.weights + row * a.experts_per_token;
    (a.bias == nullptr ? route_softmax : route_sigmoid)(a, a.logits.at(row), ids, weights, scores);
  }
}

// The sigmoid of a row's gate; 1 without one.
inline Vec shared_factor(const Rows& gate, int64_t row) {
  return gate.data == nullptr ? set1(1.0f) : set1(sigmoid(*reinterpret_cast<const float*>(gate.at(row))));
}

struct CombineJob {
  const MoeArgs* args;
  const char* outputs;    // [place][width] in x's type
  const int64_t* places;  // [row][choice]
  const float* weights;
};

inline void combine_item(const void* job_pointer, int64_t item) {
  const CombineJob& job = *static_cast<const CombineJob*>(job_pointer);
  const MoeArgs& a = *job.args;
  const Type type = a.x.type;
  for (int64_t row = item * 16; row < a.rows && row < item * 16 + 16; row++) {
    const Vec factor = shared_factor(a.shared_gate, row);
    for (int64_t c = 0; c < a.width; c += kLanes) {
      const int64_t left = a.width - c;
      Vec total = zero();
      for (int64_t choice = 0; choice < a.experts_per_token; choice++) {
        const int64_t at = row * a.experts_per_token + choice;
        const char* output = job.outputs + (job.places[at] * a.width + c) * item_bytes(type);
        total = fma(load_part(output, type, left), set1(job.weights[at]), total);
      }
      if (a.shared.data != nullptr) total = add(total, mul(factor, load_part(a.shared.at(row, c), type, left)));
      if (a.residual.data != nullptr) total = add(load_part(a.residual.at(row, c), type, left), rounded(total, type));
      store_part(a.y.at(row, c), type, total, left);
    }
  }
}

inline void add_shared_item(const void* args, int64_t item) {
  const AddSharedArgs& a = *static_cast<const AddSharedArgs*>(args);
  const Type type = a.x.type;
  for (int64_t row = item * 16; row < a.rows && row < item * 16 + 16; row++) {
    const Vec factor = shared_factor(a.gate, row);
    for (int64_t c = 0; c < a.width; c += kLanes) {
      const int64_t left = a.width - c;
      const Vec x = load_part(a.x.at(row, c), type, left);
      const Vec total = add(x, mul(factor, load_part(a.shared.at(row, c), type, left)));
      store_part(a.y.at(row, c), type, add(load_part(a.residual.at(row, c), type, left), rounded(total, type)), left);
    }
  }
}

inline void add_shared(const AddSharedArgs& a) {
  run_items((a.rows + 15) / 16, add_shared_item, &a, a.rows * a.width > (1 << 16));
}

inline void moe(const MoeArgs& a) {
  if (a.rows == 0) return;
  const int64_t choices = a.rows * a.experts_per_token, bytes = item_bytes(a.x.type);
  int64_t* index = scratch_of<int64_t>(kMoeIndex, 4 * choices + 2 * a.num_experts + 2);
  int64_t *ids = index, *places = ids + choices, *rows = places + choices;
  int64_t *starts = rows + choices, *next = starts + a.num_experts + 1;
  float* weights = reinterpret_cast<float*>(next + a.num_experts);
  const RouteJob route{&a, ids, weights};
  run_items((a.rows + 15) / 16, route_item, &route, a.rows * a.num_experts > (1 << 16));
  std::memset(starts, 0, size_t(a.num_experts + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < choices; i++) starts[ids[i] + 1]++;
  for (int64_t e = 0; e < a.num_experts; e++) starts[e + 1] += starts[e];
  std::memcpy(next, starts, size_t(a.num_experts) * sizeof(int64_t));
  for (int64_t i = 0; i < choices; i++) {
    places[i] = next[ids[i]]++;
    rows[places[i]] = i / a.experts_per_token;
  }
  char* inner = static_cast<char*>(scratch(kMoeInner, size_t(choices * a.inner * bytes)));
  char* outputs = static_cast<char*>(scratch(kMoeOutput, size_t(choices * a.width * bytes)));
  for (int64_t e = 0; e < a.num_experts; e++) {
    const int64_t first = starts[e], count = starts[e + 1] - first;
    if (count == 0) continue;
    LinearArgs up{};
    up.x = a.x;
    up.x_rows = rows + first;
    up.rows = count;
    up.weight = a.gate_up[e];
    up.glu = a.glu;
    up.y = Rows{inner + first * a.inner * bytes, a.x.type, a.inner};
    linear(up);
    LinearArgs down{};
    down.x = up.y;
    down.rows = count;
    down.weight = a.down[e];
    down.y = Rows{outputs + first * a.width * bytes, a.x.type, a.width};
    linear(down);
  }
  CombineJob job{&a, outputs, places, weights};
  run_items((a.rows + 15) / 16, combine_item, &job, a.rows * a.width > (1 << 16));
}

}  // namespace MP_ISA
}  // namespace milepost
