// Tensors from Python through DLPack, without copies and without knowing whose they are.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <initializer_list>
#include <string>

#include "common/types.h"

namespace milepost {

namespace nb = nanobind;

// The ABI of DLPack 1.x (github.com/dmlc/dlpack), as far as it is needed here.
struct DlDevice { int32_t type, id; };
struct DlType { uint8_t code, bits; uint16_t lanes; };
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

enum class Dtype { f32, bf16, i64, i8, u8 };
constexpr int kAnyDims = -1;
constexpr unsigned kF32 = 1, kBf16 = 2, kI64 = 4, kI8 = 8, kU8 = 16, kFloats = kF32 | kBf16;

// A checked view. Borrowed: valid while the Python object lives, which the call guarantees.
class Tensor {
 public:
  static constexpr int kMaxDims = 4;

  // Throws TypeError or ValueError that names the argument.
  // `ndim` may be kAnyDims. `dtypes`: the kF32 | ... that are accepted. `inner_contiguous`: how many last dimensions must be dense.
  static Tensor from(nb::handle object, const char* name, int ndim, unsigned dtypes, int inner_contiguous);

  const char* name = "";
  char* data = nullptr;
  Dtype dtype = Dtype::f32;
  int ndim = 0;
  std::array<int64_t, kMaxDims> shape{}, strides{};  // strides in elements

  Type type() const { return dtype == Dtype::bf16 ? Type::bf16 : Type::f32; }
  float* floats() const { return reinterpret_cast<float*>(data); }
  const int64_t* integers() const { return reinterpret_cast<const int64_t*>(data); }
  Rows rows() const { return Rows{data, type(), strides[0]}; }
  bool overlaps(const Tensor& other) const;

  // Each entry: the size wanted, or -1 for any.
  void check_shape(std::initializer_list<int64_t> wanted) const;
  void check_type(Type wanted) const;

  int64_t item() const {
    switch (dtype) {
      case Dtype::i64: return 8;
      case Dtype::f32: return 4;
      case Dtype::bf16: return 2;
      default: return 1;
    }
  }
};

[[noreturn]] void bad_value(const char* name, const std::string& message);

}  // namespace milepost
