"""Counts what a training step asks of an accelerator and of its host, for this package and for torch's DDP."""

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.peers.timed_store import TimedStore
from tests.accelerator import DEVICE, simulated

WARM_UP = 3
"""Steps that do not count: buckets are laid out anew in the first ones."""
BUCKETS = 8
"""About as many buckets gradients are cut into. A parameter that exceeds the size ends torch's, and begins ours."""
BATCH = 3
NO_KERNELS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"),
    *("record_stream", "_local_scalar_dense", "_unsafe_view", "is_pinned", "_pin_memory"),
}
"""Operators that launch nothing, and are not views either."""


class Norm(nn.Module):
    """A norm with two parameters. The CPU's LayerNorm in bf16 has other dtypes than an accelerator's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight + self.bias


class Block(nn.Module):
    """One of a transformer's, with 12 parameters; without attention, which needs none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.proj(query * key + value)
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """148 parameters, of the shapes of GPT-2's and small."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(width, width, bias=False), nn.Parameter(torch.zeros(width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(12)))
        self.norm = Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embed(x) + self.places)).sum()


class Small(nn.Module):
    """1,000 parameters of 32 elements."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(1000))

    def forward(self, x: Tensor) -> Tensor:
        for param in self.params:
            x = x + param
        return x.sum()


@dataclass(frozen=True)
class Model:
    """A model whose steps are counted.

    Attributes:
        make: Makes it.
        dtype: Of its parameters.
        options: Options of this package that are given in every row.
    """

    make: Callable[[], nn.Module]
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "148 parameters of a small transformer": Model(Transformer),
    "1,000 parameters of 32 elements": Model(Small),
    "148 parameters in bf16, with fp32 gradients": Model(
        Transformer, torch.bfloat16, {"grad_dtype": torch.float32, "master_params": False}
    ),
}


Wrap = Callable[..., nn.Module]
"""Wraps a module, with a size of buckets in MiB, and options of this package."""


def ours(**more: Any) -> Wrap:
    """This package's wrapper, with more options."""
    return lambda module, **options: BucketDDP(module, **options, **more)


class Ddp:
    """torch's DDP, with flags. Gradients have their parameters' dtype."""

    def __init__(self, **flags: Any) -> None:
        self._flags = flags

    def __call__(self, module: nn.Module, bucket_cap_mb: float, **options: Any) -> nn.Module:
        return DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb, **self._flags)


class Alone(Ddp):
    """No wrapper, and gradients as with torch's DDP."""

    def __call__(self, module: nn.Module, bucket_cap_mb: float, **options: Any) -> nn.Module:
        return module


BEST_FLAGS: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True, "batched_grad_copy": True}
BEST, OURS = "torch's DDP, best flags", "this package"
PEERS: dict[str, Wrap] = {
    "torch's DDP": Ddp(),
    BEST: Ddp(**BEST_FLAGS),
    OURS: ours(),
    "torch's DDP, `find_unused_parameters`": Ddp(find_unused_parameters=True),
    "`find_unused_parameters`": ours(find_unused_parameters=True),
    '`comm_hook="bf16"`': ours(comm_hook="bf16"),
    '`wire_dtype="bfloat16"`': ours(wire_dtype="bfloat16"),
    '`wire_dtype="int8"`': ours(wire_dtype="int8"),
    "`shard_optimizer`": ours(shard_optimizer=True),
    "`shard_optimizer`, `scatter_every_pass`": ours(shard_optimizer=True, scatter_every_pass=True),
    "`overlap=False`": ours(overlap=False),
    "`use_contiguous_buffers=False`": ours(use_contiguous_buffers=False),
    '`gradient_divide_by="samples"`': ours(gradient_divide_by="samples"),
    "`max_abs_grad`": ours(max_abs_grad=1e3),
    '`skip_step_on=["nonfinite"]`': ours(skip_step_on=["nonfinite"]),
    "`check_ranks_every=1`": ours(check_ranks_every=1),
}


@dataclass(frozen=True)
class Counts:
    """What a step asks for.

    Attributes:
        buckets: Buckets that gradients are reduced in.
        kernels: Kernels that are launched. An operator is one, whatever the number of its tensors.
        written: Bytes that they write, in bytes of all gradients.
        collectives: Collectives that are started.
        events: Events that are recorded, those of the communicator included.
        waits: Of a stream for another one.
        record_stream: Tensors whose memory is kept for another stream.
        allocations: Blocks of device memory that are asked for.
        calls: Of functions written in Python, in backward; in all threads.
        host_waits: How often the host waits for the device.
        store: Requests to the store.
    """

    buckets: int
    kernels: int
    written: float
    collectives: int
    events: int
    waits: int
    record_stream: int
    allocations: int
    calls: int
    host_waits: int
    store: int

    def minus(self, other: "Counts") -> "Counts":
        """What one step asks for on top of another."""
        mine, others = asdict(self), asdict(other)
        return Counts(**{name: round(mine[name] - others[name], 2) for name in mine})


