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
constexpr int64_t kBlockRows = 512;  // (token, head) rows that share a packed tile

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
    staged_ = static_cast<char*>(scratch(kStaged, size_t(kPanel * padded_width() * item_bytes(a_.type))));
  }

  // Keys [first, first + count); the rest of the last panel becomes zeros.
  void pack(int64_t first, int64_t count) {
    for (int64_t key = 0; key < count; key += kPanel) pack_panel(first + key, count - key, key / kPanel);
  }
  // Whether keys and values are bf16 pairs for the dot instruction: keys as [width / 2][32] lanes of
  // neighbouring entries, values as [keys / 2][32] lanes of neighbouring keys.
  bool dot() const {
#if defined(MP_DOT)
    return a_.type == Type::bf16;
#else
    return false;
#endif
  }
  const char* keys(int64_t panel) const { return keys_ + panel * key_panel_bytes(); }
  const char* values(int64_t panel) const { return values_ + panel * value_panel_bytes(); }
  // Distance in bytes between two keys of a value panel.
  int64_t value_step() const { return kPanel * item_bytes(a_.type); }
  int64_t value_panels() const { return value_panels_; }

 private:
  int64_t key_panel_bytes() const { return padded_width() * kPanel * item_bytes(a_.type); }
  int64_t value_panel_bytes() const { return kTileKeys * kPanel * item_bytes(a_.type); }
  int64_t padded_width() const { return (a_.width + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

  const char* entry(int64_t position) const {
    const int64_t page = a_.table[a_.table_starts[sequence_] + position / a_.match_unit];
    return a_.pages + (page * a_.page_stride + position % a_.match_unit * a_.entry_stride) * item_bytes(a_.type);
  }

  // Rows of the panel go one by one into one place first: a stream the prefetcher can follow, where 32
  // would be too many. There they are padded with zeros, so that everything below works on full vectors.
  void pack_panel(int64_t first, int64_t count, int64_t panel) {
    const size_t row_bytes = size_t(padded_width() * item_bytes(a_.type));
    const size_t bytes = size_t(a_.width * item_bytes(a_.type));
    for (int64_t i = 0; i < kPanel; i++) {
      char* row = staged_ + size_t(i) * row_bytes;
      if (i < count) std::memcpy(row, entry(first + i), bytes);
      std::memset(row + (i < count ? bytes : 0), 0, row_bytes - (i < count ? bytes : 0));
    }
    if (a_.type == Type::f32) pack_wide(panel);
    else if (dot()) pack_depth_pairs(panel);
    else pack_column_pairs(panel);
  }

  // [width][32] fp32 keys; [32 keys][32] fp32 values per value panel.
  void pack_wide(int64_t panel) {
    const uint32_t* rows = reinterpret_cast<const uint32_t*>(staged_);
    const int64_t step = padded_width();
    uint32_t* keys = reinterpret_cast<uint32_t*>(keys_ + panel * key_panel_bytes());
    for (int64_t w = 0; w < step; w += kLanes) {
      transpose(keys + w * kPanel, rows + w, step, kPanel);
      transpose(keys + w * kPanel + kLanes, rows + kLanes * step + w, step, kPanel);
    }
    for (int64_t v = 0; v < value_panels_; v++) {
      char* values = values_ + v * value_panel_bytes() + panel * kPanel * value_step();
      for (int64_t i = 0; i < kPanel; i++) std::memcpy(values + i * kPanel * 4, rows + i * step + v * kPanel, kPanel * 4);
    }
  }

  // Neighbouring entries of a key, and the same entry of neighbouring keys, share a 32-bit lane.
  void pack_depth_pairs(int64_t panel) {
    const uint32_t* rows = reinterpret_cast<const uint32_t*>(staged_);
    const int64_t step = padded_width() / 2;
    uint32_t* keys = reinterpret_cast<uint32_t*>(keys_ + panel * key_panel_bytes());
    for (int64_t w = 0; w < step; w += kLanes) {
      transpose(keys + w * kPanel, rows + w, step, kPanel);
      transpose(keys + w * kPanel + kLanes, rows + kLanes * step + w, step, kPanel);
    }
    for (int64_t i = 0; i < kPanel; i += 2) {
      const uint16_t* low = reinterpret_cast<const uint16_t*>(rows + i * step);
      const uint16_t* high = reinterpret_cast<const uint16_t*>(rows + (i + 1) * step);
      for (int64_t v = 0; v < value_panels_; v++) {
        uint32_t* values = reinterpret_cast<uint32_t*>(values_ + v * value_panel_bytes()) + (panel * kPanel + i) / 2 * kPanel;
        join(low + v * kPanel, high + v * kPanel, values);
        join(low + v * kPanel + kLanes, high + v * kPanel + kLanes, values + kLanes);
      }
    }
  }

  // Keys i and i + 16, and values i and i + 16 of a panel, share a 32-bit lane.
  void pack_column_pairs(int64_t panel) {
    const uint16_t* rows = reinterpret_cast<const uint16_t*>(staged_);
    const int64_t step = padded_width();
    uint32_t* keys = reinterpret_cast<uint32_t*>(keys_ + panel * key_panel_bytes());
    alignas(64) uint32_t block[kLanes * kLanes];
    for (int64_t w = 0; w < step; w += kLanes) {
      for (int64_t i = 0; i < kLanes; i++)
        join(rows + i * step + w, rows + (i + kLanes) * step + w, block + i * kLanes);
      transpose(keys + w * kLanes, block, kLanes, kLanes);
    }
    for (int64_t v = 0; v < value_panels_; v++) {
      uint32_t* values = reinterpret_cast<uint32_t*>(values_ + v * value_panel_bytes()) + panel * kPanel * kLanes;
      for (int64_t i = 0; i < kPanel; i++) {
        const uint16_t* row = rows + i * step + v * kPanel;
        join(row, row + kLanes, values + i * kLanes);
      }
    }
  }

  static void join(const uint16_t* low, const uint16_t* high, uint32_t* lanes) {
    for (int i = 0; i < kLanes; i++) lanes[i] = uint32_t(low[i]) | uint32_t(high[i]) << 16;
  }

  const AttentionArgs& a_;
  int64_t sequence_, value_panels_;
  char *keys_, *values_, *staged_;
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

struct RowBlock {
  const float* query;  // [width][rows], or pairs [width / 2][rows]
  int64_t rows;
  const int64_t* visible;
  SoftmaxRows state;
  float* scores;   // [rows][kTileKeys]
  float* weights;  // [keys][rows], or pairs [keys / 2][rows]
};

// Scores of all rows, then their weights in place; rescales what was summed up before.
inline void weigh_rows(const AttentionArgs& a, const LatentTile& tile, const RowBlock& b) {
  int64_t most = 0;
  for (int64_t r = 0; r < b.rows; r++) most = b.visible[r] > most ? b.visible[r] : most;
  for (int64_t panel = 0; panel * kPanel < most; panel++) {
    float* scores = b.scores + panel * kPanel;
#if defined(MP_DOT)
    if (tile.dot()) {
      dot_function(b.rows)(b.query, b.rows, tile.keys(panel), (a.width + 1) / 2 * 2, scores, kTileKeys, false);
      continue;
    }
#endif
    multiply_rows(a.type, b.rows, b.query, b.rows, tile.keys(panel), a.width, scores, kTileKeys, false);
  }
  const int64_t out_width = tile.value_panels() * kPanel;
  for (int64_t r = 0; r < b.rows; r++) {
    if (b.visible[r] <= 0) continue;
    float* row = b.scores + r * kTileKeys;
    const Vec rescale = set1(weigh(row, b.visible[r], a.scale, b.state.maximum + r, b.state.total + r));
    float* out = b.state.out + r * out_width;
    for (int64_t v = 0; v < out_width; v += kLanes) store(out + v, mul(load(out + v), rescale));
  }
}

inline void mix_rows(const AttentionArgs& a, const LatentTile& tile, const RowBlock& b) {
  const int64_t out_width = tile.value_panels() * kPanel;
  int64_t least = kTileKeys;
  for (int64_t r = 0; r < b.rows; r++) {
    const int64_t visible = b.visible[r] > 0 ? b.visible[r] : 0;
    least = visible < least ? visible : least;
    for (int64_t key = 0; key < visible; key++) b.weights[key * b.rows + r] = b.scores[r * kTileKeys + key];
  }
  for (int64_t panel = 0; panel < tile.value_panels(); panel++) {
    float* out = b.state.out + panel * kPanel;
    multiply_rows(a.type, b.rows, b.weights, b.rows, tile.values(panel), least, out, out_width, true);
    for (int64_t r = 0; r < b.rows; r++)
      if (b.visible[r] > least)
        multiply_rows(a.type, 1, b.weights + least * b.rows + r, b.rows, tile.values(panel) + least * tile.value_step(),
                      b.visible[r] - least, out + r * out_width, out_width, true);
  }
}

#if defined(MP_DOT)
// Keys go in pairs from the start of the tile. The last key of a row that sees an odd number is paired
// with zero, not with the key behind it, which may hold anything.
inline void mix_rows_dot(const LatentTile& tile, const RowBlock& b) {
  const int64_t out_width = tile.value_panels() * kPanel;
  uint32_t* pairs = reinterpret_cast<uint32_t*>(b.weights);
  int64_t least = kTileKeys / 2;
  for (int64_t r = 0; r < b.rows; r++) {
    const int64_t visible = b.visible[r] > 0 ? b.visible[r] : 0;
    least = visible / 2 < least ? visible / 2 : least;
    const float* row = b.scores + r * kTileKeys;
    for (int64_t key = 0; key < visible; key += kLanes) {
      uint32_t lanes[kLanes / 2];
      store_bf16(reinterpret_cast<uint16_t*>(lanes), load_part(reinterpret_cast<const char*>(row + key), Type::f32, visible - key));
      for (int64_t i = 0; i < kLanes / 2; i++) pairs[(key / 2 + i) * b.rows + r] = lanes[i];
    }
  }
  for (int64_t panel = 0; panel < tile.value_panels(); panel++) {
    float* out = b.state.out + panel * kPanel;
    const uint32_t* values = reinterpret_cast<const uint32_t*>(tile.values(panel));
    if (least > 0) multiply_pairs(b.rows, pairs, b.rows, values, least, out, out_width);
    for (int64_t r = 0; r < b.rows; r++) {
      const int64_t whole = b.visible[r] / 2;
      if (whole > least)
        multiply_pairs(1, pairs + least * b.rows + r, b.rows, values + least * kPanel, whole - least, out + r * out_width,
                       out_width);
      if (b.visible[r] > 0 && b.visible[r] % 2 != 0) {
        alignas(64) uint32_t single[kPanel];
        for (int64_t c = 0; c < kPanel; c++) single[c] = values[whole * kPanel + c] & 0xFFFFu;
        multiply_pairs(1, pairs + whole * b.rows + r, b.rows, single, 1, out + r * out_width, out_width);
      }
    }
  }
}
#endif

inline void attend_rows(const AttentionArgs& a, const LatentTile& tile, const RowBlock& b) {
  weigh_rows(a, tile, b);
#if defined(MP_DOT)
  if (tile.dot()) return mix_rows_dot(tile, b);
#endif
  mix_rows(a, tile, b);
}

// Rows [first, first + count) of the queries as [width][count], or as pairs.
inline void pack_query(const AttentionArgs& a, bool dot, int64_t first, int64_t count, float* target) {
  for (int64_t r = 0; r < count; r++) {
    const float* row = a.query + (first + r) * a.width;
    if (!dot) {
      for (int64_t w = 0; w < a.width; w++) target[w * count + r] = row[w];
      continue;
    }
    for (int64_t w = 0; w < a.width; w += kLanes) {
      uint32_t lanes[kLanes / 2];
      store_bf16(reinterpret_cast<uint16_t*>(lanes), load_part(reinterpret_cast<const char*>(row + w), Type::f32, a.width - w));
      for (int64_t i = 0; i < kLanes / 2 && w + 2 * i < a.width; i++)
        reinterpret_cast<uint32_t*>(target)[(w / 2 + i) * count + r] = lanes[i];
    }
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
  const int64_t query_width = a.width + a.width % 2;
  float* query = scratch_of<float>(kQuery, rows * query_width + kLanes);
  float* state = scratch_of<float>(kAccumulators, rows * (out_width + 2));
  float *maximum = state + rows * out_width, *total = maximum + rows;
  std::memset(state, 0, size_t(rows * out_width) * sizeof(float));
  for (int64_t r = 0; r < rows; r++) {
    maximum[r] = -3.0e38f;
    total[r] = 0.0f;
  }
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t count = rows - r < kTileRows ? rows - r : kTileRows;
    pack_query(a, tile.dot(), first_row + r, count, query + r * query_width);
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
      attend_rows(a, tile,
                  RowBlock{query + r * query_width, count, visible,
                           SoftmaxRows{maximum + r, total + r, state + r * out_width}, scores, weights});
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
