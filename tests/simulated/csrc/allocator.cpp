// Device memory. A block belongs to the stream it was made on. Freed, it is used again at once, in that stream's order,
// and filled with NaNs, so that whoever reads it too late on another stream reads NaNs and is reported. `record_stream`
// keeps a block until what its other streams had queued is over, as CUDA's caching allocator does.
#include "device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>
#include <set>
#include <unordered_map>

namespace simulated {

namespace {

struct Block {
  void* memory;
  size_t size, asked;
  Stream* stream;
  std::set<Stream*> others; // record_stream
};
struct Kept { // freed while other streams use it
  Block* block;
  std::vector<Event> until;
};
struct Usage {
  int64_t now = 0, most = 0;
};
struct Memory {
  std::unordered_map<const void*, Block*> used;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> free;
  std::vector<Kept> kept;
  std::map<int, Usage> usage;
};
Memory& the_memory() {
  static auto* made = new Memory;
  return *made;
}

Range bytes_of(const Block* block) {
  auto begin = reinterpret_cast<uintptr_t>(block->memory);
  return {begin, begin + block->size};
}
// All bits set: NaN in every floating dtype.
void overwrite(Block* block, const char* name, const Where& where) {
  auto fill = [block] { std::memset(block->memory, 0xFF, block->size); };
  enqueue(block->stream, name, {}, {bytes_of(block)}, fill, where);
}
void make_free(Block* block, const Where& where) {
  if (settings().reuse_at_once) overwrite(block, "reuse of freed memory", where);
  the_memory().free[{block->stream, block->size}].push_back(block);
}

void free_what_is_over(const Where& where) {
  auto& kept = the_memory().kept;
  for (size_t i = 0; i < kept.size();) {
    auto [block, until] = kept[i];
    bool over = true;
    std::vector<Clock> clocks;
    for (auto& event : until) over = over && is_over(event.at), clocks.push_back(event.clock);
    if (!over) {
      i++;
      continue;
    }
    forget(bytes_of(block), clocks);
    make_free(block, where);
    kept.erase(kept.begin() + std::ptrdiff_t(i));
  }
}

void release_block(void* context) {
  if (!context) return;
  auto where = here();
  Lock lock(mutex());
  auto* block = static_cast<Block*>(context);
  the_memory().used.erase(block->memory);
  the_memory().usage[block->stream->device].now -= int64_t(block->asked);
  Kept kept{block, {}};
  for (auto* stream : block->others)
    if (stream != block->stream) kept.until.push_back(record(stream)), counts().events--; // when it is freed is chance
  block->others.clear();
  if (kept.until.empty())
    make_free(block, where);
  else
    the_memory().kept.push_back(kept);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return allocate_on(bytes, current_device());
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    auto target = reinterpret_cast<uintptr_t>(to), source = reinterpret_cast<uintptr_t>(from);
    auto copy = [=] { std::memcpy(to, from, bytes); };
    enqueue(current_stream(current_device()), "copy", {{source, source + bytes}}, {{target, target + bytes}}, copy);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    Lock lock(mutex());
    counts().record_streams++;
    auto found = the_memory().used.find(memory.get());
    if (found != the_memory().used.end()) found->second->others.insert(stream_by_id(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(mutex());
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto usage = the_memory().usage[device];
    for (auto* kind : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*kind)[0].current = usage.now;
      (*kind)[0].peak = usage.most;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(mutex());
    the_memory().usage[device].most = the_memory().usage[device].now;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {size_t(1) << 34, size_t(1) << 34}; // bytes free, and in all
  }
};

} // namespace

c10::DeviceAllocator& allocator() {
  static auto* made = new Allocator;
  return *made;
}
REGISTER_ALLOCATOR(kDevice, &allocator());

c10::DataPtr allocate_on(size_t bytes, int index) {
  c10::Device device(kDevice, c10::DeviceIndex(index));
  if (bytes == 0) return {nullptr, nullptr, &release_block, device};
  auto where = here();
  Lock lock(mutex());
  counts().allocations++;
  free_what_is_over(where);
  auto* stream = current_stream(index);
  size_t size = 512; // as CUDA's; then powers of two
  while (size < bytes) size *= 2;
  auto& free = the_memory().free[{stream, size}];
  Block* block;
  if (free.empty()) {
    block = new Block{c10::alloc_cpu(size), size, bytes, stream, {}};
    overwrite(block, "fresh memory", where);
  } else {
    block = free.back();
    free.pop_back();
    if (!settings().reuse_at_once) overwrite(block, "reuse of freed memory", where);
  }
  block->asked = bytes;
  auto& usage = the_memory().usage[index];
  usage.now += int64_t(bytes);
  usage.most = std::max(usage.most, usage.now);
  the_memory().used[block->memory] = block;
  return {block->memory, block, &release_block, device};
}

int device_of(const void* memory) {
  Lock lock(mutex());
  auto found = the_memory().used.find(memory);
  return found == the_memory().used.end() ? -1 : found->second->stream->device;
}

} // namespace simulated
