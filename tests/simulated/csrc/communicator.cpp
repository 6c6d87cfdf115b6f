// A process group that behaves as NCCL's: each collective waits for what its caller's stream has queued, runs on a stream
// of the communicator, and `Work.wait()` makes the current stream wait, not the host. Communicators keep their order.
// After `abort()` what is under way ends and every further use raises. gloo carries the values, in memory of its own, so
// that an aborted collective touches nothing.
#include "tensors.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <numeric>
#include <set>
#include <thread>

namespace simulated {

using namespace c10d;
using Tensors = std::vector<at::Tensor>;

namespace {

std::vector<Started>& log_of_starts() {
  static auto* made = new std::vector<Started>;
  return *made;
}

// One of gloo's collectives, begun when the stream gets to it, and what to do with its result.
struct Running {
  c10::intrusive_ptr<Work> work;
  std::function<void()> finish;
};
using Step = std::function<Running()>;

struct Collective {
  OpType type;
  std::string name;
  Tensors in, out; // on the device
  bool async;
  std::vector<Step> steps;
};

struct Outcome { // of a collective; its work and its stream share it
  std::atomic<bool> failed{false};
  std::exception_ptr error;
};

struct CommunicatorWork final : Work {
  CommunicatorWork(int rank, OpType type, int device) : Work(rank, type), device(device) {}
  int device;
  Event over;
  std::shared_ptr<Outcome> outcome = std::make_shared<Outcome>();
  Tensors outputs;
  // Until somebody waits, or the next start finds it over (TORCH_NCCL_AVOID_RECORD_STREAMS). The group shares this, and
  // nothing else of the work: what a program drops after it has waited is free.
  std::shared_ptr<Tensors> kept = std::make_shared<Tensors>();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool host_waits = false;

  bool isCompleted() override {
    return query(over);
  }
  bool isSuccess() const override {
    return is_over(over.at) && !outcome->failed;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool wait(std::chrono::milliseconds) override {
    if (outcome->failed) std::rethrow_exception(outcome->error);
    auto* stream = current_stream(device);
    simulated::wait(stream, over);
    if (host_waits) simulated::synchronize(over);
    kept->clear();
    return true;
  }
  Tensors result() override {
    return outputs;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future;
  }
};

// All elements, in memory order.
at::Tensor flat(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), {tensor.numel()}, options);
}
at::Tensor flat_bytes(const at::Tensor& tensor) { // gloo moves bytes of any dtype
  auto options = at::TensorOptions().dtype(at::kByte).device(at::kCPU);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), {int64_t(tensor.nbytes())}, options);
}
template <class Function>
Tensors each(const Tensors& tensors, const Function& function) {
  Tensors made;
  for (auto& tensor : tensors) made.push_back(function(tensor));
  return made;
}
at::Tensor fresh_like(const at::Tensor& tensor) {
  return at::empty_like(tensor);
}
at::Tensor copy_of(const at::Tensor& tensor) {
  return tensor.clone();
}
void copy_each(const Tensors& to, const Tensors& from) {
  for (size_t i = 0; i < to.size(); i++) copy_values(to[i], from[i]);
}

class Communicator final : public Backend {
 public:
  Communicator(c10::intrusive_ptr<Backend> gloo, int rank, int size, std::string label)
      : Backend(rank, size), gloo_(std::move(gloo)), label_(std::move(label)) {}

