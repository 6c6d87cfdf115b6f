"""What a ``BucketDDP`` is asked to do: every option once, with its text, its default and its checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_bucketddp.layout.plan import MIB
from lightning_bucketddp.layout.require import require, require_choice

ModuleBufferSync = Literal["broadcast", "mean", "off"]
"""What happens to module buffers: rank 0's for all, the mean of the floating ones, or nothing."""

WireDtypeName = Literal["bf16", "bfloat16", "fp16", "float16"]
"""A dtype in which gradients may travel, as a configuration file spells it."""

DtypeName = Literal[WireDtypeName, "fp32", "float32", "fp64", "float64"]
"""A dtype as a configuration file spells it."""

_LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

BucketCap = float | None
"""Largest bucket in MiB; None for the default rule."""

DivideBy = Literal["world_size", "tokens"] | int
"""What the sum of gradients is divided by."""

HookName = Literal["bf16", "fp16", "powersgd"]
"""A communication hook of torch's, by name."""

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others to agree on something; torch's default for process groups."""


@dataclass(frozen=True)
class Options:
    """The options of :class:`BucketDDP`, :class:`BucketDDPStrategy` and :class:`BucketDDPFabricStrategy`.

    Each of the three takes them as keyword arguments. They are the same on every rank, but for ``process_group``,
    ``device_mesh`` and ``timeout``. An option with several spellings has one value here: dtypes are torch's, and
    ``module_buffers``, ``grad_dtype`` and ``master_params`` say what was asked for by any of their spellings.

    Args:
        broadcast_buffers: torch DDP's spelling of ``module_buffers``: True is ``"broadcast"``, False is ``"off"``, the
            copy at the start included.
        init_sync: Whether parameters and module buffers are copied from rank 0 at the start.
        process_group: The ranks that train together; all of them if None. Lightning's own collectives are among all
            ranks in any case. A module with collectives of its own in backward (``SyncBatchNorm``) needs another group
            for those, if what backward reaches may differ between the ranks.
        bucket_cap_mb: Largest bucket in MiB; with 0 each parameter has its own. None: 25 MiB where all ranks share one
            machine (all have the same host name, and ``LOCAL_WORLD_SIZE``, if a launcher sets it, is not smaller
            than the group); on several 1/32 of the gradients for two ranks, more for more ranks, from 4 to 25 MiB.
            Smaller at both ends.
        find_unused_parameters: For speed in a Trainer or Fabric where the parameters in use change from step to step:
            looks at the graph of each loss, so that no rank waits for gradients that will not come. In plain PyTorch,
            lets a rank take part whose loss reaches no parameter, if its backward comes by an output of ``forward``.
            Parameters without gradients do not need it.
        check_reduction: Accepted for torch DDP's sake; what it checked is always checked.
        gradient_as_bucket_view: Accepted for torch DDP's sake; gradients are views in any case, unless
            ``use_contiguous_buffers`` is False.
        static_graph: Accepted for torch DDP's sake; what it allows is always allowed.
        device_mesh: The ranks that train together, as a mesh of one dimension, instead of ``process_group``.
        forward_sync_buffers: torch DDP's newer spelling of ``module_buffers``, which leaves the start alone.
        module_buffers: What happens to BatchNorm statistics and the like before each forward with gradients enabled,
            unless the last one was inside ``no_sync``: ``"broadcast"`` rank 0's (the default), ``"mean"`` (of the
            floating ones), ``"off"``. A Trainer synchronises them before validation and at the end of ``fit`` too,
            Fabric when it saves a checkpoint.
        grad_dtype: The dtype in which gradients are accumulated, kept and reduced, ``.grad`` itself included: for
            parameters of lower precision (``"float32"`` for bf16 and fp16 ones), or one per pattern of parameter names
            (``fnmatch``; the first that matches). Such parameters also have their view as ``main_grad``.
        accumulate_allreduce_grads_in_fp32: Megatron-LM's spelling of ``grad_dtype="float32"``.
        master_params: Whether optimizers step on fp32 copies of such parameters, which checkpoints hold with the
            optimizers' state; by default where ``grad_dtype`` is given.
        use_contiguous_buffers: If False, gradients stay where autograd put them, and are coalesced per dtype and
            reduced after backward.
        overlap: If False, each gradient buffer is reduced after backward, in one piece per set of parameters that are
            trainable together.
        gradient_divide_by: What the sum of gradients over the ranks is divided by: ``"world_size"``, an integer, or
            ``"tokens"``, the sum over ranks and local passes of what ``count_tokens`` was told, for losses that are
            sums over tokens. With anything but the world size, clear gradients after each step.
        max_abs_grad: Gradients that are larger in absolute value, NaN or Inf are an error before they are sent
            (``math.inf``, in YAML ``.inf``: any finite one will do). The host waits for the check.
        pad_buckets_to: Number of elements that each bucket's length is a multiple of. Megatron-LM pads to 65536 for
            NCCL's full bus bandwidth on many nodes.
        sparse_parameters: Names of parameters whose gradients may be sparse, besides the weights of ``nn.Embedding``
            and ``nn.EmbeddingBag`` with ``sparse=True``, which are found. They are averaged at the end of
            backward, whatever hook or ``wire_dtype`` there is. ``.grad`` is a coalesced sparse tensor. It is dense if
            any rank's is dense.
        comm_hook: Reduces each bucket instead of an all-reduce: ``"bf16"``, ``"fp16"`` (torch's compression hooks),
            ``"powersgd"``, or a hook as for :meth:`BucketDDP.register_comm_hook`; the same on every rank.
        comm_hook_state: The communication hook's state. ``"powersgd"`` takes a ``PowerSGDState``, and makes one of rank
            1 that starts after 1,000 passes if there is none; the other named hooks take none.
        wire_dtype: ``"bfloat16"`` or ``"float16"``: gradients travel in it and are summed in fp32, where
            ``comm_hook="bf16"`` sums in bf16 too. Of no effect on gradients of less precision. In fp16, values beyond
            65504 become infinite. What is sent is staged: as many bytes again as travel, until the pass has ended.
        shard_optimizer: Whether each rank's optimizer updates one shard of the parameters, and has state for that
            alone: gradients are reduce-scattered during backward, and new parameters gathered while the next forward
            runs. For element-wise optimizers (SGD, Adam, ...; see :func:`declare_element_wise`). ``.grad`` can be
            scaled and cleared, but not looked at: use ``grad_norm``, ``clip_grad_norm_`` and ``full_grad``, or the
            Trainer's or Fabric's clipping. Checkpoints are as without; in plain PyTorch, save and load optimizers with
            :meth:`BucketDDP.optimizer_state_dict`.
        shard_group_size: Among how many consecutive ranks shards are divided, as those of a node; all of them if None.
            Parameters are then gathered inside nodes alone, each of which holds all of the optimizer's state.
        scatter_every_pass: Whether each pass of a gradient accumulation is reduce-scattered, with ``shard_optimizer``,
            so that only a shard is accumulated. More travels, and whole gradients have memory during backward alone. By
            default local passes accumulate whole gradients, and the sum is scattered once.
        timeout: How long a rank waits for the others to agree through the store; torch's 30 minutes if None.

    Raises:
        TypeError: If a value is of the wrong type; a bool is no number, a str is no sequence of names.
        ValueError: If a value is out of range, or two values contradict each other; says which.
    """

    # Ranks do not compare a field with compare=False: another spelling, an option of no effect, or a rank's own.
    broadcast_buffers: bool | None = field(default=None, compare=False)
    init_sync: bool = True
    process_group: ProcessGroup | None = field(default=None, compare=False)
    bucket_cap_mb: BucketCap = None
    find_unused_parameters: bool = False
    check_reduction: bool = field(default=False, compare=False)
    gradient_as_bucket_view: bool = field(default=True, compare=False)
    static_graph: bool = field(default=False, compare=False)
    device_mesh: DeviceMesh | None = field(default=None, compare=False)
    forward_sync_buffers: bool | None = field(default=None, compare=False)
    module_buffers: ModuleBufferSync | None = None
    grad_dtype: torch.dtype | DtypeName | Mapping[str, torch.dtype | DtypeName] | None = None
    accumulate_allreduce_grads_in_fp32: bool = field(default=False, compare=False)
    master_params: bool | None = None
    use_contiguous_buffers: bool = True
    overlap: bool = True
    gradient_divide_by: DivideBy = "world_size"
    max_abs_grad: float | None = None
    pad_buckets_to: int = 1
    sparse_parameters: Sequence[str] = ()
    comm_hook: HookName | Callable[..., Any] | None = field(default=None, compare=False)
    comm_hook_state: Any = field(default=None, compare=False)
    wire_dtype: torch.dtype | WireDtypeName | None = None
    shard_optimizer: bool = False
    shard_group_size: int | None = None
    scatter_every_pass: bool = False
    timeout: timedelta | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self._require_kinds_and_ranges()
        self._unify_spellings()
        self._require_grad_dtype_possible()
        self._require_sharding_possible()
        if self.comm_hook is not None:
            self.require_hook_decides()

    def _require_kinds_and_ranges(self) -> None:
        for each in fields(self):
            if each.type == "bool":
                require(each.name, getattr(self, each.name), "True or False", bool)
            elif each.type == "bool | None":
                require(each.name, getattr(self, each.name), "None, True or False", bool | None)
        require_choice("module_buffers", self.module_buffers, get_args(ModuleBufferSync), optional=True)
        hooks = f"None, callable or one of {get_args(HookName)}"
        others: tuple[tuple[str, str, Any, Callable[[Any], bool]], ...] = (
            ("bucket_cap_mb", "None or a number of MiB from 0", float | int | None, lambda cap: 0 <= cap < math.inf),
            ("gradient_divide_by", '"world_size", "tokens" or an integer from 1', int | str, _is_divisor),
            ("max_abs_grad", "None or a positive number", float | int | None, lambda most: most > 0),
            ("pad_buckets_to", "a number of elements from 1", int, lambda pad: pad >= 1),
            ("sparse_parameters", "a list of names", Sequence, lambda names: all(isinstance(it, str) for it in names)),
            ("comm_hook", hooks, str | Callable | None, lambda hook: callable(hook) or hook in get_args(HookName)),
            ("shard_group_size", "None or a number of ranks from 1", int | None, lambda ranks: ranks >= 1),
            ("timeout", "None or a positive timedelta", timedelta | None, lambda time: time > timedelta(0)),
        )
        for name, wanted, kinds, fits in others:
            require(name, getattr(self, name), wanted, kinds, fits)

    def _unify_spellings(self) -> None:
        """Give each option that can be spelled in several ways its one value; not again if it has it."""
        wire, grad_dtype = self.wire_dtype, self._one_grad_dtype()
        unified = {
            "module_buffers": self._one_module_buffers(),
            "grad_dtype": grad_dtype,
            "master_params": grad_dtype is not None if self.master_params is None else self.master_params,
            "wire_dtype": None if wire is None else _as_dtype("wire_dtype", wire, WireDtypeName, "None or {}"),
            "sparse_parameters": tuple(self.sparse_parameters),
            "timeout": DEFAULT_TIMEOUT if self.timeout is None else self.timeout,
        }
        for name, value in unified.items():
            object.__setattr__(self, name, value)  # frozen for all others

    def _one_module_buffers(self) -> ModuleBufferSync:
        spellings = ("module_buffers", "forward_sync_buffers", "broadcast_buffers")
        given = {name: getattr(self, name) for name in spellings if getattr(self, name) is not None}
        on = {value not in ("off", False) for value in given.values()}
        if len(on) > 1:
            found = " and ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(f"expected one choice for module buffers, found {found}")
        return self.module_buffers or ("off" if on == {False} else "broadcast")

    def _one_grad_dtype(self) -> torch.dtype | dict[str, torch.dtype] | None:
        found: torch.dtype | dict[str, torch.dtype] | None
        if isinstance(self.grad_dtype, Mapping):
            found = {}
            for pattern, dtype in self.grad_dtype.items():
                require("a pattern in grad_dtype", pattern, "a str", str)
                found[pattern] = _as_dtype(f"grad_dtype[{pattern!r}]", dtype, DtypeName)
        else:
            wanted = "None, {}, or one of these per pattern of names"
            found = None if self.grad_dtype is None else _as_dtype("grad_dtype", self.grad_dtype, DtypeName, wanted)
        if not self.accumulate_allreduce_grads_in_fp32:
            return found
        if found not in (None, torch.float32):
            raise ValueError(
                f"expected one choice for the gradients' dtype, found accumulate_allreduce_grads_in_fp32=True and "
                f"grad_dtype={found!r}"
            )
        return torch.float32

    def _require_grad_dtype_possible(self) -> None:
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

    def _require_sharding_possible(self) -> None:
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
        if self.shard_group_size is not None and not self.shard_optimizer:
            raise ValueError(
                f"shard_group_size={self.shard_group_size} says among how many ranks shards are divided; it cannot be "
                "had with shard_optimizer=False"
            )

    def require_hook_decides(self) -> None:
        """Requires that nothing but a hook decides how gradients travel, and what they are divided by.

        Raises:
            ValueError: If there is a wire dtype or another divisor than the world size.
        """
        if self.rescales:
            raise ValueError(
                "expected either comm_hook or gradient_divide_by, found both: a hook divides by the world size itself, "
                f"so that gradient_divide_by={self.gradient_divide_by!r} cannot be honoured. Leave one of them out"
            )
        if self.wire_dtype is not None:
            raise ValueError(
                f"expected either comm_hook or wire_dtype, found both: a hook decides itself how gradients travel, so "
                f"that wire_dtype={self.wire_dtype} would be without effect. Leave one of them out"
            )

    @property
    def init_sync_module_buffers(self) -> bool:
        """Whether module buffers are copied from rank 0 at the start, if parameters are."""
        return self.broadcast_buffers is not False or self.forward_sync_buffers is not None

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
        unified = cast("torch.dtype | Mapping[str, torch.dtype]", self.grad_dtype)  # by __post_init__
        if isinstance(unified, torch.dtype):
            return torch.promote_types(unified, dtype)
        for pattern, wanted in unified.items():
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
        """Each option that all ranks must have alike, and its value in words."""
        for each in fields(self):
            if each.compare:
                yield each.name, repr(getattr(self, each.name))
        yield "init_sync_module_buffers", repr(self.init_sync_module_buffers)


def _is_divisor(value: int | str) -> bool:
    return value >= 1 if isinstance(value, int) else value in ("world_size", "tokens")


def _as_dtype(option: str, value: object, choice: Any, wanted: str = "{}") -> torch.dtype:
    """The dtype that a name, or torch's dtype itself, stands for.

    Args:
        option: The option.
        value: What the user gave.
        choice: The literal type of the names that the option takes.
        wanted: What it takes, with a place for the dtypes.
    """
    named: dict[str, torch.dtype] = {name: getattr(torch, _LONG_NAMES.get(name, name)) for name in get_args(choice)}
    require(
        option,
        value,
        wanted.format(f"one of {', '.join(named)} (torch's dtypes, or their names)"),
        torch.dtype | str,
        lambda dtype: dtype in named or dtype in named.values(),
    )
    return next(dtype for name, dtype in named.items() if value in (name, dtype))
