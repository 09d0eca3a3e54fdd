// Runs every kernel of every instruction set this CPU has over fixed inputs, with one and with two threads.
// Prints `<instruction set> <case> <hash of the result>` per line; a result that depends on cuts, rows,
// threads or flushed denormals is named on stderr and ends in exit status 1. Needs no Python, so that it
// runs under an emulator of another CPU; equal hashes mean equal bits.
#include <cstdio>

#include "check/buffers.h"
#include "check/cases.h"
#include "common/dispatch.h"
#include "common/threads.h"

int main() {
  using namespace milepost;
  int num_failures = 0;
  for (const std::string& isa : available_isas()) {
    set_isa(isa);
    for (const check::Case& one : check::all_cases()) {
      check::Report report;
      set_num_threads(1);
      const std::string result = one.run(report);
      set_num_threads(2);
      report.expect(one.run(report) == result, "two threads change bits");
      std::printf("%s %s %08x\n", isa.c_str(), one.name.c_str(), unsigned(check::hash_of(result)));
      for (const std::string& failure : report.failures)
        std::fprintf(stderr, "%s %s: %s\n", isa.c_str(), one.name.c_str(), failure.c_str());
      num_failures += int(report.failures.size());
    }
  }
  set_num_threads(1);
  return num_failures == 0 ? 0 : 1;
}
