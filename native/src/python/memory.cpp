#include "python/memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

namespace milepost {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kRegion = size_t(256) << 20;  // of address space
#if defined(__SANITIZE_ADDRESS__) || !defined(MADV_HUGEPAGE)
constexpr size_t kAlone = SIZE_MAX;  // every weight by itself, so that the sanitizer sees reads behind its end
#else
constexpr size_t kAlone = size_t(64) << 10;  // smaller ones are not worth a place among the large
#endif

size_t rounded_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

std::shared_ptr<void> alone(size_t bytes) {
  void* memory = std::aligned_alloc(64, rounded_up(bytes, 64));
  if (memory == nullptr) throw std::bad_alloc();
  return std::shared_ptr<void>(memory, std::free);
}

#if defined(MADV_HUGEPAGE)
// Address space whose pages come with their first write.
class Region {
 public:
  explicit Region(size_t size) : size_(size) {
    mapped_ = size + kHugePage;
    map_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map_ == MAP_FAILED) throw std::bad_alloc();
    data_ = reinterpret_cast<char*>(rounded_up(reinterpret_cast<uintptr_t>(map_), kHugePage));
    madvise(data_, size_, MADV_HUGEPAGE);  // refused: small pages do as well
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { munmap(map_, mapped_); }

  // nullptr if the rest is too small
  char* take(size_t bytes) {
    if (size_ - used_ < bytes) return nullptr;
    char* place = data_ + used_;
    used_ += bytes;
    return place;
  }
  void reuse() { used_ = 0; }

 private:
  void* map_;
  char* data_;
  size_t mapped_, size_, used_ = 0;
};

std::mutex mutex;
std::shared_ptr<Region> current;  // where the next weight goes
#endif

}  // namespace

std::shared_ptr<void> weight_memory(size_t bytes) {
  if (bytes < kAlone) return alone(bytes);
#if defined(MADV_HUGEPAGE)
  std::lock_guard<std::mutex> lock(mutex);
  const size_t size = rounded_up(bytes, 64);
  if (current && current.use_count() == 1) current->reuse();  // all weights in it are gone
  char* place = current ? current->take(size) : nullptr;
  if (place == nullptr) {
    current = std::make_shared<Region>(rounded_up(size > kRegion ? size : kRegion, kHugePage));
    place = current->take(size);
  }
  return std::shared_ptr<void>(current, place);
#else
  return alone(bytes);
#endif
}

}  // namespace milepost
