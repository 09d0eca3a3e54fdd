// Causal attention of absorbed queries over paged latents.
//
// Keys are taken in tiles of 256 at absolute positions, with an online softmax over the tiles. A row
// (token, head) reads exactly the keys up to its own position, in ascending order, so its result does
// not depend on the rows beside it, on where the query was cut, or on which pages hold the keys; and
// what lies behind its position, NaN included, is never multiplied.
#pragma once

#include "isa/gemm.h"

namespace milepost {
namespace MP_ISA {

constexpr int64_t kTileKeys = 256;
constexpr int64_t kKeyPanels = kTileKeys / kPanel;
constexpr int64_t kBlockRows = 96;  // (token, head) rows that share a packed tile

struct AttentionJob {
  const AttentionArgs* args;
  int64_t tokens_per_item;
};

class LatentTile {
 public:
  LatentTile(const AttentionArgs& args, int64_t sequence) : a_(args), sequence_(sequence) {
    value_panels_ = (a_.value_width + kPanel - 1) / kPanel;
    keys_ = static_cast<char*>(scratch(kKeys, size_t(kKeyPanels * key_panel_bytes())));
    values_ = static_cast<char*>(scratch(kValues, size_t(value_panels_ * value_panel_bytes())));
  }

  // Keys [first, first + count); the rest of the last panel becomes zeros.
  void pack(int64_t first, int64_t count) {
    for (int64_t key = 0; key < count; key += kPanel) pack_panel(first + key, count - key, key / kPanel);
  }
  const char* keys(int64_t panel) const { return keys_ + panel * key_panel_bytes(); }
  const char* values(int64_t panel) const { return values_ + panel * value_panel_bytes(); }
  // Distance in bytes between two keys of a value panel.
  int64_t value_step() const { return kPanel * item_bytes(a_.type); }
  int64_t value_panels() const { return value_panels_; }

 private:
  int64_t key_panel_bytes() const { return padded_width() * kPanel * item_bytes(a_.type); }
  int64_t value_panel_bytes() const { return kTileKeys * kPanel * item_bytes(a_.type); }
  int64_t padded_width() const { return (a_.width + kLanes - 1) / kLanes * kLanes; }

  const char* entry(int64_t position) const {
    const int64_t page = a_.table[a_.table_starts[sequence_] + position / a_.match_unit];
    return a_.pages + (page * a_.page_stride + position % a_.match_unit * a_.entry_stride) * item_bytes(a_.type);
  }

  void pack_panel(int64_t first, int64_t count, int64_t panel) {
    const char* rows[kPanel];
    for (int64_t i = 0; i < kPanel; i++) rows[i] = i < count ? entry(first + i) : nullptr;
    alignas(64) uint32_t block[kPanel * kLanes];
    for (int64_t w = 0; w < a_.width; w += kLanes) {
      const int64_t left = a_.width - w < kLanes ? a_.width - w : kLanes;
      if (a_.type == Type::f32) {
        for (int64_t i = 0; i < kPanel; i++) gather(rows[i], w, left, block + i * kLanes);
        char* target = keys_ + panel * key_panel_bytes() + w * kPanel * 4;
        transpose(reinterpret_cast<uint32_t*>(target), block, kLanes, kPanel);
        transpose(reinterpret_cast<uint32_t*>(target) + kLanes, block + kLanes * kLanes, kLanes, kPanel);
      } else {
        for (int64_t i = 0; i < kLanes; i++) pair(rows[i], rows[i + kLanes], w, left, block + i * kLanes);
        char* target = keys_ + panel * key_panel_bytes() + w * kPanel * 2;
        transpose(reinterpret_cast<uint32_t*>(target), block, kLanes, kLanes);
      }
    }
    for (int64_t v = 0; v < value_panels_; v++) {
      char* target = values_ + v * value_panel_bytes() + panel * kPanel * value_step();
      for (int64_t i = 0; i < kPanel && i < count; i++, target += value_step()) pack_value(rows[i], v * kPanel, target);
    }
  }

