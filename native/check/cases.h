// Every kernel over fixed inputs. A case returns what the kernel wrote and reports what it should not do.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace milepost::check {

class Report {
 public:
  void expect(bool holds, const std::string& what) {
    if (!holds) failures.push_back(what);
  }
  std::vector<std::string> failures;
};

struct Case {
  std::string name;
  std::function<std::string(Report&)> run;
};

std::vector<Case> all_cases();
// Those of mixtures.cpp and sampling.cpp, which all_cases has as well.
void add_mixtures(std::vector<Case>& cases);
void add_sampling(std::vector<Case>& cases);

}  // namespace milepost::check
