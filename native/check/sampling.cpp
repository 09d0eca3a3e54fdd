// Sampling and log-probabilities over rows of every shape that took a path of its own.
#include <limits>

#include "check/buffers.h"
#include "check/cases.h"
#include "common/dispatch.h"

namespace milepost::check {
namespace {

constexpr int64_t kRows = 24;
const float kInfinity = std::numeric_limits<float>::infinity();

// Spread, spiky, tied, partly -infinity, huge and constant rows; some that are not finite.
Array logits_of(int64_t vocabulary) {
  Array logits = Array::random(kRows, vocabulary, 60, Type::f32, 4.0f, 0.0f, 3);
  Random random(61);
  for (int64_t row = 0; row < kRows; row++)
    for (int64_t i = 0; i < vocabulary; i++) {
      const float x = logits.floats()[row * (vocabulary + 3) + i];
      if (row % 6 == 1) logits.set(row, i, random.next() % 97 == 0 ? 30.0f + x : x);
      if (row % 6 == 2) logits.set(row, i, float(int(x)));
      if (row % 6 == 3) logits.set(row, i, i > 0 && random.next() % 2 == 0 ? -kInfinity : x);
      if (row % 6 == 4) logits.set(row, i, x * 4e37f);
      if (row % 6 == 5) logits.set(row, i, 0.5f);
    }
  logits.set(7, vocabulary / 2, from_bits(0x7FC00000u));
  logits.set(13, vocabulary - 1, kInfinity);
  logits.set(19, 0, from_bits(0xFFC00000u));
  return logits;
}

SampleRule rule_of(int64_t row) {
  const double temperatures[] = {1.0, 0.0, 0.6, 100.0, 1e-3}, shares[] = {1.0, 0.95, 0.3, 1e-9};
  const int64_t top_k[] = {0, 20, 3};
  const double log_min_p[] = {-double(kInfinity), -double(kInfinity), -3.0};
  return SampleRule{temperatures[row % 5], log_min_p[row / 2 % 3], shares[row % 4], top_k[row % 3],
                    0x9E3779B97F4A7C15u * uint64_t(row + 1)};
}

std::string sampled(Report& report) {
  std::string all;
  for (int64_t vocabulary : {1, 5, 64, 1000, 5003}) {
    Array logits = logits_of(vocabulary);
    std::vector<SampleRule> rules;
    for (int64_t row = 0; row < kRows; row++) rules.push_back(rule_of(row));
    std::vector<int64_t> ids(kRows, -1);
    std::vector<char> finite(kRows, 2);
    kernels().sample(SampleArgs{logits.view(), kRows, vocabulary, rules.data(), ids.data(), finite.data()});
    for (int64_t row = 0; row < kRows; row++) {
      int64_t id = -1;
      char is_finite = 2;
      kernels().sample(SampleArgs{logits.from(row), 1, vocabulary, &rules[size_t(row)], &id, &is_finite});
      report.expect(id == ids[size_t(row)] && is_finite == finite[size_t(row)], "a row alone differs");
      report.expect(id >= 0 && id < vocabulary, "no token of the vocabulary");
      const bool is_broken = row == 7 || row == 13 || row == 19;
      if (is_broken) report.expect(!is_finite && id == 0, "a row that is not finite was taken");
      if (row % 6 == 3 && !is_broken) report.expect(logits.floats()[row * (vocabulary + 3) + id] > -kInfinity, "-infinity was sampled");
      if (row % 6 != 3 && !is_broken) report.expect(is_finite == 1, "a finite row was refused");
    }
    all.append(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int64_t));
    all.append(finite.data(), finite.size());
  }
  return all;
}

std::string logprobs(Report& report) {
  std::string all;
  for (int64_t vocabulary : {1, 70, 5003}) {
    Array logits = logits_of(vocabulary);
    for (int64_t count : {int64_t(0), int64_t(1), vocabulary < 100 ? vocabulary : 100}) {
      Array values(kRows, 1 + count);
      std::vector<int64_t> ids, best(size_t(kRows * count), -1);
      for (int64_t row = 0; row < kRows; row++) ids.push_back(row * 13 % vocabulary);
      kernels().log_probabilities(
          LogprobArgs{logits.view(), kRows, vocabulary, ids.data(), count, values.floats(), best.data()});
      for (int64_t row = 0; row < kRows; row++) {
        Array alone(1, 1 + count);
        std::vector<int64_t> alone_best(size_t(count), -1);
        kernels().log_probabilities(
            LogprobArgs{logits.from(row), 1, vocabulary, &ids[size_t(row)], count, alone.floats(), alone_best.data()});
        report.expect(alone.values() == values.values(row, row + 1), "a row alone differs");
        for (int64_t i = 0; i < count; i++) report.expect(alone_best[size_t(i)] == best[size_t(row * count + i)], "a row alone differs");
      }
      all += values.values();
      all.append(reinterpret_cast<const char*>(best.data()), best.size() * sizeof(int64_t));
    }
  }
  return all;
}

std::string noise(Report& report) {
  std::vector<double> values(1000);
  kernels().gumbel_noise(0x0123456789ABCDEFu, 1000, values.data());
  for (double x : values) report.expect(x > -4.0 && x < 37.0, "no Gumbel noise");
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double));
}

}  // namespace

void add_sampling(std::vector<Case>& cases) {
  cases.push_back({"sample", sampled});
  cases.push_back({"log_probabilities", logprobs});
  cases.push_back({"gumbel_noise", noise});
}

}  // namespace milepost::check