  static void gather(const char* row, int64_t at, int64_t count, uint32_t* lanes) {
    if (row != nullptr && count == kLanes) {
      std::memcpy(lanes, row + at * 4, 64);
      return;
    }
    std::memset(lanes, 0, 64);
    if (row != nullptr) std::memcpy(lanes, row + at * 4, size_t(count) * 4);
  }
  // bf16 of `low` in the low halves, of `high` in the high halves.
  static void pair(const char* low, const char* high, int64_t at, int64_t count, uint32_t* lanes) {
    uint16_t x[kLanes] = {}, y[kLanes] = {};
    if (low != nullptr) std::memcpy(x, low + at * 2, size_t(count) * 2);
    if (high != nullptr) std::memcpy(y, high + at * 2, size_t(count) * 2);
    for (int i = 0; i < kLanes; i++) lanes[i] = uint32_t(x[i]) | uint32_t(y[i]) << 16;
  }
  void pack_value(const char* row, int64_t at, char* target) const {
    const int64_t left = a_.value_width - at;
    const int64_t low = left < kLanes ? left : kLanes;
    const int64_t high = left < kPanel ? left - low : kLanes;
    if (a_.type == Type::f32) {
      gather(row, at, low, reinterpret_cast<uint32_t*>(target));
      gather(row, at + kLanes, high > 0 ? high : 0, reinterpret_cast<uint32_t*>(target) + kLanes);
    } else {
      uint16_t x[kLanes] = {}, y[kLanes] = {};
      std::memcpy(x, row + at * 2, size_t(low) * 2);
      if (high > 0) std::memcpy(y, row + (at + kLanes) * 2, size_t(high) * 2);
      uint32_t* lanes = reinterpret_cast<uint32_t*>(target);
      for (int i = 0; i < kLanes; i++) lanes[i] = uint32_t(x[i]) | uint32_t(y[i]) << 16;
    }
  }

