// Steps that run again without Python in between.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "python/plans.h"

namespace milepost {

// What differs between two steps with the same number of rows.
struct StepContext {
  const int64_t* ids = nullptr;  // [rows]
  AttentionPlan* attention = nullptr;
  const RecurrentPlan* recurrent = nullptr;
};

class Tape;

// What a thread writes down, if it does.
struct Recorder {
  Tape* tape = nullptr;
};

// The calls of one step, written down while they run. They may run again with other token ids and plans of as many
// rows, and give what the calls themselves would give.
//
// A call counts only if all it reads was written by a call before it. What anybody else computed in between would
// be missing from the tape: such a tape is of no use, and says so.
class Tape {
 public:
  using Call = std::function<void(const StepContext&)>;

  Tape() = default;
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;
  ~Tape();

  // Calls of this thread are written down until `stop`, which no other thread may call.
  void start();
  // `result`: what the step gives; without one the tape is of no use.
  void stop(nb::handle result);
  bool is_complete() const { return complete_ && rows_ >= 0; }
  int64_t num_calls() const { return int64_t(calls_.size()); }
  void run(nb::handle ids, AttentionPlan* attention, const RecurrentPlan* recurrent) const;

  static Tape* recording();
  // Owners keep the memory behind the pointers of the call.
  void add(Call call, const std::vector<const Tensor*>& reads, const Tensor& written,
           const std::vector<nb::handle>& owners, const StepContext& context);

 private:
  bool was_written(const Tensor& tensor) const;

  std::vector<Call> calls_;
  std::vector<nb::object> owners_;
  std::vector<std::pair<const char*, const char*>> written_;
  StepContext seen_;
  std::shared_ptr<Recorder> recorder_;  // of the thread that records it
  int64_t rows_ = -1;
  bool complete_ = true;
};

// Runs a call without the GIL, and writes it down if somebody records.
template <class Call>
void perform(const Call& call, const StepContext& context, const std::vector<const Tensor*>& reads,
             const Tensor& written, const std::vector<nb::handle>& owners) {
  if (Tape* tape = Tape::recording()) tape->add(call, reads, written, owners, context);
  nb::gil_scoped_release release;
  call(context);
}

}  // namespace milepost
