// A small pool. Work is cut into items before anything runs, so that no result depends on how many
// threads there are or which of them takes an item.
#pragma once

#include <cstddef>
#include <cstdint>

namespace milepost {

using ItemFunction = void (*)(const void* args, int64_t item);

// Runs all items and returns; in the caller alone if `parallel` is false or there is one thread.
// Rounding mode and denormals are the IEEE defaults inside, whatever the caller has set.
void run_items(int64_t num_items, ItemFunction function, const void* args, bool parallel);

// The same in up to `threads` threads that exist for this call only.
void run_items_once(int64_t num_items, ItemFunction function, const void* args, int threads);

int num_threads();
void set_num_threads(int count);

// Memory of the calling thread, 64-byte aligned, kept between calls. Each slot is one block.
void* scratch(int slot, size_t bytes);
template <class T>
inline __attribute__((always_inline)) T* scratch_of(int slot, int64_t count) {
  return static_cast<T*>(scratch(slot, size_t(count) * sizeof(T)));
}

// Slots in use; a kernel that calls another must not share one with it.
enum ScratchSlot : int {
  kPackedRows, kTile, kKeys, kValues, kScores, kWeights, kAccumulators, kKdaWork, kKdaState, kInitialStates,
  kMoeOutput, kMoeInner, kMoeIndex, kQuery, kMixed, kStaged, kDecoded, kLatents, kExpanded, kSpans,
  kBlockMaxima, kCandidates, kCandidateWeights, kNumScratchSlots
};

}  // namespace milepost
