// Arguments of the kernels: plain pointers and sizes, already checked by the binding.
#pragma once

#include <cstdint>

// This header is compiled for several instruction sets: a function the linker could merge across them
// must not exist on its own.
#define MP_INLINE inline __attribute__((always_inline))

namespace milepost {

enum class Type : int { f32 = 0, bf16 = 1 };
MP_INLINE int64_t item_bytes(Type type) { return type == Type::f32 ? 4 : 2; }

// Rows of contiguous values; strides in elements.
struct Rows {
  void* data = nullptr;
  Type type = Type::f32;
  int64_t stride = 0;

  MP_INLINE char* at(int64_t row, int64_t column = 0) const {
    return static_cast<char*>(data) + (row * stride + column) * item_bytes(type);
  }
};

constexpr int kPanel = 32;  // output columns per panel of a packed weight

// How packed weights are coded. int8, int4: integers and, per column and `group` inputs, a bf16 scale.
// mxfp4: E2M1 floats and, per column and 32 inputs, a power of two as E8M0.
enum class Coding : int { plain, int8, int4, mxfp4 };
constexpr int kMxfp4Group = 32;
constexpr int kChunk = 8;  // inputs whose codes of one column lie together; a group is a multiple of it

// Weights of `groups` linears [n, k], as panels [group][panel][k][32]. bf16 panels are [k / 2][32] pairs:
// the low half of a 32-bit lane is an even k, the high half the odd one behind it (zero if k is odd).
// A paired weight is gate over up: panel p holds 16 gate columns and then the 16 up columns with the
// same numbers.
// Coded weights are [panel][group][block]: a block holds the 32 scales, then chunks of eight inputs: for
// int8 as [input][32] bytes, for nibbles as [32] lanes of 32 bits, where input 2 p + h of the chunk takes the
// four bits from 4 p + 16 h.
struct Packed {
  void* data = nullptr;
  Type type = Type::f32;  // of coded weights: bf16, which holds every code exactly
  Coding coding = Coding::plain;
  int64_t group = 1;  // inputs that share a scale
  int64_t groups = 1;
  int64_t n = 0;  // columns of the product; of a paired weight: of each half
  int64_t k = 0;
  bool paired = false;

