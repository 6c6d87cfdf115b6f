"""What only shows on an accelerator: streams, host waits, its memory, its own backend.

Three settings, of which tests take those that concern them:

    alone          one rank with the accelerator's own backend, which has nothing to send
    sending        the same rank, made to start its collectives as it would among others
    two ranks      two gloo ranks that share the device; the host waits for gloo
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.replicas.replicas import data_parallel, parallel_apply
from lightning_bucketddp.wrapper.sync_batchnorm import convert_sync_batchnorm
from tests.hooks import WAYS, options_for
from tests.inside import reducer_of, views_of
from tests.lightning_models import Regression, close_to, data, ours, trainer
from tests.models import Branches, ConvBatchNorm, Mlp, batch, build, loss_of
from tests.reference import assert_grads, copying, grads, largest_difference_between_ranks
from tests.wrapper.cases import RunRanks


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
TWO_BY_GLOO = pytest.param(TWO, marks=gloo)
SMALL_CAP = 0.0005  # MiB: several buckets in the smallest model
LONG = 150_000_000  # cycles of a kernel: about a tenth of a second


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


def same_grads(first: nn.Module, second: nn.Module, **tolerance: float) -> None:
    assert_grads(first, grads(second), **tolerance)


def clear(*modules: nn.Module) -> None:
    for module in modules:
        module.zero_grad(set_to_none=True)


def local_if(net: BucketDDP, local: bool) -> Any:
    return net.no_sync() if local else nullcontext()


# -- gradients ---------------------------------------------------------------------------------------


def same_as_one_process(setting: str, model: str, way: str) -> None:
    ranks = dist.get_world_size()
    options = {"device_ids": None if DEVICE.type == "cpu" else [0], **(options_for(way) if way else {})}
    net, sent = wrap(setting, build(model).to(DEVICE), bucket_cap_mb=SMALL_CAP, **options)
    reference = build(model).to(DEVICE)  # goes through all ranks' batches
    low = way == "wire" or model == "mixed_dtypes"  # bf16, added up in another order
    early = 0
    for step, local in enumerate([False, False, True, False, False]):
        if step != 3:
            clear(net, reference)
        with local_if(net, local):
            inputs, target = batch(step, dist.get_rank())  # forward moves them
            loss_of(net(inputs), target.to(DEVICE)).backward()
        for rank in range(ranks):
            inputs, target = on_device(step, rank)
            (loss_of(reference(inputs), target) / ranks).backward()
        if not local:
            same_grads(net.module, reference, **({"rtol": 2e-2, "atol": 2e-3} if low else {}))
            views = views_of(net)
            assert all(param.grad is views[name] for name, param in net.module.named_parameters())
            assert largest_difference_between_ranks_of_grads(net.module) == 0
            early = max(early, net.early_launches)
    assert early > 0, "no bucket was launched before backward had ended"
    assert bool(sent) == (setting == SENDING)
    net.close()


def largest_difference_between_ranks_of_grads(module: nn.Module) -> float:
    holder = nn.Module()
    for index, param in enumerate(module.parameters()):
        assert param.grad is not None
        holder.register_buffer(f"grad{index}", param.grad.cpu())
    return largest_difference_between_ranks(holder)


@pytest.mark.parametrize("model", ["mlp", "shared_weights", "mixed_dtypes", "checkpoint_reentrant"])
@pytest.mark.parametrize("setting", [ALONE, SENDING, TWO_BY_GLOO])
def test_gradients_are_those_of_one_process(run_ranks: RunRanks, setting: str, model: str) -> None:
    run_ranks(ranks_in(setting), same_as_one_process, setting, model, "")


@gloo
@pytest.mark.parametrize("way", WAYS)
def test_gradients_by_hooks_and_wire_dtypes(run_ranks: RunRanks, way: str) -> None:
    run_ranks(2, same_as_one_process, TWO, "mlp", way)


BRANCHES = [("left", "right"), ("left", "left"), ("none", "both"), ("both", "both"), ("right", "none")]


def branches(setting: str, find_unused: bool) -> None:
    net, _ = wrap(setting, Branches().to(DEVICE), bucket_cap_mb=SMALL_CAP, find_unused_parameters=find_unused)
    reference = Branches().to(DEVICE)
    reference.load_state_dict(net.module.state_dict())
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step, takes in enumerate(BRANCHES):
        clear(net, reference)
        inputs, target = on_device(step, rank)
        loss_of(net(inputs, takes[rank]), target).backward()
        for other, take in enumerate(takes[:ranks]):
            inputs, target = on_device(step, other)
            (loss_of(reference(inputs, take), target) / ranks).backward()
        same_grads(net.module, reference)
        assert net.module.idle.grad is None
    net.close()


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("setting", [SENDING, TWO_BY_GLOO])
def test_ranks_may_take_different_branches(run_ranks: RunRanks, setting: str, find_unused: bool) -> None:
    run_ranks(ranks_in(setting), branches, setting, find_unused)


def synchronised_batchnorm() -> None:
    net, _ = wrap(TWO, convert_sync_batchnorm(ConvBatchNorm().to(DEVICE)), bucket_cap_mb=SMALL_CAP)
    reference = ConvBatchNorm().to(DEVICE)
    reference.load_state_dict(net.state_dict())
    for step in range(3):
        clear(net, reference)
        inputs, target = on_device(step, dist.get_rank())
        loss_of(net(inputs), target).backward()
        inputs, target = (torch.cat(parts) for parts in zip(on_device(step, 0), on_device(step, 1), strict=True))
        loss_of(reference(inputs), target).backward()
        same_grads(net.module, reference, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(net.module.named_buffers()), dict(reference.named_buffers()))
    net.close()


@cuda
def test_synchronised_batchnorm_equals_one_process(run_ranks: RunRanks) -> None:
    run_ranks(2, synchronised_batchnorm)


# -- mixed precision ---------------------------------------------------------------------------------


def fitted(precision: Any) -> None:
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


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_a_trainer_trains_as_on_a_single_device(run_ranks: RunRanks, precision: str) -> None:
    run_ranks(1, fitted, precision)


# -- the host does not wait --------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "tokens": {"gradient_divide_by": "tokens"},
    "no overlap": {"overlap": False},
    "wire_dtype": {"wire_dtype": torch.bfloat16},
    "fp32 gradients": {"grad_dtype": torch.float32, "master_params": False},
}
PASSES = ((True, True), (True, False), (False, False), (False, True))
"""Whether they are local, and begin with cleared gradients."""


class Subject:
    """A wrapped model and its batch, for passes of which the host is not to wait."""

    def __init__(self, setting: str, options: str) -> None:
        self.dtype = torch.bfloat16 if options == "fp32 gradients" else torch.float32
        module = Mlp(width=64, depth=4).to(DEVICE, self.dtype)
        self.net, self.sent = wrap(setting, module, bucket_cap_mb=0.02, **OPTIONS[options])
        assert len(self.net.layout.buckets) > 2 or options == "no overlap"
        self.counts_tokens = options == "tokens"
        self.batch = tuple(tensor.to(self.dtype) for tensor in on_device(0, 0))
        self.tokens = torch.tensor(4, device=DEVICE)

    def run_pass(self, local: bool, cleared: bool) -> Tensor:
        if cleared:
            clear(self.net)
        with local_if(self.net, local):
            if self.counts_tokens:
                self.net.count_tokens(self.tokens)
            loss = loss_of(self.net(self.batch[0]), self.batch[1])
            loss.backward()
        return loss

    def warm_up(self) -> None:
        """What is learned in the first passes is learned by waiting."""
        for kind in PASSES * 2:
            self.run_pass(*kind)


@contextmanager
def waits_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def runs_where_waits_are_errors(setting: str, options: str) -> None:
    subject = Subject(setting, options)
    subject.warm_up()
    sent = len(subject.sent)
    with waits_are_errors():
        for kind in PASSES:
            loss = subject.run_pass(*kind)
        with pytest.raises(RuntimeError, match="synchronizing"):
            loss.item()
    assert (len(subject.sent) > sent) == (setting == SENDING)
    subject.net.close()


def returns_while_the_device_is_busy(setting: str, options: str) -> None:
    subject = Subject(setting, options)
    subject.warm_up()
    busy: list[bool] = []
    for _ in range(3):  # only the last one counts: in the others the allocators may still be asking for memory
        busy.clear()
        for kind in PASSES:
            torch.cuda.synchronize()
            torch.cuda._sleep(LONG)
            slept = torch.cuda.Event()
            slept.record()
            loss = subject.run_pass(*kind)
            busy.append(not slept.query())
            loss.item()
            assert slept.query(), "an event that is never seen to be over tells nothing"
    assert busy == [True] * len(PASSES), f"the device was busy when backward returned: {busy}, of {PASSES}"
    subject.net.close()


@cuda
@pytest.mark.parametrize("job", [runs_where_waits_are_errors, returns_while_the_device_is_busy])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("setting", [ALONE, SENDING])
def test_no_pass_makes_the_host_wait(run_ranks: RunRanks, setting: str, options: str, job: Any) -> None:
    """The second job finds waits that torch's debug mode does not know, as for events."""
    run_ranks(1, job, setting, options)


