"""What only shows on an accelerator: streams, host waits, its memory, its own backend.

Three settings, of which tests take those that concern them:

    alone          one rank with the accelerator's own backend, which has nothing to send
    sending        the same rank, made to start its collectives as it would among others
    two ranks      two ranks that send by the accelerator's own backend, on a device each; where there is one device
                   alone, two gloo ranks that share it, and the host waits for gloo

They run on the simulated accelerator where there is no other (``tests/simulated``).
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm.lane import StreamLane
from lightning_bucketddp.reducer.divisor import GradientDivisor
from lightning_bucketddp.wrapper.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm
from tests.accelerator import BACKEND, DEVICE, host_waits_raise, on_stream, simulated, sleep
from tests.hooks import WAYS, options_for
from tests.inside import reducer_of, views_of
from tests.lightning_models import Regression, close_to, data, ours, trainer
from tests.models import Branches, ConvBatchNorm, Mlp, batch, build, loss_of
from tests.pool import RunRanks, on_ranks
from tests.reference import assert_grads, copying, everyones, grads, local_if
from tests.sampling import in_turn, some_slow

pytestmark = pytest.mark.gpu

# torch.accelerator does not tell which devices gloo sends; one real accelerator alone is shared by two gloo ranks.
SHARED = DEVICE.type not in ("cpu", "sim") and torch.accelerator.device_count() < 2
gloo = pytest.mark.skipif(
    SHARED and DEVICE.type not in dist.Backend.backend_capability["gloo"],
    reason=f"needs two devices, or gloo to send tensors of {DEVICE}",
)

ALONE, SENDING, TWO = "alone", "sending", "two ranks"
RANKS = {ALONE: 1, SENDING: 1, TWO: 2}
SMALL_CAP = 0.0005  # MiB: several buckets in the smallest model
STEPS = ((False, True), (False, True), (True, True), (False, False), (False, True))
"""Whether passes are local, and begin with cleared gradients."""
TAKES = [("left", "right"), ("left", "left"), ("none", "both"), ("both", "both"), ("right", "none")]


def wrap(setting: str, module: nn.Module, **options: Any) -> tuple[BucketDDP, list[object]]:
    """A wrapper, and a list that grows with each collective of one that is made to send."""
    if setting == TWO:
        return BucketDDP(module, **options), []
    net = BucketDDP(module, process_group=dist.new_group(backend=BACKEND), **options)
    sent: list[object] = []
    if setting == SENDING:
        collectives = net._runtime.collectives
        for name in ("reduce", "reduce_scatter", "sum", "_work"):
            start = getattr(collectives, name)
            setattr(collectives, name, lambda *args, start=start: (sent.append(args), start(*args))[1])
        collectives._nothing_to_do = lambda tensor: tensor.numel() == 0
    return net, sent


def on_device(step: int, rank: int) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in batch(step, rank)]


@dataclass
class Batches:
    """A step's batches of all ranks, on the device, and what else forward takes."""

    inputs: list[Tensor]
    targets: list[Tensor]
    takes: tuple[str, ...] | None

    def arguments(self, rank: int) -> list[Any]:
        return [self.inputs[rank], *([] if self.takes is None else [self.takes[rank]])]

    def loss_of_one_process(self, module: nn.Module) -> Tensor:
        """On all batches at once; where ranks call the module differently, the mean over their calls."""
        if self.takes is None:
            return loss_of(module(torch.cat(self.inputs)), torch.cat(self.targets))
        losses = [loss_of(module(*self.arguments(rank)), target) for rank, target in enumerate(self.targets)]
        return torch.stack(losses).mean()


def batches_of(step: int, takes: list[tuple[str, str]] | None) -> Batches:
    inputs, targets = zip(*(on_device(step, rank) for rank in range(dist.get_world_size())), strict=True)
    return Batches([*inputs], [*targets], None if takes is None else takes[step])


