// Tensors of the device, as bytes and as tensors that the CPU's kernels can use.
#pragma once
#include "device.h"

#include <ATen/core/Tensor.h>

namespace simulated {

Range range_of(const at::Tensor&); // from its first to its last byte; gaps of strided tensors count
at::Tensor host_alias(const at::Tensor&); // a CPU tensor on the same memory, which does not keep it
void copy_values(const at::Tensor& to, const at::Tensor& from); // on the host, without autograd

} // namespace simulated