# -- streams -----------------------------------------------------------------------------------------


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
        late: Which gradient takes long: ``"side"``, ``"main"`` or ``"neither"``.
        first: Which one backward gets to first.
    """

    def __init__(self, late: str, first: str) -> None:
        super().__init__()
        self.main = nn.Parameter(torch.linspace(1, 2, 1 << 16, device=DEVICE))
        self.side = nn.Parameter(torch.linspace(2, 3, 1 << 16, device=DEVICE))
        self.late, self.first = late, first
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # a node works on the stream on which it was made
            self.node = self.side.expand_as(self.side).grad_fn.next_functions[0][0]

    def _product(self, which: str, x: Tensor) -> Tensor:
        product = x * getattr(self, which)
        return Delay.apply(product) if which == self.late else product

    def forward(self, x: Tensor) -> Tensor:
        caller = torch.cuda.current_stream()
        outputs = {}
        for which in ("main", "side") if self.first == "side" else ("side", "main"):  # backward begins with the last
            if which == "main":
                outputs[which] = self._product(which, x)
                continue
            self.stream.wait_stream(caller)
            with torch.cuda.stream(self.stream):
                outputs[which] = self._product(which, x)
        caller.wait_stream(self.stream)
        return outputs["main"] + outputs["side"]


def read_at_once(module: nn.Module) -> list[Tensor]:
    """Copies of the gradients, made on the current stream; then waits."""
    found = []
    for param in module.parameters():
        assert param.grad is not None
        found.append(param.grad.clone())
    torch.cuda.synchronize()
    return found


def two_streams(setting: str, late: str, first: str, cap: float) -> None:
    net, _ = wrap(setting, TwoStreams(late, first), bucket_cap_mb=cap)
    plain = TwoStreams(late, first)
    streams: set[int] = set()
    storage = reducer_of(net).storage
    gradient_ready = storage.gradient_ready

    def noted(slot: int) -> None:
        streams.add(torch.cuda.current_stream().stream_id)
        gradient_ready(slot)

    storage.gradient_ready = noted  # type: ignore[method-assign]
    for step, local in enumerate([False, False, True, True, False]):
        if step != 4:
            clear(net, plain)
        x = torch.full((1 << 16,), step + 1.0, device=DEVICE)
        torch.cuda.synchronize()
        with local_if(net, local):
            net(x).sum().backward()
        found = read_at_once(net)
        plain(x).sum().backward()
        torch.cuda.synchronize()
        for value, param in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(value, param.grad)
    assert len(streams) == 2, "gradients came on one stream"
    net.close()


@cuda
@pytest.mark.parametrize("cap", [25, 0.25], ids=["one bucket", "two buckets"])
@pytest.mark.parametrize("first", ["main", "side"])
@pytest.mark.parametrize("late", ["main", "side"])
@pytest.mark.parametrize("setting", [ALONE, SENDING, TWO_BY_GLOO])
def test_launches_wait_for_the_streams_that_made_the_gradients(
    run_ranks: RunRanks, setting: str, late: str, first: str, cap: float
) -> None:
    run_ranks(ranks_in(setting), two_streams, setting, late, first, cap)


def memory_is_used_again(local: bool) -> None:
    """The side stream's gradient is captured by the main stream, which is late; the side stream goes on at once."""
    net, _ = wrap(ALONE, TwoStreams(late="main", first="side"), bucket_cap_mb=25)
    module = net.module
    x = torch.ones(1 << 16, device=DEVICE)
    for _ in range(3):
        clear(net)
        torch.cuda.synchronize()
        with local_if(net, local):
            net(x).sum().backward()
        with torch.cuda.stream(module.stream):
            others = [torch.full_like(x, 1e6) for _ in range(16)]
        found = read_at_once(net)
        for grad in found:
            torch.testing.assert_close(grad, x)
        del others
    net.close()