  MP_INLINE int64_t columns_per_panel() const { return paired ? kPanel / 2 : kPanel; }
  MP_INLINE int64_t panels() const { return (n + columns_per_panel() - 1) / columns_per_panel(); }
  MP_INLINE int64_t scale_groups() const { return (k + group - 1) / group; }
  // k, padded to pairs or to groups
  MP_INLINE int64_t depth() const { return coding == Coding::plain ? (k + 1) / 2 * 2 : scale_groups() * group; }
  MP_INLINE int64_t scale_bytes() const { return coding == Coding::mxfp4 ? kPanel : 2 * kPanel; }
  MP_INLINE int64_t chunk_bytes() const { return kPanel * (coding == Coding::int8 ? kChunk : kChunk / 2); }
  MP_INLINE int64_t block_bytes() const { return scale_bytes() + group / kChunk * chunk_bytes(); }
  MP_INLINE int64_t panel_bytes() const {
    return coding == Coding::plain ? depth() * kPanel * item_bytes(type) : scale_groups() * block_bytes();
  }
  MP_INLINE int64_t bytes() const { return groups * panels() * panel_bytes(); }
};

// What a gated MLP does between its products: silu(gate) * up, or, with `beta` (SiTU), beta * tanh(gate / beta) *
// sigmoid(gate) * linear_beta * tanh(up / linear_beta), where the up part stays as it is without `linear_beta`.
struct Glu {
  float beta = 0.0f;         // 0: SwiGLU
  float linear_beta = 0.0f;  // 0: none
};

// y = x W^T per group; x_group and y_group: elements between the groups of a row.
struct LinearArgs {
  Rows x;
  int64_t x_group = 0;
  const int64_t* x_rows = nullptr;  // row numbers of x to use, or all in order
  int64_t rows = 0;
  Packed weight;
  Rows y;
  int64_t y_group = 0;
  Rows residual;        // data == nullptr: none; added to the rounded product
  bool serial = false;  // in the calling thread alone: it is one of those that share an item already
  Glu glu;              // of a paired weight
};

// Rows of a weight that lie in one tensor, of the type of the packed weight.
struct PackPart {
  const char* data;
  int64_t stride;  // elements between rows
  int64_t rows;
};

struct PackArgs {
  const PackPart* parts;    // one below the other: [n, k] rows of group 0 (paired: [2n, k])
  int64_t num_parts;
  int64_t group = 0;        // elements between groups
  int64_t column = 1;       // elements between neighbours along k
  Packed target;
  int threads = 1;
};

struct PackCodedArgs {
  const uint8_t* codes;     // int8: [rows, k]; int4: [rows, k], one code per byte; mxfp4: [rows, k / 2], even k low
  const uint8_t* scales;    // [rows, scale groups] of bf16, or of E8M0
  int64_t code_stride, scale_stride;  // bytes between rows
  Packed target;
};

struct NormArgs {
  Rows x;
  Rows y;
  const float* weight;
  int64_t rows, width;
  float eps;
};

struct Span {
  int64_t first_row, end_row, position;
  MP_INLINE int64_t length() const { return end_row - first_row; }
};

struct StoreLatentsArgs {
  Rows x;                   // [rows, width]: the first `normed` values are normed, the rest copied
  const float* weight;
  int64_t rows, width, normed;
  float eps;
  char* pages;
  int64_t page_stride, entry_stride;  // elements
  const int64_t* write_pages;
  const int64_t* write_offsets;
};

// Keys or values in pages: those of head `kv` of entry `offset` of page `page` start at
// page * page_stride + offset * entry_stride + kv * head_stride.
struct Pages {
  const char* data;
  int64_t page_stride, entry_stride, head_stride;  // elements
};

// Query head h reads key-value head h / (heads / kv_heads).
// Expanded: pages hold latents, from which every head makes keys and values of its own. The first
// expand_key->k entries of a latent go through the weights, the rest is a part all keys share. Expanded
// entries are rounded to the type of the pages, as if they had been stored.
struct AttentionArgs {
  const float* query;       // [rows, heads, width]
  float* out;               // [rows, heads, value_width]
  int64_t heads, kv_heads, width, value_width;
  float scale;
  Pages keys, values;
  bool shared;              // values are the first entries of the keys
  Type type;
  int64_t match_unit;
  int64_t num_spans;
  const Span* spans;
  const int64_t* table;         // page ids of all sequences
  const int64_t* table_starts;  // per sequence, where its ids begin
  const Packed* expand_key = nullptr;    // groups = heads, [width - shared part, latent]; nullptr: not expanded
  const Packed* expand_value = nullptr;  // groups = heads, [value_width, latent]
};

// Grouped-query attention around `AttentionArgs`: norms, rotary positions, page writes; and the output gate.
struct GqaArgs {
  Rows query_gate;  // [rows, heads, 2, head_dim], or [rows, heads, head_dim] if not gated
  bool gated;
  Rows key, value;  // [rows, kv_heads * head_dim]
  Rows out;         // [rows, heads * head_dim]
  const float *query_norm, *key_norm;
  float eps;
  int64_t rows, heads, kv_heads, head_dim, half_rotary;
  const float *cosines, *sines;  // [rows, half_rotary]
  float* query;                  // [rows, heads, head_dim], to be filled
  const float* mixed;            // [rows, heads, head_dim], attention's result
  Pages keys, values;
  const int64_t *write_pages, *write_offsets;
};

// y = x with the last 2 * half entries of every head times `amplitude` and rotated: entry i of the first half with
// entry i of the second one, or, interleaved, entry 2 i with entry 2 i + 1.
struct RotateArgs {
  Rows x, y;  // [rows, heads * width] of one type
  int64_t rows, heads, width, half;
  bool interleaved;
  float amplitude;
  const float *cosines, *sines;  // [rows, half]
};

struct StateExport {
  int64_t offset, slot;
};

// Where sequence i starts and what it writes.
struct RecurrentSequence {
  Span span;
  int64_t initial_slot;  // -1: zeros
  int64_t running_slot;
  int64_t first_export, end_export;
  const char* initial_tail;    // resolved per call; nullptr: zeros
  const float* initial_state;  // resolved per call; nullptr: zeros
};

// KDA, and with one decay per head Gated DeltaNet, where a key head serves heads / key_heads value heads.
struct KdaArgs {
  Rows raw;      // [rows, channels] as q | k | v
  Rows decay;    // [rows, heads * key], or [rows, heads] if scalar_decay
  Rows beta;     // [rows, heads], before the sigmoid
  Rows gate;     // [rows, heads * value], before the activation
  Rows out;      // [rows, heads * value]
  const float* conv;  // [taps, channels]
  const float* decay_log;
  const float* dt_bias;  // [heads * key], or [heads]
  const float* norm;
  int64_t taps, heads, key_heads, key_dim, value_dim;
  float eps, scale, lower_bound;
  bool bounded, scalar_decay, silu_gate;
  char* tails;
  int64_t tail_slot_stride, tail_row_stride;  // elements of raw.type
  float* states;
  int64_t state_slot_stride;
  int64_t num_sequences;
  const RecurrentSequence* sequences;
  const StateExport* exports;

