// Sampling. What it gives goes to Python, not into a step: no tape writes it down.
#include <vector>

#include "common/dispatch.h"
#include "python/operations.h"

namespace milepost {
namespace {

using nb::handle;

Tensor logits_of(handle object) {
  const Tensor logits = Tensor::from(object, "logits", 2, kF32, 1);
  if (logits.shape[1] < 1 || logits.shape[1] > kMaxVocabulary)
    bad_value("logits", "must have from 1 to " + std::to_string(kMaxVocabulary) + " columns");
  return logits;
}

SampleRule rule_of(handle object) {
  SampleRule rule{};
  if (object.is_none()) return rule;
  const nb::tuple fields = nb::cast<nb::tuple>(object);
  if (fields.size() != 5) bad_value("rules", "must hold None or (temperature, log_min_p, top_p, top_k, noise_key)");
  rule.temperature = nb::cast<double>(fields[0]);
  rule.log_min_p = nb::cast<double>(fields[1]);
  rule.top_p = nb::cast<double>(fields[2]);
  rule.top_k = nb::cast<int64_t>(fields[3]);
  rule.noise_key = nb::cast<uint64_t>(fields[4]);
  if (!(rule.temperature > 0.0)) bad_value("rules", "a temperature must be above 0; None is greedy");
  if (!(rule.log_min_p <= 0.0)) bad_value("rules", "log_min_p must be at most 0");
  if (rule.top_p != rule.top_p) bad_value("rules", "top_p must be a number");
  if (rule.top_k < 0) bad_value("rules", "top_k must not be negative");
  return rule;
}

}  // namespace

nb::tuple sample(handle logits_object, nb::list rule_objects) {
  const Tensor logits = logits_of(logits_object);
  std::vector<SampleRule> rules;
  for (handle rule : rule_objects) rules.push_back(rule_of(rule));
  if (int64_t(rules.size()) != logits.shape[0]) bad_value("rules", "must have one entry per row of logits");
  std::vector<int64_t> ids(rules.size());
  std::vector<char> finite(rules.size());
  {
    nb::gil_scoped_release release;
    kernels().sample(SampleArgs{logits.rows(), logits.shape[0], logits.shape[1], rules.data(), ids.data(), finite.data()});
  }
  nb::list id_list, finite_list;
  for (int64_t id : ids) id_list.append(id);
  for (char is_finite : finite) finite_list.append(bool(is_finite));
  return nb::make_tuple(id_list, finite_list);
}

void log_probabilities(handle logits_object, handle ids_object, handle values_object, handle best_object) {
  const Tensor logits = logits_of(logits_object), ids = Tensor::from(ids_object, "ids", 1, kI64, 1);
  const Tensor values = Tensor::from(values_object, "values", 2, kF32, 2), best = Tensor::from(best_object, "best", 2, kI64, 2);
  const int64_t rows = logits.shape[0], count = best.shape[1];
  ids.check_shape({rows});
  best.check_shape({rows, -1});
  values.check_shape({rows, 1 + count});
  if (count > logits.shape[1]) bad_value("best", "must not be wider than logits");
  for (int64_t row = 0; row < rows; row++)
    if (ids.integers()[row] < 0 || ids.integers()[row] >= logits.shape[1])
      bad_value("ids", "id " + std::to_string(ids.integers()[row]) + " is outside of the vocabulary");
  nb::gil_scoped_release release;
  kernels().log_probabilities(LogprobArgs{logits.rows(), rows, logits.shape[1], ids.integers(), count, values.floats(),
                                          reinterpret_cast<int64_t*>(best.data)});
}

nb::list gumbel_noise(uint64_t key, int64_t count) {
  if (count < 0 || count > kMaxVocabulary) bad_value("count", "must lie in [0, " + std::to_string(kMaxVocabulary) + "]");
  std::vector<double> noise(static_cast<size_t>(count));
  kernels().gumbel_noise(key, count, noise.data());
  nb::list list;
  for (double each : noise) list.append(each);
  return list;
}

}  // namespace milepost