@cuda
@pytest.mark.parametrize("local", [False, True])
def test_memory_is_not_used_again_before_a_gradient_was_packed(run_ranks: RunRanks, local: bool) -> None:
    run_ranks(1, memory_is_used_again, local)


class Late(nn.Module):
    """An MLP whose gradients all take long."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Mlp(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Delay.apply(self.head(self.body(x)))


def on_a_side_stream(setting: str, forward_too: bool) -> None:
    torch.manual_seed(3)
    net, _ = wrap(setting, Late().to(DEVICE), bucket_cap_mb=SMALL_CAP)
    plain = Late().to(DEVICE)
    plain.load_state_dict(net.state_dict())
    stream = torch.cuda.Stream()
    for step, local in enumerate([False, False, True, False]):
        clear(net, plain)
        inputs, target = on_device(step, 0)
        torch.cuda.synchronize()
        with local_if(net, local):
            with torch.cuda.stream(stream) if forward_too else nullcontext():
                loss = loss_of(net(inputs), target)
            with torch.cuda.stream(stream):
                loss.backward()
                found = read_at_once(net)
        loss_of(plain(inputs), target).backward()
        torch.cuda.synchronize()
        for value, param in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(value, param.grad)
    net.close()


@cuda
@pytest.mark.parametrize("forward_too", [True, False], ids=["forward too", "backward alone"])
@pytest.mark.parametrize("setting", [ALONE, SENDING, TWO_BY_GLOO])
def test_gradients_are_there_for_the_stream_that_called_backward(
    run_ranks: RunRanks, setting: str, forward_too: bool
) -> None:
    run_ranks(ranks_in(setting), on_a_side_stream, setting, forward_too)


class TwoDevices(nn.Module):
    """A layer on each of two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Mlp().to(torch.device(DEVICE.type, 0))
        self.second = nn.Linear(4, 4).to(torch.device(DEVICE.type, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to(self.second.weight.device)).to(x.device)


def on_two_devices(setting: str) -> None:
    torch.manual_seed(3)
    net, _ = wrap(setting, TwoDevices(), bucket_cap_mb=SMALL_CAP)
    plain = TwoDevices()
    plain.load_state_dict(net.state_dict())
    for step, local in enumerate([False, False, True, False, False]):
        if step != 3:
            clear(net, plain)
        inputs, target = on_device(step, 0)
        with local_if(net, local):
            loss_of(net(inputs), target).backward()
        loss_of(plain(inputs), target).backward()
        if not local:
            same_grads(net.module, plain)
    assert len(net.layout.buffers) == 2
    net.close()


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
@pytest.mark.parametrize("setting", [ALONE, TWO_BY_GLOO])
def test_a_module_on_two_devices(run_ranks: RunRanks, setting: str) -> None:
    run_ranks(ranks_in(setting), on_two_devices, setting)


# -- memory ------------------------------------------------------------------------------------------

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


def memory() -> dict[str, int]:
    group = dist.new_group(backend=dist.get_default_backend_for_device(DEVICE))
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "warm-up": lambda module: module,  # libraries take their workspaces
        "unwrapped": lambda module: module,
        "bucketddp": lambda module: BucketDDP(module, bucket_cap_mb=LAYER_BYTES / 2**20, process_group=group),
        "ddp": lambda module: DistributedDataParallel(module, process_group=group),
    }
    return {name: peak_bytes(wrapper) for name, wrapper in wrappers.items()}


