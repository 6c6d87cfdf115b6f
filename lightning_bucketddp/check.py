"""``python -m lightning_bucketddp check``: whether gradients are right on these machines, and what they cost.

Each case trains one model twice, on the same data: with torch's DDP as shipped, and with :class:`BucketDDP`. Compared
are the gradients of each step, how far the weights have moved, and what a step takes in time and memory.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import __version__
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.devices import is_accelerator, wait_for_device
from lightning_bucketddp.comm.host_copy import bytes_of
from lightning_bucketddp.layout.ledger import leaving
from lightning_bucketddp.layout.nodes import Nodes
from lightning_bucketddp.wrapper.bucket_ddp import BucketDDP

STEPS = 3
"""Steps whose gradients are compared: buckets are laid out anew after the first."""
LEARNING_RATE = 2e-3
"""Small enough that training does not diverge, which would make rounding look like a fault."""
LEAST_WITHIN = 1e-3
"""For the weights' change, which is small beside the weights: fp32 itself rounds that much."""


@dataclass(frozen=True)
class Case:
    """A way of training.

    Attributes:
        name: What the table calls it.
        options: Of :class:`BucketDDP`.
        within: The largest relative difference of a parameter's gradient, and of its change, from torch DDP's. In low
            precision the two round differently, and differences grow from step to step.
        dtype: Of the parameters.
        hook: The communication hook of both wrappers.
        local_passes: Passes inside ``no_sync`` before each synchronised one.
        autocast: The dtype of autocast in forward; None for none.
        set_to_none: Whether ``zero_grad`` drops gradients.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    within: float = 1e-4
    dtype: torch.dtype = torch.float32
    hook: Callable[..., Any] | None = None
    local_passes: int = 0
    autocast: torch.dtype | None = None
    set_to_none: bool = True


CASES = (
    Case("plain"),
    Case("sharded optimizer", {"shard_optimizer": True}),
    Case("bf16 on the wire", {"wire_dtype": "bfloat16"}, within=0.1),
    Case("bf16, fp32 gradients", {"grad_dtype": "float32"}, within=0.3, dtype=torch.bfloat16),
    Case("no_sync", local_passes=2),
    Case("fp16 hook", within=0.01, hook=fp16_compress_hook),
)


def matrix(world_size: int) -> Iterator[Case]:
    """Yield what ``--all`` runs: each precision with each way to reduce, to accumulate and to clear gradients.

    Args:
        world_size: The number of ranks. Groups of shards have half of them, if that divides it.
    """
    half = world_size // 2 if world_size % 2 == 0 else 1
    bf16_true = {"dtype": torch.bfloat16, "options": {"grad_dtype": "float32"}, "within": 0.3}
    precisions: dict[str, dict[str, Any]] = {
        "32": {},
        "bf16-mixed": {"autocast": torch.bfloat16, "within": 0.1},
        "16-mixed": {"autocast": torch.float16, "within": 0.1},
        "bf16-true": bf16_true,
    }
    reductions: dict[str, dict[str, Any]] = {
        "plain": {},
        "sharded": {"shard_optimizer": True},
        f"groups of {half}": {"shard_optimizer": True, "shard_group_size": half},
        "bf16 hook": {"comm_hook": "bf16"},
    }
    for (precision, given), (how, options), passes, to_none in product(
        precisions.items(), reductions.items(), (1, 4), (True, False)
    ):
        name = f"{precision}, {how}" + f", {passes} passes" * (passes > 1) + ", zeros" * (not to_none)
        within = max(given.get("within", 1e-4), 0.1 if "comm_hook" in options else 0.0)
        both = {**given, "within": within, "options": {**given.get("options", {}), **options}}
        yield Case(name, **both, local_passes=passes - 1, set_to_none=to_none)


def autocasts(case: Case, device: torch.device) -> bool:
    """Whether a device has the autocast of a case, or the case has none."""
    if case.autocast is None:
        return True
    one = torch.ones(1, 1, device=device)
    try:
        with torch.autocast(device.type, case.autocast):
            return nn.functional.linear(one, one).dtype is case.autocast
    except RuntimeError:  # no kernels for it
        return False


@dataclass(frozen=True)
class Size:
    """How large the model is, and how long it is timed.

    Attributes:
        width: Of its layers.
        depth: How many layers it has.
        rows: Of a batch.
        rounds: Blocks of steps that are timed; both wrappers in each. With 0 no times are taken.
        seconds: What a block should take.
        bucket_mb: The largest bucket, in MiB; None for the wrappers' own choice.
    """

    width: int
    depth: int
    rows: int
    rounds: int
    seconds: float
    bucket_mb: float | None = None


ON_ACCELERATOR = Size(width=1024, depth=24, rows=4096, rounds=10, seconds=0.4)
ON_CPU = Size(width=256, depth=16, rows=32, rounds=10, seconds=0.4, bucket_mb=1)
QUICK = Size(width=32, depth=3, rows=8, rounds=0, seconds=0.0, bucket_mb=0.005)

DESCRIPTION = (
    "Compare this package with torch's DDP: gradients, weights, time and memory, on all devices of this machine."
)


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add the layer's output to its input."""
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Peer:
    """A wrapped copy of the model, its optimizer, and what was measured of both."""

    def __init__(self, case: Case, size: Size, device: torch.device, rank: int, ours: bool) -> None:
        self.case, self.size, self.device = case, size, device
        self._bytes_before = _memory(device, "memory_allocated")
        _memory(device, "reset_peak_memory_stats")
        torch.manual_seed(0)
        module = nn.Sequential(*(Layer(size.width) for _ in range(size.depth))).to(device, case.dtype)
        self.names, self.params = zip(*module.named_parameters(), strict=True)
        options = {"bucket_cap_mb": size.bucket_mb, **(case.options if ours else {})}
        self.net: Any = (BucketDDP if ours else DistributedDataParallel)(module, **options)
        if case.hook is not None:
            self.net.register_comm_hook(None, case.hook)
        # What `grad_dtype` brings along, by hand for torch's DDP.
        by_hand = not ours and "grad_dtype" in case.options
        self._masters = [nn.Parameter(param.detach().float()) for param in self.params] if by_hand else []
        self._optimizer = torch.optim.SGD(self._masters or self.params, lr=LEARNING_RATE, momentum=0.9)
        self._scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, enabled=case.autocast is torch.float16)
        self._before = [_host(param) for param in self.params]
        generator = torch.Generator().manual_seed(rank)  # other data on each rank, the same for both peers
        shape = (STEPS, case.local_passes + 1, 2, size.rows, size.width)
        self._batches = torch.randn(shape, generator=generator).to(device)

    def run_passes(self, step: int = 0) -> None:
        """Forward and backward: the local passes, and the synchronised one."""
        for number, (inputs, targets) in enumerate(self._batches[step]):
            with self.net.no_sync() if number < self.case.local_passes else nullcontext():
                with torch.autocast(self.device.type, self.case.autocast, enabled=self.case.autocast is not None):
                    outputs = self.net(inputs.to(self.case.dtype))
                loss = (outputs.float() - targets).square().sum(1).mean()
                self._scaler.scale(loss).backward()

    def step(self) -> None:
        """The optimizer's step, and cleared gradients."""
        if self._masters:
            for master, param in zip(self._masters, self.params, strict=True):
                master.grad = None if param.grad is None else param.grad.float()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(list(self.params), list(self._masters))
        self.net.zero_grad(self.case.set_to_none)

    def train(self) -> tuple[list[Tensor], list[Tensor]]:
        """Train some steps. Return the gradients of all steps, and how far the weights have moved, on the CPU."""
        whole = getattr(self.net, "full_grad", lambda param: param.grad)
        grads = []
        for step in range(STEPS):
            self.run_passes(step)
            self._scaler.unscale_(self._optimizer)
            grads += [_host(whole(param)) for param in self.params]
            self.step()
        moved = [_host(param) - before for param, before in zip(self.params, self._before, strict=True)]
        self.peak_bytes = None
        if (peak := _memory(self.device, "max_memory_allocated")) is not None:
            self.peak_bytes = peak - (self._bytes_before or 0)
        return grads, moved

    def host_waits(self) -> int | None:
        """How often the host waits for the device in the passes of a step; None on a CPU.

        torch's sync debug mode, which CUDA has, sees neither events nor streams nor devices that Python waits for.
        These are counted in any case, unless the event has come already. The passes of a step before that one make
        some of the events.
        """
        debug = getattr(torch.get_device_module(self.device), "set_sync_debug_mode", None)
        if debug is None and not is_accelerator(self.device):
            return None
        with counted_waits(self.device) as waits:
            self.run_passes()
            self.step()
            waits.clear()
            with warnings.catch_warnings(record=True, action="always") as warned:
                if debug is not None:
                    debug("warn")
                try:
                    self.run_passes()
                finally:
                    if debug is not None:
                        debug("default")
            found = len(waits) + sum("synchroniz" in str(one.message) for one in warned)
        self.step()
        return found

    def seconds(self, steps: int) -> float:
        """Seconds of a step, the mean of some."""
        wait_for_device(self.device)
        begin = time.perf_counter()
        for _ in range(steps):
            self.run_passes()
            self.step()
        wait_for_device(self.device)
        return (time.perf_counter() - begin) / steps


