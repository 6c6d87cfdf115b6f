"""Measure the memory of gradients, and of everything else, on two ranks of one machine.

    python benchmarks/memory.py [--models gpt shuffled] [--peers bucketddp]

Each peer trains in its own processes: some steps of one pass, then one step of three passes, two of them local. A
ledger counts every tensor in use by its storage, also tensors that C++ holds. It counts after each forward, backward,
step, zero_grad and operator, and inside backward as soon as a parameter's gradient exists.

The figure for gradients and buckets is what remains of the tensors in use after three subtractions: parameters,
optimizer state, and the unwrapped module's other tensors at the same point. After an operator there is no such point,
because peers run different operators. There the largest size of the unwrapped module's other tensors in the phase is
subtracted. That makes a lower bound, too low by at most the activations and the largest gradient. For FSDP2 the figure
includes gathered parameters.

Two other figures are for comparison. The allocator's own count shows memory that no tensor holds (the collectives'
scratch, Python's objects). The largest size of the process is shown as a ratio to the unwrapped module's.

The bound for BucketDDP: at no point do gradients take more than their size and one bucket.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from models import GPT, Shuffled, Workload, loss_of, mlp, resnet50
from ranks import prepare, require_device, run_ranks
from report import plots, save, table
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from wrapped import Wrapping, bucketddp, ddp, fairscale, fsdp2, local_pass, try_wrap, unwrapped, zero

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.layout.plan import ALIGNMENT_BYTES, MIB
from lightning_bucketddp.optim.swap import swap_of

RANKS = 2
TOLERANCE_BYTES = 64 * 1024
"""Most bytes that the wrapper's other tensors may take, such as the control vector."""

STEPS = 6
"""Steps of one pass each: wrappers learn orders in them."""
PASSES = (*(f"pass {number + 1}" for number in range(STEPS)), "local pass 1", "local pass 2", "pass after local ones")


def workloads(small: bool = False) -> dict[str, Workload]:
    """Models with much larger gradients than activations, by name."""
    width, layers = (512, 8) if small else (1024, 24)
    narrow, many = (128, 64) if small else (384, 128)  # several to a bucket
    return {
        "gpt": Workload("gpt", lambda: GPT(4096, 32, 512, 8, 2 if small else 8), (1, 32), 4096, tokens=True),
        "resnet": Workload("resnet", lambda: resnet50(32 if small else 64), (2, 3, 32, 32), 100),
        "mlp": Workload("mlp", lambda: mlp(width, layers), (4, width), width),
        "shuffled": Workload("shuffled", lambda: Shuffled(narrow, many), (4, narrow), narrow),
    }


@dataclass(frozen=True)
class Peer:
    """A way of training, and how the training loop runs it.

    Attributes:
        wrapping: The way of training.
        dtype: The dtype of the parameters.
        set_to_none: How ``zero_grad`` is called.
    """

    wrapping: Wrapping
    dtype: torch.dtype = torch.float32
    set_to_none: bool = True

    @property
    def name(self) -> str:
        return self.wrapping.name

    @property
    def baseline(self) -> Peer:
        """The unwrapped module, trained in the same manner."""
        words = ["unwrapped", *(["bf16"] if self.dtype is torch.bfloat16 else [])]
        words += [] if self.set_to_none else ["zeroed in place"]
        return Peer(replace(unwrapped(), name=", ".join(words)), self.dtype, self.set_to_none)


def peers() -> list[Peer]:
    """All but the baselines."""
    return [
        Peer(ddp("ddp as shipped")),
        Peer(ddp("ddp, gradient_as_bucket_view", gradient_as_bucket_view=True)),
        Peer(zero("ddp + ZeroRedundancyOptimizer", gradient_as_bucket_view=True)),
        Peer(fsdp2()),
        Peer(bucketddp("bucketddp")),
        Peer(bucketddp("bucketddp, zeroed in place"), set_to_none=False),
        Peer(bucketddp("bucketddp, bf16, fp32 gradients", grad_dtype="float32"), torch.bfloat16),
        Peer(fairscale("FairScale ShardedDDP + OSS")),
        Peer(bucketddp("bucketddp_sharded", shard_optimizer=True)),
        Peer(
            bucketddp("bucketddp_sharded, bf16, fp32 gradients", shard_optimizer=True, grad_dtype="float32"),
            torch.bfloat16,
        ),
    ]


# -- memory in use -----------------------------------------------------------------------------------


