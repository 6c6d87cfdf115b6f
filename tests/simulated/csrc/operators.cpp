// Operators of the device that are not kernels: memory, views, copies, a value for the host.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace simulated {

Range range_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + uintptr_t(last + 1) * tensor.element_size()};
}
at::Tensor host_alias(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto made = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}
void copy_values(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  const_cast<at::Tensor&>(to).copy_(from);
}

namespace {

using Sizes = c10::SymIntArrayRef;
at::IntArrayRef ints(Sizes sizes) {
  return C10_AS_INTARRAYREF_SLOW(sizes);
}

at::Tensor empty_memory_format(
    Sizes size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device ? *device : c10::Device(kDevice, c10::DeviceIndex(current_device())));
  c10::DispatchKeySet key(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(ints(size), &allocator(), key, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(
    Sizes size,
    Sizes stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  c10::DeviceGuard guard(device ? *device : c10::Device(kDevice, c10::DeviceIndex(current_device())));
  c10::DispatchKeySet key(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(ints(size), ints(stride), &allocator(), key, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  auto begin = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, ints(size), ints(stride), begin);
}
at::Tensor view(const at::Tensor& self, Sizes size) {
  return at::native::view(self, ints(size));
}
at::Tensor reshape_alias(const at::Tensor& self, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(self, ints(size), ints(stride));
}

void grow_to_fit(const at::Tensor& self) {
  size_t bytes = 0;
  if (self.numel()) {
    int64_t last = self.storage_offset();
    for (int64_t dim = 0; dim < self.dim(); dim++) last += (self.size(dim) - 1) * self.stride(dim);
    bytes = size_t(last + 1) * self.element_size();
  }
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
}
const at::Tensor& resize_(const at::Tensor& self, Sizes size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(ints(size));
  if (format && *format != at::MemoryFormat::Preserve && *format != at::MemoryFormat::Contiguous)
    impl->empty_tensor_restride(*format);
  grow_to_fit(self);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, Sizes size, Sizes stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  if (stride.size() == size.size())
    impl->set_sizes_and_strides(ints(size), ints(stride));
  else
    impl->set_sizes_contiguous(ints(size));
  grow_to_fit(self);
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}
at::Tensor& set_nothing(at::Tensor& self) {
  auto memory = allocate_on(0, self.device().index());
  at::Storage empty(at::Storage::use_byte_size_t(), 0, std::move(memory), &allocator(), true);
  return set_storage(self, empty, 0, std::vector<c10::SymInt>{0}, {});
}
void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

at::Tensor copy_on_devices(const at::Tensor& source, const at::Tensor& target) {
  auto *from = current_stream(source.device().index()), *to = current_stream(target.device().index());
  if (from != to) wait(from, record(to)); // as CUDA's copies between devices do
  auto copy = [to = host_alias(target), from = host_alias(source)] { copy_values(to, from); };
  enqueue(from, "copy", {range_of(source)}, {range_of(target)}, copy);
  if (from != to) wait(to, record(from));
  return target;
}
at::Tensor copy_to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto* stream = current_stream(target.device().index());
  bool at_once = !(non_blocking && source.is_contiguous() && source.dtype() == target.dtype() &&
                   is_pinned(source.const_data_ptr()));
  // Pageable memory is read before the call returns; pinned memory later, where the checker sees it.
  auto values = at_once ? source.detach().clone() : host_alias(source);
  auto copy = [to = host_alias(target), values] { copy_values(to, values); };
  auto index = enqueue(stream, "copy from the host", {at_once ? Range{} : range_of(source)}, {range_of(target)}, copy);
  if (!at_once) use_pinned(source.const_data_ptr(), {stream, index});
  if (!non_blocking) wait_for_result(stream, "copy from the host");
  return target;
}
at::Tensor copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  bool waits = !(non_blocking && is_pinned(target.const_data_ptr()));
  if (waits) require_waits_allowed("copy to the host"); // else it would be written to after the error
  auto* stream = current_stream(source.device().index());
  auto copy = [to = host_alias(target), from = host_alias(source)] { copy_values(to, from); };
  auto index = enqueue(stream, "copy to the host", {range_of(source)}, {}, copy);
  use_pinned(target.const_data_ptr(), {stream, index});
  if (waits) wait_for_result(stream, "copy to the host");
  return target;
}
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  bool from_device = source.device().type() == kDevice, to_device = target.device().type() == kDevice;
  if (from_device && to_device) return copy_on_devices(source, target);
  return to_device ? copy_to_device(source, target, non_blocking) : copy_to_host(source, target, non_blocking);
}
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  const_cast<at::Tensor&>(target).resize_(source.sizes());
  return copy_from(source, target, false);
}
at::Scalar local_scalar_dense(const at::Tensor& self) {
  auto* stream = current_stream(self.device().index());
  enqueue(stream, "item", {range_of(self)}, {}, nullptr);
  wait_for_result(stream, "item");
  at::AutoDispatchBelowADInplaceOrView below;
  return at::native::_local_scalar_dense_cpu(host_alias(self));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("record_stream", record_stream);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
}

} // namespace

} // namespace simulated
