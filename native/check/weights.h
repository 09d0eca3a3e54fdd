// Weights of the self-check, packed.
#pragma once

#include "check/buffers.h"
#include "common/dispatch.h"

namespace milepost::check {

inline const char* label(Type type) { return type == Type::f32 ? "f32" : "bf16"; }

class Weight {
 public:
  Weight(Array source, int64_t n, int64_t k, Type type, bool paired = false, int64_t groups = 1) {
    packed.type = type;
    packed.groups = groups;
    packed.n = n;
    packed.k = k;
    packed.paired = paired;
    memory_.assign(size_t(packed.bytes()) + 64, char(0xFF));
    packed.data = memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64;
    const Rows rows = source.view();
    const PackPart part{static_cast<const char*>(rows.data), rows.stride, n * (paired ? 2 : 1) * groups};
    PackArgs args{};
    args.parts = &part;
    args.num_parts = 1;
    args.group = n * (paired ? 2 : 1) * rows.stride;
    args.target = packed;
    kernels().pack(args);
  }
  Packed packed;

 private:
  std::vector<char> memory_;
};

// Codes of every value, with scales around one.
class CodedWeight {
 public:
  CodedWeight(Coding coding, int64_t n, int64_t k, int64_t group, bool paired, uint32_t seed) {
    packed.type = Type::bf16;
    packed.coding = coding;
    packed.group = group;
    packed.n = n;
    packed.k = k;
    packed.paired = paired;
    const int64_t rows = n * (paired ? 2 : 1), stride = coding == Coding::mxfp4 ? k / 2 : k;
    const int64_t scale_stride = packed.scale_groups() * packed.scale_bytes() / kPanel;
    std::vector<uint8_t> codes(size_t(rows * stride)), scales(size_t(rows * scale_stride));
    Random random(seed);
    for (uint8_t& code : codes) {
      code = uint8_t(random.next() >> 8);
      if (coding == Coding::int4) code = uint8_t(int8_t(code << 4) >> 4);
    }
    for (size_t i = 0; i < scales.size(); i++) {
      const uint32_t bits = random.next() >> 8;
      if (coding == Coding::mxfp4) scales[i] = uint8_t(124 + bits % 5);
      else scales[i] = i % 2 == 0 ? uint8_t(bits) : uint8_t(0x3B + (bits & 0x80));  // bf16 of 2^-9 to 2^-7, any sign
    }
    memory_.assign(size_t(packed.bytes()) + 64, char(0xFF));
    packed.data = memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64;
    kernels().pack_coded(PackCodedArgs{codes.data(), scales.data(), stride, scale_stride, packed});
  }
  Packed packed;

 private:
  std::vector<char> memory_;
};

}  // namespace milepost::check
