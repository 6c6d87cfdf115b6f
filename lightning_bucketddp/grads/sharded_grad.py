"""The ``.grad`` of a parameter when this rank holds only its part of the reduced gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ABOUT_A_TENSOR = frozenset({
    "grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "grad_dtype",
    "output_nr", "name", "names", "is_cpu", "is_cuda", "is_ipu", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia",
    "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu", "itemsize", "nbytes",
    "retains_grad", "volatile", "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "_base",
    "_has_grad_dtype_override",
})  # fmt: skip
"""Attributes that do not depend on a tensor's values."""

CALLS_ABOUT_A_TENSOR = frozenset({
    "__dir__", "__dlpack_device__", "__len__", "_is_view", "_is_zerotensor", "dense_dim", "dim", "dim_order",
    "element_size", "get_device", "has_names", "is_coalesced", "is_complex", "is_conj", "is_contiguous",
    "is_distributed", "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_same_size", "is_set_to",
    "is_shared", "is_signed", "ndimension", "nelement", "numel", "result_type", "size", "sparse_dim", "storage_offset",
    "storage_type", "stride",
    # tensors like it, with other values
    "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like", "new",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
})  # fmt: skip
"""Methods and functions that neither read nor change a tensor's values."""

_CALLS_WITHOUT_VALUES = CALLS_ABOUT_A_TENSOR | {
    "requires_grad_", "detach_", "untyped_storage", "_clear_non_serializable_cached_data",
    "_has_compatible_shallow_copy_type", "_parse_to",
}  # fmt: skip

_CONVERSIONS = frozenset({
    "to", "type", "cpu", "cuda", "mtia", "xpu", "bfloat16", "double", "float", "half", "cdouble", "cfloat", "chalf",
    "conj", "conj_physical", "contiguous", "positive", "__pos__", "real", "resolve_conj", "resolve_neg", "to_dense",
})  # fmt: skip
"""They return the tensor itself where there is nothing to convert."""

_LIKE_ANOTHER = frozenset({"to", "type_as", "expand_as", "reshape_as", "view_as"})
"""Methods whose argument may be a tensor of which they need no values."""

_ELEMENT_WISE = frozenset({
    "zero_", "mul_", "div_", "true_divide_", "clamp_", "clip_", "clamp_min_", "clamp_max_", "nan_to_num_", "neg_",
    "_foreach_zero_", "_foreach_mul_", "_foreach_div_", "_foreach_neg_", "_foreach_clamp_min_", "_foreach_clamp_max_",
    "__imul__", "__itruediv__", "__idiv__",
})  # fmt: skip
"""In-place operations that each rank can apply to its own part."""

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


Pieces = Callable[[], tuple[Tensor, list[Tensor]]]


class ShardedGrad(Tensor):
    """A parameter's gradient, reduced only in this rank's part.

    It can be scaled, clamped and cleared in place, and asked for all that is not its values. Conversions that change
    nothing return it. Reading its values raises, because elements outside of the part have no meaning.

    Attributes:
        param_name: The parameter's name.
        pieces: Returns this rank's part, 1-D and possibly empty, and the tensors that an operation on the gradient
            changes: its view, which may hold the part, and the part if it has memory of its own.
        sum_over_ranks: Replaces a tensor by its sum over the ranks.
    """

    param_name: str
    pieces: Pieces
    sum_over_ranks: Callable[[Tensor], None]

    @classmethod
    def of(cls, view: Tensor, name: str, pieces: Pieces, sum_over_ranks: Callable[[Tensor], None]) -> ShardedGrad:
        """The gradient with the shape of ``view``."""
        grad = view.as_subclass(cls)
        grad.param_name, grad.pieces, grad.sum_over_ranks = name, pieces, sum_over_ranks
        return grad

    @property
    def own_part(self) -> Tensor:
        """This rank's part; 1-D, possibly empty."""
        return self.pieces()[0]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Apply element-wise operations to the part; raise for operations that read values."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = _attribute_of(func)
        if name == _UNSCALE:
            return _unscale(*args, **kwargs)
        if name in _ELEMENT_WISE:
            return _change(func, args, kwargs)
        if (
            name in _CALLS_WITHOUT_VALUES
            or (name in ("__get__", "__set__") and attribute in ABOUT_A_TENSOR)
            or (name in _LIKE_ANOTHER and not isinstance(args[0], ShardedGrad))
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in ("__repr__", "__format__"):
            return f"ShardedGrad({args[0].param_name})"
        if name == "__set__" and attribute == "data" and args[0] is args[1]:
            return None  # a module that is moved to the device where it is
        if (name in _CONVERSIONS or (name == "__get__" and attribute in _CONVERSIONS)) and "out" not in kwargs:
            with torch._C.DisableTorchFunctionSubclass():
                converted = func(*args, **kwargs)
            unchanged = any(converted is each for each in (*args, *kwargs.values()))
            if unchanged or not isinstance(converted, Tensor):  # `type()` gives a name
                return converted
        raise RuntimeError(_refusal((*args, *kwargs.values()), f".{attribute}" if name == "__get__" else name))


def _attribute_of(func: Any) -> str:
    """The attribute that a ``__get__`` or ``__set__`` is for; Python's properties have their name elsewhere."""
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", "") or getattr(getattr(owner, "fget", None), "__name__", "")


def _change(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply an in-place operation to the pieces of one gradient, or of each gradient in a list."""
    first, *others = args
    if any(isinstance(other, list | tuple) or (isinstance(other, Tensor) and other.numel() != 1) for other in others):
        raise RuntimeError(_refusal(args, "an operation with more than one number"))
    grads = first if isinstance(first, list | tuple) else [first]
    pieces = [piece for grad in grads for piece in (grad.pieces()[1] if isinstance(grad, ShardedGrad) else [grad])]
    for target in [pieces] if grads is first else pieces:
        func(target, *others, **kwargs)
    return first


def _refusal(args: Sequence[Any], what: str) -> str:
    each = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
    name = next(item.param_name for item in each if isinstance(item, ShardedGrad))  # torch looks no deeper either
    refused = f"the gradient of parameter {name!r} is sharded: this rank holds only its own part, and {what} would "
    if what in _CONVERSIONS or what == "share_memory_":
        return (
            f"{refused}need all of it. A module converts gradients together with parameters: call zero_grad() first. "
            "For single gradients use full_grad(), which all ranks must call"
        )
    return (
        f"{refused}read all of it. For norms and clipping use grad_norm(), clip_grad_norm_() and "
        "clip_grad_value_() of the BucketDDP or its strategy, or a Trainer's gradient_clip_val. For single gradients "
        "use full_grad(), which all ranks must call"
    )


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Do the work of a GradScaler on the parts. If one rank finds an Inf, all ranks know."""
    parts = [grad.own_part if isinstance(grad, ShardedGrad) else grad for grad in grads]
    parts = [part for part in parts if part.numel()]
    if parts:
        torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inverse_scale)
    next(grad for grad in grads if isinstance(grad, ShardedGrad)).sum_over_ranks(found_inf)
    found_inf.clamp_(max=1.0)  # fused optimizers skip a step at 1 only
