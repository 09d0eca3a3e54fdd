#include "python/tape.h"

namespace milepost {
namespace {

thread_local std::shared_ptr<Recorder> current = std::make_shared<Recorder>();

// One past the last byte a tensor may touch.
const char* end_of(const Tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.ndim; i++) last += (t.shape[size_t(i)] - 1) * t.strides[size_t(i)];
  return t.data + (last + 1) * t.item();
}

}  // namespace

Tape::~Tape() {
  if (recorder_ != nullptr) recorder_->tape = nullptr;
}

Tape* Tape::recording() { return current->tape; }

void Tape::start() {
  if (current->tape != nullptr) bad_value("tape", "this thread records already");
  if (!calls_.empty()) bad_value("tape", "was recorded before");
  current->tape = this;
  recorder_ = current;
}

void Tape::stop(nb::handle result) {
  if (recorder_ != nullptr) {
    if (recorder_ != current) bad_value("tape", "another thread records it");
    recorder_->tape = nullptr;
    recorder_ = nullptr;
  }
  complete_ = complete_ && !result.is_none() && was_written(Tensor::from(result, "result", 2, kFloats, 1));
}

bool Tape::was_written(const Tensor& tensor) const {
  for (const auto& [first, end] : written_)
    if (tensor.data >= first && end_of(tensor) <= end) return true;
  return false;
}

void Tape::add(Call call, const std::vector<const Tensor*>& reads, const Tensor& written,
               const std::vector<nb::handle>& owners, const StepContext& context) {
  if (context.ids != nullptr) {
    complete_ = complete_ && calls_.empty();
    rows_ = written.shape[0];
  }
  for (const Tensor* tensor : reads) complete_ = complete_ && was_written(*tensor);
  const auto same = [](auto*& known, auto* now) {
    if (known == nullptr) known = now;
    return now == nullptr || known == now;
  };
  complete_ = complete_ && same(seen_.attention, context.attention) && same(seen_.recurrent, context.recurrent);
  written_.emplace_back(written.data, end_of(written));
  calls_.push_back(std::move(call));
  for (nb::handle owner : owners)
    if (owner.is_valid()) owners_.push_back(nb::borrow(owner));
}

void Tape::run(nb::handle ids_object, AttentionPlan* attention, const RecurrentPlan* recurrent) const {
  if (!is_complete()) bad_value("tape", "does not hold all of a step");
  const Tensor ids = Tensor::from(ids_object, "ids", 1, kI64, 1);
  ids.check_shape({rows_});
  if (seen_.attention != nullptr && (attention == nullptr || attention->rows() != rows_))
    bad_value("attention", "must be a plan of " + std::to_string(rows_) + " rows");
  if (seen_.recurrent != nullptr && (recurrent == nullptr || recurrent->rows() != rows_))
    bad_value("recurrent", "must be a plan of " + std::to_string(rows_) + " rows");
  const StepContext context{ids.integers(), attention, recurrent};
  nb::gil_scoped_release release;
  for (const Call& call : calls_) call(context);
}

}  // namespace milepost
