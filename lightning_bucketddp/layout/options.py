"""What a ``BucketDDP`` was asked to do: values that do not depend on the rank, checked in one place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch

from lightning_bucketddp.layout.plan import MIB

ModuleBufferSync = Literal["broadcast", "mean", "off"]
"""What happens to module buffers: rank 0's for all, the mean of the floating ones, or nothing."""

WIRE_DTYPES = (torch.bfloat16, torch.float16)
"""In which gradients may travel."""

DtypeName = Literal["float64", "float32", "bfloat16", "float16"]
"""A dtype as a configuration file spells it."""

Dtype = torch.dtype | DtypeName

BucketCap = float | None
"""Largest bucket in MiB; None for the default rule."""

GradDtype = torch.dtype | Mapping[str, torch.dtype]
"""One dtype for the gradients of all parameters of lower precision, or one per pattern of parameter names."""

DivideBy = Literal["world_size", "tokens"] | int
"""What the sum of gradients is divided by."""

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others to agree on something; torch's default for process groups."""


@dataclass(frozen=True)
class Options:
    """The options of :class:`BucketDDP` that all ranks must have alike; it documents them.

    Raises:
        ValueError: If a value is out of range, or two values contradict each other; says which.
    """

    bucket_cap_mb: BucketCap = None
    pad_buckets_to: int = 1
    module_buffers: ModuleBufferSync = "broadcast"
    find_unused_parameters: bool = False
    init_sync: bool = True
    init_sync_module_buffers: bool = True
    grad_dtype: GradDtype | None = None
    master_params: bool = False
    use_contiguous_buffers: bool = True
    overlap: bool = True
    gradient_divide_by: DivideBy = "world_size"
    max_abs_grad: float | None = None
    sparse_parameters: Sequence[str] = ()
    wire_dtype: torch.dtype | None = None
    shard_optimizer: bool = False
    shard_group_size: int | None = None
    scatter_every_pass: bool = False

    def __post_init__(self) -> None:
        cap: object = self.bucket_cap_mb
        if not (cap is None or (isinstance(cap, int | float) and cap >= 0)):
            gone = "; that is gone, and None is the default rule" if cap == "auto" else ""
            raise ValueError(f"expected bucket_cap_mb to be None or a number of MiB from 0, found {cap!r}{gone}")
        if not (isinstance(self.pad_buckets_to, int) and self.pad_buckets_to >= 1):
            raise ValueError(
                f"expected pad_buckets_to to be a number of elements from 1, found {self.pad_buckets_to!r}"
            )
        if self.module_buffers not in get_args(ModuleBufferSync):
            raise ValueError(
                f"expected module_buffers to be one of {get_args(ModuleBufferSync)}, found {self.module_buffers!r}"
            )
        divisor = self.gradient_divide_by
        if divisor not in ("world_size", "tokens") and not (
            isinstance(divisor, int) and not isinstance(divisor, bool) and divisor >= 1
        ):
            raise ValueError(
                f'expected gradient_divide_by to be "world_size", "tokens" or an integer from 1, found {divisor!r}'
            )
        if self.max_abs_grad is not None and not self.max_abs_grad > 0:
            raise ValueError(
                f"expected max_abs_grad to be None or a positive number (math.inf: any finite gradient will do), found "
                f"{self.max_abs_grad!r}"
            )
        if self.wire_dtype is not None and self.wire_dtype not in WIRE_DTYPES:
            raise ValueError(f"expected wire_dtype to be None or one of {WIRE_DTYPES}, found {self.wire_dtype!r}")
        self._require_valid_grad_dtype()
        self._require_valid_sharding()

    def _require_valid_sharding(self) -> None:
        if self.shard_optimizer and not self.use_contiguous_buffers:
            raise ValueError(
                "shard_optimizer=True divides contiguous buffers between the ranks; it cannot be had with "
                "use_contiguous_buffers=False"
            )
        if self.scatter_every_pass and not self.shard_optimizer:
            raise ValueError(
                "scatter_every_pass=True keeps only a shard of what local passes accumulate; it cannot be had with "
                "shard_optimizer=False"
            )
        if self.scatter_every_pass and self.gradient_divide_by == "tokens":
            raise ValueError(
                'gradient_divide_by="tokens" divides by the tokens of all passes since the last reduction, which are '
                "not known when each pass is reduced; it cannot be had with scatter_every_pass=True"
            )
        size = self.shard_group_size
        if size is None:
            return
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"expected shard_group_size to be None or a number of ranks from 1, found {size!r}")
        if not self.shard_optimizer:
            raise ValueError(
                f"shard_group_size={size} says among how many ranks shards are divided; it cannot be had with "
                "shard_optimizer=False"
            )

    def _require_valid_grad_dtype(self) -> None:
        dtypes = list(self.grad_dtype.values()) if isinstance(self.grad_dtype, Mapping) else [self.grad_dtype]
        for dtype in dtypes:
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"expected grad_dtype to name floating dtypes, found {dtype!r}")
        if self.grad_dtype is not None and not self.use_contiguous_buffers:
            raise ValueError(
                f"grad_dtype={self.grad_dtype!r} accumulates gradients in the contiguous buffers; it cannot be had "
                "with use_contiguous_buffers=False, which leaves gradients where autograd put them"
            )
        if self.master_params and self.grad_dtype is None:
            raise ValueError(
                "master_params=True steps on gradients of higher precision than the parameters'; give "
                "grad_dtype=torch.float32 with it"
            )

    @property
    def bucket_cap_bytes(self) -> int | None:
        """Largest bucket in bytes; None for the default rule."""
        return None if self.bucket_cap_mb is None else int(self.bucket_cap_mb * MIB)

    @property
    def rescales(self) -> bool:
        """Whether gradients are not simply averaged, so that what is in ``.grad`` cannot be reduced a second time."""
        return self.gradient_divide_by != "world_size"

    def grad_dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the gradient of a parameter.

        Args:
            name: The parameter's qualified name.
            dtype: The parameter's dtype.

        Raises:
            ValueError: If a pattern asks for less precision than the parameter has.
        """
        if not dtype.is_floating_point or self.grad_dtype is None:
            return dtype
        if isinstance(self.grad_dtype, torch.dtype):
            return torch.promote_types(self.grad_dtype, dtype)
        for pattern, wanted in self.grad_dtype.items():
            if fnmatchcase(name, pattern):
                if torch.promote_types(wanted, dtype) is not wanted:
                    raise ValueError(
                        f"expected a gradient dtype that holds what parameter {name!r} holds, {dtype}; found {wanted} "
                        f"for the pattern {pattern!r}"
                    )
                return wanted
        return dtype

    def require_patterns_match(self, names: Sequence[str]) -> None:
        """Requires that each pattern of ``grad_dtype`` is some parameter's.

        Raises:
            ValueError: If one is nobody's.
        """
        for pattern in self.grad_dtype if isinstance(self.grad_dtype, Mapping) else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"expected patterns of parameter names in grad_dtype, found {pattern!r}, which fits none"
                )

    def described(self) -> Iterator[tuple[str, str]]:
        """Each option and its value in words, for ranks to compare."""
        for field in fields(self):
            yield field.name, repr(getattr(self, field.name))


def resolve_options(
    *,
    broadcast_buffers: bool | None = None,
    forward_sync_buffers: bool | None = None,
    module_buffers: ModuleBufferSync | None = None,
    grad_dtype: Dtype | Mapping[str, Dtype] | None = None,
    accumulate_allreduce_grads_in_fp32: bool = False,
    master_params: bool | None = None,
    wire_dtype: Dtype | None = None,
    sparse_parameters: Sequence[str] = (),
    **others: Any,
) -> Options:
    """One value for each option, whatever way it was spelled.

    Args:
        broadcast_buffers: See :func:`resolve_module_buffers`.
        forward_sync_buffers: See :func:`resolve_module_buffers`.
        module_buffers: See :func:`resolve_module_buffers`.
        grad_dtype: See :func:`resolve_grad_dtype`; dtypes may be names.
        accumulate_allreduce_grads_in_fp32: See :func:`resolve_grad_dtype`.
        master_params: With ``grad_dtype`` if None.
        wire_dtype: May be a name.
        sparse_parameters: Any sequence.
        others: Options that have one spelling.

    Raises:
        ValueError: If a value is out of range, or two contradict each other.
    """
    mode, initially = resolve_module_buffers(module_buffers, broadcast_buffers, forward_sync_buffers)
    if isinstance(grad_dtype, Mapping):
        named: GradDtype | None = {name: _as_dtype("grad_dtype", dtype) for name, dtype in grad_dtype.items()}
    else:
        named = None if grad_dtype is None else _as_dtype("grad_dtype", grad_dtype)
    dtype = resolve_grad_dtype(named, accumulate_allreduce_grads_in_fp32)
    return Options(
        module_buffers=mode,
        init_sync_module_buffers=initially,
        grad_dtype=dtype,
        master_params=dtype is not None if master_params is None else master_params,
        sparse_parameters=sparse_parameters if isinstance(sparse_parameters, str) else tuple(sparse_parameters),
        wire_dtype=None if wire_dtype is None else _as_dtype("wire_dtype", wire_dtype),
        **others,
    )


def _as_dtype(option: str, dtype: Dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in get_args(DtypeName):
        raise ValueError(f"expected {option} to name a dtype, one of {get_args(DtypeName)}, found {dtype!r}")
    named: torch.dtype = getattr(torch, dtype)
    return named


def resolve_module_buffers(
    module_buffers: ModuleBufferSync | None, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[ModuleBufferSync, bool]:
    """One value for the three spellings of what happens to module buffers.

    Args:
        module_buffers: This package's.
        broadcast_buffers: torch DDP's of old, which decides about the first synchronisation too.
        forward_sync_buffers: torch DDP's since 2.13, which leaves the first synchronisation alone.

    Returns:
        What happens in forward, and whether module buffers are copied from rank 0 at first.

    Raises:
        ValueError: If two of them contradict each other.
    """
    given: dict[str, bool] = {}
    if module_buffers is not None:
        given[f"module_buffers={module_buffers!r}"] = module_buffers != "off"
    if forward_sync_buffers is not None:
        given[f"forward_sync_buffers={forward_sync_buffers}"] = forward_sync_buffers
    if broadcast_buffers is not None:
        given[f"broadcast_buffers={broadcast_buffers}"] = broadcast_buffers
    if len(set(given.values())) > 1:
        raise ValueError(f"expected one choice for module buffers, found {' and '.join(given)}")
    synchronised = next(iter(given.values()), True)
    initially = broadcast_buffers is not False or forward_sync_buffers is not None
    return module_buffers or ("broadcast" if synchronised else "off"), initially


def resolve_grad_dtype(grad_dtype: GradDtype | None, in_fp32: bool) -> GradDtype | None:
    """One value for the two spellings of fp32 gradients.

    Raises:
        ValueError: If they contradict each other.
    """
    if in_fp32 and grad_dtype not in (None, torch.float32):
        raise ValueError(
            f"expected one choice for the gradients' dtype, found accumulate_allreduce_grads_in_fp32=True and "
            f"grad_dtype={grad_dtype!r}"
        )
    return torch.float32 if in_fp32 else grad_dtype
