// Sampling without a sorted vocabulary: one pass finds the maximum of every block of 64 logits, and whatever
// follows reads only the blocks whose maximum says that they matter.
//
// Plain loops that the compiler makes vectors of: they hold nothing that rounds differently on another CPU.
#include "isa/sampling.h"

#include <cstring>

#include "common/threads.h"

namespace milepost {
namespace MP_ISA {
namespace {

constexpr int64_t kBlock = 64;
constexpr int32_t kInfinity = 0x7F800000, kMinusInfinity = int32_t(0x807FFFFF);  // as keys
constexpr double kMostNoise = 36.75;  // 53 log(2), rounded up

MP_INLINE uint64_t bits_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  return bits;
}
MP_INLINE double double_of(uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
}

// ---------------------------------------------------------------- elementary functions

// exp(x) for x <= 700, within two units of the last place; at least exp(-700). exp(0) is exactly 1.
MP_INLINE double exp_of(double x) {
  const double bounded = x > -700.0 ? x : -700.0;
  const double shifted = bounded * 1.4426950408889634 + 6755399441055744.0;  // 1.5 * 2^52
  const double n = shifted - 6755399441055744.0;
  const double r = (bounded - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  // Taylor's series on |r| <= log(2) / 2.
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return p * double_of((bits_of(shifted) - bits_of(6755399441055744.0) + 1023) << 52);
}

// Natural logarithm of a normal x > 0, within one unit of the last place (Sun's fdlibm, e_log.c: x = 2^k (1 + f),
// s = f / (2 + f), a polynomial in s^2).
MP_INLINE double log_of(double x) {
  const uint64_t offset = bits_of(x) - bits_of(0.70710678118654752440);
  const int64_t k = int64_t(offset) >> 52;
  const double f = double_of(bits_of(x) - (uint64_t(k) << 52)) - 1.0;
  const double s = f / (2.0 + f), z = s * s, w = z * z;
  const double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const double odd = z * (6.666666666666735130e-01 +
                          w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  const double half = 0.5 * f * f, power = double(k);
  return power * 6.93147180369123816490e-01 -
         ((half - (s * (half + (even + odd)) + power * 1.90821492927058770002e-10)) - f);
}

// The 53 random bits of an id: splitmix64 at counter id + 1.
MP_INLINE uint64_t random_bits(uint64_t key, int64_t id) {
  uint64_t value = key + 0x9E3779B97F4A7C15u * uint64_t(id + 1);
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return (value ^ (value >> 31)) >> 11;
}

// Standard Gumbel noise of 53 random bits; finite.
double noise_of(uint64_t bits) {
  const double uniform = (double(int64_t(bits)) + 0.5) * 0x1p-53;
  return -log_of(-log_of(uniform < 1.0 ? uniform : 1.0 - 0x1p-53));
}

// ---------------------------------------------------------------- order

// Integers in the order of the floats; -0 is 0. NaN lies beyond the infinities.
MP_INLINE int32_t key_of(float x) {
  const float positive_zero = x + 0.0f;
  int32_t bits;
  std::memcpy(&bits, &positive_zero, 4);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
MP_INLINE float float_of_key(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7FFFFFFF);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// A logit and its id in one number: larger logits are larger, then lower ids. No two are equal.
MP_INLINE uint64_t item_of(int32_t key, int64_t id) {
  return uint64_t(uint32_t(key) ^ 0x80000000u) << 32 | (0xFFFFFFFFu - uint64_t(id));
}
MP_INLINE int32_t item_key(uint64_t item) { return int32_t(uint32_t(item >> 32) ^ 0x80000000u); }
MP_INLINE int64_t item_id(uint64_t item) { return int64_t(0xFFFFFFFFu - (item & 0xFFFFFFFFu)); }

struct Row {
  const float* x;
  int64_t size, blocks;
  int32_t* maxima;  // keys, one per block
  int32_t top;
  bool finite;   // neither NaN nor infinity
  bool ordered;  // neither NaN nor +infinity, and not -infinity alone
  double top_value, temperature, floor;

  // What is sampled from but for the noise, at most 0. Monotone, so that a block's maximum bounds its block.
  MP_INLINE double shifted(int32_t key) const { return (double(float_of_key(key)) - top_value) / temperature; }
};

// Keys of a block, -infinity behind the row's end; returns how many belong to the row.
MP_INLINE int64_t load_keys(const Row& row, int64_t block, int32_t* keys) {
  const float* x = row.x + block * kBlock;
  const int64_t count = row.size - block * kBlock;
  if (count >= kBlock) {
    for (int64_t i = 0; i < kBlock; i++) keys[i] = key_of(x[i]);
    return kBlock;
  }
  for (int64_t i = 0; i < kBlock; i++) keys[i] = i < count ? key_of(x[i]) : kMinusInfinity;
  return count;
}

Row scan(const float* x, int64_t size) {
  Row row{x, size, (size + kBlock - 1) / kBlock, nullptr, kMinusInfinity, false, false, 0.0, 1.0, 0.0};
  row.maxima = scratch_of<int32_t>(kBlockMaxima, row.blocks);
  int32_t least = kInfinity, most = INT32_MIN;
  for (int64_t block = 0; block < row.blocks; block++) {
    const float* values = x + block * kBlock;
    const int64_t count = size - block * kBlock;
    int32_t low = INT32_MAX, high = INT32_MIN;
    if (count >= kBlock) {
      for (int64_t i = 0; i < kBlock; i++) {
        const int32_t key = key_of(values[i]);
        low = key < low ? key : low;
        high = key > high ? key : high;
      }
    } else {
      for (int64_t i = 0; i < count; i++) {
        const int32_t key = key_of(values[i]);
        low = key < low ? key : low;
        high = key > high ? key : high;
      }
    }
    row.maxima[block] = high;
    least = low < least ? low : least;
    most = high > most ? high : most;
  }
  row.top = most;
  row.top_value = double(float_of_key(most));
  row.finite = most < kInfinity && least > kMinusInfinity;
  row.ordered = most < kInfinity && least >= kMinusInfinity && most > kMinusInfinity;
  return row;
}

int64_t first_of_top(const Row& row) {
  int64_t block = 0;
  while (row.maxima[block] != row.top) block++;
  int64_t id = block * kBlock;
  while (key_of(row.x[id]) != row.top) id++;
  return id;
}

// ---------------------------------------------------------------- selection

// exp of what is sampled from, in units of 2^-40: integers, so that no sum depends on its order. Below -28.5: 0.
MP_INLINE int64_t weight_of(double shifted) {
  return int64_t(bits_of(exp_of(shifted) * 0x1p40 + 0x1p52) - bits_of(0x1p52));
}
constexpr double kNoWeight = -28.5;

struct Candidates {
  uint64_t* items;
  int64_t* weights;
  int64_t count, total;
};

Candidates candidates_of(const Row& row) {
  const int64_t room = row.size + kBlock;
  return {scratch_of<uint64_t>(kCandidates, room), scratch_of<int64_t>(kCandidateWeights, room), 0, 0};
}

// The item at which the sum of weights, from the largest item down, reaches `target`, 1 <= target <= total.
// A radix selection: it keeps the items that share the digits found so far; a digit starts at the first bit in which
// they differ.
uint64_t item_reaching(Candidates& c, int64_t target) {
  while (c.count > 1) {
    uint64_t differing = 0;
    for (int64_t i = 1; i < c.count; i++) differing |= c.items[i] ^ c.items[0];
    const int highest = 63 - __builtin_clzll(differing), shift = highest > 7 ? highest - 7 : 0;
    int64_t sums[256] = {};
    for (int64_t i = 0; i < c.count; i++) sums[c.items[i] >> shift & 255] += c.weights[i];
    uint64_t digit = 255;
    while (sums[digit] < target) target -= sums[digit--];
    int64_t kept = 0;
    for (int64_t i = 0; i < c.count; i++) {
      const uint64_t item = c.items[i];
      const int64_t weight = c.weights[i];
      c.items[kept] = item;
      c.weights[kept] = weight;
      kept += (item >> shift & 255) == digit;
    }
    c.count = kept;
  }
  return c.items[0];
}

// All items from `lowest` on; each weighs 1.
void count_items(const Row& row, uint64_t lowest, Candidates& c) {
  const int32_t lowest_key = item_key(lowest);
  c.count = 0;
  for (int64_t block = 0; block < row.blocks; block++) {
    if (row.maxima[block] < lowest_key) continue;
    int32_t keys[kBlock];
    const int64_t size = load_keys(row, block, keys);
    for (int64_t i = 0; i < size; i++) {
      c.items[c.count] = item_of(keys[i], block * kBlock + i);
      c.weights[c.count] = 1;
      c.count += c.items[c.count] >= lowest;
    }
  }
  c.total = c.count;
}

// Weights of a block; 0 below `least` and behind the row's end.
MP_INLINE void weigh_block(const Row& row, const int32_t* keys, double least, int64_t* weights) {
  for (int64_t i = 0; i < kBlock; i++) {
    const double shifted = row.shifted(keys[i]);
    const int64_t weight = weight_of(shifted);
    weights[i] = shifted >= least ? weight : 0;
  }
}

// The items from `lowest` on that weigh something and are at least `least` when shifted.
void weigh_items(const Row& row, uint64_t lowest, double least, Candidates& c) {
  const int32_t lowest_key = item_key(lowest);
  c.count = c.total = 0;
  for (int64_t block = 0; block < row.blocks; block++) {
    if (row.maxima[block] < lowest_key || row.shifted(row.maxima[block]) < least) continue;
    int32_t keys[kBlock];
    int64_t weights[kBlock];
    const int64_t size = load_keys(row, block, keys);
    weigh_block(row, keys, least, weights);
    for (int64_t i = 0; i < size; i++) {
      const uint64_t item = item_of(keys[i], block * kBlock + i);
      const bool is_in = item >= lowest && weights[i] > 0;
      c.items[c.count] = item;
      c.weights[c.count] = weights[i];
      c.total += is_in ? weights[i] : 0;
      c.count += is_in;
    }
  }
}

int64_t total_weight(const Row& row) {
  const double least = row.floor > kNoWeight ? row.floor : kNoWeight;
  int64_t total = 0;
  for (int64_t block = 0; block < row.blocks; block++) {
    if (row.shifted(row.maxima[block]) < least) continue;
    int32_t keys[kBlock];
    int64_t weights[kBlock];
    load_keys(row, block, keys);
    weigh_block(row, keys, row.floor, weights);
    for (int64_t i = 0; i < kBlock; i++) total += weights[i];
  }
  return total;
}

// The k-th largest item, 1 <= k <= size.
uint64_t kth_item(const Row& row, int64_t k) {
  Candidates c = candidates_of(row);
  uint64_t lowest = 0;
  if (k <= row.blocks) {
    // The k-th largest of the blocks' maxima is no larger than the k-th largest item.
    for (int64_t block = 0; block < row.blocks; block++) {
      c.items[block] = item_of(row.maxima[block], block);
      c.weights[block] = 1;
    }
    c.count = row.blocks;
    lowest = item_reaching(c, k) & 0xFFFFFFFF00000000u;
  }
  count_items(row, lowest, c);
  return item_reaching(c, k);
}

// The last of the fewest items that hold a share of `top_p` of all from `lowest` on.
uint64_t nucleus_end(const Row& row, uint64_t lowest, double top_p) {
  Candidates c = candidates_of(row);
  if (lowest != 0) weigh_items(row, lowest, row.floor, c);
  const int64_t total = lowest != 0 ? c.total : total_weight(row);
  const double wanted = top_p * double(total);
  int64_t target = int64_t(wanted);
  if (double(target) < wanted) target++;
  target = target < 1 ? 1 : target > total ? total : target;
  if (lowest == 0) {
    // Most nuclei lie close to the maximum. Items deeper than `enough` cannot hold what is left over, unless weights
    // were rounded up; everything that weighs something lies within 32.
    const double left_over = double(total - target) * 0x1p-40;
    const double enough = left_over > 0.0 ? log_of(double(row.size) / left_over) : 32.0;
    const double depths[] = {enough < 4.0 ? enough : 4.0, enough, 32.0};
    for (double depth : depths) {
      weigh_items(row, 0, row.floor > -depth ? row.floor : -depth, c);
      if (c.total >= target) break;
    }
  }
  return item_reaching(c, target);
}

// ---------------------------------------------------------------- noise

// argmax(shifted + noise) over the items from `lowest` on. Noise is only worked out where random bits are high
// enough for the best so far: that of u is at most -log(1 - u).
int64_t draw(const Row& row, uint64_t noise_key, uint64_t lowest) {
  const int32_t lowest_key = item_key(lowest);
  int64_t best_id = first_of_top(row);
  double best = noise_of(random_bits(noise_key, best_id));
  for (int64_t block = 0; block < row.blocks; block++) {
    if (row.maxima[block] < lowest_key) continue;
    const double most = row.shifted(row.maxima[block]);
    if (most < row.floor || most + kMostNoise < best) continue;
    // A millionth more than needed: roundings decide nothing here.
    const double limit = exp_of(most - best) * (1.0 + 0x1p-20) * 0x1p53;
    const int64_t needed = limit >= 0x1p53 ? 0 : (int64_t(1) << 53) - 1 - int64_t(limit);
    const int64_t first = block * kBlock;
    int64_t bits[kBlock], highest = 0;
    for (int64_t i = 0; i < kBlock; i++) {
      bits[i] = int64_t(random_bits(noise_key, first + i));
      highest = bits[i] > highest ? bits[i] : highest;
    }
    if (highest < needed) continue;
    const int64_t count = row.size - first < kBlock ? row.size - first : kBlock;
    for (int64_t i = 0; i < count; i++) {
      if (bits[i] < needed) continue;
      const int32_t key = key_of(row.x[first + i]);
      const double shifted = row.shifted(key);
      if (item_of(key, first + i) < lowest || shifted < row.floor) continue;
      const double value = shifted + noise_of(uint64_t(bits[i]));
      if (value > best || (value == best && first + i < best_id)) {
        best = value;
        best_id = first + i;
      }
    }
  }
  return best_id;
}

void sample_item(const void* args, int64_t item) {
  const SampleArgs& a = *static_cast<const SampleArgs*>(args);
  const SampleRule& rule = a.rules[item];
  Row row = scan(reinterpret_cast<const float*>(a.logits.at(item)), a.vocabulary);
  a.finite[item] = row.finite;
  a.ids[item] = 0;
  if (!row.ordered) return;
  if (!(rule.temperature > 0.0)) {
    a.ids[item] = first_of_top(row);
    return;
  }
  row.temperature = rule.temperature;
  row.floor = rule.log_min_p;
  uint64_t lowest = rule.top_k > 0 && rule.top_k < row.size ? kth_item(row, rule.top_k) : 0;
  if (rule.top_p < 1.0) lowest = nucleus_end(row, lowest, rule.top_p);
  a.ids[item] = draw(row, rule.noise_key, lowest);
}

// ---------------------------------------------------------------- log-probabilities

// Logarithm of the sum of exp(x - top).
double log_of_sum(const Row& row) {
  double sums[8] = {};
  for (int64_t block = 0; block < row.blocks; block++) {
    int32_t keys[kBlock];
    double values[kBlock];
    load_keys(row, block, keys);
    for (int64_t i = 0; i < kBlock; i++) values[i] = exp_of(row.shifted(keys[i]));
    for (int64_t i = 0; i < kBlock; i += 8)
      for (int64_t lane = 0; lane < 8; lane++) sums[lane] += values[i + lane];
  }
  double sum = 0.0;
  for (double each : sums) sum += each;
  return log_of(sum);
}

// Heap sort, descending.
void sort_items(uint64_t* items, int64_t count) {
  const auto sink = [items](int64_t at, int64_t end) {
    for (int64_t child; (child = 2 * at + 1) < end; at = child) {
      if (child + 1 < end && items[child + 1] < items[child]) child++;
      if (items[at] <= items[child]) return;
      const uint64_t item = items[at];
      items[at] = items[child];
      items[child] = item;
    }
  };
  for (int64_t at = count / 2; at-- > 0;) sink(at, count);
  for (int64_t end = count - 1; end > 0; end--) {
    const uint64_t item = items[0];
    items[0] = items[end];
    items[end] = item;
    sink(0, end);
  }
}

void logprob_item(const void* args, int64_t item) {
  const LogprobArgs& a = *static_cast<const LogprobArgs*>(args);
  float* values = a.values + item * (1 + a.count);
  int64_t* best = a.best + item * a.count;
  const Row row = scan(reinterpret_cast<const float*>(a.logits.at(item)), a.vocabulary);
  if (!row.ordered) {
    for (int64_t i = 0; i <= a.count; i++) values[i] = __builtin_nanf("");
    for (int64_t i = 0; i < a.count; i++) best[i] = i;
    return;
  }
  const double rest = log_of_sum(row);
  values[0] = float(row.shifted(key_of(row.x[a.ids[item]])) - rest);
  if (a.count == 0) return;
  const uint64_t lowest = kth_item(row, a.count);
  Candidates c = candidates_of(row);
  count_items(row, lowest, c);
  sort_items(c.items, c.count);
  for (int64_t i = 0; i < a.count; i++) {
    best[i] = item_id(c.items[i]);
    values[1 + i] = float(row.shifted(item_key(c.items[i])) - rest);
  }
}

}  // namespace

void sample(const SampleArgs& a) { run_items(a.rows, sample_item, &a, a.rows * a.vocabulary > (1 << 16)); }

void log_probabilities(const LogprobArgs& a) {
  run_items(a.rows, logprob_item, &a, a.rows * a.vocabulary > (1 << 16));
}

void gumbel_noise(uint64_t key, int64_t count, double* out) {
  for (int64_t id = 0; id < count; id++) out[id] = noise_of(random_bits(key, id));
}

}  // namespace MP_ISA
}  // namespace milepost
