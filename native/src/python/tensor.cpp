#include "python/tensor.h"

namespace milepost {
namespace {

constexpr int32_t kCpu = 1;

struct ExchangeHeader {
  uint32_t major, minor;
  ExchangeHeader* previous;
};
// DLPack 1.2: function pointers a framework hands out once, so that a tensor costs no Python call.
struct ExchangeApi {
  ExchangeHeader header;
  void* allocate;
  void* from_object;
  void* to_object;
  int (*borrow)(void* object, DlTensor* out);
  void* stream;
};

struct Managed { DlTensor tensor; void* context; void (*deleter)(Managed*); };
struct ManagedVersioned {
  uint32_t major, minor;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;
  DlTensor tensor;
};

const ExchangeApi* exchange_api(PyTypeObject* type) {
  static PyTypeObject* known_type = nullptr;  // guarded by the GIL
  static const ExchangeApi* known = nullptr;
  if (type == known_type) return known;
  nb::object capsule = nb::getattr(nb::handle((PyObject*)type), "__dlpack_c_exchange_api__", nb::none());
  const ExchangeApi* api = nullptr;
  if (PyCapsule_CheckExact(capsule.ptr())) {
    api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) PyErr_Clear();
    else if (api->header.major != 1 || api->borrow == nullptr) api = nullptr;
  }
  Py_INCREF((PyObject*)type);
  known_type = type;
  known = api;
  return api;
}

std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int i = 0; i < t.ndim; i++) text += (i ? ", " : "") + std::to_string(t.shape[i]);
  return text + "]";
}

void fill(Tensor& t, const DlTensor& d, unsigned dtypes) {
  const auto is = [&d](uint8_t code, uint8_t bits) { return d.dtype.code == code && d.dtype.bits == bits; };
  if (d.device.type != kCpu) bad_value(t.name, "must be in CPU memory");
  unsigned flag = 0;
  if (is(2, 32)) { t.dtype = Dtype::f32; flag = kF32; }
  if (is(4, 16)) { t.dtype = Dtype::bf16; flag = kBf16; }
  if (is(0, 64)) { t.dtype = Dtype::i64; flag = kI64; }
  if (is(0, 8)) { t.dtype = Dtype::i8; flag = kI8; }
  if (is(1, 8)) { t.dtype = Dtype::u8; flag = kU8; }
  if (d.dtype.lanes != 1 || (flag & dtypes) == 0) {
    std::string wanted;
    for (auto [bit, label] : {std::pair{kF32, "float32"}, std::pair{kBf16, "bfloat16"}, std::pair{kI64, "int64"},
                              std::pair{kI8, "int8"}, std::pair{kU8, "uint8"}})
      if (dtypes & bit) wanted += (wanted.empty() ? "" : " or ") + std::string(label);
    throw nb::type_error((std::string(t.name) + ": dtype must be " + wanted).c_str());
  }
  if (t.ndim == kAnyDims && d.ndim <= Tensor::kMaxDims) t.ndim = d.ndim;
  if (d.ndim != t.ndim)
    bad_value(t.name, "must have " + (t.ndim == kAnyDims ? "at most " + std::to_string(Tensor::kMaxDims) : std::to_string(t.ndim)) + " dimensions, not " + std::to_string(d.ndim));
  int64_t dense = 1;
  for (int i = t.ndim - 1; i >= 0; i--) {
    t.shape[i] = d.shape[i];
    t.strides[i] = d.strides == nullptr ? dense : d.strides[i];
    dense *= d.shape[i];
  }
  t.data = static_cast<char*>(d.data) + d.byte_offset;
}

void check_layout(const Tensor& t, int inner_contiguous, int64_t item) {
  int64_t dense = 1;  // 0 behind an empty dimension: no stride matters
  for (int i = t.ndim - 1; i >= t.ndim - inner_contiguous; i--) {
    if (t.shape[i] > 1 && dense > 0 && t.strides[i] != dense)
      bad_value(t.name, "must be contiguous in its last " + std::to_string(inner_contiguous) + " dimensions; call contiguous()");
    dense *= t.shape[i];
  }
  for (int i = 0; i < t.ndim; i++)
    if (t.shape[i] > 1 && t.strides[i] < 0) bad_value(t.name, "has a negative stride; call contiguous()");
  if (reinterpret_cast<uintptr_t>(t.data) % size_t(item) != 0)
    bad_value(t.name, "is not aligned to its elements of " + std::to_string(item) + " bytes");
}

}  // namespace

void bad_value(const char* name, const std::string& message) {
  throw nb::value_error((std::string(name) + ": " + message).c_str());
}

Tensor Tensor::from(nb::handle object, const char* name, int ndim, unsigned dtypes, int inner_contiguous) {
  Tensor t;
  t.name = name;
  t.ndim = ndim;
  if (const ExchangeApi* api = exchange_api(Py_TYPE(object.ptr()))) {
    DlTensor d{};
    if (api->borrow(object.ptr(), &d) != 0) throw nb::python_error();
    fill(t, d, dtypes);
  } else {
    if (!nb::hasattr(object, "__dlpack__"))
      throw nb::type_error((std::string(name) + ": must be a tensor (an object with __dlpack__)").c_str());
    // The capsule may be dropped: the memory belongs to `object`, which outlives the call.
    nb::object capsule = object.attr("__dlpack__")();
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
      fill(t, static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))->tensor, dtypes);
    } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
      auto* managed = static_cast<ManagedVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
      fill(t, managed->tensor, dtypes);
    } else {
      throw nb::type_error((std::string(name) + ": __dlpack__ returned no DLPack capsule").c_str());
    }
  }
  check_layout(t, inner_contiguous, t.item());
  return t;
}

bool Tensor::overlaps(const Tensor& other) const {
  const auto end = [](const Tensor& t) {
    int64_t last = 0;
    for (int i = 0; i < t.ndim; i++) {
      if (t.shape[i] == 0) return t.data;
      last += (t.shape[i] - 1) * t.strides[i];
    }
    return t.data + (last + 1) * t.item();
  };
  return data < end(other) && other.data < end(*this);
}

void Tensor::check_shape(std::initializer_list<int64_t> wanted) const {
  int i = 0;
  bool fits = true;
  std::string text;
  for (int64_t size : wanted) {
    text += (i ? ", " : "") + (size < 0 ? std::string("any") : std::to_string(size));
    fits = fits && (size < 0 || shape[size_t(i)] == size);
    i++;
  }
  if (!fits) bad_value(name, "must have shape [" + text + "], not " + shape_text(*this));
}

void Tensor::check_type(Type wanted) const {
  if (type() != wanted)
    throw nb::type_error((std::string(name) + ": dtype must be " + (wanted == Type::f32 ? "float32" : "bfloat16")).c_str());
}

}  // namespace milepost
