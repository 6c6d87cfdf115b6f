// The checker: vector clocks. Each stream has a clock; waits for events, and what the host has seen to be over, merge
// clocks. Two accesses to the same bytes, one of them a write, are unordered if neither's clock includes the other. That
// does not depend on when they run, so that a missing wait is found in every run.
#include "device.h"

#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <set>

namespace simulated {

namespace {

constexpr size_t kMost = 5000; // reports, and waits, that are kept
constexpr int kFrames = 14; // of each stack that are shown

struct Access {
  Stream* stream;
  uint64_t index;
  std::string name;
  Where where;
};
using AccessPtr = std::shared_ptr<Access>;

struct Segment { // bytes that the same operations have used
  uintptr_t end;
  AccessPtr write;
  std::vector<AccessPtr> reads; // since the write, one per stream
};
struct Conflict {
  AccessPtr now, before;
  bool writes, wrote;
};
struct HostWait {
  std::string what;
  Where where;
};
struct Checker {
  std::map<uintptr_t, Segment> segments; // by their first byte
  std::vector<Conflict> conflicts;
  std::vector<HostWait> waits;
};
Checker& the_checker() {
  static auto* made = new Checker;
  return *made;
}

// Cut the segment that has `byte` inside in two.
void split_at(uintptr_t byte) {
  auto& segments = the_checker().segments;
  auto found = segments.upper_bound(byte);
  if (found == segments.begin()) return;
  --found;
  if (found->first == byte || byte >= found->second.end) return;
  Segment right = found->second;
  found->second.end = byte;
  segments[byte] = right;
}

// Call `use` with each segment of a range; gaps become segments.
template <class Use>
void each_segment(Range range, const Use& use) {
  if (range.begin >= range.end) return;
  auto& segments = the_checker().segments;
  split_at(range.begin);
  split_at(range.end);
  for (auto byte = range.begin; byte < range.end;) {
    auto next = segments.lower_bound(byte);
    if (next == segments.end() || next->first > byte) {
      auto end = next == segments.end() ? range.end : std::min(next->first, range.end);
      next = segments.insert({byte, Segment{end, nullptr, {}}}).first;
    }
    use(next->second);
    byte = next->second.end;
  }
}

bool includes(const Clock& clock, const Access& access) {
  auto number = access.stream->number;
  return number < clock.size() && clock[number] >= access.index;
}

std::string text_of(const Where& where) {
  auto found = torch::symbolize({where.get()});
  std::string text;
  int shown = 0;
  for (auto index : found.tracebacks.at(0)) {
    auto& frame = found.all_frames.at(index);
    text += "      " + frame.filename + ":" + std::to_string(frame.lineno) + " " + frame.funcname + "\n";
    if (++shown == kFrames) break;
  }
  return text.empty() ? "      (a thread without Python frames)\n" : text;
}
std::string text_of(const Access& access) {
  static const std::map<Kind, std::string> names = {
      {Kind::Default, "the default stream"}, {Kind::Side, "side stream "}, {Kind::Communicator, "communicator stream "}};
  auto* stream = access.stream;
  std::string name = names.at(stream->kind) + (stream->kind == Kind::Default ? "" : std::to_string(stream->id));
  return access.name + " on " + name + " of device " + std::to_string(stream->device) + "\n" + text_of(access.where);
}

std::string first_frame(const std::string& text) {
  auto begin = text.find('\n') + 1;
  return text.substr(begin, text.find('\n', begin) - begin);
}

} // namespace

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

Where here() {
  return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
}

void check(Stream* stream, const std::string& name, const Ranges& reads, const Ranges& writes, const Where& where) {
  auto now = std::make_shared<Access>(Access{stream, stream->queued, name, where});
  auto require_before = [&](const AccessPtr& access, bool is_write, bool was_write) {
    if (access && !includes(stream->clock, *access) && the_checker().conflicts.size() < kMost)
      the_checker().conflicts.push_back({now, access, is_write, was_write});
  };
  for (auto range : reads)
    each_segment(range, [&](Segment& segment) {
      require_before(segment.write, false, true);
      auto same = [&](const AccessPtr& access) { return access->stream == stream; };
      auto mine = std::find_if(segment.reads.begin(), segment.reads.end(), same);
      if (mine == segment.reads.end())
        segment.reads.push_back(now);
      else
        *mine = now;
    });
  for (auto range : writes)
    each_segment(range, [&](Segment& segment) {
      require_before(segment.write, true, true);
      for (auto& access : segment.reads) {
        if (access != now) require_before(access, true, false); // an operation in place reads what it writes
      }
      segment.reads.clear();
      segment.write = now;
    });
}

void forget(Range range, const std::vector<Clock>& clocks) {
  auto over = [&](const AccessPtr& access) {
    auto included = [&](const Clock& clock) { return includes(clock, *access); };
    return access && std::any_of(clocks.begin(), clocks.end(), included);
  };
  each_segment(range, [&](Segment& segment) {
    if (over(segment.write)) segment.write = nullptr;
    segment.reads.erase(std::remove_if(segment.reads.begin(), segment.reads.end(), over), segment.reads.end());
  });
}

void note_host_wait(const std::string& what, const Where& where) {
  Lock lock(mutex());
  if (the_checker().waits.size() < kMost) the_checker().waits.push_back({what, where});
}

std::vector<std::string> unordered_accesses() {
  Lock lock(mutex());
  auto conflicts = the_checker().conflicts;
  lock.unlock(); // the text of stacks takes Python's lock
  std::vector<std::string> texts;
  std::set<std::string> seen;
  for (auto& found : conflicts) {
    auto now = text_of(*found.now), before = text_of(*found.before);
    if (!seen.insert(found.now->name + first_frame(now) + found.before->name + first_frame(before)).second) continue;
    texts.push_back(
        std::string(found.writes ? "a write" : "a read") + " by " + now + "  is not ordered after the " +
        (found.wrote ? "write" : "read") + " by " + before);
  }
  return texts;
}
size_t host_wait_count() {
  Lock lock(mutex());
  return the_checker().waits.size();
}
std::vector<std::string> host_waits(size_t first) {
  Lock lock(mutex());
  auto waits = the_checker().waits;
  lock.unlock();
  std::vector<std::string> texts;
  for (size_t i = first; i < waits.size(); i++) texts.push_back(waits[i].what + "\n" + text_of(waits[i].where));
  return texts;
}
void clear_reports() {
  Lock lock(mutex());
  the_checker().conflicts.clear();
  the_checker().waits.clear();
}

} // namespace simulated