  const AttentionArgs& a_;
  int64_t sequence_, value_panels_;
  char *keys_, *values_;
};

// The running softmax of up to kTileRows rows.
struct SoftmaxRows {
  float* maximum;
  float* total;
  float* out;  // [rows][value_panels * 32]
};

// Scores of one row become weights in place: exp(scale * s - m) for the first `visible` keys.
// Returns the factor for what was summed up before.
inline float weigh(float* scores, int64_t visible, float scale, float* maximum, float* total) {
  const Vec factor = set1(scale);
  alignas(64) float lanes[kLanes];
  float tile_max = -3.0e38f;
  Vec best = set1(-3.0e38f);
  int64_t key = 0;
  for (; key + kLanes <= visible; key += kLanes) {
    const Vec s = mul(load(scores + key), factor);
    store(scores + key, s);
    best = max(s, best);
  }
  store(lanes, best);
  for (int i = 0; i < kLanes; i++) tile_max = lanes[i] > tile_max ? lanes[i] : tile_max;
  const int64_t tail = visible - key;
  if (tail > 0) {
    store(lanes, mul(load(scores + key), factor));
    for (int64_t i = 0; i < tail; i++) {
      scores[key + i] = lanes[i];
      tile_max = lanes[i] > tile_max ? lanes[i] : tile_max;
    }
  }
  const float next = tile_max > *maximum ? tile_max : *maximum;
  const float rescale = *maximum <= -3.0e38f ? 0.0f : exp(*maximum - next);
  Vec sums = zero();
  for (key = 0; key < visible; key += kLanes) {
    const int64_t count = visible - key < kLanes ? visible - key : kLanes;
    const Vec weight = exp(sub(load(scores + key), set1(next)));
    store(scores + key, weight);
    if (count < kLanes) {
      sums = add(sums, load_part(reinterpret_cast<const char*>(scores + key), Type::f32, count));
    } else {
      sums = add(sums, weight);
    }
  }
  *total = *total * rescale + sum(sums);
  *maximum = next;
  return rescale;
}

inline void attend_rows(const AttentionArgs& a, const LatentTile& tile, const float* query, int64_t rows,
                        const int64_t* visible, SoftmaxRows state, float* scores, float* weights) {
  int64_t most = 0, least = kTileKeys;
  for (int64_t r = 0; r < rows; r++) {
    most = visible[r] > most ? visible[r] : most;
    least = visible[r] < least ? visible[r] : least;
  }
  for (int64_t panel = 0; panel * kPanel < most; panel++)
    multiply_rows(a.type, rows, query, rows, tile.keys(panel), a.width, scores + panel * kPanel, kTileKeys, false);
  const int64_t out_width = tile.value_panels() * kPanel;
  for (int64_t r = 0; r < rows; r++) {
    if (visible[r] <= 0) continue;
    float* row = scores + r * kTileKeys;
    const Vec rescale = set1(weigh(row, visible[r], a.scale, state.maximum + r, state.total + r));
    float* out = state.out + r * out_width;
    for (int64_t v = 0; v < out_width; v += kLanes) store(out + v, mul(load(out + v), rescale));
    for (int64_t key = 0; key < visible[r]; key++) weights[key * rows + r] = row[key];
  }
  if (least < 0) least = 0;
  for (int64_t panel = 0; panel < tile.value_panels(); panel++) {
    float* out = state.out + panel * kPanel;
    multiply_rows(a.type, rows, weights, rows, tile.values(panel), least, out, out_width, true);
    for (int64_t r = 0; r < rows; r++)
      if (visible[r] > least)
        multiply_rows(a.type, 1, weights + least * rows + r, rows, tile.values(panel) + least * tile.value_step(),
                      visible[r] - least, out + r * out_width, out_width, true);
  }
}

inline void attend_item(const void* job_pointer, int64_t item) {
  const AttentionJob& job = *static_cast<const AttentionJob*>(job_pointer);
  const AttentionArgs& a = *job.args;
  int64_t sequence = 0;
  for (;; sequence++) {
    const int64_t items = (a.spans[sequence].length() + job.tokens_per_item - 1) / job.tokens_per_item;
    if (item < items) break;
    item -= items;
  }
  const Span& span = a.spans[sequence];
  const int64_t first_token = item * job.tokens_per_item;
  const int64_t left = span.length() - first_token;
  const int64_t tokens = left < job.tokens_per_item ? left : job.tokens_per_item;
  const int64_t rows = tokens * a.heads, first_row = (span.first_row + first_token) * a.heads;
  const int64_t last_position = span.position + first_token + tokens - 1;

  LatentTile tile(a, sequence);
  const int64_t out_width = tile.value_panels() * kPanel;
  float* scores = scratch_of<float>(kScores, kTileRows * kTileKeys + kLanes);
  float* weights = scratch_of<float>(kWeights, kTileRows * kTileKeys + kLanes);
  float* query = scratch_of<float>(kQuery, rows * a.width + kLanes);
  float* state = scratch_of<float>(kAccumulators, rows * (out_width + 2));
  float *maximum = state + rows * out_width, *total = maximum + rows;
  std::memset(state, 0, size_t(rows * out_width) * sizeof(float));
  for (int64_t r = 0; r < rows; r++) {
    maximum[r] = -3.0e38f;
    total[r] = 0.0f;
  }
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t count = rows - r < kTileRows ? rows - r : kTileRows;
    for (int64_t i = 0; i < count; i++)
      for (int64_t w = 0; w < a.width; w++)
        query[r * a.width + w * count + i] = a.query[(first_row + r + i) * a.width + w];
  }
  for (int64_t first = 0; first <= last_position; first += kTileKeys) {
    const int64_t keys = last_position + 1 - first < kTileKeys ? last_position + 1 - first : kTileKeys;
    tile.pack(first, keys);
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const int64_t count = rows - r < kTileRows ? rows - r : kTileRows;
      int64_t visible[kTileRows];
      for (int64_t i = 0; i < count; i++) {
        const int64_t end = span.position + first_token + (r + i) / a.heads + 1 - first;
        visible[i] = end < kTileKeys ? end : kTileKeys;
      }
      attend_rows(a, tile, query + r * a.width, count, visible,
                  SoftmaxRows{maximum + r, total + r, state + r * out_width}, scores, weights);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    const Vec inverse = set1(1.0f / total[r]);
    float* target = a.out + (first_row + r) * a.value_width;
    for (int64_t v = 0; v < a.value_width; v += kLanes)
      // Adding +0 turns -0 into +0, which a row otherwise gets from the order of its factors.
      store_part(reinterpret_cast<char*>(target + v), Type::f32, fma(load(state + r * out_width + v), inverse, zero()),
                 a.value_width - v);
  }
}

inline void attend(const AttentionArgs& a) {
  AttentionJob job{&a, kBlockRows / a.heads < 1 ? 1 : kBlockRows / a.heads};
  int64_t items = 0, products = 0;
  for (int64_t s = 0; s < a.num_spans; s++) {
    products += a.spans[s].length() * (a.spans[s].position + a.spans[s].length()) * a.heads * a.width;
    items += (a.spans[s].length() + job.tokens_per_item - 1) / job.tokens_per_item;
  }
  run_items(items, attend_item, &job, products > (1 << 20));
}

}  // namespace MP_ISA
}  // namespace milepost
