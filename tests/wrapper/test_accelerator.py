"""What only shows on an accelerator: streams, host waits, its memory, its own backend.

Three settings, of which tests take those that concern them:

    alone          one rank with the accelerator's own backend, which has nothing to send
    sending        the same rank, made to start its collectives as it would among others
    two ranks      two gloo ranks that share the device; the host waits for gloo
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.replicas.replicas import data_parallel
from lightning_bucketddp.wrapper.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm
from tests.hooks import WAYS, options_for
from tests.inside import reducer_of, views_of
from tests.lightning_models import Regression, close_to, data, ours, trainer
from tests.models import Branches, ConvBatchNorm, Mlp, batch, build, loss_of
from tests.pool import RunRanks, on_ranks
from tests.reference import assert_grads, copying, grads


def _sends(backend: str, device: torch.device) -> bool:
    return device.type in dist.Backend.backend_capability.get(backend, ())


def _accelerator() -> torch.device | None:
    """The accelerator, if there is one whose tensors its own backend sends."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type not in dist.Backend.default_device_backend_map:
        return None
    return found if _sends(dist.get_default_backend_for_device(found), found) else None


DEVICE = _accelerator() or torch.device("cpu")  # the jobs run on the CPU too, should one want to look for slips there

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_accelerator() is None, reason="needs an accelerator, found none"),
]
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, found none")
gloo = pytest.mark.skipif(not _sends("gloo", DEVICE), reason=f"needs gloo to send tensors of {DEVICE}")

ALONE, SENDING, TWO = "alone", "sending", "two ranks"
SMALL_CAP = 0.0005  # MiB: several buckets in the smallest model
LONG = 150_000_000  # cycles of a kernel: about a tenth of a second
STEPS = ((False, True), (False, True), (True, True), (False, False), (False, True))
"""Whether passes are local, and begin with cleared gradients."""


def ranks_in(setting: str) -> int:
    return 2 if setting == TWO else 1


def wrap(setting: str, module: nn.Module, **options: Any) -> tuple[BucketDDP, list[object]]:
    """A wrapper, and a list that grows with each collective of one that is made to send."""
    if setting == TWO:
        return BucketDDP(module, **options), []
    group = dist.new_group(backend=dist.get_default_backend_for_device(DEVICE))
    net = BucketDDP(module, process_group=group, **options)
    sent: list[object] = []
    if setting == SENDING:
        collectives = net._runtime.collectives
        start = collectives._started

        def started(*args: Any) -> Any:
            sent.append(args)
            return start(*args)

        collectives._started = started  # type: ignore[method-assign]
        collectives._nothing_to_do = lambda tensor: tensor.numel() == 0  # type: ignore[method-assign]
    return net, sent


