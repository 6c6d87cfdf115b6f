"""The options of the wrapper and the strategies: each once, with its text, its default and its checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

import torch
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_bucketddp.layout.plan import MIB
from lightning_bucketddp.layout.require import require, require_choice

ModuleBufferSync = Literal["broadcast", "mean", "off"]
"""How module buffers are synchronised: rank 0's for all, the mean of the floating ones, or not at all."""

HalfName = Literal["bf16", "bfloat16", "fp16", "float16"]
"""A dtype of 16 bits, as a configuration file spells it."""

WireDtypeName = Literal[HalfName, "int8"]
"""A dtype for gradients on the wire, as a configuration file spells it."""

DtypeName = Literal[HalfName, "fp32", "float32", "fp64", "float64"]
"""A dtype, as a configuration file spells it."""

_LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

BucketCap = float | None
"""Largest bucket in MiB; None for the default rule."""

DivideBy = Literal["world_size", "tokens", "samples"] | int
"""The divisor of summed gradients."""

OnDifference = Literal["warn", "error"]
"""What happens if parameters differ between ranks."""

SkipReason = Literal["nonfinite", "oom"]
"""Why all ranks skip a step: a gradient is NaN or infinite, or a rank ran out of memory on its accelerator."""

HookName = Literal["bf16", "fp16", "powersgd"]
"""One of torch's communication hooks, by name."""

StateDictType = Literal["full", "sharded"]
"""How a Trainer saves checkpoints: as one file, or as a directory with every rank's parts."""

UnevenInputs = Literal["world_size", "active_ranks"]
"""What gradients are divided by where ranks run out of batches."""