def grads_of_a_pass(net: BucketDDP, batches: Batches, streams: tuple[Any, Any], from_host: bool) -> dict[str, Any]:
    """Gradients, read at once on backward's stream. ``streams`` are those of forward and backward."""
    arguments, target = batches.arguments(dist.get_rank()), batches.targets[dist.get_rank()]
    if from_host:  # forward moves its inputs
        arguments[0] = arguments[0].cpu()
    with on_stream(streams[0]):
        loss = loss_of(net(*arguments), target)
    with on_stream(streams[1]):
        loss.backward()
        return grads(net.module)


def tolerance_of(module: nn.Module, options: dict[str, Any]) -> dict[str, float]:
    low = any(param.dtype is torch.bfloat16 for param in module.parameters()) or "wire_dtype" in options
    return {"rtol": 2e-2, "atol": 2e-3} if low else {"rtol": 1e-4, "atol": 1e-5}


def alike(
    setting: str,
    make: Callable[[], nn.Module],
    takes: list[tuple[str, str]] | None = None,
    streams: tuple[Any, Any] = (None, None),
    copied: bool = False,
    **options: Any,
) -> int:
    """Compare gradients with those of one process that has all ranks' batches.

    ``takes`` are the module's second argument, by step and rank; ``streams`` those of forward and backward. With
    ``copied`` replicas have copies of the parameters. Returns how many buckets a pass launched before its end.
    """
    torch.manual_seed(3)
    net, sent = wrap(setting, make(), **{"bucket_cap_mb": SMALL_CAP, **options})
    plain = revert_sync_batchnorm(make())
    plain.load_state_dict(net.state_dict())
    if copied:
        net._replicated = copying(net._replicated)
    early = 0
    for step, (local, cleared) in enumerate(STEPS):
        for model in (net, plain) if cleared else ():
            model.zero_grad()
        batches = batches_of(step, takes)
        torch.accelerator.synchronize()
        with local_if(net, local):
            found = grads_of_a_pass(net, batches, streams, from_host="device_ids" in options)
        torch.accelerator.synchronize()
        batches.loss_of_one_process(plain).backward()
        if not local:
            for name, param in net.module.named_parameters():
                assert param.grad is None or param.grad is views_of(net)[name]
            assert_grads(plain, found, **tolerance_of(plain, options))
            early = max(early, net.last_pass().early_launches)
    assert bool(sent) == (setting == SENDING)
    torch.testing.assert_close(dict(net.module.named_buffers()), dict(plain.named_buffers()))
    net.close()
    return early


def built(model: str) -> Callable[[], nn.Module]:
    return lambda: build(model).to(DEVICE)


MODELS = ("mlp", "shared_weights", "mixed_dtypes", "checkpoint_reentrant")
UNUSED = {"unused parameters": False, "unused parameters that are looked for": True}
COMMON = [*MODELS, *UNUSED]
AMONG_TWO = [*WAYS, "sync batchnorm"]


def parity(setting: str, what: str) -> None:
    if what in MODELS:
        early = alike(setting, built(what), device_ids=[torch.accelerator.current_device_index()])
        assert early > 0 or what == "shared_weights", "no bucket was launched early"  # it has one bucket
    elif what in UNUSED:
        alike(setting, lambda: Branches().to(DEVICE), TAKES, find_unused_parameters=UNUSED[what])
    elif what in WAYS:
        alike(setting, built("mlp"), **options_for(what))
    else:
        alike(setting, lambda: convert_sync_batchnorm(ConvBatchNorm().to(DEVICE)))


def run_in(run_ranks: RunRanks, setting: str, job: Callable[[str, str], None], what: str) -> None:
    sends = DEVICE.type in dist.Backend.backend_capability["gloo"] and what != "sync batchnorm"
    if setting == TWO and SHARED and not sends:  # torch's SyncBatchNorm sends by the device's own backend alone
        pytest.skip(f"needs two devices, or gloo to send tensors of {DEVICE}")
    run_ranks(RANKS[setting], job, setting, what)


