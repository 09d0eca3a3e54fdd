// Causal attention over paged keys and values: absorbed queries over latents, grouped-query heads, or keys
// and values that each head expands from latents, tile by tile.
//
// Keys are taken in tiles of 256 at absolute positions, with an online softmax over the tiles. A row
// (token, head) reads exactly the keys up to its own position, in ascending order, so its result does
// not depend on the rows beside it, on where the query was cut, or on which pages hold the keys; and
// what lies behind its position, NaN included, is never multiplied.
#pragma once

#include "isa/gemm.h"
#include "isa/pages.h"

namespace milepost {
namespace MP_ISA {

constexpr int64_t kTileKeys = 256;
constexpr int64_t kKeyPanels = kTileKeys / kPanel;
constexpr int64_t kBlockRows = 512;  // (token, head) rows that share a packed tile

struct AttentionJob {
  const AttentionArgs* args;
  int64_t tokens_per_item;
};

#if defined(MP_DOT)
// Entries 0 to 15, and 16 to 31, of two vectors of 16-bit lanes, in turns.
#define MP_PAIR(i) i, i + 32
#define MP_PAIRS(i) MP_PAIR(i), MP_PAIR(i + 1), MP_PAIR(i + 2), MP_PAIR(i + 3)
alignas(64) constexpr uint16_t kFirstPairs[32] = {MP_PAIRS(0), MP_PAIRS(4), MP_PAIRS(8), MP_PAIRS(12)};
alignas(64) constexpr uint16_t kLastPairs[32] = {MP_PAIRS(16), MP_PAIRS(20), MP_PAIRS(24), MP_PAIRS(28)};
#undef MP_PAIRS
#undef MP_PAIR
#endif

// 256 keys and values of one key-value head, packed for the products.
class KeyTile {
 public:
  KeyTile(const AttentionArgs& args, int64_t sequence, int64_t kv_head)
      : a_(args), sequence_(sequence), kv_head_(kv_head) {
    value_panels_ = (a_.value_width + kPanel - 1) / kPanel;
    keys_ = static_cast<char*>(scratch(kKeys, size_t(kKeyPanels * key_panel_bytes())));
    values_ = static_cast<char*>(scratch(kValues, size_t(value_panels_ * value_panel_bytes())));
    const int64_t value_width = a_.shared ? 0 : value_panels_ * kPanel;
    if (expanded()) {
      const int64_t latent_bytes = (a_.expand_key->k + shared_width()) * item_bytes(a_.type);
      latents_ = static_cast<char*>(scratch(kLatents, size_t(kTileKeys * latent_bytes)));
      expanded_ = static_cast<char*>(scratch(kExpanded, size_t(kTileKeys * (a_.width + a_.value_width) * item_bytes(a_.type))));
    }
    staged_keys_ = static_cast<char*>(scratch(kStaged, size_t(kPanel * (padded_width() + value_width) * item_bytes(a_.type))));
    staged_values_ = a_.shared ? staged_keys_ : staged_keys_ + kPanel * padded_width() * item_bytes(a_.type);
    value_row_ = a_.shared ? padded_width() : value_width;
  }