class Kernels(TorchDispatchMode):
    """Counts operators that launch a kernel, and the bytes that these write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, schema = func._schema.name.partition("::")[2], func._schema
        if func.namespace == "c10d" or name in NO_KERNELS:
            return result
        by_name = {**dict(zip((each.name for each in schema.arguments), args, strict=False)), **(kwargs or {})}
        changed = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
        written = [by_name[each] for each in changed if each in by_name]
        if not written and all(each.alias_info is None for each in schema.returns):
            written = [result]
        found = [each for each in tree_leaves(written) if isinstance(each, Tensor) and each.device.type == DEVICE.type]
        if found:
            self.count += 1
            self.written += sum(each.nbytes for each in found)
        return result


TORCHS = os.path.dirname(torch.__file__)
SHAPES = tuple(f"{TORCHS}/{name}" for name in ("_", "fx", "utils"))
"""Parts of torch that the simulated device calls to know the shapes of results; a real one calls none."""


class Calls:
    """A profiler that counts calls of Python functions."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        self.count += event == "call" and not frame.f_code.co_filename.startswith(SHAPES)


class Step:
    """A wrapped model, and its steps.

    Args:
        model: The model.
        wrap: Wraps it.
    """

    def __init__(self, model: Model, wrap: Wrap) -> None:
        torch.manual_seed(0)
        module = model.make().to(DEVICE, model.dtype)
        if not isinstance(wrap, Ddp):
            for param in module.parameters():
                param.grad_dtype = model.options.get("grad_dtype", model.dtype)
        self.nbytes = sum(param.numel() * (param.grad_dtype or param.dtype).itemsize for param in module.parameters())
        self.net = wrap(module, bucket_cap_mb=self.nbytes / BUCKETS / 2**20, **model.options)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.optimizer = self.net.prepare_optimizer(optimizer) if isinstance(self.net, BucketDDP) else optimizer
        self.x = torch.ones(BATCH, 32, device=DEVICE, dtype=model.dtype)

    def run(self, profile: Calls | None = None) -> None:
        """Make a step; ``profile`` counts calls in its backward."""
        loss = self.net(self.x)
        if isinstance(self.net, BucketDDP) and self.net._options.gradient_divide_by == "samples":
            self.net.count_samples(BATCH)
        loss.register_hook(lambda _: sys.setprofile(profile))  # in autograd's thread of the device
        sys.setprofile(profile)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counted(self) -> Counts:
        """Count a step. What the host does not wait for is not there before its end."""
        library = simulated().library
        for _ in range(WARM_UP):
            self.run()
        torch.accelerator.synchronize()
        with Kernels() as kernels:
            self.run()
        torch.accelerator.synchronize()
        gc.collect()
        gc.disable()
        library.set_lag("all", 1e7)
        try:
            before, waits = library.counts(), library.host_wait_count()
            started, calls = len(simulated().started_collectives()), Calls()
            with store_requests() as requests:
                self.run(calls)
            found = {name: count - before[name] for name, count in library.counts().items()}
        finally:
            gc.enable()
            library.set_lag("random", 2000)
        return Counts(
            self.buckets(),
            kernels.count,
            kernels.written / self.nbytes,
            len(simulated().started_collectives()) - started,
            found["events"],
            found["stream waits"],
            found["record_stream"],
            found["allocations"],
            calls.count,
            library.host_wait_count() - waits,
            len(requests),
        )

    def buckets(self) -> int:
        """How many buckets a step reduces."""
        if isinstance(self.net, BucketDDP):
            return len(self.net.layout.buckets)
        if isinstance(self.net, DistributedDataParallel):
            found = self.net._get_ddp_logging_data()
            return len(str(found.get("rebuilt_bucket_sizes", found["bucket_sizes"])).split(","))
        return 0


@contextmanager
def store_requests() -> Iterator[list[str]]:
    """Note the requests that threads of the program make, and not those that only listen."""
    noted: list[str] = []
    request = TimedStore._request

    def note(self: TimedStore, call: Any, *args: Any) -> Any:
        if not threading.current_thread().name.startswith("bucketddp"):
            noted.append(call.__name__)
        return request(self, call, *args)

    with patch.object(TimedStore, "_request", note):
        yield noted


@cache
def alone(model: str, as_ddp: bool) -> Counts:
    """What a step of a module without a wrapper asks for."""
    return Step(MODELS[model], Alone() if as_ddp else lambda module, **options: module).counted()


def counts(model: str, peer: str) -> Counts:
    """What a step of a wrapped model asks for on top of a step of the module alone."""
    wrap = PEERS[peer]
    return Step(MODELS[model], wrap).counted().minus(alone(model, isinstance(wrap, Ddp)))
