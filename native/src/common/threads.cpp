#include "common/threads.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace milepost {
namespace {

class FloatDefaults {
 public:
#if defined(__x86_64__)
  FloatDefaults() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatDefaults() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatDefaults() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t(0)));
  }
  ~FloatDefaults() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

struct Job {
  int64_t num_items;
  ItemFunction function;
  const void* args;
  std::atomic<int64_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error;

  void work() {
    FloatDefaults defaults;
    try {
      for (int64_t item; (item = next.fetch_add(1)) < num_items;) function(args, item);
    } catch (...) {
      next.store(num_items);
      std::lock_guard<std::mutex> lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }
};

class Pool {
 public:
  explicit Pool(int helpers) : owner_(getpid()) {
    for (int i = 0; i < helpers; i++) threads_.emplace_back([this] { loop(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  // A forked child has the pool but not its threads.
  bool usable() const { return owner_ == getpid(); }
  int helpers() const { return int(threads_.size()); }

  void run(Job& job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      generation_++;
      active_ = helpers();
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return active_ == 0; });
    job_ = nullptr;
  }

 private:
  void loop() {
    uint64_t seen = 0;
    for (;;) {
      Job* job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
        if (stop_) return;
        seen = generation_;
        job = job_;
      }
      job->work();
      std::lock_guard<std::mutex> lock(mutex_);
      if (--active_ == 0) done_.notify_one();
    }
  }

  pid_t owner_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  int active_ = 0;
  bool stop_ = false;
};

std::mutex pool_mutex;  // one parallel call at a time; others run in their own thread alone
Pool* pool = nullptr;
std::atomic<int> wanted_threads{1};

struct Arena {
  void* blocks[kNumScratchSlots] = {};
  size_t sizes[kNumScratchSlots] = {};
  ~Arena() {
    for (void* block : blocks) std::free(block);
  }
};
thread_local Arena arena;

}  // namespace

int num_threads() { return wanted_threads.load(); }

void set_num_threads(int count) {
  std::lock_guard<std::mutex> lock(pool_mutex);
  wanted_threads = count;
  if (pool != nullptr && pool->usable()) delete pool;
  pool = nullptr;
}

void run_items(int64_t num_items, ItemFunction function, const void* args, bool parallel) {
  Job job{};
  job.num_items = num_items;
  job.function = function;
  job.args = args;
  std::unique_lock<std::mutex> lock(pool_mutex, std::defer_lock);
  if (parallel && num_items > 1 && wanted_threads.load() > 1 && lock.try_lock()) {
    // The threads of a forked child's pool do not exist; leaking the object is all one can do.
    if (pool == nullptr || !pool->usable()) pool = new Pool(wanted_threads.load() - 1);
    pool->run(job);
  } else {
    job.work();
  }
  if (job.error) std::rethrow_exception(job.error);
}

void run_items_once(int64_t num_items, ItemFunction function, const void* args, int threads) {
  Job job{};
  job.num_items = num_items;
  job.function = function;
  job.args = args;
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < threads && i < num_items; i++) {
    try {
      helpers.emplace_back([&job] { job.work(); });
    } catch (const std::system_error&) {
      break;  // as many as the system allows
    }
  }
  job.work();
  for (std::thread& helper : helpers) helper.join();
  if (job.error) std::rethrow_exception(job.error);
}

void* scratch(int slot, size_t bytes) {
  if (arena.sizes[slot] < bytes) {
    std::free(arena.blocks[slot]);
    const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    arena.blocks[slot] = std::aligned_alloc(64, size);
    arena.sizes[slot] = arena.blocks[slot] == nullptr ? 0 : size;
    if (arena.blocks[slot] == nullptr) throw std::bad_alloc();
  }
  return arena.blocks[slot];
}

}  // namespace milepost
