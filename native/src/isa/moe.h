// Mixture of experts: sigmoid router, one product per expert over the rows that chose it, and one
// fixed order of sums per token.
#pragma once

#include "isa/coded.h"

namespace milepost {
namespace MP_ISA {

// The `k` experts with the largest score + bias, ascending by number; equal scores: the lowest number.
inline void choose_experts(const MoeArgs& a, int64_t row, int64_t* ids, float* weights, float* scores, char* taken) {
  const float* logits = reinterpret_cast<const float*>(a.logits.at(row));
  for (int64_t e = 0; e < a.num_experts; e += kLanes)
    store_part(reinterpret_cast<char*>(scores + e), Type::f32,
               sigmoid(load_part(reinterpret_cast<const char*>(logits + e), Type::f32, a.num_experts - e)),
               a.num_experts - e);
  std::memset(taken, 0, size_t(a.num_experts));
  for (int64_t choice = 0; choice < a.experts_per_token; choice++) {
    int64_t best = -1;
    for (int64_t e = 0; e < a.num_experts; e++)
      if (!taken[e] && (best < 0 || scores[e] + a.bias[e] > scores[best] + a.bias[best])) best = e;
    taken[best] = 1;
  }
  float total = 0.0f;
  int64_t count = 0;
  for (int64_t e = 0; e < a.num_experts; e++) {
    if (!taken[e]) continue;
    ids[count] = e;
    weights[count++] = scores[e];
    total += scores[e];
  }
  for (int64_t i = 0; i < count; i++)
    weights[i] = (a.renormalize ? weights[i] / (total + 1e-20f) : weights[i]) * a.scaling;
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
    for (int64_t c = 0; c < a.width; c += kLanes) {
      const int64_t left = a.width - c;
      Vec total = zero();
      for (int64_t choice = 0; choice < a.experts_per_token; choice++) {
        const int64_t at = row * a.experts_per_token + choice;
        const char* output = job.outputs + (job.places[at] * a.width + c) * item_bytes(type);
        total = fma(load_part(output, type, left), set1(job.weights[at]), total);
      }
      if (a.shared.data != nullptr) total = add(total, load_part(a.shared.at(row, c), type, left));
      if (a.residual.data != nullptr) total = add(load_part(a.residual.at(row, c), type, left), rounded(total, type));
      store_part(a.y.at(row, c), type, total, left);
    }
  }
}

inline void moe(const MoeArgs& a) {
  if (a.rows == 0) return;
  const int64_t choices = a.rows * a.experts_per_token, bytes = item_bytes(a.x.type);
  int64_t* index = scratch_of<int64_t>(kMoeIndex, 4 * choices + 2 * a.num_experts + 2);
  int64_t *ids = index, *places = ids + choices, *rows = places + choices;
  int64_t *starts = rows + choices, *next = starts + a.num_experts + 1;
  float* weights = reinterpret_cast<float*>(next + a.num_experts);
  float* scores = scratch_of<float>(kScores, a.num_experts + kLanes);
  char* taken = static_cast<char*>(scratch(kWeights, size_t(a.num_experts)));
  for (int64_t row = 0; row < a.rows; row++)
    choose_experts(a, row, ids + row * a.experts_per_token, weights + row * a.experts_per_token, scores, taken);
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
