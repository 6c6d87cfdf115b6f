// Every operator that has no implementation of its own: a run on meta tensors tells the shapes of its results, their
// memory is allocated, and the CPU's kernel is queued on the current stream. Queued kernels do not keep memory.
//
// Operators without a meta kernel, with shapes that depend on values, or that draw random numbers run when their stream
// has caught up. Only those whose result's shape depends on values make a real device's host wait, and are counted.
#include "tensors.h"

#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unordered_set>

namespace simulated {

namespace {

using c10::IValue;
using torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

const std::unordered_set<std::string> kShapesDependOnValues = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal", "aten::bincount", "aten::repeat_interleave", "aten::histc"};
const std::unordered_set<std::string> kTakesIndicesFromTheHost = {
    "aten::index", "aten::_index_put_impl_", "aten::index_put_"};

std::map<std::string, int>& not_queued() { // operators whose meta kernel failed
  static auto* made = new std::map<std::string, int>;
  return *made;
}

template <class Use>
void for_each_tensor(const IValue& value, const Use& use) {
  auto if_defined = [&](const at::Tensor& tensor) {
    if (tensor.defined()) use(tensor);
  };
  if (value.isTensor()) {
    if_defined(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) if_defined(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& element : value.toOptionalTensorList())
      if (std::optional<at::Tensor> tensor = element) if_defined(*tensor);
  }
}
template <class Change>
IValue with_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorList()) made.push_back(tensor.defined() ? change(tensor) : tensor);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& element : value.toOptionalTensorList()) {
      std::optional<at::Tensor> tensor = element;
      made.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    }
    return made;
  }
  return value;
}
Tensors tensors_in(const IValue& value) {
  Tensors found;
  for_each_tensor(value, [&](const at::Tensor& tensor) { found.push_back(tensor); });
  return found;
}

at::Tensor like_number(at::Tensor made, const at::Tensor& tensor) { // Python numbers do not decide dtypes
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}
at::Tensor on_meta(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta);
  return like_number(at::empty_strided(tensor.sizes(), tensor.strides(), options), tensor);
}
at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.device().type() == kDevice ? host_alias(tensor) : like_number(tensor.detach().clone(), tensor);
}
Stack moved(const std::vector<IValue>& arguments, at::Tensor (*move)(const at::Tensor&), c10::Device device) {
  Stack made;
  for (auto& argument : arguments)
    made.push_back(argument.isDevice() ? IValue(device) : with_tensors(argument, move));
  return made;
}

// One call of an operator with tensors of the device.
class Call {
 public:
  // With `gives_scalar` the result has no dimension, whatever the meta kernel says.
  Call(const c10::OperatorHandle& op, Stack* stack, bool gives_scalar)
      : op_(op), schema_(op.schema()), stack_(stack), gives_scalar_(gives_scalar), below_() {
    auto count = std::ptrdiff_t(schema_.arguments().size());
    arguments_.assign(stack->end() - count, stack->end());
    torch::jit::drop(*stack, size_t(count));
    find_device();
    find_results();
  }