  MP_INLINE int64_t channels() const { return 2 * key_heads * key_dim + heads * value_dim; }
};

struct MoeArgs {
  Rows x;
  Rows logits;        // fp32 [rows, experts]
  const float* bias;  // of a sigmoid router; nullptr: a softmax router
  int64_t rows, width, inner, num_experts, experts_per_token;
  bool renormalize;
  float scaling;
  const Packed* gate_up;
  const Packed* down;
  Glu glu;
  Rows shared;       // [rows, width] in x's type, or no data
  Rows shared_gate;  // fp32 [rows, 1], before the sigmoid, or no data
  Rows residual;     // x's type, or no data
  Rows y;            // x's type
};

// y = residual + (x + [sigmoid(gate) *] shared), the sum in brackets rounded once. All [rows, width] of one type.
struct AddSharedArgs {
  Rows x, shared, residual, y;
  Rows gate;  // fp32 [rows, 1], or no data
  int64_t rows, width;
};

// y = x * sigmoid(gate), all [rows, width].
struct GateArgs {
  Rows x, gate, y;
  int64_t rows, width;
};

constexpr int64_t kMaxSources = 256;

// y = sources weighted by a softmax over rms_norm(source) . query, per row.
struct MixArgs {
  const Rows* sources;  // [count], each [rows, width]
  int64_t count, rows, width;
  const float* query;   // [width]
  float eps;
  Rows y;
};

struct EmbedArgs {
  const char* table;
  int64_t row_bytes, table_stride_bytes;
  const int64_t* ids;
  char* out;
  int64_t rows;
};

// How one row is sampled; the rule is that of milepost/runner/sampler.py.
struct SampleRule {
  double temperature;  // 0: greedy, and the rest is not read
  double log_min_p;    // -infinity: off
  double top_p;        // 1: off
  int64_t top_k;       // 0: off
  uint64_t noise_key;
};

constexpr int64_t kMaxVocabulary = int64_t(1) << 22;  // sums of weights stay below 2^63

struct SampleArgs {
  Rows logits;  // fp32 [rows, vocabulary]
  int64_t rows, vocabulary;
  const SampleRule* rules;  // [rows]
  int64_t* ids;             // [rows]; 0 where a row holds NaN or +infinity, or nothing but -infinity
  char* finite;             // [rows]: neither NaN nor infinity
};

struct LogprobArgs {
  Rows logits;  // fp32 [rows, vocabulary]
  int64_t rows, vocabulary;
  const int64_t* ids;  // [rows]
  int64_t count;       // how many of the best to name
  float* values;       // [rows, 1 + count]: of the id, then of the best, descending
  int64_t* best;       // [rows, count]; equal logits: the lowest id first
};

// One implementation of everything, for one instruction set.
struct KernelTable {
  const char* isa;
  bool fused;
  // Bits that tell one CPU's roundings from another's, where an instruction leaves them open; else 0.
  uint32_t (*probe)();
  // Returns the number of the first part that holds NaN or infinity, or -1.
  int64_t (*pack)(const PackArgs&);
  void (*pack_coded)(const PackCodedArgs&);
  void (*linear)(const LinearArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*store_latents)(const StoreLatentsArgs&);
  void (*attend)(const AttentionArgs&);
  void (*gqa_begin)(const GqaArgs&);
  void (*gqa_end)(const GqaArgs&);
  void (*rotate)(const RotateArgs&);
  void (*kda)(const KdaArgs&);
  void (*moe)(const MoeArgs&);
  void (*add_shared)(const AddSharedArgs&);
  void (*gate)(const GateArgs&);
  void (*mix)(const MixArgs&);
  void (*sample)(const SampleArgs&);
  void (*log_probabilities)(const LogprobArgs&);
  void (*gumbel_noise)(uint64_t key, int64_t count, double* out);
};

}  // namespace milepost
