// Streams: queues that a thread each works off, later than it could. The host runs ahead, as with a real accelerator.
#include "device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <thread>

#include <ATen/Parallel.h>

namespace simulated {

using steady = std::chrono::steady_clock;

namespace {

const char* setting(const char* name, const char* otherwise) {
  const char* found = std::getenv(name);
  return found ? found : otherwise;
}

struct Streams {
  std::vector<Stream*> all;
  std::map<std::pair<int, int64_t>, Stream*> by_id;
  std::map<int, int64_t> last_id;
  std::map<int, std::vector<Stream*>> side;
  std::map<int, size_t> next_side;
  Clock host; // what the host knows to be over
  std::string error; // of an operation; raised where the host waits next, as a device's errors are
  std::mt19937 random{std::mt19937::result_type(std::atoi(setting("SIM_SEED", "1")))};
};
Streams& the_streams() {
  static auto* made = new Streams; // never destroyed: threads use it until the process ends
  return *made;
}

Stream* make(int device, int64_t id, Kind kind) {
  auto* stream = new Stream{device, id, the_streams().all.size(), kind};
  the_streams().all.push_back(stream);
  the_streams().by_id[{device, id}] = stream;
  return stream;
}

steady::duration lag_of(Stream* stream) {
  auto full = std::chrono::duration_cast<steady::duration>(std::chrono::duration<double, std::micro>(settings().lag_us));
  const auto& late = settings().lag;
  if (late == "random") { // for some operations in a row, so that streams overtake each other
    if (stream->lag_left == 0) {
      stream->lag_left = 1 + random_number() % 24;
      stream->lag = full * (random_number() % 4);
    }
    stream->lag_left--;
    return stream->lag;
  }
  static const std::map<Kind, std::string> names = {
      {Kind::Default, "default"}, {Kind::Side, "side"}, {Kind::Communicator, "communicator"}};
  return late == "all" || late == names.at(stream->kind) ? full : steady::duration(0);
}

// The host waits for this point: what it depends on is not delayed any longer. All else stays late.
void hurry(Point point) {
  if (!point.stream || point.stream->hurried >= point.index) return;
  auto* stream = point.stream;
  stream->hurried = point.index;
  stream->changed.notify_all();
  for (size_t i = stream->head; i < stream->queue.size(); i++)
    if (stream->queue[i].index <= point.index) hurry(stream->queue[i].waits_for);
}

void wait_until_over(Point point, Lock& lock) {
  point.stream->changed.wait(lock, [&] { return is_over(point); });
}

void run_operation(std::function<void()> run, Lock& lock) {
  lock.unlock();
  std::string error;
  try {
    run();
  } catch (const c10::Error& raised) {
    error = raised.what_without_backtrace();
  } catch (const std::exception& raised) {
    error = raised.what();
  }
  run = nullptr; // before others see that it is over
  lock.lock();
  if (the_streams().error.empty()) the_streams().error = error;
}

void serve(Stream* stream) {
  at::set_num_threads(1);
  Lock lock(mutex());
  while (true) {
    stream->changed.wait(lock, [&] { return stream->head < stream->queue.size(); });
    auto index = stream->queue[stream->head].index;
    auto due = stream->queue[stream->head].due;
    while (stream->hurried < index && steady::now() < due) stream->changed.wait_until(lock, due);
    auto& next = stream->queue[stream->head];
    if (Point awaited = next.waits_for; awaited.stream)
      wait_until_over(awaited, lock);
    else if (next.run)
      run_operation(std::move(next.run), lock);
    stream->done = index;
    if (++stream->head == stream->queue.size()) stream->queue.clear(), stream->head = 0;
    stream->changed.notify_all();
  }
}

uint64_t push(Stream* stream, std::function<void()> run, Point waits_for) {
  auto index = ++stream->queued;
  if (stream->clock.size() <= stream->number) stream->clock.resize(stream->number + 1);
  stream->clock[stream->number] = index;
  stream->queue.push_back({index, std::move(run), steady::now() + lag_of(stream), waits_for});
  if (waits_for.stream && stream->hurried >= index) hurry(waits_for);
  if (!stream->has_thread) {
    stream->has_thread = true;
    std::thread(serve, stream).detach();
  }
  stream->changed.notify_all();
  return index;
}

void raise_error() {
  std::string text;
  std::swap(text, the_streams().error);
  TORCH_CHECK(text.empty(), "simulated device: an operation failed: ", text);
}

Point end_of(Stream* stream) {
  return {stream, stream->queued};
}

} // namespace

std::recursive_mutex& mutex() {
  static auto* made = new std::recursive_mutex;
  return *made;
}

Settings& settings() {
  static auto* made = [] {
    auto* read = new Settings;
    read->devices = std::atoi(setting("SIM_DEVICES", "2"));
    read->lag = setting("SIM_LAG", "random");
    read->lag_us = std::atof(setting("SIM_LAG_US", "2000"));
    return read;
  }();
  return *made;
}
uint64_t random_number() {
  return the_streams().random();
}
void seed(uint64_t number) {
  the_streams().random.seed(std::mt19937::result_type(number));
}

int& current_device() {
  thread_local int device = 0;
  return device;
}
namespace {
std::map<int, Stream*>& current_streams() {
  thread_local std::map<int, Stream*> by_device;
  return by_device;
}
} // namespace
Stream* current_stream(int device) {
  auto found = current_streams().find(device);
  return found != current_streams().end() ? found->second : stream_by_id(device, 0);
}
void set_current_stream(Stream* stream) {
  current_streams()[stream->device] = stream;
}
Stream* stream_by_id(int device, int64_t id) {
  Lock lock(mutex());
  auto found = the_streams().by_id.find({device, id});
  if (found != the_streams().by_id.end()) return found->second;
  TORCH_CHECK(id == 0, "simulated device: expected a stream of device ", device, ", found the number ", id);
  return make(device, 0, Kind::Default);
}
Stream* new_stream(int device, Kind kind) {
  Lock lock(mutex());
  if (kind == Kind::Communicator) return make(device, ++the_streams().last_id[device], kind);
  auto& side = the_streams().side[device];
  if (side.size() < settings().side_streams) {
    side.push_back(make(device, ++the_streams().last_id[device], kind));
    return side.back();
  }
  return side[the_streams().next_side[device]++ % side.size()];
}
c10::Stream as_torch(const Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, c10::DeviceIndex(stream->device)), stream->id);
}
std::vector<Stream*> streams_of(int device) {
  Lock lock(mutex());
  std::vector<Stream*> found;
  for (auto* stream : the_streams().all)
    if (stream->device == device) found.push_back(stream);
  return found;
}

