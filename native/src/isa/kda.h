// Kimi Delta Attention and Gated DeltaNet, from raw projections to the normed output, token by token in fp32.
//
// Per head, with S [key, value] (Kimi Linear technical report, KDA):
//   S' = diag(exp(g_t)) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = S_t^T q_t.
// A state is a function of the tokens before it and of nothing else: wherever a sequence is cut, every
// S_t goes through the same roundings. That is what makes any position a legal checkpoint.
#pragma once

#include "isa/gemm.h"

namespace milepost {
namespace MP_ISA {

constexpr int64_t kBlockTokens = 64;

inline int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Inputs of the recurrence for the tokens of a block; rows padded to full vectors.
struct KdaBlock {
  float *extended, *q, *k, *all_v, *decay, *decayed_k, *decayed_q, *out;
  float *beta, *qk;
  float* v;  // of the value head at work
};

// One key head of one sequence, with all value heads it serves: they share q, k and their tails.
struct KdaItem {
  const KdaArgs& a;
  const RecurrentSequence& seq;
  int64_t key_head, served, key_pad, value_pad, history, width;
  KdaBlock block;
  float* state_memory = nullptr;
  const float* ahead = nullptr;  // the state that is read after the one at work, laid out like a slot

  KdaItem(const KdaArgs& args, int64_t item)
      : a(args), seq(args.sequences[item / args.key_heads]), key_head(item % args.key_heads),
        served(args.heads / args.key_heads), key_pad(round_up(args.key_dim)), value_pad(round_up(args.value_dim)),
        history(args.taps - 1), width(2 * key_pad + served * value_pad) {
    float* p = scratch_of<float>(kKdaWork, (kBlockTokens + history) * width +
                                               kBlockTokens * (5 * key_pad + (served + 1) * value_pad + 2));
    const auto take = [&p](int64_t count) { float* q = p; p += count; return q; };
    block.extended = take((kBlockTokens + history) * width);
    block.q = take(kBlockTokens * key_pad);
    block.k = take(kBlockTokens * key_pad);
    block.decay = take(kBlockTokens * key_pad);
    block.decayed_k = take(kBlockTokens * key_pad);
    block.decayed_q = take(kBlockTokens * key_pad);
    block.all_v = take(kBlockTokens * served * value_pad);
    block.out = take(kBlockTokens * value_pad);
    block.beta = take(kBlockTokens);
    block.qk = take(kBlockTokens);
  }

  int64_t head(int64_t j) const { return key_head * served + j; }
  // Parts of a raw row: 0 = q, 1 = k, 2 + j = v of value head j. Where a part begins, and its size.
  int64_t num_parts() const { return 2 + served; }
  int64_t channel(int64_t part) const {
    return part < 2 ? (part * a.key_heads + key_head) * a.key_dim
                    : 2 * a.key_heads * a.key_dim + head(part - 2) * a.value_dim;
  }
  int64_t size(int64_t part) const { return part < 2 ? a.key_dim : a.value_dim; }
  int64_t pad(int64_t part) const { return part < 2 ? key_pad : value_pad; }
  int64_t extended_offset(int64_t part) const {
    return part < 2 ? part * key_pad : 2 * key_pad + (part - 2) * value_pad;
  }

  // Raw row `row` of the sequence (negative: of the tail it started from), or nullptr for zeros.
  const char* raw_row(int64_t row, int64_t at) const {
    if (row >= 0) return a.raw.at(seq.span.first_row + row, at);
    if (seq.initial_tail == nullptr) return nullptr;
    return seq.initial_tail + ((row + history) * a.tail_row_stride + at) * item_bytes(a.raw.type);
  }

  void extend(int64_t first, int64_t count) {
    for (int64_t i = 0; i < history + count; i++) {
      for (int64_t part = 0; part < num_parts(); part++) {
        float* target = block.extended + i * width + extended_offset(part);
        const char* source = raw_row(first - history + i, channel(part));
        for (int64_t c = 0; c < size(part); c += kLanes)
          store(target + c, source == nullptr ? zero()
                                              : load_part(source + c * item_bytes(a.raw.type), a.raw.type, size(part) - c));
      }
    }
  }

  // silu(sum over taps) of one part for `count` tokens; pads become zeros.
  void convolve(int64_t part, int64_t count, float* target) {
    for (int64_t c = 0; c < pad(part); c += kLanes) {
      const float* weights = a.conv + channel(part) + c;
      for (int64_t t = 0; t < count; t++) {
        Vec y = zero();
        for (int64_t tap = 0; tap <= history; tap++) {
          const Vec w = load_part(reinterpret_cast<const char*>(weights + tap * a.channels()), Type::f32, size(part) - c);
          y = fma(w, load(block.extended + (t + tap) * width + extended_offset(part) + c), y);
        }
        store(target + t * pad(part) + c, silu(y));
      }
    }
  }