  // Keys from `first`, as many as a tile has and come before `end`; the rest of the last panel becomes zeros.
  void pack(int64_t first, int64_t end) {
    const int64_t last = first + kTileKeys < end ? first + kTileKeys : end;
    if (expanded()) expand(first, last - first);
    for (int64_t key = first; key < last; key += kPanel) {
      pack_panel(key, last - key, (key - first) / kPanel, end);
    }
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
  bool expanded() const { return a_.expand_key != nullptr; }
  int64_t shared_width() const { return a_.width - a_.expand_key->n; }

  Entries entries(const Pages& pages, int64_t position) const { return Entries(a_, pages, sequence_, kv_head_, position); }

  // Keys and values of this head from the latents of [first, first + count), each row from its own latent.
  void expand(int64_t first, int64_t count) {
    const int64_t item = item_bytes(a_.type), latent = a_.expand_key->k, width = latent + shared_width();
    Entries latents = entries(a_.keys, first);
    for (int64_t i = 0; i < count; i++) std::memcpy(latents_ + i * width * item, latents.next(), size_t(width * item));
    char* values = expanded_ + kTileKeys * a_.width * item;
    const auto product = [&](const Packed& weights, char* target, int64_t stride) {
      LinearArgs args{};
      args.x = Rows{latents_, a_.type, width};
      args.rows = count;
      args.weight = weights;
      args.weight.groups = 1;
      args.weight.data = static_cast<char*>(weights.data) + kv_head_ * weights.panels() * weights.panel_bytes();
      args.y = Rows{target, a_.type, stride};
      args.serial = true;
      linear(args);
    };
    product(*a_.expand_key, expanded_, a_.width);
    product(*a_.expand_value, values, a_.value_width);
    for (int64_t i = 0; i < count; i++)
      std::memcpy(expanded_ + (i * a_.width + a_.expand_key->n) * item, latents_ + (i * width + latent) * item,
                  size_t(shared_width() * item));
    expanded_first_ = first;
  }

  int64_t key_panel_bytes() const { return padded_width() * kPanel * item_bytes(a_.type); }
  int64_t value_panel_bytes() const { return kTileKeys * kPanel * item_bytes(a_.type); }
  int64_t padded_width() const { return (a_.width + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

  // Where the rows of a panel are read, and those of the panel after it, which are fetched meanwhile: pages lie
  // anywhere, where no hardware prefetcher looks for them.
  struct PanelRows {
    const char* at[kPanel];
    const char* ahead[kPanel];
    MP_INLINE const char* operator()(int64_t i, int64_t bytes) const {
      prefetch_far(ahead[i] + bytes);
      return at[i] + bytes;
    }
  };

  // Rows that no full vector can be read from, or that do not exist, get a padded copy.
  void find_rows(bool keys, int64_t width, int64_t padded, int64_t first, int64_t count, int64_t end, char* copies,
                 PanelRows* rows) const {
    const int64_t item = item_bytes(a_.type), row_bytes = padded * item;
    const Pages& pages = keys ? a_.keys : a_.values;
    const int64_t existing = count < kPanel ? count : kPanel;
    if (expanded()) {
      const char* row = expanded_ + ((keys ? 0 : kTileKeys * a_.width) + (first - expanded_first_) * width) * item;
      for (int64_t i = 0; i < existing; i++) rows->at[i] = row + i * width * item;
    } else {
      Entries source = entries(pages, first);
      for (int64_t i = 0; i < existing; i++) rows->at[i] = source.next();
    }
    if (width != padded)
      for (int64_t i = 0; i < existing; i++) {
        char* copy = copies + i * row_bytes;
        copy_row(copy, rows->at[i], width * item, row_bytes);
        rows->at[i] = copy;
      }
    if (existing < kPanel) std::memset(copies + existing * row_bytes, 0, size_t((kPanel - existing) * row_bytes));
    for (int64_t i = existing; i < kPanel; i++) rows->at[i] = copies + i * row_bytes;
    const int64_t next = first + kPanel, left = expanded() || next >= end ? 0 : end - next < kPanel ? end - next : kPanel;
    if (left > 0) {
      Entries source = entries(pages, next);
      for (int64_t i = 0; i < left; i++) rows->ahead[i] = source.next();
    }
    for (int64_t i = left; i < kPanel; i++) rows->ahead[i] = rows->at[i];
  }

  void pack_panel(int64_t first, int64_t count, int64_t panel, int64_t end) {
    PanelRows keys, values;
    find_rows(true, a_.width, padded_width(), first, count, end, staged_keys_, &keys);
    if (!a_.shared) find_rows(false, a_.value_width, value_row_, first, count, end, staged_values_, &values);
    const PanelRows& value_rows = a_.shared ? keys : values;
    if (a_.type == Type::f32) pack_wide(panel, keys, value_rows);
    else if (dot()) pack_depth_pairs(panel, keys, value_rows);
    else pack_column_pairs(panel, keys, value_rows);
  }

  // Lanes [first, first + 16) of all rows, transposed.
  void transpose_rows(uint32_t* keys, const PanelRows& rows, int64_t first) const {
    transpose_of(keys, kPanel, [&](int i) { return rows(i, first * 4); });
    transpose_of(keys + kLanes, kPanel, [&](int i) { return rows(kLanes + i, first * 4); });
  }

  // [width][32] fp32 keys; [32 keys][32] fp32 values per value panel.
  void pack_wide(int64_t panel, const PanelRows& key_rows, const PanelRows& value_rows) {
    uint32_t* keys = reinterpret_cast<uint32_t*>(keys_ + panel * key_panel_bytes());
    for (int64_t w = 0; w < padded_width(); w += kLanes) transpose_rows(keys + w * kPanel, key_rows, w);
    for (int64_t i = 0; i < kPanel; i++)
      for (int64_t v = 0; v < value_panels_; v++) {
        char* values = values_ + v * value_panel_bytes() + (panel * kPanel + i) * value_step();
        std::memcpy(values, value_rows(i, v * kPanel * 4), 64);
        std::memcpy(values + 64, value_rows(i, v * kPanel * 4 + 64), 64);
      }
  }

  // Neighbouring entries of a key, and the same entry of neighbouring keys, share a 32-bit lane.
  void pack_depth_pairs(int64_t panel, const PanelRows& key_rows, const PanelRows& value_rows) {
    uint32_t* keys = reinterpret_cast<uint32_t*>(keys_ + panel * key_panel_bytes());
    for (int64_t w = 0; w < padded_width() / 2; w += kLanes) transpose_rows(keys + w * kPanel, key_rows, w);
    for (int64_t i = 0; i < kPanel; i += 2)
      for (int64_t v = 0; v < value_panels_; v++) {
        uint32_t* values = reinterpret_cast<uint32_t*>(values_ + v * value_panel_bytes()) + (panel * kPanel + i) / 2 * kPanel;
        interleave(halves(value_rows(i, v * kPanel * 2)), halves(value_rows(i + 1, v * kPanel * 2)), values);
      }
  }

  // Keys i and i + 16, and values i and i + 16 of a panel, share a 32-bit lane.
  void pack_column_pairs(int64_t panel, const PanelRows& key_rows, const PanelRows& value_rows) {
    uint32_t* keys = reinterpret_cast<uint32_t*>(keys_ + panel * key_panel_bytes());
    alignas(64) uint32_t block[kLanes * kLanes];
    for (int64_t w = 0; w < padded_width(); w += kLanes) {
      for (int64_t i = 0; i < kLanes; i++)
        join(halves(key_rows(i, w * 2)), halves(key_rows(i + kLanes, w * 2)), block + i * kLanes);
      transpose(keys + w * kLanes, block, kLanes, kLanes);
    }
    for (int64_t i = 0; i < kPanel; i++)
      for (int64_t v = 0; v < value_panels_; v++) {
        const uint16_t* row = halves(value_rows(i, v * kPanel * 2));
        join(row, row + kLanes, reinterpret_cast<uint32_t*>(values_ + v * value_panel_bytes()) + (panel * kPanel + i) * kLanes);
      }
  }

  static const uint16_t* halves(const char* row) { return reinterpret_cast<const uint16_t*>(row); }
  // 32 of each
  static void interleave(const uint16_t* low, const uint16_t* high, uint32_t* lanes) {
#if defined(MP_DOT)
    const __m512i first = _mm512_loadu_si512(low), second = _mm512_loadu_si512(high);
    _mm512_storeu_si512(lanes, _mm512_permutex2var_epi16(first, _mm512_loadu_si512(kFirstPairs), second));
    _mm512_storeu_si512(lanes + kLanes, _mm512_permutex2var_epi16(first, _mm512_loadu_si512(kLastPairs), second));
#else
    join(low, high, lanes);
    join(low + kLanes, high + kLanes, lanes + kLanes);
#endif
  }
  static void join(const uint16_t* low, const uint16_t* high, uint32_t* lanes) {
    for (int i = 0; i < kLanes; i++) lanes[i] = uint32_t(low[i]) | uint32_t(high[i]) << 16;
  }

  const AttentionArgs& a_;
  int64_t sequence_, kv_head_, value_panels_, value_row_;
  char *keys_, *values_, *staged_keys_, *staged_values_;
  char *latents_ = nullptr, *expanded_ = nullptr;
  int64_t expanded_first_ = 0;
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
inline void weigh_rows(const AttentionArgs& a, const KeyTile& tile, const RowBlock& b) {
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

inline void mix_rows(const AttentionArgs& a, const KeyTile& tile, const RowBlock& b) {
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
inline void mix_rows_dot(const KeyTile& tile, const RowBlock& b) {
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

inline void attend_rows(const AttentionArgs& a, const KeyTile& tile, const RowBlock& b) {
  weigh_rows(a, tile, b);
#if defined(MP_DOT)
  if (tile.dot()) return mix_rows_dot(tile, b);
#endif
  mix_rows(a, tile, b);
}

// `count` rows of the queries as [width][count], or as pairs; rows[r] is the row of a.query.
inline void pack_query(const AttentionArgs& a, bool dot, const int64_t* rows, int64_t count, float* target) {
  for (int64_t r = 0; r < count; r++) {
    const float* row = a.query + rows[r] * a.width;
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

// Tokens [first_token, + tokens) of one sequence, all query heads of one key-value head.
struct AttentionItem {
  const AttentionArgs& a;
  const Span& span;
  int64_t kv_head, first_token, tokens;

  int64_t group() const { return a.heads / a.kv_heads; }
  int64_t rows() const { return tokens * group(); }
  // Row of a.query and a.out, and absolute position.
  int64_t row(int64_t r) const {
    return (span.first_row + first_token + r / group()) * a.heads + kv_head * group() + r % group();
  }
  int64_t position(int64_t r) const { return span.position + first_token + r / group(); }

  void run(KeyTile& tile) const {
    const int64_t num_rows = rows(), out_width = tile.value_panels() * kPanel, query_width = a.width + a.width % 2;
    float* scores = scratch_of<float>(kScores, kTileRows * kTileKeys + kLanes);
    float* weights = scratch_of<float>(kWeights, kTileRows * kTileKeys + kLanes);
    float* query = scratch_of<float>(kQuery, num_rows * query_width + kLanes);
    float* state = scratch_of<float>(kAccumulators, num_rows * (out_width + 2));
    float *maximum = state + num_rows * out_width, *total = maximum + num_rows;
    std::memset(state, 0, size_t(num_rows * out_width) * sizeof(float));
    for (int64_t r = 0; r < num_rows; r++) {
      maximum[r] = -3.0e38f;
      total[r] = 0.0f;
    }
    for (int64_t r = 0; r < num_rows; r += kTileRows) {
      int64_t numbers[kTileRows];
      const int64_t count = num_rows - r < kTileRows ? num_rows - r : kTileRows;
      for (int64_t i = 0; i < count; i++) numbers[i] = row(r + i);
      pack_query(a, tile.dot(), numbers, count, query + r * query_width);
    }
    const int64_t end = position(num_rows - 1) + 1;
    for (int64_t first = 0; first < end; first += kTileKeys) {
      tile.pack(first, end);
      for (int64_t r = 0; r < num_rows; r += kTileRows) {
        const int64_t count = num_rows - r < kTileRows ? num_rows - r : kTileRows;
        int64_t visible[kTileRows];
        for (int64_t i = 0; i < count; i++) {
          const int64_t seen = position(r + i) + 1 - first;
          visible[i] = seen < kTileKeys ? seen : kTileKeys;
        }
        attend_rows(a, tile,
                    RowBlock{query + r * query_width, count, visible,
                             SoftmaxRows{maximum + r, total + r, state + r * out_width}, scores, weights});
      }
    }
    for (int64_t r = 0; r < num_rows; r++) {
      const Vec inverse = set1(1.0f / total[r]);
      float* target = a.out + row(r) * a.value_width;
      for (int64_t v = 0; v < a.value_width; v += kLanes)
        // Adding +0 turns -0 into +0, which a row otherwise gets from the order of its factors.
        store_part(reinterpret_cast<char*>(target + v), Type::f32,
                   fma(load(state + r * out_width + v), inverse, zero()), a.value_width - v);
    }
  }
};

inline void attend_item(const void* job_pointer, int64_t item) {
  const AttentionJob& job = *static_cast<const AttentionJob*>(job_pointer);
  const AttentionArgs& a = *job.args;
  const int64_t kv_head = item % a.kv_heads;
  item /= a.kv_heads;
  int64_t sequence = 0;
  for (;; sequence++) {
    const int64_t items = (a.spans[sequence].length() + job.tokens_per_item - 1) / job.tokens_per_item;
    if (item < items) break;
    item -= items;
  }
  const int64_t first = item * job.tokens_per_item, left = a.spans[sequence].length() - first;
  KeyTile tile(a, sequence, kv_head);
  AttentionItem{a, a.spans[sequence], kv_head, first, left < job.tokens_per_item ? left : job.tokens_per_item}.run(tile);
}

inline void attend(const AttentionArgs& a) {
  const int64_t group = a.heads / a.kv_heads;
  AttentionJob job{&a, kBlockRows / group < 1 ? 1 : kBlockRows / group};
  int64_t items = 0, products = 0;
  for (int64_t s = 0; s < a.num_spans; s++) {
    products += a.spans[s].length() * (a.spans[s].position + a.spans[s].length()) * a.heads * a.width;
    items += (a.spans[s].length() + job.tokens_per_item - 1) / job.tokens_per_item;
  }
  run_items(items * a.kv_heads, attend_item, &job, products > (1 << 20));
}

}  // namespace MP_ISA
}  // namespace milepost