class _MallInfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def allocated(device: torch.device) -> Callable[[], int] | None:
    """Return a function that counts the bytes which the device's allocator has handed out; None if there is none."""
    if device.type != "cpu":
        return lambda: torch.accelerator.memory_allocated(device)
    # torch's CPU allocator caches nothing, so malloc's count is the memory in use.
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if mallinfo2 is None:  # glibc before 2.33, or another library
        return None
    mallinfo2.restype = _MallInfo

    def given_out() -> int:
        info = mallinfo2()
        return info.uordblks + info.hblkhd

    return given_out


def process_bytes(device: torch.device, peak: bool = False) -> int:
    """Return the size of the process, resident or reserved on an accelerator: now, or at its peak.

    0 if the system does not say.
    """
    if device.type != "cpu":
        return (torch.accelerator.max_memory_reserved if peak else torch.accelerator.memory_reserved)(device)
    if sys.platform != "linux":
        return 0
    label = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(label))


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors' storages on this rank, each counted once."""
    with torch._C.DisableTorchFunctionSubclass():  # looking at memory waits for no parameter
        storages = [_local(tensor).untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state on this rank, fp32 master parameters included."""
    state = getattr(optimizer, "optim", optimizer).state  # ZeroRedundancyOptimizer's is inside
    tensors = [value for entry in state.values() for value in entry.values()]
    if (swap := swap_of(optimizer)) is not None:
        tensors += [swap.master(param) for group in optimizer.param_groups for param in group["params"]]
    return _storage_bytes(tensors)


class Ledger(TorchDispatchMode):
    """Counts the tensors in use at the points of a training run, while it is active.

    Attributes:
        points: Per point, the bytes of: all tensors in use; ``.grad`` and a gradient just made; parameters and
            optimizer state; memory that the device's allocator has handed out. A point is "pass/phase", at its end, or
            "pass/backward/parameter".
        peaks: Per pass and phase, the most bytes in use after an operator; and the most without ``.grad`` and without
            the value of ``fixed`` when the phase began.
        params: The parameters.
        fixed: Returns the bytes of parameters and optimizer state.
        recounts: Whether memory is counted anew at each look. FSDP2's storages change their size without an operator;
            those of sharded parameters lie in their bucket's.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.points: dict[str, tuple[int, int, int, int]] = {}
        self.peaks: dict[str, tuple[int, int]] = {}
        self.params: list[nn.Parameter] = []
        self.fixed: Callable[[], int] = lambda: 0
        self.recounts = False
        self.phase = ""
        self._fixed = 0
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._sum = 0
        self._allocated = allocated(device) or (lambda: 0)
        self._before = self._allocated()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            tree_map_only(Tensor, self._add, result)
            self._look()
        return result

    def _add(self, tensor: Tensor) -> None:
        # A storage's Python object lives as long as the storage, also if C++ holds it.
        storage = weakref.ref(_local(tensor).untyped_storage(), self._gone)
        if storage not in self._sizes:
            self._sizes[storage] = _local(tensor).untyped_storage().nbytes()
            self._sum += self._sizes[storage]

    def _gone(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        self._sum -= self._sizes.pop(storage)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase; its end is a point."""
        self.phase, self._fixed = phase, self.fixed()
        yield
        self.note(phase)
        self.phase = ""

    def _used(self) -> int:
        if not self.recounts:
            return self._sum
        storages = [storage for ref in list(self._sizes) if (storage := ref()) is not None]
        used = end = 0
        for start, stop in sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages):
            used += max(stop, end) - max(start, end)
            end = max(stop, end)
        return used

    def _look(self) -> int:
        used = self._used()
        if self.phase:
            grads = sum(_local(grad).nbytes for param in self.params if (grad := param.grad) is not None)
            most, rest = self.peaks.get(self.phase, (0, 0))
            self.peaks[self.phase] = max(most, used), max(rest, used - grads - self._fixed)
        return used

    def note(self, point: str, *made: Tensor) -> None:
        """Note the memory in use at a point; ``made`` is a gradient just made."""
        used = self._look()
        grads = [grad for param in self.params if (grad := param.grad) is not None]
        allocated_bytes = self._allocated() - self._before
        self.points[point] = used, _storage_bytes([*grads, *made]), self.fixed(), allocated_bytes


# -- a training run ----------------------------------------------------------------------------------


def worker(device: torch.device, model_name: str, peer_name: str, small: bool) -> dict[str, Any]:
    """Run one rank; return its ledger's figures."""
    import warnings

    warnings.simplefilter("ignore")
    chosen = next(one for peer in peers() for one in (peer, peer.baseline) if one.name == peer_name)
    workload = workloads(small)[model_name]
    torch.manual_seed(0)
    inputs, targets = (tensor.to(device) for tensor in workload.batch(torch.Generator().manual_seed(dist.get_rank())))
    inputs = inputs if workload.tokens else inputs.to(chosen.dtype)
    process_before, ledger = process_bytes(device), Ledger(device)
    with ledger:
        module = workload.make().to(device, chosen.dtype)
        model, note = try_wrap(chosen.wrapping, module)
        if model is None:
            return {"note": note}
        params = ledger.params = list(model.parameters())
        optimizer = chosen.wrapping.optimizer(params)
    ledger.recounts = isinstance(model, FSDPModule) or "sharded" in peer_name
    ledger.fixed = lambda: _storage_bytes(params) + _state_bytes(optimizer)
    for name, param in module.named_parameters():
        if not isinstance(param, DTensor):  # whose gradient is there only after backward
            param.register_hook(lambda grad, name=name: ledger.note(f"{ledger.phase}/{name}", grad))
    buckets: dict[str, int] = {}
    with ledger:
        for name in PASSES:
            largest = _largest_bucket(model)
            _run_pass(name, model, (inputs, targets), optimizer, chosen.set_to_none, ledger)
            buckets[name] = max(largest, _largest_bucket(model))  # the pass may have rebuilt the buckets
    return {
        "note": "",
        "gradient_bytes": sum(param.numel() * (param.grad_dtype or param.dtype).itemsize for param in params),
        "parameter_bytes": _storage_bytes(params),
        "elements": sum(param.numel() for param in params),
        "parameters": len(params),
        "bucket_bytes": buckets,
        "process_bytes": process_bytes(device, peak=True) - process_before,
        "points": ledger.points,
        "peaks": ledger.peaks,
    }


def _largest_bucket(model: nn.Module) -> int:
    if not isinstance(model, BucketDDP):
        return 0
    layout = model.layout
    return max(layout.bucket_nbytes(bucket) for bucket in layout.buckets)


def _run_pass(
    name: str,
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    optimizer: torch.optim.Optimizer,
    set_to_none: bool,
    ledger: Ledger,
) -> None:
    local = name.startswith("local")
    with local_pass(model) if local else nullcontext():
        with ledger.during(f"{name}/forward"):
            loss = loss_of(model(batch[0]), batch[1])
        with ledger.during(f"{name}/backward"):
            loss.backward()
    del loss
    if not local:
        with ledger.during(f"{name}/step"):
            optimizer.step()
        with ledger.during(f"{name}/zero_grad"):
            optimizer.zero_grad(set_to_none)


# -- what it comes to --------------------------------------------------------------------------------

KINDS = ("forward", "in backward", "backward", "step", "zero_grad", "local passes", "operators")


def _kind(point: str) -> str:
    name, phase, *parameter = point.split("/")
    if name.startswith("local"):
        return "local passes"
    return "in backward" if parameter else phase


@dataclass(frozen=True)
class Account:
    """Bytes of a peer's gradients, on the rank with the most.

    Attributes:
        unit: The size of the gradients in fp32. Other sizes are shown as shares of it.
        largest: Per kind of point, the most that gradients and buckets take, and where.
        settled: The most that they take from the last step of one pass on, when orders and buckets are known.
        bucket: The largest bucket of the peers whose buckets are known.
        violations: Where gradients take more than their size and one bucket: the worst point of each pass and phase.
        total: Parameters, optimizer state, gradients and buckets, and the rest, when their sum was largest.
        outside: The most that the allocator had given out and no tensor held.
        process: By how much the process grew at most.
    """

    unit: int
    largest: dict[str, tuple[int, str]]
    settled: int
    bucket: int
    violations: list[tuple[int, str]]
    total: tuple[int, int, int, int]
    outside: int
    process: int

    def part(self, kind: str) -> float:
        """The most that gradients take at points of a kind, as a share of the unit; NaN if there was no such point."""
        return self.largest[kind][0] / self.unit if kind in self.largest else math.nan

    @property
    def most(self) -> tuple[int, str]:
        """The most that gradients take anywhere, and where."""
        return max(self.largest.values())


def account(peer: dict[str, Any], base: dict[str, Any]) -> Account:
    """Sum up one rank's ledger.

    Args:
        peer: The result of :func:`worker`.
        base: The same of the unwrapped module.
    """
    found: list[tuple[str, str, int]] = []
    for point, (used, _, fixed, _) in peer["points"].items():
        base_used, base_grads, base_fixed, _ = base["points"][point]
        found.append((_kind(point), point, used - fixed - (base_used - base_grads - base_fixed)))
    for phase, (used, _) in peer["peaks"].items():
        if phase.endswith(("/forward", "/backward")):
            size = used - peer["points"][phase][2] - base["peaks"][phase][1]
            found.append(("operators", f"{phase}, after an operator", size))
    largest: dict[str, tuple[int, str]] = {}
    worst: dict[str, tuple[int, str]] = {}
    slack = TOLERANCE_BYTES + ALIGNMENT_BYTES * peer["parameters"]
    for kind, point, size in found:
        largest[kind] = max(largest.get(kind, (-1, "")), (size, point))
        name, phase = point.split("/")[:2]
        if size > peer["gradient_bytes"] + peer["bucket_bytes"][name] + slack:
            worst[f"{name}/{phase}"] = max(worst.get(f"{name}/{phase}", (-1, "")), (size, point))
    return Account(
        4 * peer["elements"],
        largest,
        max(size for _, point, size in found if point.split("/")[0] in PASSES[STEPS - 1 :]),
        max(peer["bucket_bytes"].values()),
        list(worst.values()),
        _total(peer, base),
        max(given_out - used for used, _, _, given_out in peer["points"].values()),
        peer["process_bytes"],
    )


def _total(peer: dict[str, Any], base: dict[str, Any]) -> tuple[int, int, int, int]:
    late = [phase for phase in peer["peaks"] if not phase.startswith(PASSES[0])]  # optimizer state is there by then
    top = max(late, key=lambda phase: peer["peaks"][phase][0])
    used, params = peer["peaks"][top][0], peer["parameter_bytes"]
    state = peer["points"][top][2] - params
    rest = min(base["peaks"][top][1], used - params - state)
    return params, state, used - params - state - rest, rest


def described(model: str, accounts: dict[str, Account], base_of: dict[str, str]) -> str:
    """The tables of one model."""
    unit = next(iter(accounts.values())).unit
    lines = [f"{model}: {unit / MIB:.1f} MiB of gradients in fp32; figures without a unit are shares of this", ""]
    heads = [kind if " " in kind or kind == "operators" else f"after {kind}" for kind in KINDS]
    rows = [["gradients and buckets, at most", *heads]]
    for name, one in accounts.items():
        rows.append([name, *(f"{one.part(kind):.3f}".replace("nan", "-") for kind in KINDS)])
    lines += [table(rows), ""]
    heads = ["parameters", "state", "gradients", "rest", "sum", "process", "over unwrapped", "outside, MiB"]
    rows = [["everything, at most", *heads]]
    for name, one in accounts.items():
        over = one.process - accounts[base_of[name]].process
        parts = [f"{size / unit:.3f}" for size in (*one.total, sum(one.total), one.process, over)]
        rows.append([name, *parts, f"{one.outside / MIB:.1f}"])
    lines += [table(rows), ""]
    for name, one in accounts.items():
        whole = accounts[base_of[name]].total[1]
        if one.total[1] < 0.9 * whole:
            share = f"{one.total[1] / whole:.4f} of the unwrapped module's; 1/{RANKS} is {1 / RANKS:.4f}"
            lines.append(f"{name}: the optimizer's state is {share}")
    lines += [verdict(name, one) for name, one in accounts.items() if one.bucket]
    return "\n".join([*lines, ""])


def _most(one: Account) -> tuple[int, str]:
    return one.most


def verdict(name: str, one: Account) -> str:
    """Whether the bound holds, in a line."""
    size, where = one.most
    words = "the bound holds"
    if one.violations:
        worst = sorted(one.violations, reverse=True)
        shown = "; ".join(f"{size / one.unit:.3f} at {where}" for size, where in worst[:3])
        more = f"; and {len(worst) - 3} points more" if len(worst) > 3 else ""
        words = f"the bound does NOT hold: {shown}{more}"
    share, bucket = size / one.unit, one.bucket / one.unit
    settled = f"{one.settled / one.unit:.3f} when settled"
    return f"{name}: at most {share:.3f} (at {where}), {settled}; the largest bucket is {bucket:.3f}: {words}"


COLOURS = {
    "parameters": "0.6",
    "optimizer state": "0.8",
    "gradients and buckets": "tab:blue",
    "activations and others": "tab:olive",
}


def plot(results: dict[str, dict[str, Account]]) -> Any:
    """Plot per model the bytes of gradients, at rest and at most, and of everything."""
    pyplot = plots()
    count = max(len(accounts) for accounts in results.values())
    inches = (11, (0.28 * count + 1.1) * len(results))
    figure, axes = pyplot.subplots(len(results), 2, figsize=inches, squeeze=False, constrained_layout=True)
    for (left, right), (model, accounts) in zip(axes, results.items(), strict=True):
        names = list(accounts)
        for at, one in enumerate(accounts.values()):
            most, settled = one.most[0] / one.unit, one.settled / one.unit
            ours = names[at].startswith("bucketddp")
            colour = "tab:blue" if ours else "tab:orange"
            left.barh(at, most, color="none", edgecolor=colour, ls=":", height=0.7)
            left.barh(at, settled, color=colour, alpha=0.45, height=0.7)
            left.barh(at, one.part("backward"), color=colour, height=0.7)
            left.text(
                most + 0.02,
                at,
                f"{settled:.2f}" + (f" ({most:.2f})" if most - settled > 0.005 else ""),
                va="center",
                fontsize=7,
            )
            begin = 0.0
            for part, size in zip(COLOURS, one.total, strict=True):
                width = size / one.unit
                label = part if not at else None
                right.barh(at, width, left=begin, color=COLOURS[part], height=0.7, label=label)
                begin += width
            right.text(begin + 0.05, at, f"{begin:.2f}", va="center", fontsize=7)
        left.axvline(1, color="k", lw=0.8, ls=":")
        left.set_yticks(range(len(names)), names)
        right.set_yticks(range(len(names)), [""] * len(names))
        for axis in (left, right):
            axis.invert_yaxis()
            axis.margins(x=0.16)
            axis.set_xlabel("memory relative to the gradients in fp32")
        left.set_title(f"{model}: gradients and buckets")
        right.set_title(f"{model}: everything, when it is most")
    axes[0, 1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.suptitle(
        "Memory: lower is better. Left: after backward (full), at most in a step (pale), in the first steps (dots)"
    )
    return figure


def measure(model: str, chosen: list[Peer], small: bool, device_type: str) -> tuple[dict[str, Account], str]:
    """The accounts of all peers and of the unwrapped modules they are measured against, and the tables."""
    base_of = {peer.name: peer.baseline.name for peer in chosen}
    base_of = {**{base: base for base in base_of.values()}, **base_of}
    found = {name: run_ranks(worker, model, name, small, size=RANKS, device_type=device_type) for name in base_of}
    notes = [ranks[0]["note"] for ranks in found.values() if ranks[0]["note"]]
    accounts = {
        name: max((account(*pair) for pair in zip(ranks, found[base_of[name]], strict=True)), key=_most)
        for name, ranks in found.items()
        if not ranks[0]["note"]
    }
    return accounts, "\n".join([described(model, accounts, base_of), *notes, ""])


def _chosen(wanted: list[str]) -> list[Peer]:
    names = [peer.name for peer in peers()]
    found = {
        name for part in wanted for name in ([part] if part in names else [name for name in names if part in name])
    }
    if wanted and not found:
        raise SystemExit(f"expected --peers to be parts of {names}, found {wanted}")
    return [peer for peer in peers() if not wanted or peer.name in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(workloads()), help="default: all; with --quick, mlp")
    parser.add_argument(
        "--peers", nargs="+", default=[], help="names, or parts of names; their unwrapped modules are added"
    )
    parser.add_argument("--device", default="cpu", help="type of the device; ranks share it if there is one only")
    parser.add_argument("--quick", action="store_true", help="small models: shows that it runs; saves nothing")
    arguments = parser.parse_args()
    require_device(arguments.device)
    # glibc then keeps no large freed block, so the size of the process is the memory in use.
    prepare(MALLOC_MMAP_THRESHOLD_="65536")
    chosen = _chosen(arguments.peers)
    results: dict[str, dict[str, Account]] = {}
    text: list[str] = []
    for model in arguments.models or (["mlp"] if arguments.quick else list(workloads())):
        results[model], lines = measure(model, chosen, arguments.quick, arguments.device)
        text.append(lines)
        print(lines, flush=True)
    if not arguments.quick:
        figures = {model: {name: asdict(one) for name, one in accounts.items()} for model, accounts in results.items()}
        print(save("memory", {"device": arguments.device, "bytes": figures}, "\n".join(text), plot(results)))


if __name__ == "__main__":
    main()