  void normalize(float* rows, int64_t count, float scale) {
    for (int64_t t = 0; t < count; t++) {
      float* x = rows + t * key_pad;
      Vec squares = zero();
      for (int64_t c = 0; c < key_pad; c += kLanes) squares = fma(load(x + c), load(x + c), squares);
      const Vec inverse = set1(inverse_root(sum(squares) + 1e-6f));
      for (int64_t c = 0; c < key_pad; c += kLanes) store(x + c, mul(mul(load(x + c), inverse), set1(scale)));
    }
  }

  Vec log_decay(Vec z, Vec rate) const {
    return a.bounded ? mul(set1(a.lower_bound), sigmoid(mul(rate, z))) : mul(sub(zero(), rate), softplus(z));
  }

  void gates(int64_t j, int64_t first, int64_t count) {
    const Vec rate = set1(exp(a.decay_log[head(j)]));
    for (int64_t t = 0; t < count; t++) {
      const int64_t row = seq.span.first_row + first + t;
      float lanes[kLanes];
      store(lanes, sigmoid(load_part(a.beta.at(row, head(j)), a.beta.type, 1)));
      block.beta[t] = lanes[0];
      Vec e = zero(), qk = zero();
      if (a.scalar_decay) {
        const Vec z = add(load_part(a.decay.at(row, head(j)), a.decay.type, 1), set1(a.dt_bias[head(j)]));
        store(lanes, exp(log_decay(z, rate)));
        e = set1(lanes[0]);
      }
      for (int64_t c = 0; c < key_pad; c += kLanes) {
        const int64_t i = t * key_pad + c;
        if (!a.scalar_decay) {
          const int64_t left = a.key_dim - c, at = head(j) * a.key_dim + c;
          const Vec bias = load_part(reinterpret_cast<const char*>(a.dt_bias + at), Type::f32, left);
          e = exp(log_decay(add(load_part(a.decay.at(row, at), a.decay.type, left), bias), rate));
        }
        const Vec k = load(block.k + i), q = load(block.q + i);
        store(block.decay + i, e);
        store(block.decayed_k + i, mul(e, k));
        store(block.decayed_q + i, mul(e, q));
        qk = fma(q, k, qk);
      }
      block.qk[t] = sum(qk);
    }
  }

  // Tokens [first, end) of the block on VECS * 16 value columns. The state comes from `source` and stays
  // in `target`; the update of a token is fused with the reads of the next one.
  // AHEAD: half of the next state's lines are fetched while this one is read, half while it is updated; columns of a
  // slot are too far apart for hardware prefetchers. For single tokens: with several, it would be done for each.
  template <int VECS, bool AHEAD>
  void recur(const float* source, int64_t source_step, float* target, int64_t target_step, int64_t column,
             int64_t first, int64_t end) {
    Vec by_k[VECS], by_q[VECS], delta[VECS];
    const int64_t keys = a.key_dim;
    const float* fetched = AHEAD ? ahead + column : nullptr;
    MP_UNROLL
    for (int j = 0; j < VECS; j++) by_k[j] = by_q[j] = zero();
    for (int64_t d = 0; d < keys; d++) {
      const Vec kd = set1(block.decayed_k[first * key_pad + d]), qd = set1(block.decayed_q[first * key_pad + d]);
      if (AHEAD)
        MP_UNROLL
        for (int j = 0; j < VECS; j += 2) prefetch_far(fetched + d * a.value_dim + j * kLanes);
      MP_UNROLL
      for (int j = 0; j < VECS; j++) {
        const Vec s = load(source + d * source_step + j * kLanes);
        by_k[j] = fma(kd, s, by_k[j]);
        by_q[j] = fma(qd, s, by_q[j]);
      }
    }
    for (int64_t t = first; t < end; t++) {
      const Vec beta = set1(block.beta[t]), qk = set1(block.qk[t]);
      MP_UNROLL
      for (int j = 0; j < VECS; j++) {
        const int64_t at = t * value_pad + column + j * kLanes;
        delta[j] = mul(beta, sub(load(block.v + at), by_k[j]));
        store(block.out + at, fma(qk, delta[j], by_q[j]));
        by_k[j] = by_q[j] = zero();
      }
      const float *e = block.decay + t * key_pad, *k = block.k + t * key_pad;
      const bool last = t + 1 == end;
      const float *next_k = block.decayed_k + (last ? t : t + 1) * key_pad;
      const float *next_q = block.decayed_q + (last ? t : t + 1) * key_pad;
      for (int64_t d = 0; d < keys; d++) {
        const Vec ed = set1(e[d]), kd = set1(k[d]), nk = set1(next_k[d]), nq = set1(next_q[d]);
        if (AHEAD)
          MP_UNROLL
          for (int j = 1; j < VECS; j += 2) prefetch_far(fetched + d * a.value_dim + j * kLanes);
        MP_UNROLL
        for (int j = 0; j < VECS; j++) {
          const Vec s = fma(kd, delta[j], mul(ed, load(source + d * source_step + j * kLanes)));
          store(target + d * target_step + j * kLanes, s);
          by_k[j] = fma(nk, s, by_k[j]);
          by_q[j] = fma(nq, s, by_q[j]);
        }
      }
      source = target;
      source_step = target_step;
    }
  }