  void run() {
    c10::DeviceGuard guard(c10::Device(kDevice, c10::DeviceIndex(device_)));
    auto* stream = current_stream(device_);
    Stack shapes;
    bool queued = !runs_at_once() && find_shapes(shapes);
    auto on_cpu = moved(arguments_, on_host, at::kCPU);
    Ranges reads, writes;
    for (size_t i = 0; i < arguments_.size(); i++)
      for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
        if (tensor.device().type() == kDevice) (is_written(i) ? writes : reads).push_back(range_of(tensor));
      });
    if (queued)
      queue(stream, shapes, on_cpu, reads, writes);
    else
      run_now(stream, on_cpu, reads, writes);
  }

 private:
  const std::string& name() const {
    return schema_.name();
  }
  bool is_written(size_t i) const {
    auto* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  void find_device() {
    for (auto& argument : arguments_) {
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (device_ < 0 && tensor.device().type() == kDevice) device_ = tensor.device().index();
      });
      if (device_ < 0 && argument.isDevice() && argument.toDevice().type() == kDevice)
        device_ = argument.toDevice().index();
    }
    if (device_ < 0) device_ = current_device();
    for (auto& argument : arguments_)
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        bool here = tensor.device().type() == kDevice && tensor.device().index() == device_;
        bool number = tensor.device().type() != kDevice && tensor.dim() == 0;
        TORCH_CHECK(
            here || number || kTakesIndicesFromTheHost.count(name()), name(),
            ": expected all tensors on one device, found ", tensor.device(), " and device ", device_);
      });
  }

  // Which results are arguments, and which arguments are outputs that get their size here.
  void find_results() {
    for (auto& result : schema_.returns()) {
      int same = -1;
      for (size_t i = 0; i < arguments_.size() && result.alias_info(); i++) {
        auto* alias = schema_.arguments()[i].alias_info();
        if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) same = int(i);
      }
      same_as_.push_back(same);
    }
    for (size_t i = 0; i < arguments_.size(); i++)
      if (is_written(i) && schema_.arguments()[i].is_out() && arguments_[i].isTensor()) outputs_.push_back(i);
  }

  bool runs_at_once() const {
    bool found = kShapesDependOnValues.count(name()) || name().find("dropout") != std::string::npos ||
        name().find("rand") != std::string::npos;
    for (auto& argument : schema_.arguments())
      found = found || argument.type()->str().find("Generator") != std::string::npos;
    return found;
  }

  // Run on meta tensors. False if the operator cannot.
  bool find_shapes(Stack& shapes) {
    bool needed = false;
    for (int same : same_as_) needed = needed || same < 0;
    for (size_t i : outputs_) needed = needed || arguments_[i].toTensor().numel() == 0; // torch has sized the others
    if (!needed) return true;
    try {
      shapes = moved(arguments_, on_meta, at::kMeta);
      Stack given = shapes;
      op_.callBoxed(&shapes);
      if (gives_scalar_) shapes[0] = at::empty({}, shapes[0].toTensor().options());
      for (size_t i : outputs_) resize(i, given[i].toTensor().sizes());
      return true;
    } catch (const std::exception& raised) {
      auto* error = dynamic_cast<const c10::Error*>(&raised);
      std::string why = error ? error->what_without_backtrace() : raised.what();
      Lock lock(mutex());
      not_queued()[name() + ": " + why.substr(0, why.find('\n'))]++;
      return false;
    }
  }
  void resize(size_t output, at::IntArrayRef sizes) {
    auto tensor = arguments_[output].toTensor();
    if (tensor.sizes() != sizes) tensor.resize_(sizes);
  }

  // Hand result `r` to the caller: an argument, or fresh tensors like those in `shapes`, which are returned.
  Tensors give(size_t r, const IValue& shapes) {
    if (same_as_[r] >= 0) {
      torch::jit::push(*stack_, arguments_[size_t(same_as_[r])]);
      return {};
    }
    c10::Device device(kDevice, c10::DeviceIndex(device_));
    auto given = with_tensors(shapes, [&](const at::Tensor& tensor) {
      auto options = at::TensorOptions().dtype(tensor.dtype()).device(device);
      return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    });
    torch::jit::push(*stack_, given);
    return tensors_in(given);
  }

  void queue(Stream* stream, const Stack& shapes, const Stack& on_cpu, const Ranges& reads, Ranges writes) {
    std::vector<Tensors> targets; // by result
    for (size_t r = 0; r < same_as_.size(); r++) {
      auto fresh = give(r, same_as_[r] < 0 ? shapes[r] : IValue());
      targets.emplace_back();
      for (auto& tensor : fresh) {
        writes.push_back(range_of(tensor));
        targets.back().push_back(host_alias(tensor));
      }
    }
    std::vector<std::pair<size_t, at::Tensor>> outputs;
    for (size_t i : outputs_) outputs.emplace_back(i, host_alias(arguments_[i].toTensor()));
    enqueue(stream, name(), reads, writes, [op = op_, on_cpu, targets, outputs] {
      c10::AutoGradMode no_grad(false);
      at::AutoDispatchBelowADInplaceOrView below;
      Stack results = on_cpu;
      Tensors made; // the CPU's kernel sizes its outputs itself
      for (auto& [i, target] : outputs) {
        made.push_back(at::empty({0}, target.options()));
        results[i] = made.back();
      }
      op.callBoxed(&results);
      for (size_t i = 0; i < made.size(); i++) copy_values(outputs[i].second, made[i]);
      for (size_t r = 0; r < targets.size(); r++) {
        if (targets[r].empty()) continue;
        auto values = tensors_in(results[r]);
        for (size_t i = 0; i < values.size(); i++) // the CPU's batch normalisation gives no statistics in evaluation
          if (values[i].numel()) copy_values(targets[r][i], values[i]);
      }
    });
  }

  // When the stream has caught up: on this thread.
  void run_now(Stream* stream, const Stack& on_cpu, const Ranges& reads, const Ranges& writes) {
    auto last = enqueue(stream, name(), reads, {}, nullptr);
    if (kShapesDependOnValues.count(name()))
      wait_for_result(stream, name());
    else
      finish({stream, last});
    Stack results = on_cpu;
    Tensors made;
    for (size_t i : outputs_) {
      made.push_back(at::empty({0}, results[i].toTensor().options()));
      results[i] = made.back();
    }
    op_.callBoxed(&results);
    for (size_t i = 0; i < made.size(); i++) {
      resize(outputs_[i], made[i].sizes());
      queue_copy(stream, arguments_[outputs_[i]].toTensor(), made[i]);
    }
    enqueue(stream, name(), {}, writes, nullptr); // arguments that were changed in place
    for (size_t r = 0; r < same_as_.size(); r++) {
      auto fresh = give(r, results[r]);
      auto values = tensors_in(results[r]);
      for (size_t i = 0; i < fresh.size(); i++) queue_copy(stream, fresh[i], values[i]);
    }
  }
  void queue_copy(Stream* stream, const at::Tensor& target, const at::Tensor& values) {
    enqueue(stream, name(), {}, {range_of(target)}, [to = host_alias(target), values] { copy_values(to, values); });
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  bool gives_scalar_;
  at::AutoDispatchBelowADInplaceOrView below_;
  std::vector<IValue> arguments_;
  int device_ = -1;
  std::vector<int> same_as_; // by result: the argument that it is; -1 for a fresh one
  std::vector<size_t> outputs_; // arguments such as `out`
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, stack, false).run();
}
void loss(const c10::OperatorHandle& op, Stack* stack) { // their meta kernels tell the size before the reduction
  auto reduction = torch::jit::last(*stack, op.schema().arguments().size())[2].toInt();
  Call(op, stack, reduction != at::Reduction::None).run();
}

c10::OperatorHandle named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}
void convolution(const c10::OperatorHandle&, Stack* stack) {
  Call(named("aten::convolution"), stack, false).run();
}
void convolution_backward(const c10::OperatorHandle& op, Stack* stack) { // the general one has `bias_sizes` besides
  auto count = op.schema().arguments().size();
  auto argument = [&](size_t i) { return torch::jit::peek(*stack, i, count); };
  auto weight = argument(2).toTensor();
  int64_t channels = argument(6).toBool() ? weight.size(1) * argument(8).toInt() : weight.size(0);
  stack->insert(stack->end() - std::ptrdiff_t(count) + 3, IValue(c10::List<int64_t>({channels})));
  Call(named("aten::convolution_backward"), stack, false).run();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { // torch's macro calls the library `m`
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&loss>());
  library.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&loss>());
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

} // namespace

std::map<std::string, int> operators_not_queued() {
  Lock lock(mutex());
  return not_queued();
}

} // namespace simulated