def test_gradients_exist_once_in_the_devices_memory(run_ranks: RunRanks) -> None:
    peaks = run_ranks(1, memory)[0]
    assert peaks["unwrapped"] >= 2 * LAYERS * LAYER_BYTES
    assert peaks["bucketddp"] <= peaks["unwrapped"] + 1.5 * LAYER_BYTES, peaks
    assert peaks["ddp"] >= peaks["unwrapped"] + (LAYERS - 2) * LAYER_BYTES, peaks


# -- replicas inside one process ---------------------------------------------------------------------


def _several() -> list[torch.device]:
    """All accelerators; the CPU beside it where there is one alone, for copies to go from one device to another."""
    count = torch.accelerator.device_count()
    found = [torch.device(DEVICE.type, index) for index in range(count)]
    return found if count > 1 else [*found, torch.device("cpu")]


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
        same_grads(module, reference, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(dict(module.state_dict()), dict(reference.state_dict()))


@cuda
def test_a_replica_has_its_device_and_the_callers_stream() -> None:
    class Where(nn.Module):
        def forward(self, x: Tensor) -> tuple[int, int, bool, torch.dtype]:
            index = torch.cuda.current_device()
            enabled = torch.is_autocast_enabled("cuda")
            return index, torch.cuda.current_stream().cuda_stream, enabled, torch.get_autocast_dtype("cuda")

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices = devices if len(devices) > 1 else devices * 2
    stream = torch.cuda.Stream(devices[0])
    with torch.cuda.stream(stream), torch.autocast("cuda", torch.bfloat16):
        found = parallel_apply([Where() for _ in devices], [torch.ones(1)] * len(devices), devices=devices)
    for device, (index, current, enabled, dtype) in zip(devices, found, strict=True):
        assert (index, enabled, dtype) == (device.index, True, torch.bfloat16)
        assert (current == stream.cuda_stream) == (device == devices[0])


# -- several devices in one process --------------------------------------------------------------------


def replicas_on(setting: str, devices: list[torch.device], copied: bool, model: str) -> None:
    """As one device with the whole batch, and no bucket waits for the end of backward."""
    home = devices[0]
    options = {"bucket_cap_mb": SMALL_CAP, "device_ids": devices}
    with pytest.warns(UserWarning, match=f"device_ids has {len(devices)} entries"):
        net, sent = wrap(setting, build(model).to(home), **options)
    if copied:
        net._replicated = copying(net._replicated)
    reference = build(model).to(home)
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if model == "mixed_dtypes" else {"rtol": 1e-4, "atol": 1e-6}
    optimizers = [torch.optim.SGD(it.parameters(), lr=0.1) for it in (net, reference)]
    for step in range(4):
        inputs, target = batch(step, 0)
        clear(net, reference)
        output = net(inputs)  # which moves them
        loss_of(output, target.to(home)).backward()
        loss_of(reference(inputs.to(home)), target.to(home)).backward()
        same_grads(net.module, reference, **tolerance)
        for optimizer in optimizers:
            optimizer.step()
    assert net.early_launches > 0 or "reentrant" in model
    assert bool(sent) == (setting == SENDING)
    net.close()


@pytest.mark.parametrize("model", ["mlp", "shared_weights", "mixed_dtypes", "nested_outputs", "checkpoint_reentrant"])
@pytest.mark.parametrize("copied", [False, True], ids=["shared", "copied"])
@pytest.mark.parametrize("setting", [ALONE, SENDING])
def test_several_replicas_on_one_device(run_ranks: RunRanks, setting: str, copied: bool, model: str) -> None:
    run_ranks(1, replicas_on, setting, [DEVICE, DEVICE], copied, model)


@pytest.mark.parametrize("model", ["mlp", "shared_weights", "mixed_dtypes"])
def test_replicas_on_all_devices_or_on_the_cpu_too(run_ranks: RunRanks, model: str) -> None:
    run_ranks(1, replicas_on, ALONE, _several(), False, model)
