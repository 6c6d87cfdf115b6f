"""What ``.grad`` is when this rank holds only its shard of a reduced gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ABOUT_A_TENSOR = frozenset({
    "grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "grad_dtype",
    "output_nr", "names", "is_cpu", "is_cuda", "is_mps", "is_xpu", "is_meta", "is_sparse", "is_quantized",
    "is_nested", "is_mkldnn", "itemsize", "nbytes", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks",
    "_version", "_base",
})  # fmt: skip
"""Attributes that tell nothing of a tensor's values."""


_ABOUT_CALLS = frozenset({
    "requires_grad_", "detach_", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "is_neg",
    "is_conj", "storage_offset", "untyped_storage", "_is_view",
})  # fmt: skip
"""Methods that neither look at a tensor's values nor change them."""

_ELEMENT_WISE = frozenset({
    "zero_", "mul_", "div_", "true_divide_", "clamp_", "clip_", "clamp_min_", "clamp_max_", "nan_to_num_", "neg_",
    "_foreach_zero_", "_foreach_mul_", "_foreach_div_", "_foreach_neg_", "_foreach_clamp_min_", "_foreach_clamp_max_",
    "__imul__", "__itruediv__", "__idiv__",
})  # fmt: skip
"""What is as right on the rank's own part as on the whole, every rank doing the same."""

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class ShardedGrad(Tensor):
    """A parameter's gradient of which only the part in this rank's shard has been reduced.

    It tells that there is a gradient, and can be scaled, clamped and cleared in place. Whatever looks at its values
    raises: those outside of the shard have no meaning.

    Attributes:
        param_name: The parameter's.
        pieces: Gives the part of it that this rank holds, 1-D and possibly empty; and the tensors that an operation on
            the gradient concerns: its view, which the part may be in, and the part if it has memory of its own.
        sum_over_ranks: Replaces a tensor by its sum over the ranks.
    """

    param_name: str
    pieces: Callable[[], tuple[Tensor, list[Tensor]]]
    sum_over_ranks: Callable[[Tensor], None]

    @classmethod
    def of(
        cls,
        view: Tensor,
        name: str,
        pieces: Callable[[], tuple[Tensor, list[Tensor]]],
        sum_over_ranks: Callable[[Tensor], None],
    ) -> ShardedGrad:
        """The gradient with the shape of ``view``."""
        grad = view.as_subclass(cls)
        grad.param_name, grad.pieces, grad.sum_over_ranks = name, pieces, sum_over_ranks
        return grad

    @property
    def own_part(self) -> Tensor:
        """The part of it that this rank holds; 1-D, possibly empty."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.pieces()[0]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Lets through what is element-wise, in place; raises for anything else."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == _UNSCALE:
            return _unscale(*args, **kwargs)
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _ELEMENT_WISE:
            for arguments in _on_pieces(args):
                func(*arguments, **kwargs)
            return args[0]
        if name in _ABOUT_CALLS or (name in ("__get__", "__set__") and attribute in ABOUT_A_TENSOR):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "__repr__":
            return f"ShardedGrad({args[0].param_name})"
        raise RuntimeError(_refusal(args, f".{attribute}" if name == "__get__" else name))


def _first(values: Any) -> ShardedGrad | None:
    for value in values.values() if isinstance(values, Mapping) else values:
        if isinstance(value, ShardedGrad):
            return value
        if isinstance(value, list | tuple | Mapping) and (found := _first(value)) is not None:
            return found
    return None


def _on_pieces(args: Sequence[Any]) -> list[list[Any]]:
    """The arguments of an operation on one gradient, or a list of them, once for each piece of memory concerned."""
    grads = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    if any(isinstance(it, Tensor) and it.numel() != 1 for it in args[1:]):
        raise RuntimeError(_refusal(args, "an operation with a tensor of several elements"))
    pieces = [grad.pieces()[1] if isinstance(grad, ShardedGrad) else [grad] for grad in grads]
    if grads is not args[0]:
        return [[piece, *args[1:]] for piece in pieces[0]]
    return [[[piece for of_one in pieces for piece in of_one], *_repeated(args[1:], pieces)]]


def _repeated(others: Sequence[Any], pieces: list[list[Tensor]]) -> list[Any]:
    """Further arguments of a foreach operation: of a list, each item as often as its gradient has pieces."""
    return [
        [it for it, of_one in zip(other, pieces, strict=True) for _ in of_one]
        if isinstance(other, list | tuple)
        else other
        for other in others
    ]


def _refusal(args: Sequence[Any], what: str) -> str:
    grad = _first(args)
    whose = f" of parameter {grad.param_name!r}" if grad is not None else ""
    return (
        f"the gradient{whose} is sharded: this rank holds its own part only, and {what} would look at all of it. For "
        "norms and clipping use grad_norm(), clip_grad_norm_() and clip_grad_value_() of the BucketDDP or its strategy "
        "(a Trainer's gradient_clip_val does), for single gradients full_grad(), which all ranks must call"
    )


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """A GradScaler's work, on the parts; what one rank finds concerns all of them."""
    first = _first(grads)
    assert first is not None
    parts = [grad.own_part if isinstance(grad, ShardedGrad) else grad for grad in grads]
    parts = [part for part in parts if part.numel()]
    if parts:
        torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inverse_scale)
    first.sum_over_ranks(found_inf)