LoggedKeys = Literal["same", "any"]
"""Which keys ranks may log."""

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Longest wait for the other ranks' answers; torch's default for process groups."""

DEFAULT_MAX_SKIPPED = 10
"""How many steps in a row may be skipped."""

DEFAULT_REPORT_AFTER = 60.0
"""After how many seconds of waiting ranks report where all are."""


@dataclass(frozen=True)
class Options:
    """The options of :class:`BucketDDP`, :class:`BucketDDPStrategy` and :class:`BucketDDPFabricStrategy`.

    All three take them as keyword arguments. ``process_group``, ``device_mesh``, ``timeout`` and ``report_after`` may
    differ between ranks; all others must be the same on every rank. Words in capitals begin a topic. An instance holds
    one spelling of each choice: torch's dtypes, and ``module_buffers``, ``grad_dtype`` and ``master_params`` in place
    of their other spellings.

    Args:
        broadcast_buffers: TORCH DDP'S ARGUMENTS. Its spelling of ``module_buffers``: True is ``"broadcast"``, False is
            ``"off"``. With False module buffers are not copied at the start either.
        init_sync: Whether to copy parameters and module buffers from rank 0 at the start.
        process_group: The ranks that train together; None for all ranks. Lightning's own collectives use all ranks in
            any case. A module with collectives of its own in backward (``SyncBatchNorm``) needs another group for them
            if backward may reach different parameters on different ranks.
        bucket_cap_mb: Largest bucket in MiB; with 0 each parameter has its own. None: 25 MiB if all ranks share one
            machine. On several machines 1/32 of the gradients for two ranks, more for more ranks and in two levels,
            from 4 to 25 MiB, and from 128 ranks on one parameter more. The first and the last bucket are smaller,
            except on one machine without accelerators. A Trainer or Fabric with ``num_nodes`` of 2 and more says which
            ranks share a machine. Otherwise ``LOCAL_WORLD_SIZE``, where a launcher sets it to less than the number of
            all ranks, and ``LOCAL_RANK`` do, and else the host names.
        find_unused_parameters: In plain PyTorch: a rank whose loss reaches no parameter takes part, if its backward
            starts from an output of ``forward``. A Trainer and Fabric do not need it. Parameters without gradients do
            not need it either.
        check_reduction: Accepted because torch DDP accepts it. The check is always on.
        gradient_as_bucket_view: Accepted because torch DDP accepts it. Gradients are always views, except with
            ``use_contiguous_buffers=False``.
        static_graph: Accepted because torch DDP accepts it. It is not needed for anything.
        bucket_cap_mb_list: The largest size of each bucket in MiB, in the order in which buckets are sent, instead of
            ``bucket_cap_mb``. The last one also holds for all further buckets.
        batched_grad_copy: Accepted because torch DDP accepts it. Small gradients are always copied in batches.
        skip_all_reduce_unused_params: Accepted because torch DDP accepts it. Gradients that no rank has stay as they
            are, always, though zeros travel in their place.
        device_mesh: The ranks that train together, as a mesh of one dimension, instead of ``process_group``.
        forward_sync_buffers: torch DDP's newer spelling of ``module_buffers``. It does not change the copy at the
            start.
        lazy_bucket_allocation: Accepted because torch DDP accepts it. Gradients are in the buckets' memory, which
            stays.
        require_manual_backward_finalization: torch 2.15's. True is refused: gradients are averaged before backward
            returns.
        module_buffers: MODULE BUFFERS. How to synchronise BatchNorm statistics and the like before each forward with
            gradients enabled, unless the last such forward was inside ``no_sync``: ``"broadcast"`` sends rank 0's (the
            default), ``"mean"`` averages floating ones, ``"off"`` does nothing. A Trainer also synchronises them before
            validation and at the end of ``fit``, Fabric when it saves a checkpoint.
        grad_dtype: PRECISION. The dtype in which gradients are accumulated, kept in ``.grad`` and reduced. Meant for
            parameters of lower precision: ``"float32"`` for bf16 and fp16 ones. Complex gradients keep their
            parameters' dtype. A mapping gives one dtype per pattern of parameter names (``fnmatch``; the first match
            counts). All parameters, fp32 ones too, then have their gradient as ``main_grad``, unless it is sharded.
        accumulate_allreduce_grads_in_fp32: Megatron-LM's spelling of ``grad_dtype="float32"``.
        master_params: Whether optimizers step on fp32 copies of parameters that have another ``grad_dtype``.
            Checkpoints hold the copies with the optimizers' state. Default: True if ``grad_dtype`` is given.
        use_contiguous_buffers: GRADIENTS. If False, gradients stay where autograd put them. They are copied together
            per dtype and reduced after backward.
        overlap: If False, each gradient buffer is reduced after backward, in one piece per set of parameters that are
            trainable together.
        gradient_divide_by: The divisor of the sum of gradients over the ranks: ``"world_size"``, an integer,
            ``"tokens"`` or ``"samples"``. Tokens are the sum over ranks and local passes of the numbers given to
            ``count_tokens``, for losses that are sums over tokens. Samples are for losses that are means over a rank's
            batch, where batches differ in size: a rank's gradient since the last reduction is weighted by its number of
            samples, as given to ``count_samples``. A Trainer counts each batch itself. Unless this is the world size,
            clear gradients after each step.
        max_abs_grad: Raise an error before gradients are sent if one is larger in absolute value, NaN or Inf.
            ``math.inf`` (in YAML ``.inf``) allows all finite ones. The host waits for this check.
        pad_buckets_to: Pad each bucket to a multiple of this number of elements. Megatron-LM pads to 65536 for NCCL's
            full bus bandwidth on many nodes.
        sparse_parameters: Names of parameters whose gradients may be sparse. The weights of ``nn.Embedding`` and
            ``nn.EmbeddingBag`` with ``sparse=True`` need not be named. Sparse gradients are averaged at the end of
            backward, without communication hook or ``wire_dtype``. ``.grad`` is then a coalesced sparse tensor, or
            dense if any rank's is dense.
        comm_hook: ON THE WIRE. Reduces each bucket instead of an all-reduce: ``"bf16"`` or ``"fp16"`` (torch's
            compression hooks), ``"powersgd"``, or a hook as for :meth:`BucketDDP.register_comm_hook`; the same on every
            rank.
        comm_hook_state: The communication hook's state. ``"powersgd"`` takes a ``PowerSGDState``; the default has rank
            1 and starts after 1,000 passes. The other named hooks take none.
        wire_dtype: ``"bfloat16"``, ``"float16"`` or ``"int8"``: gradients travel in this dtype and are summed in fp32
            (``comm_hook="bf16"`` sums in bf16). Where a node has several ranks, they travel so between nodes, and
            inside in their own dtype. Gradients of lower precision travel as they are. In fp16, values beyond 65504
            become infinite. Until the pass has ended, a copy of the sent bytes takes memory. In int8, the values
            of each block of 128 are rounded to multiples of 1/127 of its largest absolute value. A mean is off by at
            most 0.8 % of this largest value (the ranks' mean of it), a mean of two ranks or nodes and a sharded
            gradient by 0.4 %; much smaller values of the block may become zero. A block with NaN or an infinity has no
            finite value on arrival. Parameters of one dimension, such as biases, are exempt: their gradients travel in
            their own dtype, in buckets of their own.
        hierarchical: Whether gradients are reduced in two levels where each of several nodes has several ranks:
            scattered inside a node, each part exchanged across nodes, gathered inside. Of M nodes, each sends
            2 (M - 1) / M times the gradients' size, however many ranks it has. None: on the CPU, and with
            ``wire_dtype``. One level where nodes have different numbers of ranks, or a node's ranks do not follow each
            other, with a warning if two were asked for. Never with a communication hook.
        shard_optimizer: SHARDED OPTIMIZER. Whether each rank's optimizer updates one shard of the parameters and holds
            state for this shard only. Gradients are reduce-scattered during backward; new parameters are gathered
            during the next forward. For element-wise optimizers (SGD, Adam, ...; see :func:`declare_element_wise`), and
            for Muon, with whole matrices (see :func:`declare_whole_parameter`). ``.grad`` can be scaled and cleared,
            but not read: use ``grad_norm``, ``clip_grad_norm_`` and ``full_grad``, or the clipping of Trainer and
            Fabric. Checkpoints have the same content as without. In plain PyTorch, save and load optimizers with
            :meth:`BucketDDP.optimizer_state_dict`.
        shard_group_size: Divide shards among this many consecutive ranks, such as the ranks of a node; None for all
            ranks. Parameters are then gathered inside nodes only, and each node holds the optimizer's whole state. Not
            with a ``process_group`` of some processes.
        scatter_every_pass: With ``shard_optimizer``: reduce-scatter each pass of a gradient accumulation, so that only
            shards accumulate. This sends more, and saves the memory of whole gradients between passes. By default
            local passes accumulate whole gradients, and only their sum is reduce-scattered.
        skip_step_on: SKIPPED STEPS. Reasons for which all ranks drop the gradients of a step, leave out the steps of
            optimizer and scheduler, and go on. Rank 0 warns. ``"nonfinite"``: a reduced gradient is NaN or infinite.
            ``"oom"``: a rank raised ``torch.OutOfMemoryError`` in ``backward_pass`` or the Trainer's ``training_step``.
            The host waits for each pass. Gradients are read twice, and a small all-reduce is added, unless the only
            reason is ``"oom"``.
        skip_norm_above: Skip steps whose gradient norm is larger than this multiple of its median over the last 100
            steps that were not skipped. The first ten steps are never skipped for this reason.
        max_skipped: How many steps in a row may be skipped; one more is an error on all ranks.
        check_ranks_every: COMPARISONS AND WAITING. Compare the parameters of all ranks in the first synchronised pass,
            and then once in this many: a sum over the bits of each. Options of parameter groups, such as learning
            rates, are compared too. Costs one read of the parameters, and eight bytes per rank. None: never. Not for
            post-local SGD, where parameters differ on purpose.
        check_ranks: If parameters differ: ``"warn"`` warns once, and ``"error"`` raises an error on all ranks. Either
            names the first parameters. On accelerators that is in the pass after the comparison.
        timeout: Longest wait for the other ranks' answers through the store; None for torch's 30 minutes.
        report_after: Seconds after which a rank that waits for others has a report logged on every rank: which ranks
            did not come, and where each rank is. Another one follows after ten times as long. ``math.inf`` (in YAML
            ``.inf``) for none. Of several wrappers on one group the last one decides.

    Raises:
        TypeError: If a value has the wrong type; a bool is no number, a str is no sequence of names.
        ValueError: If a value is out of range, or two values contradict each other; says which.
    """

    # compare=False: ranks may differ in this field. It is another spelling, has no effect, or belongs to the rank.
    broadcast_buffers: bool | None = field(default=None, compare=False)
    init_sync: bool = True
    process_group: ProcessGroup | None = field(default=None, compare=False)
    bucket_cap_mb: BucketCap = None
    find_unused_parameters: bool = False
    check_reduction: bool = field(default=False, compare=False)
    gradient_as_bucket_view: bool = field(default=True, compare=False)
    static_graph: bool = field(default=False, compare=False)
    bucket_cap_mb_list: Sequence[float] | None = None
    batched_grad_copy: bool = field(default=False, compare=False)
    skip_all_reduce_unused_params: bool = field(default=False, compare=False)
    device_mesh: DeviceMesh | None = field(default=None, compare=False)
    forward_sync_buffers: bool | None = field(default=None, compare=False)
    lazy_bucket_allocation: bool = field(default=False, compare=False)
    require_manual_backward_finalization: bool = field(default=False, compare=False)
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
    hierarchical: bool | None = None
    shard_optimizer: bool = False
    shard_group_size: int | None = None
    scatter_every_pass: bool = False
    skip_step_on: Sequence[SkipReason] = ()
    skip_norm_above: float | None = None
    max_skipped: int = DEFAULT_MAX_SKIPPED
    check_ranks_every: int | None = None
    check_ranks: OnDifference = "warn"
    timeout: timedelta | None = field(default=None, compare=False)
    report_after: float = field(default=DEFAULT_REPORT_AFTER, compare=False)

    def __post_init__(self) -> None:
        self._require_kinds_and_ranges()
        self._unify_spellings()
        if self.grad_dtype is not None and not self.use_contiguous_buffers:
            self._refuse("grad_dtype", "accumulates gradients in contiguous buffers", "use_contiguous_buffers")
        if self.master_params and self.grad_dtype is None:
            why = "needs gradients of higher precision than the parameters (give grad_dtype=torch.float32 with it)"
            self._refuse("master_params", why, "grad_dtype")
        if self.shard_optimizer and not self.use_contiguous_buffers:
            self._refuse("shard_optimizer", "divides contiguous buffers between the ranks", "use_contiguous_buffers")
        if self.scatter_every_pass and not self.shard_optimizer:
            self._refuse("scatter_every_pass", "keeps only a shard of accumulated gradients", "shard_optimizer")
        if self.shard_group_size is not None and not self.shard_optimizer:
            self._refuse("shard_group_size", "sets the number of ranks that divide shards", "shard_optimizer")
        if self.scatter_every_pass and self.gradient_divide_by in ("tokens", "samples"):
            why = f"divides by the {self.gradient_divide_by} of all passes since the last step, unknown to a single one"
            self._refuse("gradient_divide_by", why, "scatter_every_pass")
        if self.check_ranks == "error" and self.check_ranks_every is None:
            why = "needs comparisons of the ranks' parameters (give check_ranks_every with it)"
            self._refuse("check_ranks", why, "check_ranks_every")
        if self.max_abs_grad is not None and "nonfinite" in self.skip_step_on:
            self._refuse("max_abs_grad", "raises an error for gradients that are not finite", "skip_step_on")
        if self.max_skipped != DEFAULT_MAX_SKIPPED and not self.skips_steps:
            why = "limits skipped steps (give skip_step_on or skip_norm_above with it)"
            self._refuse("max_skipped", why, "skip_step_on")
        if self.scatter_every_pass and self.skips_steps:
            why = "adds each pass to the step before it is known whether a later pass is to be dropped"
            self._refuse("scatter_every_pass", why, "skip_step_on" if self.skip_step_on else "skip_norm_above")
        if self.require_manual_backward_finalization:
            raise ValueError(
                "expected require_manual_backward_finalization=False, found True: gradients are averaged before "
                "backward() returns, so finalize_backward() has nothing to do. Leave both out. To average the sum of "
                "several backwards, run all but the last inside no_sync()"
            )
        if self.bucket_cap_mb is not None and self.bucket_cap_mb_list is not None:
            self._refuse("bucket_cap_mb", "holds for all buckets", "bucket_cap_mb_list")
        if self.comm_hook is not None:
            self.require_hook_decides()

    def _refuse(self, option: str, why: str, other: str) -> None:
        values = {name: f"{name}={getattr(self, name)!r}" for name in (option, other)}
        raise ValueError(f"{values[option]} {why}; it cannot be combined with {values[other]}")

    def _require_kinds_and_ranges(self) -> None:
        for each in fields(self):
            if each.type == "bool":
                require(each.name, getattr(self, each.name), "True or False", bool)
            elif each.type == "bool | None":
                require(each.name, getattr(self, each.name), "None, True or False", bool | None)
        require_choice("module_buffers", self.module_buffers, get_args(ModuleBufferSync), optional=True)
        require_choice("check_ranks", self.check_ranks, get_args(OnDifference))
        hooks = f"None, callable or one of {get_args(HookName)}"
        others: tuple[tuple[str, str, Any, Callable[[Any], bool]], ...] = (
            ("bucket_cap_mb", "None or a number of MiB from 0", float | int | None, lambda cap: 0 <= cap < math.inf),
            ("bucket_cap_mb_list", "None or a list of numbers of MiB from 0", Sequence | None, _are_caps),
            ("gradient_divide_by", '"world_size", "tokens", "samples" or an integer from 1', int | str, _is_divisor),
            ("max_abs_grad", "None or a positive number", float | int | None, lambda most: most > 0),
            ("pad_buckets_to", "a number of elements from 1", int, lambda pad: pad >= 1),
            (
                "sparse_parameters",
                "a list of names",
                Sequence,
                lambda names: all(isinstance(name, str) for name in names),
            ),
            ("comm_hook", hooks, str | Callable | None, lambda hook: callable(hook) or hook in get_args(HookName)),
            ("shard_group_size", "None or a number of ranks from 1", int | None, lambda ranks: ranks >= 1),
            (
                "skip_step_on",
                f"a list of {get_args(SkipReason)}",
                Sequence,
                lambda reasons: all(reason in get_args(SkipReason) for reason in reasons),
            ),
            ("skip_norm_above", "None or a number above 1", float | int | None, lambda multiple: multiple > 1),
            ("max_skipped", "a number of steps from 1", int, lambda steps: steps >= 1),
            ("check_ranks_every", "None or a number of passes from 1", int | None, lambda passes: passes >= 1),
            ("process_group", "None or a process group", ProcessGroup | int | None, _is_group),
            ("device_mesh", "None or a DeviceMesh", DeviceMesh | None, lambda mesh: True),
            ("timeout", "None or a positive timedelta", timedelta | None, lambda time: time > timedelta(0)),
            ("report_after", "a positive number of seconds", float | int, lambda seconds: seconds > 0),
        )
        for name, wanted, kinds, fits in others:
            require(name, getattr(self, name), wanted, kinds, fits)

    def _unify_spellings(self) -> None:
        """Give each choice with several spellings its one value. Does nothing the second time."""
        wire, grad_dtype = self.wire_dtype, self._unified_grad_dtype()
        unified = {
            "module_buffers": self._unified_module_buffers(),
            "grad_dtype": grad_dtype,
            "master_params": grad_dtype is not None if self.master_params is None else self.master_params,
            "wire_dtype": None if wire is None else _as_dtype("wire_dtype", wire, WireDtypeName, "None or {}"),
            "sparse_parameters": tuple(self.sparse_parameters),
            "skip_step_on": tuple(reason for reason in get_args(SkipReason) if reason in self.skip_step_on),
            "bucket_cap_mb_list": None if self.bucket_cap_mb_list is None else tuple(self.bucket_cap_mb_list),
            "timeout": DEFAULT_TIMEOUT if self.timeout is None else self.timeout,
        }
        for name, value in unified.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else

    def _unified_module_buffers(self) -> ModuleBufferSync:
        spellings = ("module_buffers", "forward_sync_buffers", "broadcast_buffers")
        given = {name: getattr(self, name) for name in spellings if getattr(self, name) is not None}
        on = {value not in ("off", False) for value in given.values()}
        if len(on) > 1:
            found = " and ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(f"expected one choice for module buffers, found {found}")
        return self.module_buffers or ("off" if on == {False} else "broadcast")

    def _unified_grad_dtype(self) -> torch.dtype | dict[str, torch.dtype] | None:
        found: torch.dtype | dict[str, torch.dtype] | None = None
        if isinstance(self.grad_dtype, Mapping):
            by_pattern = self.grad_dtype.items()
            found = {pattern: _as_dtype(f"grad_dtype[{pattern!r}]", dtype, DtypeName) for pattern, dtype in by_pattern}
        elif self.grad_dtype is not None:
            wanted = "None, {}, or one of these per pattern of names"
            found = _as_dtype("grad_dtype", self.grad_dtype, DtypeName, wanted)
        if not self.accumulate_allreduce_grads_in_fp32:
            return found
        if found not in (None, torch.float32):
            raise ValueError(
                "expected one choice for the gradients' dtype, found accumulate_allreduce_grads_in_fp32=True and "
                f"grad_dtype={found!r}"
            )
        return torch.float32

    def require_hook_decides(self) -> None:
        """Require that only the communication hook decides how gradients travel, and the divisor.

        Raises:
            ValueError: If there is a wire dtype, a choice of levels, or another divisor than the world size.
        """
        for option, default, why in (
            ("gradient_divide_by", "world_size", "divides by the world size itself"),
            ("wire_dtype", None, "decides itself in which dtype gradients travel"),
            ("hierarchical", None, "decides itself between which ranks"),
        ):
            if (found := getattr(self, option)) != default:
                raise ValueError(
                    f"expected either comm_hook or {option}, found both: a hook {why}, so {option}={found!r} would "
                    "have no effect. Leave one of them out"
                )

    @property
    def init_sync_module_buffers(self) -> bool:
        """Whether to copy module buffers from rank 0 at the start, if parameters are copied."""
        return self.broadcast_buffers is not False or self.forward_sync_buffers is not None

    @property
    def bucket_cap_bytes(self) -> tuple[int, ...]:
        """Largest size of each bucket in bytes; the last one holds for all further ones. Empty: the default rule."""
        caps = self.bucket_cap_mb_list or (() if self.bucket_cap_mb is None else (self.bucket_cap_mb,))
        return tuple(int(cap * MIB) for cap in caps)

    @property
    def rescales(self) -> bool:
        """Whether reduced gradients are not means. Then reducing them again would change them."""
        return self.gradient_divide_by != "world_size"

    @property
    def skips_steps(self) -> bool:
        """Whether ranks may skip steps together."""
        return bool(self.skip_step_on) or self.skip_norm_above is not None

    def grad_dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a parameter's gradient.

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
                        f"expected a gradient dtype no less precise than parameter {name!r}, which is {dtype}; found "
                        f"{wanted} for the pattern {pattern!r}"
                    )
                return wanted
        return dtype

    def require_patterns_match(self, names: Sequence[str]) -> None:
        """Require that each pattern of ``grad_dtype`` matches a parameter name.

        Raises:
            ValueError: If one matches none.
        """
        for pattern in self.grad_dtype if isinstance(self.grad_dtype, Mapping) else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"expected patterns in grad_dtype that match parameters, found {pattern!r}: no match")

    def described(self) -> Iterator[tuple[str, str]]:
        """Each option that must be the same on all ranks, and its value as text."""
        for each in fields(self):
            if each.compare:
                yield each.name, repr(getattr(self, each.name))
        yield "init_sync_module_buffers", repr(self.init_sync_module_buffers)


@dataclass(frozen=True)
class TrainerOptions(Options):
    """The options of :class:`BucketDDPStrategy`, which documents those that the wrapper does not have."""

    state_dict_type: StateDictType = "full"
    async_save: bool = False
    uneven_inputs: UnevenInputs | None = None
    exact_evaluation: bool = False
    exact_resume: bool = False
    logged_keys: LoggedKeys = "same"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("state_dict_type", self.state_dict_type, get_args(StateDictType))
        require_choice("uneven_inputs", self.uneven_inputs, get_args(UnevenInputs), optional=True)
        require_choice("logged_keys", self.logged_keys, get_args(LoggedKeys))
        if self.async_save and self.state_dict_type != "sharded":
            raise ValueError(
                f'expected state_dict_type="sharded" with async_save=True, found {self.state_dict_type!r}: a single '
                "file is written by a CheckpointIO. Give the Trainer Lightning's AsyncCheckpointIO for that"
            )
        if self.exact_resume and self.uneven_inputs is not None:
            self._refuse("exact_resume", "goes by batches that all ranks have alike", "uneven_inputs")
        if self.uneven_inputs == "active_ranks" and self.rescales:
            raise ValueError(
                'expected uneven_inputs="active_ranks" or gradient_divide_by, found both: each says what gradients are '
                "divided by. Leave one of them out"
            )


def _is_group(value: ProcessGroup | int) -> bool:
    # A rank outside of a group has NON_GROUP_MEMBER in its place: Collectives refuses that, in torch's words.
    return isinstance(value, ProcessGroup) or value == GroupMember.NON_GROUP_MEMBER


def _are_caps(values: Sequence[float]) -> bool:
    numbers = all(isinstance(cap, float | int) and not isinstance(cap, bool) for cap in values)
    return len(values) > 0 and numbers and all(0 <= cap < math.inf for cap in values)


def _is_divisor(value: int | str) -> bool:
    return value >= 1 if isinstance(value, int) else value in ("world_size", "tokens", "samples")


def _as_dtype(option: str, value: Any, choice: Any, wanted: str = "{}") -> torch.dtype:
    """The dtype that a name stands for. One of torch's dtypes stands for itself.

    Args:
        option: The option.
        value: The user's value.
        choice: The literal type of the accepted names.
        wanted: All accepted values in words, with ``{}`` in place of the dtypes.
    """
    dtypes: dict[Any, torch.dtype] = {name: getattr(torch, _LONG_NAMES.get(name, name)) for name in get_args(choice)}
    wanted = wanted.format(f"one of {', '.join(dtypes)} (torch's dtypes, or their names)")
    dtypes |= {dtype: dtype for dtype in dtypes.values()}
    require(option, value, wanted, torch.dtype | str, dtypes.__contains__)
    return dtypes[value]
