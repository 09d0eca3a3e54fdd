#include "python/plans.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "common/dispatch.h"
#include "python/memory.h"

namespace milepost {

PackedWeight::PackedWeight(nb::handle weight, bool paired) {
  const Tensor w = Tensor::from(weight, "weight", kAnyDims, kFloats, 0);
  const bool grouped = w.ndim == 3;
  if (!grouped && w.ndim != 2) bad_value("weight", "must be [out, in] or [groups, out, in]");
  const size_t row = grouped ? 1 : 0;
  PackArgs args{};
  packed_.groups = grouped ? w.shape[0] : 1;
  args.group = grouped ? w.strides[0] : 0;
  args.column = w.strides[row + 1];
  pack({PackPart{w.data, w.strides[row], w.shape[row]}}, w.type(), w.shape[row + 1], paired, args);
}

PackedWeight::PackedWeight(nb::list weights, bool paired, int threads) {
  if (threads < 1 || threads > 256) bad_value("threads", "must lie in [1, 256]");
  std::vector<PackPart> parts;
  Tensor first;
  for (nb::handle weight : weights) {
    const Tensor w = Tensor::from(weight, "parts", 2, kFloats, 1);
    if (parts.empty()) first = w;
    w.check_shape({-1, first.shape[1]});
    w.check_type(first.type());
    parts.push_back(PackPart{w.data, w.strides[0], w.shape[0]});
  }
  if (parts.empty()) bad_value("parts", "must not be empty");
  PackArgs args{};
  args.threads = threads;
  pack(parts, first.type(), first.shape[1], paired, args);
}

void PackedWeight::pack(const std::vector<PackPart>& parts, Type type, int64_t k, bool paired, PackArgs args) {
  int64_t rows = 0;
  for (const PackPart& part : parts) rows += part.rows;
  if (paired && rows % 2 != 0) bad_value("weight", "gate and up must have the same number of rows");
  packed_.type = type;
  packed_.n = rows / (paired ? 2 : 1);
  packed_.k = k;
  packed_.paired = paired;
  if (packed_.groups < 1 || packed_.n < 1 || packed_.k < 1) bad_value("weight", "must not be empty");
  allocate();
  args.parts = parts.data();
  args.num_parts = int64_t(parts.size());
  args.target = packed_;
  nb::gil_scoped_release release;
  first_not_finite_ = kernels().pack(args);
}

void PackedWeight::allocate() {
  memory_ = weight_memory(size_t(packed_.bytes()));
  packed_.data = memory_.get();
}

PackedWeight::PackedWeight(nb::handle values, nb::handle scales, int bits, int64_t group, bool paired) {
  const Tensor v = Tensor::from(values, "values", 2, kI8, 1), s = Tensor::from(scales, "scales", 2, kBf16, 1);
  if (bits != 4 && bits != 8) bad_value("bits", "must be 4 or 8");
  if (group < kChunk || group > 1024 || group % kChunk != 0) bad_value("group", "must be a multiple of 8 up to 1024");
  const int limit = bits == 4 ? 8 : 128;
  int wrong = 0;
  for (int64_t row = 0; row < v.shape[0]; row++) {
    const int8_t* p = reinterpret_cast<const int8_t*>(v.data) + row * v.strides[0];
    for (int64_t k = 0; k < v.shape[1]; k++) wrong |= p[k] < -limit || p[k] >= limit;
  }
  if (wrong) bad_value("values", "must lie in [-8, 7] for 4 bits");
  packed_.coding = bits == 4 ? Coding::int4 : Coding::int8;
  packed_.group = group;
  packed_.k = v.shape[1];
  pack_coded(v, s, paired);
}

PackedWeight::PackedWeight(nb::handle packed, nb::handle scales, bool paired) {
  const Tensor v = Tensor::from(packed, "packed", 2, kU8, 1), s = Tensor::from(scales, "scales", 2, kU8, 1);
  if (v.shape[1] % (kMxfp4Group / 2) != 0) bad_value("packed", "must hold whole groups of 32 values");
  // Beyond these, decoded values are denormal or overflow, which the decoder does not do.
  for (int64_t row = 0; row < s.shape[0]; row++)
    for (int64_t g = 0; g < s.shape[1]; g++) {
      const uint8_t code = uint8_t(s.data[row * s.strides[0] + g]);
      if (code < 2 || code > 252) bad_value("scales", "must lie in [2, 252]; decode the others");
    }
  packed_.coding = Coding::mxfp4;
  packed_.group = kMxfp4Group;
  packed_.k = 2 * v.shape[1];
  pack_coded(v, s, paired);
}

void PackedWeight::pack_coded(const Tensor& codes, const Tensor& scales, bool paired) {
  if (paired && codes.shape[0] % 2 != 0) bad_value("weight", "gate and up must have the same number of rows");
  packed_.type = Type::bf16;
  packed_.n = codes.shape[0] / (paired ? 2 : 1);
  packed_.paired = paired;
  if (packed_.n < 1 || packed_.k < 1) bad_value("weight", "must not be empty");
  scales.check_shape({codes.shape[0], packed_.scale_groups()});
  allocate();
  PackCodedArgs args{};
  args.codes = reinterpret_cast<const uint8_t*>(codes.data);
  args.scales = reinterpret_cast<const uint8_t*>(scales.data);
  args.code_stride = codes.strides[0];
  args.scale_stride = scales.strides[0] * (scales.dtype == Dtype::bf16 ? 2 : 1);
  args.target = packed_;
  nb::gil_scoped_release release;
  kernels().pack_coded(args);
}

Experts::Experts(nb::list gate_up_list, nb::list down_list) : owners_gate_up_(gate_up_list), owners_down_(down_list) {
  if (nb::len(gate_up_list) == 0 || nb::len(gate_up_list) != nb::len(down_list))
    bad_value("experts", "needs as many gate_up as down weights, and at least one");
  for (nb::handle h : gate_up_list) gate_up.push_back(nb::cast<const PackedWeight&>(h).view());
  for (nb::handle h : down_list) down.push_back(nb::cast<const PackedWeight&>(h).view());
  width = gate_up[0].k;
  inner = gate_up[0].n;
  for (size_t i = 0; i < down.size(); i++) {
    const bool fits = gate_up[i].paired && gate_up[i].n == inner && gate_up[i].k == width && !down[i].paired &&
                      down[i].n == width && down[i].k == inner && gate_up[i].groups == 1 && down[i].groups == 1;
    if (!fits) bad_value("experts", "expert " + std::to_string(i) + " does not fit expert 0");
  }
}

std::vector<Span> spans_of(nb::list list) {
  std::vector<Span> spans;
  int64_t row = 0;
  for (nb::handle h : list) {
    const nb::tuple t = nb::cast<nb::tuple>(h);
    if (nb::len(t) != 3) bad_value("spans", "entries are (first_row, end_row, position)");
    const Span span{nb::cast<int64_t>(t[0]), nb::cast<int64_t>(t[1]), nb::cast<int64_t>(t[2])};
    if (span.first_row != row || span.end_row <= span.first_row || span.position < 0)
      bad_value("spans", "must follow each other from row 0, without empty ones, at positions >= 0");
    row = span.end_row;
    spans.push_back(span);
  }
  return spans;
}

AttentionPlan::AttentionPlan(nb::list span_list, nb::handle page_tables, nb::handle pages, nb::handle offsets,
                             nb::list expanded_list)
    : spans(spans_of(span_list)), expanded(spans.size(), 0) {
  for (nb::handle h : expanded_list) {
    const int64_t number = nb::cast<int64_t>(h);
    if (number < 0 || number >= int64_t(spans.size())) bad_value("expanded", "must be numbers of spans");
    expanded[size_t(number)] = 1;
  }
  table_starts.push_back(0);
  for (nb::handle h : nb::cast<nb::sequence>(page_tables)) {
    const Tensor t = Tensor::from(h, "page_tables", 1, kI64, 1);
    table.insert(table.end(), t.integers(), t.integers() + t.shape[0]);
    table_starts.push_back(int64_t(table.size()));
  }
  if (table_starts.size() != spans.size() + 1) bad_value("page_tables", "must be one per span");
  const Tensor p = Tensor::from(pages, "write_pages", 1, kI64, 1);
  const Tensor o = Tensor::from(offsets, "write_offsets", 1, kI64, 1);
  o.check_shape({p.shape[0]});
  write_pages.assign(p.integers(), p.integers() + p.shape[0]);
  write_offsets.assign(o.integers(), o.integers() + o.shape[0]);
  if (rows() != (spans.empty() ? 0 : spans.back().end_row)) bad_value("write_pages", "must have one entry per row");
  for (const auto* ids : {&table, &write_pages}) {
    for (int64_t id : *ids) {
      smallest_page_ = std::min(smallest_page_, id);
      largest_page_ = std::max(largest_page_, id);
    }
  }
  for (int64_t offset : write_offsets) {
    smallest_offset_ = std::min(smallest_offset_, offset);
    largest_offset_ = std::max(largest_offset_, offset);
  }
}

void AttentionPlan::check(int64_t num_pages, int64_t match_unit) const {
  if (smallest_page_ < 0 || largest_page_ >= num_pages)
    bad_value("plan", "a page id is outside of " + std::to_string(num_pages) + " pages");
  if (smallest_offset_ < 0 || largest_offset_ >= match_unit)
    bad_value("plan", "a write offset is outside of a page of " + std::to_string(match_unit) + " entries");
  for (size_t s = 0; s < spans.size(); s++) {
    const int64_t end = spans[s].position + spans[s].length();
    if ((table_starts[s + 1] - table_starts[s]) * match_unit < end)
      bad_value("plan", "page table " + std::to_string(s) + " covers fewer than " + std::to_string(end) + " positions");
  }
}

const RotaryTable& AttentionPlan::rotary(const float* frequencies, int64_t count) {
  const std::vector<float> wanted(frequencies, frequencies + count);
  if (rotary_.frequencies == wanted && !rotary_.cosines.empty()) return rotary_;
  rotary_ = RotaryTable{wanted, {}, {}};
  for (const Span& span : spans) {
    for (int64_t i = 0; i < span.length(); i++) {
      for (float frequency : wanted) {
        const double angle = float(span.position + i) * frequency;
        rotary_.cosines.push_back(float(std::cos(angle)));
        rotary_.sines.push_back(float(std::sin(angle)));
      }
    }
  }
  return rotary_;
}

RecurrentPlan::RecurrentPlan(nb::list span_list, nb::list initial_slots, nb::list running_slots, nb::list export_list) {
  const std::vector<Span> spans = spans_of(span_list);
  if (nb::len(initial_slots) != spans.size()) bad_value("initial_slots", "must be one per span");
  if (nb::len(running_slots) != spans.size()) bad_value("running_slots", "must be one per span");
  std::unordered_map<int64_t, size_t> writer;  // slot -> sequence that writes it
  const auto writes = [&](int64_t slot, size_t sequence) {
    if (slot < 0) bad_value("plan", "a written slot is negative");
    if (!writer.emplace(slot, sequence).second) bad_value("plan", "slot " + std::to_string(slot) + " is written twice");
    largest_slot_ = std::max(largest_slot_, slot);
  };
  for (size_t s = 0; s < spans.size(); s++) {
    RecurrentSequence sequence{};
    sequence.span = spans[s];
    sequence.initial_slot = nb::cast<int64_t>(initial_slots[s]);
    sequence.running_slot = nb::cast<int64_t>(running_slots[s]);
    if (sequence.initial_slot < -1) bad_value("initial_slots", "must be slots, or -1 for zeros");
    largest_slot_ = std::max(largest_slot_, sequence.initial_slot);
    writes(sequence.running_slot, s);
    sequences.push_back(sequence);
  }
  size_t at = 0;
  int64_t previous = 0;
  for (nb::handle h : export_list) {
    const nb::tuple t = nb::cast<nb::tuple>(h);
    const size_t sequence = nb::cast<size_t>(t[0]);
    const StateExport entry{nb::cast<int64_t>(t[1]), nb::cast<int64_t>(t[2])};
    if (sequence >= spans.size() || sequence < at) bad_value("exports", "must ascend by sequence");
    for (; at < sequence; previous = 0) {
      sequences[at].end_export = int64_t(exports.size());
      sequences[++at].first_export = int64_t(exports.size());
    }
    if (entry.offset <= previous || entry.offset > spans[at].length())
      bad_value("exports", "offsets must ascend within [1, rows of the sequence]");
    previous = entry.offset;
    writes(entry.slot, at);
    exports.push_back(entry);
  }
  for (; at < sequences.size(); at++) {
    sequences[at].end_export = int64_t(exports.size());
    if (at + 1 < sequences.size()) sequences[at + 1].first_export = int64_t(exports.size());
  }
  for (size_t s = 0; s < sequences.size(); s++) {
    if (sequences[s].initial_slot < 0 || sequences[s].initial_slot == sequences[s].running_slot) continue;
    if (writer.count(sequences[s].initial_slot)) endangered.push_back(s);
  }
}

void RecurrentPlan::check(int64_t num_slots) const {
  if (largest_slot_ >= num_slots)
    bad_value("plan", "slot " + std::to_string(largest_slot_) + " is outside of " + std::to_string(num_slots) + " slots");
}

}  // namespace milepost
