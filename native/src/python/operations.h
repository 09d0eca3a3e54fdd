// What Python calls in every step. Arguments and results: the operations of milepost/kernels/api.py.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "python/plans.h"

namespace milepost {

// fp32 [size]
const float* vector_of(nb::handle object, const char* name, int64_t size);
Pages pages_of(const Tensor& pages);
// Checks the plan. Queries, results and, where keys are not values as well, those are for the caller to add.
AttentionArgs attention_args(const Tensor& pages, const AttentionPlan& plan, int64_t heads, int64_t value_width,
                             float scale);
// Of a paired weight; without betas SwiGLU.
Glu glu_of(std::optional<float> beta, std::optional<float> linear_beta);

void linear(nb::handle x, const PackedWeight& weight, nb::handle out, nb::handle residual, std::optional<float> beta,
            std::optional<float> linear_beta);
void rms_norm(nb::handle x, nb::handle weight, float eps, nb::handle out);
void store_latents(nb::handle x, nb::handle weight, float eps, nb::handle pages, AttentionPlan& plan);
void attend(nb::handle query, nb::handle pages, AttentionPlan& plan, int64_t value_width, float scale, nb::handle out);
void attend_latents(nb::handle query, const PackedWeight& absorb_key, const PackedWeight& absorb_value, nb::handle pages,
                    AttentionPlan& plan, float scale, nb::handle out, const PackedWeight* expand_key);
void gqa_mixer(nb::handle query_gate, nb::handle key, nb::handle value, nb::handle query_norm, nb::handle key_norm,
               float eps, nb::handle frequencies, nb::handle pages, AttentionPlan& plan, nb::handle out);
void rotate_heads(nb::handle x, int64_t num_heads, nb::handle frequencies, float amplitude, bool interleaved,
                  AttentionPlan& plan, nb::handle out);
void store_keys_values(nb::handle key, nb::handle value, nb::handle key_norm, float eps, nb::handle frequencies,
                       nb::handle pages, AttentionPlan& plan);
void kda_mixer(nb::handle raw, nb::handle decay, nb::handle beta, nb::handle gate, nb::handle conv, nb::handle decay_log,
               nb::handle dt_bias, nb::handle norm, float eps, std::optional<float> lower_bound, nb::handle tails,
               nb::handle states, const RecurrentPlan& plan, nb::handle out);
void gdn_mixer(nb::handle raw, nb::handle decay, nb::handle beta, nb::handle gate, nb::handle conv, nb::handle decay_log,
               nb::handle dt_bias, nb::handle norm, float eps, nb::handle tails, nb::handle states,
               const RecurrentPlan& plan, nb::handle out);
void moe(nb::handle x, nb::handle logits, nb::handle bias, const Experts& experts, int64_t experts_per_token,
         bool renormalize, float scaling, nb::handle shared, nb::handle residual, nb::handle out, nb::handle shared_gate,
         std::optional<float> beta, std::optional<float> linear_beta);
void add_shared(nb::handle x, nb::handle shared, nb::handle gate, nb::handle residual, nb::handle out);
void gate_values(nb::handle x, nb::handle gate, nb::handle out);
void mix_sources(nb::list sources, nb::handle query, float eps, nb::handle out);
void embed(nb::handle ids, nb::handle table, nb::handle out);

// rules: per row of logits None (greedy) or (temperature, log_min_p, top_p, top_k, noise_key).
// Returns token ids, and per row whether it is finite.
nb::tuple sample(nb::handle logits, nb::list rules);
// values fp32 [rows, 1 + count]: of ids, then of the best; best int64 [rows, count]. Both are filled.
void log_probabilities(nb::handle logits, nb::handle ids, nb::handle values, nb::handle best);
// For tests: the noise of ids 0 to count - 1.
nb::list gumbel_noise(uint64_t key, int64_t count);

}  // namespace milepost