def on_device(step: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    inputs, target = batch(step, rank, size)
    return inputs.to(DEVICE), target.to(DEVICE)


def clear(*modules: nn.Module) -> None:
    for module in modules:
        module.zero_grad(set_to_none=True)


def local_if(net: BucketDDP, local: bool) -> Any:
    return net.no_sync() if local else nullcontext()


def synchronise() -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()


def alike(
    setting: str,
    make: Callable[[], nn.Module],
    takes: list[tuple[str, str]] | None = None,
    streams: tuple[Any, Any] = (None, None),
    copied: bool = False,
    **options: Any,
) -> int:
    """Compare gradients, read at once, with those of one process that has all ranks' batches.

    ``takes`` are the module's second argument, by step and rank; ``streams`` those of forward and backward. With
    ``copied`` replicas have copies of the parameters. Returns how many buckets a pass launched before its end.
    """
    torch.manual_seed(3)
    net, sent = wrap(setting, make(), **{"bucket_cap_mb": SMALL_CAP, **options})
    plain = revert_sync_batchnorm(make())
    plain.load_state_dict(net.state_dict())
    if copied:
        net._replicated = copying(net._replicated)
    low = any(param.dtype is torch.bfloat16 for param in plain.parameters()) or "wire_dtype" in options
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if low else {"rtol": 1e-4, "atol": 1e-5}
    rank, early = dist.get_rank(), 0
    for step, (local, cleared) in enumerate(STEPS):
        if cleared:
            clear(net, plain)
        everyone = [on_device(step, other) for other in range(dist.get_world_size())]
        given = [[inputs] if takes is None else [inputs, takes[step][r]] for r, (inputs, _) in enumerate(everyone)]
        synchronise()
        with local_if(net, local):
            if "device_ids" in options:  # forward moves its inputs
                given[rank][0] = given[rank][0].cpu()
            with torch.cuda.stream(streams[0]):
                loss = loss_of(net(*given[rank]), everyone[rank][1])
            with torch.cuda.stream(streams[1]):
                loss.backward()
                found = {name: None if grad is None else grad.clone() for name, grad in named_grads(net.module)}
        synchronise()
        if takes is None:
            inputs, targets = (torch.cat(parts) for parts in zip(*everyone, strict=True))
            loss_of(plain(inputs), targets).backward()
        else:
            losses = [loss_of(plain(*args), it) for args, (_, it) in zip(given, everyone, strict=True)]
            torch.stack(losses).mean().backward()
        if not local:
            assert all(grad is None or grad is views_of(net)[name] for name, grad in named_grads(net.module))
            assert_grads(plain, found, **tolerance)
            early = max(early, net.last_pass().early_launches)
    assert bool(sent) == (setting == SENDING)
    torch.testing.assert_close(dict(net.module.named_buffers()), dict(plain.named_buffers()))
    net.close()
    return early


def named_grads(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [(name, param.grad) for name, param in module.named_parameters()]


class TwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Mlp().to(torch.device(DEVICE.type, 0))
        self.second = nn.Linear(4, 4).to(torch.device(DEVICE.type, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to(self.second.weight.device)).to(x.device)


def built(model: str) -> Callable[[], nn.Module]:
    return lambda: build(model).to(DEVICE)


def parity(setting: str) -> None:
    ids = {} if DEVICE.type == "cpu" else {"device_ids": [0]}
    for model in ("mlp", "shared_weights", "mixed_dtypes", "checkpoint_reentrant"):
        early = alike(setting, built(model), **ids)
        assert early > 0 or model == "shared_weights", f"{model}: no bucket was launched early"  # it has one bucket
    takes = [("left", "right"), ("left", "left"), ("none", "both"), ("both", "both"), ("right", "none")]
    for find_unused in (False, True):
        alike(setting, lambda: Branches().to(DEVICE), takes, find_unused_parameters=find_unused)
    if setting == TWO:
        for way in WAYS:
            alike(setting, built("mlp"), **options_for(way))
        if DEVICE.type == "cuda":
            alike(setting, lambda: convert_sync_batchnorm(ConvBatchNorm().to(DEVICE)))
    if torch.accelerator.device_count() > 1:
        alike(setting, TwoDevices)


settings = pytest.mark.parametrize("setting", [ALONE, SENDING, pytest.param(TWO, marks=gloo)])


@settings
def test_gradients_are_those_of_one_process(run_ranks: RunRanks, setting: str) -> None:
    run_ranks(ranks_in(setting), parity, setting)


@pytest.mark.parametrize(("setting", "several"), [(ALONE, False), (SENDING, False), (ALONE, True)])
@on_ranks(1)
def test_several_replicas_in_one_process(setting: str, several: bool) -> None:
    """On one device twice; or on all, the CPU beside it where there is one alone."""
    models = ["mlp", "shared_weights", "mixed_dtypes", "nested_outputs", "checkpoint_reentrant"]
    devices = [DEVICE, DEVICE]
    if several:
        devices = [torch.device(DEVICE.type, index) for index in range(torch.accelerator.device_count())]
        devices = devices if len(devices) > 1 else [*devices, torch.device("cpu")]
    for index, model in enumerate(models[: 3 if several else 5]):
        copied = not several and (index % 2 == 0) == (setting == SENDING)
        early = alike(setting, built(model), copied=copied, device_ids=devices)
        assert early > 0 or "reentrant" in model


@cuda
def test_data_parallel_equals_torchs() -> None:
    devices = list(range(torch.cuda.device_count()))
    for name in ("mlp", "conv_batchnorm_channels_last", "shared_weights", "mixed_dtypes"):
        module, reference = (build(name).to("cuda:0") for _ in range(2))
        inputs, target = batch(0, 0, 4 * len(devices) + 1)
        output = data_parallel(module, inputs, devices)
        expected = torch.nn.parallel.data_parallel(reference, inputs.to("cuda:0"), devices)
        torch.testing.assert_close(output, expected)
        for each in (output, expected):
            loss_of(each, target.to("cuda:0")).backward()
        assert_grads(module, grads(reference), rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(dict(module.state_dict()), dict(reference.state_dict()))


@on_ranks(1, cases=("32-true", "16-mixed", "bf16-mixed"))
def test_a_trainer_trains_as_on_a_single_device(precision: Any) -> None:
    torch.manual_seed(5)
    trained = [Regression(), Regression()]
    initial = copy.deepcopy(trained[0])
    for module, strategy in zip(trained, (ours(), "auto"), strict=True):
        trainer(strategy, accelerator=DEVICE.type, devices=1, precision=precision).fit(module, data())
    for module in trained:
        module.cpu()
    close_to(*trained)
    with pytest.raises(AssertionError):
        close_to(trained[0], initial)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "tokens": {"gradient_divide_by": "tokens"},
    "no overlap": {"overlap": False},
    "wire_dtype": {"wire_dtype": torch.bfloat16},
    "fp32 gradients": {"grad_dtype": torch.float32, "master_params": False},
}


@cuda
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("setting", [ALONE, SENDING])
@on_ranks(1)
def test_no_pass_makes_the_host_wait(setting: str, options: str) -> None:
    """torch's debug mode knows some waits; that the device is still busy behind backward shows the others."""
    dtype = torch.bfloat16 if options == "fp32 gradients" else torch.float32
    net, sent = wrap(setting, Mlp(width=64, depth=4).to(DEVICE, dtype), bucket_cap_mb=0.02, **OPTIONS[options])
    assert len(net.layout.buckets) > 2 or options == "no overlap"
    inputs, target = (tensor.to(dtype) for tensor in on_device(0, 0))
    tokens = torch.tensor(4, device=DEVICE)
    kinds = ((True, True), (True, False), (False, False), (False, True))

    def run_pass(local: bool, cleared: bool) -> Tensor:
        if cleared:
            clear(net)
        with local_if(net, local):
            if options == "tokens":
                net.count_tokens(tokens)
            loss = loss_of(net(inputs), target)
            loss.backward()
        return loss

    for kind in kinds * 2:  # what is learned in the first passes is learned by waiting
        run_pass(*kind)
    sent_before = len(sent)
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [run_pass(*kind) for kind in kinds]
        with pytest.raises(RuntimeError, match="synchronizing"):
            losses[0].item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (len(sent) > sent_before) == (setting == SENDING)

    for _ in range(3):  # only the last one counts: in the others the allocators may still be asking for memory
        busy = []
        for kind in kinds:
            torch.cuda.synchronize()
            torch.cuda._sleep(LONG)
            slept = torch.cuda.Event()
            slept.record()
            loss = run_pass(*kind)
            busy.append(not slept.query())
            loss.item()
            assert slept.query(), "an event that is never seen to be over tells nothing"
    assert all(busy), f"the device was busy when backward returned: {busy}, of {kinds}"


SIZE = 1 << 16


class Delay(torch.autograd.Function):
    """The identity, whose backward keeps its stream busy for long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.cuda._sleep(LONG)
        return grad.clone()


class TwoStreams(nn.Module):
    """Two products, one of them on a stream of its own, where autograd accumulates its gradient too.

    Args:
        late: Which gradient takes long: ``"side"`` or ``"main"``.
        first: Which one backward gets to first.
    """

    def __init__(self, late: str, first: str) -> None:
        super().__init__()
        self.main = nn.Parameter(torch.linspace(1, 2, SIZE, device=DEVICE))
        self.side = nn.Parameter(torch.linspace(2, 3, SIZE, device=DEVICE))
        self.late, self.first = late, first
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # a node works on the stream on which it was made
            self.node = self.side.expand_as(self.side).grad_fn.next_functions[0][0]

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten().repeat(SIZE // x.numel())
        x.record_stream(self.stream)
        caller = torch.cuda.current_stream()
        self.stream.wait_stream(caller)
        outputs = {}
        for which in ("main", "side") if self.first == "side" else ("side", "main"):  # backward begins with the last
            with torch.cuda.stream(self.stream if which == "side" else caller):
                product = x * getattr(self, which)
                outputs[which] = Delay.apply(product) if which == self.late else product
        caller.wait_stream(self.stream)
        return (outputs["main"] + outputs["side"]).view(-1, 4, SIZE // 16).sum(2)


class Late(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return Delay.apply(super().forward(x))


def streams_by_setting(setting: str) -> None:
    cases: list[tuple[str, str, float]] = [  # of MiB: one bucket, or two
        ("main", "main", 25),
        ("main", "side", 0.25),
        ("side", "main", 0.25),
        ("side", "side", 25),
    ]
    for late, first, cap in cases:
        alike(setting, partial(TwoStreams, late, first), bucket_cap_mb=cap)
    side = torch.cuda.Stream()
    for forward in (None, side):
        alike(setting, lambda: Late().to(DEVICE), streams=(forward, side))


@cuda
@settings
def test_launches_and_the_caller_wait_for_the_streams_of_gradients(run_ranks: RunRanks, setting: str) -> None:
    run_ranks(ranks_in(setting), streams_by_setting, setting)


@cuda
@on_ranks(1)
def test_memory_is_not_used_again_before_a_gradient_was_packed() -> None:
    """The side stream's gradient is packed by the main stream, which is late; the side stream goes on at once."""
    module = TwoStreams(late="main", first="side")
    net, _ = wrap(ALONE, module, bucket_cap_mb=25)
    streams: set[int] = set()
    storage = reducer_of(net).storage
    gradient_ready = storage.gradient_ready

    def noted(slot: int) -> None:
        streams.add(torch.cuda.current_stream().stream_id)
        gradient_ready(slot)

    storage.gradient_ready = noted  # type: ignore[method-assign]
    x = torch.ones(SIZE, device=DEVICE)
    for local in (False, True) * 3:
        clear(net)
        torch.cuda.synchronize()
        with local_if(net, local):
            net(x).sum().backward()
        with torch.cuda.stream(module.stream):
            others = [torch.full_like(x, 1e6) for _ in range(16)]
        found = [param.grad.clone() for param in module.parameters()]
        torch.cuda.synchronize()
        for grad in found:
            torch.testing.assert_close(grad, x)
        del others
    assert len(streams) == 2, "gradients came on one stream"


WIDTH, LAYERS = 512, 8
LAYER_BYTES = 4 * WIDTH * WIDTH


def peak_bytes(wrapper: Callable[[nn.Module], nn.Module]) -> int:
    """Bytes of the device's memory that passes use at most, parameters included."""
    before = torch.accelerator.memory_allocated()
    net = wrapper(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(DEVICE))
    x = torch.ones(1, WIDTH, device=DEVICE)
    for step in range(5):
        clear(net)
        if step == 3:
            torch.accelerator.reset_peak_memory_stats()
        net(x).sum().backward()
    return torch.accelerator.max_memory_allocated() - before


@on_ranks(1)
def test_gradients_exist_once_in_the_devices_memory() -> None:
    group = dist.new_group(backend=dist.get_default_backend_for_device(DEVICE))
    _, unwrapped = (peak_bytes(lambda module: module) for _ in range(2))  # first libraries take their workspaces
    ours = peak_bytes(partial(BucketDDP, bucket_cap_mb=LAYER_BYTES / 2**20, process_group=group))
    assert unwrapped >= 2 * LAYERS * LAYER_BYTES
    assert ours <= unwrapped + 1.5 * LAYER_BYTES
    assert peak_bytes(partial(DistributedDataParallel, process_group=group)) > ours