@pytest.mark.parametrize(
    ("what", "setting"),
    some_slow(
        [*product(COMMON, RANKS), *product(AMONG_TWO, [TWO])],
        [*in_turn(COMMON, [SENDING, TWO, ALONE]), ("own hook", TWO), ("wire", TWO)],
    ),
)
def test_gradients_are_those_of_one_process(run_ranks: RunRanks, what: str, setting: str) -> None:
    run_in(run_ranks, setting, parity, what)


REPLICAS = [(ALONE, False), (SENDING, False), (ALONE, True)]


@pytest.mark.parametrize(("setting", "several"), some_slow(REPLICAS, REPLICAS[1:]))
@on_ranks(1)
def test_several_replicas_in_one_process(setting: str, several: bool) -> None:
    """On one device twice; or on all, the CPU beside it where there is one alone."""
    models = ["mlp", "shared_weights", "mixed_dtypes", "nested_outputs", "checkpoint_reentrant"]
    all_devices = [torch.device(DEVICE.type, index) for index in range(torch.accelerator.device_count())]
    devices = [*all_devices, torch.device("cpu")][: max(2, len(all_devices))] if several else [DEVICE, DEVICE]
    for index, model in enumerate(models[: 3 if several else 5]):
        copied = not several and (index % 2 == 0) == (setting == SENDING)
        launched_early = alike(setting, built(model), copied=copied, device_ids=devices)
        assert launched_early > 0 or several or "reentrant" in model  # several devices: one thread of autograd each


class OnTwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32).to(DEVICE), nn.Linear(32, 4).to(torch.device(DEVICE.type, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu().to(self.second.weight.device)).to(DEVICE)


@pytest.mark.skipif(SHARED, reason="needs two devices")
@on_ranks(1)
def test_a_module_on_two_devices_has_a_lane_on_each() -> None:
    with patch.object(StreamLane, "run", autospec=True, side_effect=StreamLane.run) as ran:
        alike(SENDING, OnTwoDevices)
    assert {call.args[0]._device.index for call in ran.mock_calls} == {0, 1}


@on_ranks(1, cases=("32-true", "16-mixed", "bf16-mixed"), quick=["16-mixed"])
def test_a_trainer_trains_as_on_a_single_device(precision: Any) -> None:
    trained = [Regression(), Regression()]
    for module, strategy in zip(trained, (ours(), "auto"), strict=True):
        trainer(strategy, accelerator=DEVICE.type, devices=1, precision=precision).fit(module, data())
        module.cpu()
    close_to(*trained)
    with pytest.raises(AssertionError):
        close_to(trained[0], Regression())


OPTIONS: dict[str, dict[str, Any]] = {
    "find_unused_parameters": {"find_unused_parameters": True},
    "tokens": {"gradient_divide_by": "tokens"},
    "no overlap": {"overlap": False},
    "wire_dtype": {"wire_dtype": torch.bfloat16},
    "fp32 gradients": {"grad_dtype": torch.float32, "master_params": False},
}


HALF = in_turn([*OPTIONS], [SENDING, ALONE])


@pytest.mark.parametrize(("options", "setting"), some_slow(product(OPTIONS, [ALONE, SENDING]), HALF))
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
            net.zero_grad()
        with local_if(net, local):
            if options == "tokens":
                net.count_tokens(tokens)
            loss = loss_of(net(inputs), target)
            loss.backward()
        return loss

    for kind in kinds * 2:  # what is learned in the first passes is learned by waiting
        run_pass(*kind)
    sent_before = len(sent)
    with host_waits_raise():
        losses = [run_pass(*kind) for kind in kinds]
        with pytest.raises(RuntimeError, match="synchronizing"):
            losses[0].item()
    assert (len(sent) > sent_before) == (setting == SENDING)

    if DEVICE.type == "sim":  # it counts all waits, however slow the machine is
        simulated().clear()
        for kind in kinds:
            run_pass(*kind)
        assert simulated().host_waits() == []
        return
    for _ in range(3):  # only the last one counts: in the others the allocators may still be asking for memory
        busy = []
        for kind in kinds:
            torch.accelerator.synchronize()
            sleep()
            slept = torch.Event(DEVICE)
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
        sleep()
        return grad.clone()


class Late(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Delay.apply(x)


class TwoStreams(nn.Module):
    """Two products, one of them on a stream of its own, where autograd accumulates its gradient too.

    The gradient ``late``, ``"side"`` or ``"main"``, takes long. Backward gets to ``first`` first.
    """

    def __init__(self, late: str, first: str) -> None:
        super().__init__()
        self.main = nn.Parameter(torch.linspace(1, 2, SIZE, device=DEVICE))
        self.side = nn.Parameter(torch.linspace(2, 3, SIZE, device=DEVICE))
        self.late, self.first = late, first
        self.stream = torch.Stream(DEVICE)
        self.stream.wait_stream(torch.accelerator.current_stream())
        with on_stream(self.stream):  # a node works on the stream on which it was made
            self.node = self.side.expand_as(self.side).grad_fn.next_functions[0][0]

    def forward(self, x: Tensor, take: str = "") -> Tensor:
        x = x.flatten().repeat(SIZE // x.numel())
        x.record_stream(self.stream)
        caller = torch.accelerator.current_stream()
        self.stream.wait_stream(caller)
        outputs = {}
        for which in ("main", "side") if self.first == "side" else ("side", "main"):  # backward begins with the last
            with on_stream(self.stream if which == "side" else caller):
                product = x * getattr(self, which)
                outputs[which] = Delay.apply(product) if which == self.late else product
        caller.wait_stream(self.stream)
        outputs["side"].record_stream(caller)
        return (outputs["main"] + outputs["side"]).view(-1, 4, SIZE // 16).sum(2)


LATE_AND_FIRST = {f"{late} late, {first} first": (late, first) for late, first in product(("main", "side"), repeat=2)}
ASIDE = ("backward aside", "both aside")


def by_streams(setting: str, what: str) -> None:
    if what in ASIDE:
        side = torch.Stream(DEVICE)
        forward = side if what == "both aside" else None
        alike(setting, lambda: nn.Sequential(Mlp(), Late()).to(DEVICE), streams=(forward, side))
        return
    late, first = LATE_AND_FIRST[what]
    cap = 25 if late == first else 0.25  # or two buckets
    # Its output has one size: so the reference takes one rank's batch after the other.
    takes = [("", "")] * len(STEPS) if setting == TWO else None
    alike(setting, partial(TwoStreams, late, first), takes, bucket_cap_mb=cap)


STREAMS = [*LATE_AND_FIRST, *ASIDE]


@pytest.mark.parametrize(
    ("what", "setting"),
    some_slow(
        product(STREAMS, RANKS),
        [*product(LATE_AND_FIRST, [SENDING]), *in_turn(ASIDE, [ALONE, SENDING])],
    ),
)
def test_launches_and_the_caller_wait_for_the_streams_of_gradients(
    run_ranks: RunRanks, what: str, setting: str
) -> None:
    run_in(run_ranks, setting, by_streams, what)


@on_ranks(1)
def test_memory_is_not_used_again_before_a_gradient_was_packed() -> None:
    """The side stream's gradient is packed by the main stream, which is late; the side stream goes on at once."""
    module = TwoStreams(late="main", first="side")
    net, _ = wrap(ALONE, module, bucket_cap_mb=25)
    streams: set[int] = set()
    storage = reducer_of(net).storage
    ready = storage.gradient_ready
    storage.gradient_ready = lambda slot: (streams.add(torch.accelerator.current_stream().stream_id), ready(slot))
    x = torch.ones(SIZE, device=DEVICE)
    for local in (False, True) * 3:
        net.zero_grad()
        torch.accelerator.synchronize()
        with local_if(net, local):
            net(x).sum().backward()
        with on_stream(module.stream):
            others = [torch.full_like(x, 1e6) for _ in range(16)]
        found = [param.grad.clone() for param in module.parameters()]
        torch.accelerator.synchronize()
        for grad in found:
            torch.testing.assert_close(grad, x)
        del others
    assert len(streams) == 2, "gradients came on one stream"


WIDTH, LAYERS = 512, 8
LAYER_BYTES = 4 * WIDTH * WIDTH


def peak_bytes(wrapper: Callable[[nn.Module], nn.Module]) -> int:
    gc.collect()  # the module before
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    net = wrapper(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(DEVICE))
    x = torch.ones(1, WIDTH, device=DEVICE)
    for step in range(5):
        net.zero_grad()
        if step == 3:
            torch.accelerator.reset_peak_memory_stats()
        net(x).sum().backward()
    return torch.accelerator.max_memory_allocated() - before


@on_ranks(1)
def test_gradients_exist_once_in_the_devices_memory() -> None:
    group = dist.new_group(backend=BACKEND)
    _, unwrapped = (peak_bytes(lambda module: module) for _ in range(2))  # first libraries take their workspaces
    ours = peak_bytes(partial(BucketDDP, bucket_cap_mb=LAYER_BYTES / 2**20, process_group=group))
    assert unwrapped >= 2 * LAYERS * LAYER_BYTES
    assert ours <= unwrapped + 1.5 * LAYER_BYTES
    assert peak_bytes(partial(DistributedDataParallel, process_group=group)) > ours


class FirstIsLast(nn.Module):
    """Its gradients come in the order in which it is registered: not as expected."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@gloo
@on_ranks(2)
def test_a_new_layout_and_close_give_the_buffers_back() -> None:
    module, x = FirstIsLast().to(DEVICE), torch.ones(1, WIDTH, device=DEVICE)
    module(x).sum().backward()  # libraries take their workspaces
    module.zero_grad()
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    net = BucketDDP(module, bucket_cap_mb=LAYER_BYTES / 2**20)
    first = net.layout
    for _ in range(4):
        net.zero_grad()
        net(x).sum().backward()
    assert net.layout != first
    torch.accelerator.synchronize()
    assert torch.accelerator.max_memory_allocated() - before < (LAYERS + 3) * LAYER_BYTES
    net.close()
    net.zero_grad()
    assert torch.accelerator.memory_allocated() - before < LAYER_BYTES


@gloo
@on_ranks(2)
def test_gradients_are_reduced_where_tensors_are_made_on_another_device() -> None:
    net = BucketDDP(Branches().to(DEVICE), check_ranks_every=1, check_ranks="error")
    inputs, target = on_device(0, dist.get_rank())
    with torch.device("meta"), net.no_sync():  # as any default device that is not the CPU
        loss_of(net(inputs, "left"), target).backward()
        net.allreduce_gradients()
        net._compare_ranks()
    expected = grads(net.module)["left.weight"].cpu()
    assert everyones(expected.tolist()) == [expected.tolist()] * 2
    assert expected.any()


class RoundsFactors(TorchDispatchMode):
    """As CUDA's kernel does: it rounds a factor of no dimension in its memory to the other operand's dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul_.Tensor and args[1].device.type == DEVICE.type and args[1].dim() == 0:
            args = args[0], args[1].to(args[0].dtype)
        return func(*args, **(kwargs or {}))


@on_ranks(1)
def test_gradients_of_low_precision_are_divided_exactly() -> None:
    divisor = GradientDivisor.__new__(GradientDivisor)
    divisor.factor = torch.tensor(8 / 1234, dtype=torch.float64, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64):
        gradients = torch.linspace(1, 1000, 100, device=DEVICE).to(dtype)
        exact = (gradients.cpu().to(torch.promote_types(dtype, torch.float64)) * (8 / 1234)).to(dtype)
        with RoundsFactors():
            divisor.rescale(gradients)
        torch.testing.assert_close(gradients.cpu(), exact, rtol=1e-6 if exact.element_size() > 2 else 0, atol=0)
