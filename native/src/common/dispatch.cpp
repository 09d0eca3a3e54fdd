#include "common/dispatch.h"

#include <atomic>
#include <stdexcept>

namespace milepost {

namespace baseline { const KernelTable& table(); }
#if defined(MP_HAS_X86_PATHS)
namespace avx2 { const KernelTable& table(); }
namespace avx512 { const KernelTable& table(); }
namespace avx512_bf16 { const KernelTable& table(); }
#endif

namespace {

// An AMX path would be one more table here; its numerics need an id of their own (TDPBF16PS flushes
// denormals and rounds in another order), and the process must ask the kernel for the tile registers.
std::vector<const KernelTable*> usable_tables() {
  std::vector<const KernelTable*> tables = {&baseline::table()};
#if defined(MP_HAS_X86_PATHS)
  // These builtins also ask the operating system whether it saves the registers.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&avx2::table());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    tables.push_back(&avx512::table());
    if (__builtin_cpu_supports("avx512bf16")) tables.push_back(&avx512_bf16::table());
  }
#endif
  return tables;
}

std::atomic<const KernelTable*> chosen{nullptr};

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : usable_tables()) names.emplace_back(table->isa);
  return names;
}

const KernelTable& kernels() {
  const KernelTable* table = chosen.load();
  if (table == nullptr) {
    table = usable_tables().back();
    chosen.store(table);
  }
  return *table;
}

void set_isa(const std::string& name) {
  std::string known;
  for (const KernelTable* table : usable_tables()) {
    if (name == table->isa) {
      chosen.store(table);
      return;
    }
    known += known.empty() ? table->isa : std::string(", ") + table->isa;
  }
  throw std::invalid_argument("instruction set '" + name + "' is not available on this CPU; available: " + known);
}

}  // namespace milepost