  void write_tail(int64_t offset, int64_t slot) {
    const int64_t bytes = item_bytes(a.raw.type);
    for (int64_t i = 0; i < history; i++) {
      for (int64_t part = 0; part < num_parts(); part++) {
        char* target = a.tails + (slot * a.tail_slot_stride + i * a.tail_row_stride + channel(part)) * bytes;
        const char* source = raw_row(offset - history + i, channel(part));
        // In place, rows move towards the front, so ascending order reads each before it is overwritten.
        if (source == nullptr) std::memset(target, 0, size_t(size(part) * bytes));
        else std::memmove(target, source, size_t(size(part) * bytes));
      }
    }
  }

  void finish(int64_t j, int64_t first, int64_t count) {
    const Type type = a.out.type;
    for (int64_t t = 0; t < count; t++) {
      const float* o = block.out + t * value_pad;
      Vec squares = zero();
      for (int64_t c = 0; c < value_pad; c += kLanes) squares = fma(load(o + c), load(o + c), squares);
      const Vec scale = set1(inverse_root(sum(squares) / float(a.value_dim) + a.eps));
      const int64_t row = seq.span.first_row + first + t;
      for (int64_t c = 0; c < a.value_dim; c += kLanes) {
        const int64_t left = a.value_dim - c, at = head(j) * a.value_dim + c;
        const Vec weight = load_part(reinterpret_cast<const char*>(a.norm + c), Type::f32, left);
        const Vec raw_gate = load_part(a.gate.at(row, at), a.gate.type, left);
        const Vec gate = a.silu_gate ? silu(raw_gate) : sigmoid(raw_gate);
        store_part(a.out.at(row, at), type, mul(mul(mul(load(o + c), scale), weight), gate), left);
      }
    }
  }

  float* slot_state(int64_t slot, int64_t j) const {
    return a.states + slot * a.state_slot_stride + head(j) * a.key_dim * a.value_dim;
  }

  // Value columns [column, column + width of the panel) of the state, wherever they are.
  struct StatePanels {
    float* data;
    int64_t key_dim, value_pad, slot_step;  // slot_step > 0: laid out like a slot
    float* at(int64_t column) const { return slot_step > 0 ? data + column : data + column * key_dim; }
    int64_t step(int64_t panel_width) const { return slot_step > 0 ? slot_step : panel_width; }
  };

  int64_t panel_width(int64_t column) const {
    const int64_t vecs = (value_pad - column) / kLanes;
    return (vecs >= kStateVecs ? kStateVecs : vecs >= 2 && kStateVecs >= 2 ? 2 : 1) * kLanes;
  }

  template <int VECS>
  void recur_panel(const StatePanels& source, bool from_zero, const StatePanels& target, int64_t column, int64_t first,
                   int64_t end) {
    static const float zeros[kLanes * 4] = {};
    const float* from = from_zero ? zeros : source.at(column);
    const int64_t step = from_zero ? 0 : source.step(VECS * kLanes), target_step = target.step(VECS * kLanes);
    if (ahead == nullptr) recur<VECS, false>(from, step, target.at(column), target_step, column, first, end);
    else recur<VECS, true>(from, step, target.at(column), target_step, column, first, end);
  }

  void recur_all(const StatePanels& source, bool from_zero, const StatePanels& target, int64_t first, int64_t end) {
    for (int64_t column = 0; column < value_pad; column += panel_width(column)) {
      switch (panel_width(column) / kLanes) {
        case 1: recur_panel<1>(source, from_zero, target, column, first, end); break;
        case 2: recur_panel<(kStateVecs >= 2 ? 2 : 1)>(source, from_zero, target, column, first, end); break;
        default: recur_panel<(kStateVecs >= 4 ? 4 : 1)>(source, from_zero, target, column, first, end); break;
      }
    }
  }