@contextmanager
def counted_waits(device: torch.device) -> Iterator[list[str]]:
    """Give a list that grows when Python waits for an event that was made here, for a stream, or for a device."""
    found: list[str] = []

    class Event(torch.Event):
        def synchronize(self) -> None:
            if not self.query():
                found.append("event")
            super().synchronize()

    def noting(owner: Any, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def wait(*args: Any, **options: Any) -> Any:
            found.append(f"{owner.__name__}.{name}")
            return original(*args, **options)

        return wait

    module = torch.get_device_module(device)
    owners = [torch.accelerator, module, getattr(module, "Event", None), getattr(module, "Stream", None)]
    owners = [owner for owner in owners if owner not in (torch.Event, torch.Stream)]  # these cannot be changed
    with ExitStack() as patches:
        patches.enter_context(patch.object(torch, "Event", Event))
        for owner in owners:
            if callable(getattr(owner, "synchronize", None)):
                patches.enter_context(patch.object(owner, "synchronize", noting(owner, "synchronize")))
        yield found


def _host(tensor: Tensor | None) -> Tensor:
    """A copy on the CPU, in fp32; of no gradient, an empty one."""
    return torch.empty(0) if tensor is None else tensor.detach().float().cpu().clone()


def _memory(device: torch.device, call: str) -> Any:
    """What one of torch's calls about an accelerator's memory returns; None where there is no such thing."""
    try:
        return getattr(torch.accelerator, call)(device) if is_accelerator(device) else None
    except RuntimeError:
        return None


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of a tensor, relative to the norm of the expected one; infinite if shapes differ."""
    if any(one.shape != other.shape for one, other in zip(found, expected, strict=True)):
        return float("inf")
    parts = [(one - other).norm() / other.norm() for one, other in zip(found, expected, strict=True)]
    return float(torch.stack(parts).nan_to_num(float("inf")).max())


@dataclass
class Result:
    """What a case has shown on one rank, or on all.

    Attributes:
        case: Its name.
        gradients: The largest relative difference of a gradient from torch DDP's.
        weights: The same for the change of a weight.
        ranks_differ: The first tensor that is not the same on all ranks, to the last bit; empty if there is none.
        host_waits: How often the host waits for the device in a step's passes, with torch's DDP and with this package.
        step_ms: Milliseconds of a step with either: medians; None without times.
        step_ratio: Time of a step relative to torch DDP's: the median over blocks; None without times.
        peak_bytes: The most memory of the device with either.
        buckets: How many buckets this package's wrapper has.
        early_launches: How many of them it launched before backward had ended.
        wrong: What is wrong.
    """

    case: str
    gradients: float
    weights: float
    ranks_differ: str
    host_waits: tuple[int, ...] | None
    step_ms: tuple[float, ...] | None
    step_ratio: float | None
    peak_bytes: tuple[int, ...] | None
    buckets: int
    early_launches: int
    wrong: list[str] = field(default_factory=list)


def run_case(case: Case, size: Size, device: torch.device, ranks: Collectives) -> Result:
    """Run a case. All ranks must call this; each returns the result of all."""
    peers = [Peer(case, size, device, ranks.rank, ours=False)]
    their_grads, their_moves = peers[0].train()
    peers.append(Peer(case, size, device, ranks.rank, ours=True))
    grads, moves = peers[1].train()
    digests = [hashlib.blake2b(bytes_of(tensor)).digest() for tensor in (*grads, *moves)]
    mine = _difference(grads, their_grads), _difference(moves, their_moves), digests
    gradients, weights, of_ranks = zip(*ranks.exchange_objects(mine), strict=True)
    names = [f"the gradient of {name} in step {step + 1}" for step in range(STEPS) for name in peers[1].names]
    names += [f"the parameter {name}" for name in peers[1].names]
    differ = [name for name, *digest in zip(names, *of_ranks, strict=True) if len(set(digest)) > 1]
    waits = [ranks.exchange_objects(peer.host_waits()) for peer in peers]
    times = _times(peers, size, ranks) if size.rounds else None
    last_pass = peers[1].net.last_pass()
    peers[1].net.close()
    result = Result(
        case.name,
        max(gradients),
        max(weights),
        differ[0] if differ else "",
        tuple(max(found) for found in waits if None not in found) or None,
        None if times is None else tuple(1000 * median(found) for found in times),
        None if times is None else median(ours / theirs for theirs, ours in zip(*times, strict=True)),
        tuple(peer.peak_bytes for peer in peers if peer.peak_bytes is not None) or None,
        len(last_pass.buckets),
        last_pass.early_launches,
    )
    result.wrong = list(_faults(result, case))
    return result


def _times(peers: list[Peer], size: Size, ranks: Collectives) -> list[list[float]]:
    """Seconds of a step, per peer and block. Rank 0 decides how many steps a block has, as steps communicate."""
    steps = ranks.exchange_objects(max(1, round(size.seconds / peers[0].seconds(1))))[0]
    times: list[list[float]] = [[], []]
    for number in range(size.rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append(peers[which].seconds(steps))
    return times


def _faults(found: Result, case: Case) -> Iterator[str]:
    for what, difference, within in (
        ("gradients", found.gradients, case.within),
        ("weights", found.weights, max(case.within, LEAST_WITHIN)),
    ):
        if not difference <= within:
            yield f"expected {what} within {within:g} of torch DDP's, found a difference of {difference:.1e} of a norm"
    if found.ranks_differ:
        yield f"expected the same on all ranks to the last bit, found differences, first in {found.ranks_differ}"
    if found.host_waits is not None and found.host_waits[1] > found.host_waits[0]:
        yield (
            f"expected no more waits of the host for the device than torch DDP's {found.host_waits[0]}, found "
            f"{found.host_waits[1]} in the passes of a step"
        )


def environment(device: torch.device, world_size: int, hosts: Nodes) -> dict[str, Any]:
    """Ranks, hardware and versions."""
    of_accelerators = getattr(torch.get_device_module(device), "get_device_name", None)
    facts = {
        "ranks": world_size,
        "hosts": hosts.count,
        "device": f"{platform.machine()}, {os.cpu_count()} cores" if of_accelerators is None else of_accelerators(),
        "backend": dist.get_backend(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA or HIP": torch.version.cuda or torch.version.hip,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if dist.get_backend() == "nccl" else None,
        "lightning": version_of("lightning"),
        "pytorch-lightning": version_of("pytorch-lightning"),
        "lightning_bucketddp": __version__,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


HEAD = ("case", "gradients", "weights", "ranks", "host waits", "ms a step", "of DDP's", "MiB", "of DDP's", "")


def _row(found: Result) -> tuple[str, ...]:
    waits, peak = found.host_waits, found.peak_bytes
    return (
        found.case,
        f"{found.gradients:.0e}",
        f"{found.weights:.0e}",
        "differ" if found.ranks_differ else "equal",
        "-" if waits is None else f"{waits[1]} ({waits[0]})",
        "-" if found.step_ms is None else f"{found.step_ms[1]:.2f}",
        "-" if found.step_ratio is None else f"{found.step_ratio:.3f}",
        "-" if peak is None else f"{peak[1] / 2**20:.0f}",
        "-" if peak is None else f"{peak[1] / peak[0]:.3f}",
        "WRONG" if found.wrong else "right",
    )


def _line(cells: Sequence[str], width: int) -> str:
    return f"{cells[0]:{width}}" + "".join(f"{cell:>11}" for cell in cells[1:])


def run_rank(quick: bool, output: str | None, everything: bool = False) -> bool:
    """Run all cases in the default process group; rank 0 prints, and writes the file.

    Args:
        quick: Whether to take a tiny model and a few steps.
        output: The file to write; None for none.
        everything: Whether to run the matrix of options instead, with a tiny model.

    Returns:
        Whether all is right.
    """
    ranks = Collectives(None)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else accelerator
    says = print if ranks.rank == 0 else lambda *_, **__: None
    cases = [case for case in matrix(ranks.world_size) if autocasts(case, device)] if everything else [*CASES]
    size = QUICK if quick or everything else ON_CPU if accelerator is None else ON_ACCELERATOR
    hosts = Nodes(tuple(ranks.exchange_objects(platform.node())))
    facts = environment(device, ranks.world_size, hosts)
    says("\n".join(f"{name:21}{fact}" for name, fact in facts.items()))
    leaves = {} if hosts.one or hosts.ranks_each is None else leaving(hosts.names)
    if leaves:
        says("\nleaves a host in a pass, in units of the gradients' size in fp32 (by arithmetic):")
        says("\n".join(f"{share:6.2f}  {option}" for option, share in leaves.items()))
    if ranks.world_size == 1:
        says("One rank sends nothing: this checks less than two would.")
    width = max(len(case.name) for case in cases) + 1
    says("\n" + _line(HEAD, width), flush=True)
    results = []
    for case in cases:
        results.append(run_case(case, size, device, ranks))
        says(_line(_row(results[-1]), width), flush=True)
        gc.collect()
    wrong = [f"{found.case}: {fault}" for found in results for fault in found.wrong]
    says("\n" + "\n".join(wrong or ["All is right."]))
    if output is not None and ranks.rank == 0:
        report = {"environment": facts, "leaves a host": leaves, "size": asdict(size), "wrong": wrong}
        Path(output).write_text(json.dumps({**report, "cases": [asdict(found) for found in results]}, indent=1) + "\n")
    return not wrong


def _run_started_rank(quick: bool, output: str | None, everything: bool) -> bool:
    """Join the ranks that the environment names, and check. The default group is bound to a device, as Lightning's."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    bound = None
    if accelerator is not None:
        bound = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(bound)
    backend = dist.get_default_backend_for_device(accelerator or "cpu")
    dist.init_process_group(backend, timeout=timedelta(minutes=2), device_id=bound)
    right = run_rank(quick, output, everything)
    dist.barrier()
    dist.destroy_process_group()
    return right


def main(quick: bool, output: str | None, start_method: str = "spawn", everything: bool = False) -> int:
    """Check, in the ranks that a launcher has started, or in ranks of its own.

    Args:
        quick: Whether to take a tiny model and a few steps.
        output: The file to write; None for none.
        start_method: How ranks are started, as in ``torch.multiprocessing``.
        everything: Whether to run the matrix of options.

    Returns:
        The exit code: 1 if something is wrong.

    Raises:
        SystemExit: If srun has started several tasks, and torchrun has not started the ranks.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(not _run_started_rank(quick, output, everything))
    if (tasks := int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))) > 1:
        raise SystemExit(
            f"expected ranks that torchrun has started, found one of {tasks} tasks of srun, which would each check its "
            "own machine alone; write: srun --ntasks-per-node 1 torchrun ... -m lightning_bucketddp check"
        )
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=torch.accelerator.device_count() or 2,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method=start_method,
        max_restarts=0,
    )
    try:
        return int(not all(elastic_launch(launch, _run_started_rank)(quick, output, everything).values()))
    except ChildFailedError as error:
        print(error)
        return 1