uint64_t enqueue(
    Stream* stream,
    const std::string& name,
    const Ranges& reads,
    const Ranges& writes,
    std::function<void()> run,
    const Where& where) {
  Lock lock(mutex());
  merge(stream->clock, the_streams().host);
  auto index = push(stream, std::move(run), {});
  check(stream, name, reads, writes, where);
  return index;
}
uint64_t queue_wait(Stream* stream, Point point) {
  Lock lock(mutex());
  return push(stream, nullptr, point);
}
uint64_t queue_mark(Stream* stream, std::function<void()> run) {
  Lock lock(mutex());
  merge(stream->clock, the_streams().host);
  return push(stream, std::move(run), {});
}

bool is_over(Point point) {
  Lock lock(mutex());
  return !point.stream || point.stream->done >= point.index;
}
void finish(Point point) {
  if (!point.stream) return;
  Lock lock(mutex());
  hurry(point);
  wait_until_over(point, lock);
  raise_error();
}
bool finish_all(double seconds) {
  Lock lock(mutex());
  auto streams = the_streams().all; // others may come while this waits
  for (auto* stream : streams) hurry(end_of(stream));
  auto until = steady::now() + std::chrono::duration_cast<steady::duration>(std::chrono::duration<double>(seconds));
  return std::all_of(streams.begin(), streams.end(), [&](Stream* stream) {
    return stream->changed.wait_until(lock, until, [&] { return is_over(end_of(stream)); });
  });
}
void host_knows(const Clock& clock) {
  Lock lock(mutex());
  merge(the_streams().host, clock);
}
bool host_has_seen(Point point) {
  Lock lock(mutex());
  auto& host = the_streams().host;
  return !point.stream || (point.stream->number < host.size() && host[point.stream->number] >= point.index);
}
bool stream_is_over(Stream* stream) {
  Lock lock(mutex());
  if (!is_over(end_of(stream))) return false;
  host_knows(stream->clock);
  return true;
}

namespace {
void wait_for(Stream* stream) {
  Lock lock(mutex());
  auto end = end_of(stream);
  auto clock = stream->clock;
  lock.unlock();
  finish(end);
  host_knows(clock);
}
} // namespace

void synchronize(Stream* stream) {
  note_host_wait("synchronize a stream", here());
  wait_for(stream);
}
void synchronize_device(int device) {
  note_host_wait("synchronize the device", here());
  auto streams = streams_of(device);
  // In any order: so streams that others do not wait for stay late.
  for (size_t i = streams.size(); i > 1; i--) {
    Lock lock(mutex());
    std::swap(streams[i - 1], streams[random_number() % i]);
  }
  for (auto* stream : streams) wait_for(stream);
}
void require_waits_allowed(const std::string& what) {
  TORCH_CHECK(!settings().waits_raise, "called a synchronizing operation: ", what);
}
void wait_for_result(Stream* stream, const std::string& what) {
  require_waits_allowed(what);
  note_host_wait(what, here());
  wait_for(stream);
}

} // namespace simulated
