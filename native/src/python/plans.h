// What one step or one model keeps on the native side between calls.
#pragma once

#include <memory>
#include <vector>

#include "python/tensor.h"

namespace milepost {

// Weights in the order in which the products read them.
class PackedWeight {
 public:
  // weight [n, k], or [groups, n, k]; paired: [2n, k], gate over up.
  PackedWeight(nb::handle weight, bool paired);
  // Tensors [rows, k] one below the other, packed by up to `threads` threads.
  PackedWeight(nb::list parts, bool paired, int threads);
  // Integers int8 [n, k] (paired: [2n, k]) of `bits` bits, with one bf16 scale per row and `group` inputs.
  PackedWeight(nb::handle values, nb::handle scales, int bits, int64_t group, bool paired);
  // E2M1 floats uint8 [n, k / 2], the even input in the low half of a byte; E8M0 scales uint8 [n, k / 32].
  PackedWeight(nb::handle packed, nb::handle scales, bool paired);
  const Packed& view() const { return packed_; }
  // Number of the first part that holds NaN or infinity, or -1; of coded weights -1.
  int64_t first_not_finite() const { return first_not_finite_; }
  // The bytes as they are; for tests.
  nb::bytes bytes() const { return nb::bytes(packed_.data, size_t(packed_.bytes())); }

 private:
  void pack(const std::vector<PackPart>& parts, Type type, int64_t k, bool paired, PackArgs args);
  void pack_coded(const Tensor& codes, const Tensor& scales, bool paired);
  void allocate();

  std::shared_ptr<void> memory_;
  Packed packed_;
  int64_t first_not_finite_ = -1;
};

class Experts {
 public:
  Experts(nb::list gate_up, nb::list down);
  std::vector<Packed> gate_up, down;
  int64_t width = 0, inner = 0;

 private:
  nb::list owners_gate_up_, owners_down_;
};

// Cosines and sines of a step's rows, [rows, frequencies].
struct RotaryTable {
  std::vector<float> frequencies, cosines, sines;
};

// Index of an attention group in one step.
class AttentionPlan {
 public:
  // expanded: numbers of spans whose rows read keys and values expanded from latents, ascending.
  AttentionPlan(nb::list spans, nb::handle page_tables, nb::handle write_pages, nb::handle write_offsets,
                nb::list expanded);
  // Throws if a page id or an offset does not exist in pages of this shape, or a table is too short.
  void check(int64_t num_pages, int64_t match_unit) const;
  int64_t rows() const { return int64_t(write_pages.size()); }
  // Angles are position times frequency in fp32; all layers of a step share one table.
  const RotaryTable& rotary(const float* frequencies, int64_t count);

  std::vector<Span> spans;
  std::vector<int64_t> table, table_starts, write_pages, write_offsets;
  std::vector<char> expanded;  // per span

 private:
  RotaryTable rotary_;
  int64_t smallest_page_ = 0, largest_page_ = -1, smallest_offset_ = 0, largest_offset_ = -1;
};

// Index of a recurrent group in one step.
class RecurrentPlan {
 public:
  // exports: (sequence, offset, slot), ascending by sequence, then offset. Initial slot -1: zeros.
  RecurrentPlan(nb::list spans, nb::list initial_slots, nb::list running_slots, nb::list exports);
  int64_t rows() const { return sequences.empty() ? 0 : sequences.back().span.end_row; }
  void check(int64_t num_slots) const;

  std::vector<RecurrentSequence> sequences;
  std::vector<StateExport> exports;
  // Sequences whose initial slot somebody else writes in this step: they start from a copy.
  std::vector<size_t> endangered;

 private:
  int64_t largest_slot_ = -1;
};

std::vector<Span> spans_of(nb::list spans);

}  // namespace milepost
