// Page-locked host memory: copies from and to it do not make the host wait. Freed, a block is used again only when such
// copies are over, as in CUDA's caching host allocator.
#include "device.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <cstring>

namespace simulated {

namespace {

struct Pinned {
  void* memory;
  size_t size;
  std::vector<Point> until; // copies that use it
};
struct PinnedMemory {
  std::map<uintptr_t, Pinned> used; // by its first byte
  std::vector<Pinned> freed;
};
PinnedMemory& the_pinned() {
  static auto* made = new PinnedMemory;
  return *made;
}

void release_pinned(void* memory) {
  if (!memory) return;
  Lock lock(mutex());
  auto found = the_pinned().used.find(reinterpret_cast<uintptr_t>(memory));
  the_pinned().freed.push_back(found->second);
  the_pinned().used.erase(found);
}

Pinned* block_of(const void* memory) {
  auto byte = reinterpret_cast<uintptr_t>(memory);
  auto found = the_pinned().used.upper_bound(byte);
  if (found == the_pinned().used.begin()) return nullptr;
  --found;
  return byte < found->first + found->second.size ? &found->second : nullptr;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    Lock lock(mutex());
    size_t size = 512;
    while (size < bytes) size *= 2;
    auto usable = [&](const Pinned& block) {
      return block.size == size && std::all_of(block.until.begin(), block.until.end(), is_over);
    };
    auto& freed = the_pinned().freed;
    auto found = std::find_if(freed.begin(), freed.end(), usable);
    Pinned block{nullptr, size, {}};
    if (found == freed.end()) {
      block.memory = c10::alloc_cpu(size);
    } else {
      block.memory = found->memory;
      freed.erase(found);
    }
    std::memset(block.memory, 0xFF, size); // NaNs
    the_pinned().used[reinterpret_cast<uintptr_t>(block.memory)] = block;
    return {block.memory, block.memory, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

} // namespace

c10::Allocator& pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return *made;
}
bool is_pinned(const void* memory) {
  Lock lock(mutex());
  return block_of(memory) != nullptr;
}
bool use_pinned(const void* memory, Point until) {
  Lock lock(mutex());
  auto* block = block_of(memory);
  if (block && until.stream) block->until.push_back(until);
  return block != nullptr;
}

} // namespace simulated
