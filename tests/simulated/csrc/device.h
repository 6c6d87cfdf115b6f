// A simulated accelerator: host memory, streams that run on threads of their own, later, and a checker.
//
// streams.cpp       streams and their threads, delays, how the host waits
// events.cpp        points in a stream, and waits for them on other streams
// checker.cpp       who has read or written which bytes, and what orders two accesses
// allocator.cpp     device memory, used again at once in the order of the stream that frees it
// pinned.cpp        page-locked host memory
// guard.cpp         what torch asks a device for: devices, streams, events
// operators.cpp     views, copies, what is not a kernel
// fallback.cpp      every other operator: the CPU's kernel, later
// communicator.cpp  a process group whose collectives run on a stream of its own, as NCCL's do
// bindings.cpp      what Python sees
//
// One mutex guards everything. Nothing takes Python's lock while it holds this one: see `here()`.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace c10 {
struct DeviceAllocator;
struct Allocator;
struct DataPtr;
} // namespace c10
namespace torch {
struct CapturedTraceback;
}

namespace simulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
using Lock = std::unique_lock<std::recursive_mutex>;
std::recursive_mutex& mutex();

// ------------------------------------------------------------------------------------------------ settings

struct Settings {
  int devices = 2;
  std::string lag = "random"; // which streams are late: random, all, none, default, side or communicator
  double lag_us = 2000; // by how much
  size_t side_streams = 32; // per device, before they are handed out again
  bool reuse_at_once = true; // freed memory is overwritten when it is freed; else when it is given out again
  bool waits_raise = false; // as with torch.cuda.set_sync_debug_mode("error")
};
Settings& settings();
uint64_t random_number(); // of a generator that SIM_SEED seeds
void seed(uint64_t);

// ------------------------------------------------------------------------------------------------ checker

using Clock = std::vector<uint64_t>; // by a stream's number: how many of its operations have happened before
void merge(Clock& into, const Clock& from);

struct Range { // of bytes
  uintptr_t begin = 0, end = 0;
};
using Ranges = std::vector<Range>;

// The Python stack of a program's thread. Capturing takes Python's lock, so it comes before any `Lock`.
using Where = std::shared_ptr<torch::CapturedTraceback>;
Where here();

struct Stream;
// Report what this operation, the last one of the stream, reads or writes without being ordered after earlier accesses.
void check(Stream*, const std::string& name, const Ranges& reads, const Ranges& writes, const Where&);
// Forget accesses to a range that have happened before one of these clocks.
void forget(Range, const std::vector<Clock>&);
void note_host_wait(const std::string& what, const Where&);

std::vector<std::string> unordered_accesses(); // as text, each once
size_t host_wait_count();
std::vector<std::string> host_waits(size_t first);
void clear_reports();

// ------------------------------------------------------------------------------------------------ streams

struct Point { // in a stream
  Stream* stream = nullptr;
  uint64_t index = 0;
};
struct Operation {
  uint64_t index;
  std::function<void()> run; // empty for a wait
  std::chrono::steady_clock::time_point due;
  Point waits_for;
};
enum class Kind { Default, Side, Communicator };

struct Stream {
  int device;
  int64_t id; // torch's, within the device
  size_t number; // among all streams
  Kind kind;
  std::vector<Operation> queue; // first in, first out; from `head`
  size_t head = 0;
  uint64_t queued = 0, done = 0;
  uint64_t hurried = 0; // up to here the host waits: no delays
  bool has_thread = false;
  Clock clock; // what has happened before the next operation
  std::chrono::steady_clock::duration lag{0};
  uint64_t lag_left = 0; // operations until another lag is drawn
  std::condition_variable_any changed; // an operation is queued, over, or not delayed any longer
};
int& current_device(); // of this thread
Stream* current_stream(int device); // of this thread
void set_current_stream(Stream*);
Stream* stream_by_id(int device, int64_t id);
Stream* new_stream(int device, Kind);
c10::Stream as_torch(const Stream*);
std::vector<Stream*> streams_of(int device);

// Queue an operation. `reads` and `writes` are for the checker.
uint64_t enqueue(
    Stream*,
    const std::string& name,
    const Ranges& reads,
    const Ranges& writes,
    std::function<void()> run,
    const Where& where = here());
uint64_t queue_wait(Stream*, Point); // without a note of what the wait orders
uint64_t queue_mark(Stream*, std::function<void()> run); // touches no memory

bool is_over(Point);
void finish(Point); // waits, and raises what an operation has raised; the host learns nothing of it
bool finish_all(double seconds); // whether all has run by then; at exit
void host_knows(const Clock&); // all that the host queues later comes after this
bool host_has_seen(Point); // whether the host has waited for it, or has asked and found it over
bool stream_is_over(Stream*);
void synchronize(Stream*);
void synchronize_device(int device);
// What CUDA does in `item()` and in copies to pageable memory. An error where waits are forbidden.
void require_waits_allowed(const std::string& what);
void wait_for_result(Stream*, const std::string& what);

// ------------------------------------------------------------------------------------------------ events

struct Event {
  Point at;
  Clock clock;
  std::shared_ptr<std::chrono::steady_clock::time_point> time; // when it was over
};
Event record(Stream*);
void wait(Stream*, const Event&);
bool query(const Event&); // as the host asks: if it is over, the host knows
void synchronize(const Event&);

// ------------------------------------------------------------------------------------------------ counts

struct Counts { // of what the host has asked for
  uint64_t events = 0; // recorded
  uint64_t waits = 0; // of a stream for another one's event
  uint64_t record_streams = 0;
  uint64_t allocations = 0;
};
Counts& counts(); // hold the mutex

// ------------------------------------------------------------------------------------------------ memory

c10::DeviceAllocator& allocator();
c10::DataPtr allocate_on(size_t bytes, int device);
int device_of(const void*); // -1 if it is no device's memory
std::pair<int64_t, int64_t> bytes_now_and_at_most(int device);

c10::Allocator& pinned_allocator();
bool is_pinned(const void*);
bool use_pinned(const void*, Point until); // whether it is pinned; if so it is not used again before

// ------------------------------------------------------------------------------------------------ for Python

void register_hooks();
std::map<std::string, int> operators_not_queued(); // and why; how often

struct Started { // a collective, as the program started it
  std::string group, name, dtype;
  int64_t numel;
};
std::vector<Started> started_collectives();
void clear_started_collectives();

} // namespace simulated