  // Between a slot [key][value] and the panels of the local state.
  template <bool to_slot>
  void move_state(float* slot, const StatePanels& local) const {
    for (int64_t column = 0; column < value_pad; column += panel_width(column)) {
      const int64_t width = panel_width(column), left = a.value_dim - column;
      const size_t bytes = size_t(left < width ? left : width) * sizeof(float);
      for (int64_t d = 0; d < a.key_dim; d++) {
        float* here = local.at(column) + d * width;
        float* there = slot + d * a.value_dim + column;
        if (to_slot) {
          std::memcpy(there, here, bytes);
        } else {
          std::memset(here, 0, size_t(width) * sizeof(float));
          std::memcpy(here, there, bytes);
        }
      }
    }
  }

  void prepare(int64_t first, int64_t count) {
    extend(first, count);
    convolve(0, count, block.q);
    convolve(1, count, block.k);
    for (int64_t j = 0; j < served; j++) convolve(2 + j, count, block.all_v + j * kBlockTokens * value_pad);
    normalize(block.q, count, a.scale);
    normalize(block.k, count, 1.0f);
  }

  // One token: from slot to slot. Several: a local state whose panels are contiguous.
  bool full_vectors() const { return a.value_dim % kLanes == 0; }
  bool direct() const { return seq.span.length() == 1 && full_vectors(); }
  StatePanels in_slot(float* state) const { return {state, a.key_dim, value_pad, a.value_dim}; }
  StatePanels local(int64_t j) const { return {state_memory + j * a.key_dim * value_pad, a.key_dim, value_pad, 0}; }
  float* initial(int64_t j) const {
    if (seq.initial_state == nullptr) return nullptr;
    return const_cast<float*>(seq.initial_state) + head(j) * a.key_dim * a.value_dim;
  }

  // Heads of a sequence lie one after the other, and items are taken in their order.
  const float* after(int64_t j) const {
    if (!direct() || seq.initial_state == nullptr) return nullptr;
    if (head(j) + 1 < a.heads) return initial(j) + a.key_dim * a.value_dim;
    return &seq + 1 < a.sequences + a.num_sequences ? (&seq + 1)->initial_state : nullptr;
  }

  // The block's tokens through value head j, stopping at each export; returns the next export.
  int64_t run_block(int64_t j, int64_t first, int64_t count, int64_t next_export) {
    float* running = slot_state(seq.running_slot, j);
    const StatePanels target = direct() ? in_slot(running) : local(j);
    ahead = after(j);
    for (int64_t done = 0; done < count;) {
      const bool exports = next_export < seq.end_export && a.exports[next_export].offset <= first + count;
      const int64_t end = exports ? a.exports[next_export].offset - first : count;
      const bool untouched = first + done == 0;
      const StatePanels source = untouched && full_vectors() ? in_slot(initial(j)) : target;
      recur_all(source, untouched && initial(j) == nullptr, target, done, end);
      done = end;
      if (exports) {
        float* slot = slot_state(a.exports[next_export++].slot, j);
        if (direct()) std::memcpy(slot, running, size_t(a.key_dim * a.value_dim) * sizeof(float));
        else move_state<true>(slot, target);
      }
    }
    return next_export;
  }

  void run() {
    const int64_t length = seq.span.length();
    if (!direct()) {
      state_memory = scratch_of<float>(kKdaState, served * a.key_dim * value_pad);
      for (int64_t j = 0; j < served; j++)
        if (initial(j) != nullptr && !full_vectors()) move_state<false>(initial(j), local(j));
    }
    int64_t next_export = seq.first_export;
    for (int64_t first = 0; first < length; first += kBlockTokens) {
      const int64_t count = length - first < kBlockTokens ? length - first : kBlockTokens;
      prepare(first, count);
      int64_t after = next_export;
      for (int64_t j = 0; j < served; j++) {
        block.v = block.all_v + j * kBlockTokens * value_pad;
        gates(j, first, count);
        after = run_block(j, first, count, next_export);
        finish(j, first, count);
      }
      next_export = after;
    }
    if (!direct())
      for (int64_t j = 0; j < served; j++) move_state<true>(slot_state(seq.running_slot, j), local(j));
    for (int64_t e = seq.first_export; e < seq.end_export; e++) write_tail(a.exports[e].offset, a.exports[e].slot);
    write_tail(length, seq.running_slot);
  }
};

inline void kda_item(const void* args, int64_t item) {
  KdaItem(*static_cast<const KdaArgs*>(args), item).run();
}

inline void kda(const KdaArgs& a) {
  int64_t tokens = 0;
  for (int64_t s = 0; s < a.num_sequences; s++) tokens += a.sequences[s].span.length();
  run_items(a.num_sequences * a.key_heads, kda_item, &a, tokens * a.heads * a.key_dim * a.value_dim > (1 << 18));
}

}  // namespace MP_ISA
}  // namespace milepost