  const std::string getBackendName() const override {
    return "simccl";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return started_;
  }
  ErrorType getError() override {
    return ErrorType::SUCCESS;
  }
  void abort() override {
    *aborted_ = true;
  }
  void shutdown() override {
    if (*aborted_) return; // gloo may still wait for other ranks
    for (auto& [device, stream] : streams_) simulated::synchronize(stream);
    gloo_->shutdown();
  }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    auto target = flat_bytes(tensors.at(0));
    Step step = [=, gloo = gloo_]() -> Running {
      Tensors sent{target.clone()};
      return {gloo->broadcast(sent, options), [=] { copy_values(target, sent[0]); }};
    };
    return launch({OpType::BROADCAST, "broadcast", tensors, tensors, options.asyncOp, {step}});
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    std::vector<Step> steps;
    for (auto& tensor : tensors) steps.push_back(sum_of(tensor, options.reduceOp, flat(tensor), 0));
    return launch({OpType::ALLREDUCE, "allreduce", tensors, tensors, options.asyncOp, steps});
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const ReduceOptions& options) override {
    auto step = sum_of(tensors.at(0), options.reduceOp, flat(tensors[0]), 0);
    return launch({OpType::REDUCE, "reduce", tensors, tensors, options.asyncOp, {step}});
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& out, Tensors& in, const AllgatherOptions& options) override {
    auto step = gathered(each(out.at(0), flat_bytes), flat_bytes(in.at(0)));
    return launch({OpType::ALLGATHER, "allgather", in, out[0], options.asyncOp, {step}});
  }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& out, at::Tensor& in, const AllgatherOptions& options) override {
    require_numel(out, in.numel() * size_, "the output of an all-gather");
    auto step = gathered(parts(flat_bytes(out)), flat_bytes(in));
    return launch({OpType::_ALLGATHER_BASE, "allgather_base", {in}, {out}, options.asyncOp, {step}});
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const AllgatherOptions& options)
      override {
    startCoalescing();
    for (size_t i = 0; i < out.size(); i++) _allgather_base(out[i], in[i], options);
    return endCoalescing();
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const ReduceScatterOptions& options)
      override {
    require_numel(in, out.numel() * size_, "the input of a reduce-scatter");
    auto step = sum_of(in, options.reduceOp, flat(out), rank_ * out.numel());
    return launch({OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_base", {in}, {out}, options.asyncOp, {step}});
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const ReduceScatterOptions& options)
      override {
    startCoalescing();
    for (size_t i = 0; i < out.size(); i++) _reduce_scatter_base(out[i], in[i], options);
    return endCoalescing();
  }
  c10::intrusive_ptr<Work> reduce_scatter(
      Tensors& out,
      std::vector<Tensors>& in,
      const ReduceScatterOptions& options) override {
    std::vector<Step> steps;
    auto target = flat(out.at(0));
    for (int r = 0; r < size_; r++)
      steps.push_back(sum_of(in.at(0).at(size_t(r)), options.reduceOp, r == rank_ ? target : at::Tensor(), 0));
    return launch({OpType::REDUCE_SCATTER, "reduce_scatter", in[0], {out[0]}, options.asyncOp, steps});
  }
  c10::intrusive_ptr<Work> alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      std::vector<int64_t>& out_rows,
      std::vector<int64_t>& in_rows,
      const AllToAllOptions& options) override {
    auto target = range_of(out), source = range_of(in);
    TORCH_CHECK(
        target.end <= source.begin || source.end <= target.begin || target.begin == target.end,
        "all-to-all: NCCL cannot send and receive in the same memory");
    auto step = exchanged(flat_bytes(out), flat_bytes(in), bytes_per_rank(out, out_rows), bytes_per_rank(in, in_rows));
    return launch({OpType::ALLTOALL_BASE, "alltoall_base", {in}, {out}, options.asyncOp, {step}});
  }
  c10::intrusive_ptr<Work> alltoall(Tensors& out, Tensors& in, const AllToAllOptions& options) override {
    auto targets = each(out, flat_bytes), sources = each(in, flat_bytes);
    Step step = [=, gloo = gloo_]() -> Running {
      auto sent = at::cat(sources), received = at::empty_like(at::cat(targets));
      std::vector<int64_t> receives, sends;
      for (auto& target : targets) receives.push_back(target.numel());
      for (auto& source : sources) sends.push_back(source.numel());
      auto parts = received.split_with_sizes(receives); // gloo takes the sizes away
      auto work = gloo->alltoall_base(received, sent, receives, sends, {});
      return {work, [=] { copy_each(targets, parts); }};
    };
    return launch({OpType::ALLTOALL, "alltoall", in, out, options.asyncOp, {step}});
  }
  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& out, Tensors& in, const GatherOptions& options) override {
    auto targets = out.empty() ? Tensors() : each(out[0], flat_bytes);
    auto source = flat_bytes(in.at(0));
    Step step = [=, gloo = gloo_]() -> Running {
      std::vector<Tensors> received;
      if (!targets.empty()) received.push_back(each(targets, fresh_like));
      Tensors sent{source.clone()};
      auto work = gloo->gather(received, sent, options);
      return {work, [=] { copy_each(targets, received.empty() ? Tensors() : received[0]); }};
    };
    return launch({OpType::GATHER, "gather", in, out.empty() ? Tensors() : out[0], options.asyncOp, {step}});
  }
  c10::intrusive_ptr<Work> scatter(Tensors& out, std::vector<Tensors>& in, const ScatterOptions& options) override {
    auto sources = in.empty() ? Tensors() : each(in[0], flat_bytes);
    auto target = flat_bytes(out.at(0));
    Step step = [=, gloo = gloo_]() -> Running {
      std::vector<Tensors> sent;
      if (!sources.empty()) sent.push_back(each(sources, copy_of));
      Tensors received{fresh_like(target)};
      auto work = gloo->scatter(received, sent, options);
      return {work, [=] { copy_values(target, received[0]); }};
    };
    return launch({OpType::SCATTER, "scatter", in.empty() ? Tensors() : in[0], out, options.asyncOp, {step}});
  }
  c10::intrusive_ptr<Work> barrier(const BarrierOptions& options) override {
    int device = current_device();
    if (options.device) device = options.device->index();
    if (!options.device_ids.empty()) device = int(options.device_ids[0]);
    auto on_device = at::TensorOptions().device(c10::Device(kDevice, c10::DeviceIndex(device))).dtype(at::kFloat);
    Tensors nothing{at::zeros({1}, on_device)};
    auto step = sum_of(nothing[0], ReduceOp::SUM, flat(nothing[0]), 0);
    return launch({OpType::BARRIER, "barrier", nothing, nothing, options.asyncOp, {step}}, /*host_waits=*/true);
  }

  void startCoalescing() override {
    coalescing_ = true;
  }
  c10::intrusive_ptr<Work> endCoalescing() override {
    coalescing_ = false;
    Collective all{OpType::COALESCED, "coalesced", {}, {}, true, {}};
    for (auto& one : held_) {
      all.in.insert(all.in.end(), one.in.begin(), one.in.end());
      all.out.insert(all.out.end(), one.out.begin(), one.out.end());
      all.steps.insert(all.steps.end(), one.steps.begin(), one.steps.end());
      all.async = one.async;
    }
    held_.clear();
    if (all.in.empty()) return c10::make_intrusive<CommunicatorWork>(rank_, OpType::COALESCED, current_device());
    return start(all, false);
  }

 private:
  // ---- steps: what a stream does when it gets to a collective

  // The sum, or the mean, of a tensor; `target` gets its elements from `begin` on. An undefined target gets nothing.
  Step sum_of(const at::Tensor& tensor, const ReduceOp& op, const at::Tensor& target, int64_t begin) {
    auto source = flat(tensor);
    bool mean = op == ReduceOp::AVG; // gloo does not average integers; NCCL does, and rounds to zero
    auto rounding = tensor.is_floating_point() ? std::optional<std::string_view>() : "trunc";
    AllreduceOptions options;
    options.reduceOp = mean ? ReduceOp(ReduceOp::SUM) : op;
    return [=, gloo = gloo_, size = size_]() -> Running {
      Tensors sent{source.clone()};
      auto finish = [=] {
        at::AutoDispatchBelowADInplaceOrView below;
        if (!target.defined()) return;
        auto found = sent[0].narrow(0, begin, target.numel());
        copy_values(target, mean ? found.div(size, rounding) : found);
      };
      return {gloo->allreduce(sent, options), finish};
    };
  }
  Step gathered(const Tensors& targets, const at::Tensor& source) {
    return [=, gloo = gloo_]() -> Running {
      std::vector<Tensors> received{each(targets, fresh_like)};
      Tensors sent{source.clone()};
      auto work = gloo->allgather(received, sent, {});
      return {work, [=] { copy_each(targets, received[0]); }};
    };
  }
  Step exchanged(
      const at::Tensor& target,
      const at::Tensor& source,
      const std::vector<int64_t>& receives,
      const std::vector<int64_t>& sends) {
    return [=, gloo = gloo_]() -> Running {
      auto sent = source.clone(), received = at::empty_like(target);
      auto out = receives, in = sends;
      auto work = gloo->alltoall_base(received, sent, out, in, {});
      return {work, [=] { copy_values(target, received); }};
    };
  }
  Tensors parts(const at::Tensor& whole) const {
    return whole.numel() ? whole.chunk(size_) : Tensors(size_t(size_), whole);
  }
  std::vector<int64_t> bytes_per_rank(const at::Tensor& tensor, std::vector<int64_t> rows) const {
    if (rows.empty()) return std::vector<int64_t>(size_t(size_), int64_t(tensor.nbytes()) / size_);
    int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t(0));
    for (auto& count : rows) count = total ? count * int64_t(tensor.nbytes()) / total : 0;
    return rows;
  }

  // ---- starting

  static void require_numel(const at::Tensor& tensor, int64_t numel, const char* what) {
    TORCH_CHECK(tensor.numel() == numel, "expected ", numel, " elements in ", what, ", found ", tensor.numel());
  }
  static void require_sendable(const Collective& collective) {
    static const std::set<at::ScalarType> known = {
        at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kInt, at::kLong, at::kBool,
        at::kFloat8_e4m3fn, at::kFloat8_e5m2};
    auto& in = collective.in;
    auto& out = collective.out;
    TORCH_CHECK(!in.empty() || !out.empty(), collective.name, ": expected tensors, found none");
    auto device = in.empty() ? out[0].device() : in[0].device();
    auto require = [&](const at::Tensor& tensor) {
      TORCH_CHECK(
          tensor.device().type() == kDevice && tensor.device() == device, collective.name,
          ": expected all tensors on one device, found some on ", tensor.device(), " and ", device);
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), collective.name, ": expected contiguous tensors");
      TORCH_CHECK(known.count(tensor.scalar_type()), collective.name, ": NCCL cannot send ", tensor.scalar_type());
    };
    for (auto& tensor : in) require(tensor);
    for (auto& tensor : out) require(tensor);
  }

  static bool has_one_size(OpType type) { // on all ranks; only that is worth comparing
    return type != OpType::SCATTER && type != OpType::ALLTOALL && type != OpType::ALLTOALL_BASE;
  }

  c10::intrusive_ptr<Work> launch(Collective collective, bool host_waits = false) {
    TORCH_CHECK(!*aborted_, "expected a communicator in use, found one that was aborted on rank ", rank_);
    require_sendable(collective);
    auto& tensors = collective.in.empty() ? collective.out : collective.in;
    int64_t numel = 0;
    if (has_one_size(collective.type))
      for (auto& tensor : tensors) numel += tensor.numel();
    {
      Lock lock(mutex());
      log_of_starts().push_back({label_, collective.name, c10::toString(tensors[0].scalar_type()), numel});
    }
    started_++;
    if (!coalescing_) return start(collective, host_waits);
    held_.push_back(collective);
    return c10::make_intrusive<CommunicatorWork>(rank_, collective.type, tensors[0].device().index());
  }

  c10::intrusive_ptr<Work> start(const Collective& collective, bool host_waits) {
    forget_what_is_over();
    auto& tensors = collective.in.empty() ? collective.out : collective.in;
    int device = tensors[0].device().index();
    auto* caller = current_stream(device);
    auto* stream = collective.async ? stream_of(device) : caller; // as PyTorch's NCCL group since 2.8
    if (stream != caller) wait(stream, record(caller));
    // Collectives of one communicator keep their order on whatever streams they start. A program must not rely on that
    // to order its own operations: the checker learns nothing of it.
    if (last_.count(device)) wait(stream, {last_[device].at, {}, nullptr});

    auto work = c10::make_intrusive<CommunicatorWork>(rank_, collective.type, device);
    work->outputs = collective.out;
    work->host_waits = host_waits;
    if (collective.async) {
      *work->kept = collective.in;
      work->kept->insert(work->kept->end(), collective.out.begin(), collective.out.end());
    }
    Ranges reads, writes;
    for (auto& tensor : collective.in) reads.push_back(range_of(tensor));
    for (auto& tensor : collective.out) writes.push_back(range_of(tensor));
    auto run = [steps = collective.steps, outcome = work->outcome, aborted = aborted_, name = collective.name] {
      try {
        for (auto& step : steps) finish_step(step, *aborted, name);
      } catch (...) {
        outcome->error = std::current_exception();
        outcome->failed = true;
        if (!*aborted) throw; // NCCL ends the kernels of an aborted communicator
      }
    };
    enqueue(stream, "collective " + collective.name, reads, writes, run);
    work->over = last_[device] = record(stream);
    if (collective.async) under_way_.emplace_back(work->over, work->kept);
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{tensors[0].device()});
    c10::StreamGuard guard(as_torch(stream));
    work->future->markCompleted(c10::IValue(collective.out));
    return work;
  }

  static void finish_step(const Step& step, const std::atomic<bool>& aborted, const std::string& name) {
    TORCH_CHECK(!aborted, name, ": the communicator was aborted");
    auto [work, finish] = step();
    for (auto pause = std::chrono::microseconds(10); !work->isCompleted(); std::this_thread::sleep_for(pause)) {
      TORCH_CHECK(!aborted, name, ": the communicator was aborted");
      pause = std::min(2 * pause, std::chrono::microseconds(500));
    }
    work->wait();
    finish();
  }
  Stream* stream_of(int device) {
    auto& stream = streams_[device];
    if (!stream) stream = new_stream(device, Kind::Communicator);
    return stream;
  }
  void forget_what_is_over() {
    for (size_t i = 0; i < under_way_.size();) {
      auto& [over, kept] = under_way_[i];
      if (!query(over)) {
        i++;
        continue;
      }
      kept->clear();
      under_way_.erase(under_way_.begin() + std::ptrdiff_t(i));
    }
  }

  c10::intrusive_ptr<Backend> gloo_;
  std::string label_;
  std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
  std::map<int, Stream*> streams_; // by device
  std::map<int, Event> last_; // by device: when the collective before is over
  std::vector<std::pair<Event, std::shared_ptr<Tensors>>> under_way_; // when it is over, and what it uses
  uint64_t started_ = 0;
  bool coalescing_ = false;
  std::vector<Collective> held_; // of a coalesced launch
};

} // namespace

c10::intrusive_ptr<Backend> make_communicator(
    const c10::intrusive_ptr<Backend>& gloo,
    int rank,
    int size,
    const std::string& label) {
  return c10::make_intrusive<Communicator>(gloo, rank, size, label);
}
std::vector<Started> started_collectives() {
  Lock lock(mutex());
  return log_of_starts();
}
void clear_started_collectives() {
  Lock lock(mutex());
  log_of_starts().clear();
}

} // namespace simulated
