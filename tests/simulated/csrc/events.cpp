// Events: points in a stream. A wait for one orders what comes after it behind what the event's stream had queued.
#include "device.h"

namespace simulated {

using steady = std::chrono::steady_clock;

Counts& counts() {
  static auto* made = new Counts;
  return *made;
}

Event record(Stream* stream) {
  Lock lock(mutex());
  counts().events++;
  Event event;
  event.time = std::make_shared<steady::time_point>();
  event.at = {stream, queue_mark(stream, [time = event.time] { *time = steady::now(); })};
  event.clock = stream->clock;
  return event;
}
void wait(Stream* stream, const Event& event) {
  if (!event.at.stream || event.at.stream == stream) return;
  Lock lock(mutex());
  counts().waits++;
  queue_wait(stream, event.at);
  merge(stream->clock, event.clock);
}
bool query(const Event& event) {
  Lock lock(mutex());
  if (!is_over(event.at)) return false;
  host_knows(event.clock);
  return true;
}
void synchronize(const Event& event) {
  if (!host_has_seen(event.at)) note_host_wait("synchronize an event", here());
  finish(event.at);
  host_knows(event.clock);
}

} // namespace simulated
