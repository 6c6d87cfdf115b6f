"""Replicas inside one process give the gradients of one device, and are kept between steps."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_bucketddp.replicas import replicas as replicas_file
from lightning_bucketddp.replicas.replicas import Replicas, data_parallel, gather, parallel_apply, replicate, scatter
from tests.models import MODELS, REPLICATED, AllKinds, Branches, Mlp, Outputs, batch, loss_of

THREE = ["cpu"] * 3
ALL = {**MODELS, **REPLICATED}
SHARED, COPIED = True, False
both_ways = pytest.mark.parametrize("share", [SHARED, COPIED], ids=["shared", "copied"])


def call(replicas: Replicas, x: Tensor) -> Any:
    parts = scatter((x,), replicas.devices)
    return gather(parallel_apply(replicas.refresh(len(parts)), parts), "cpu")


def trained(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.requires_grad)]


def take_grads(module: nn.Module) -> list[Tensor | None]:
    found = [None if tensor.grad is None else tensor.grad.to_dense() for tensor in trained(module)]
    for tensor in trained(module):
        tensor.grad = None
    return found


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.to_dense().clone() for name, value in module.state_dict().items()}


def assert_same(found: Any, expected: Any, **tolerance: float) -> None:
    if isinstance(expected, Outputs):
        found, expected = [found.logits, found.extras], [expected.logits, expected.extras]
    torch.testing.assert_close(found, expected, **tolerance or {"rtol": 1e-4, "atol": 1e-6})


def compare(run: Callable[[Tensor], Any], module: nn.Module, x: Tensor, y: Tensor) -> None:
    outputs, found = [], []
    for way in (run, module):
        outputs.append(way(x))
        loss_of(outputs[-1], y).backward()
        found.append(take_grads(module))
    assert_same(*outputs)
    assert_same(*found)


def compare_copies(run: Callable[[Tensor], Any], module: nn.Module, x: Tensor, y: Tensor, **tolerance: float) -> None:
    """With copies that have the same parameters, each called with its chunk; the first one's state is the module's."""
    copies = [copy.deepcopy(module, {id(tensor): tensor for tensor in trained(module)}) for _ in range(3)]
    expected = gather([net(part) for net, part in zip(copies, x.chunk(3), strict=True)], "cpu")
    loss_of(expected, y).backward()
    expected_grads, output = take_grads(module), run(x)
    loss_of(output, y).backward()
    for pair in ((output, expected), (take_grads(module), expected_grads)):
        assert_same(*pair, **tolerance)
    assert_same(state(module), state(copies[0]))


@torch.no_grad()
def step(module: nn.Module) -> None:
    for param in module.parameters():
        param.mul_(0.9)


@both_ways
@pytest.mark.parametrize("name", sorted(ALL))
def test_replicas_do_what_modules_called_one_by_one_do(name: str, share: bool) -> None:
    torch.manual_seed(7)
    module = ALL[name]()
    replicas = Replicas(module, THREE, share)
    low = {"rtol": 0.02, "atol": 0.01} if name in ("mixed_dtypes", "all_kinds") else {}
    for number in range(2):
        x, y = batch(number, 0, 8)
        y = y[:, :3] if name == "all_kinds" else y
        compare_copies(partial(call, replicas), module, x, y, **low)
        step(module)


def test_replicas_share_tensors_or_have_memory_of_their_own() -> None:
    module = AllKinds(low=False)
    for replica in replicate(module, THREE):
        assert all(p is q for p, q in zip(replica.parameters(), module.parameters(), strict=True))
    replicas = Replicas(module, THREE, COPIED)
    first, second, _ = replicas.refresh()
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert not own & {p.untyped_storage().data_ptr() for p in first.parameters() if p.numel()}
    assert first.norm.running_mean is module.norm.running_mean is not second.norm.running_mean
    assert second.conv.weight.stride() == module.conv.weight.stride()
    assert second.first.weight is second.last.weight is not module.first.weight
    with torch.no_grad():
        assert not any(param.requires_grad for param in replicas.refresh()[1].parameters())


def test_gradients_come_home_while_backward_still_runs() -> None:
    order: list[str] = []
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    replicas = Replicas(module, THREE, COPIED).refresh()
    module[1].weight.register_post_accumulate_grad_hook(lambda _: order.append("of the last layer"))
    total = torch.zeros(())
    for replica, x in zip(replicas, batch(0, 0, 6)[0].chunk(3), strict=True):
        x = replica[0](x)
        x.register_hook(lambda _: order.append("of the first layer's output"))
        total = total + replica[1](x).sum()
    total.backward()
    assert order[-2:] == ["of the last layer", "of the first layer's output"]


def test_copies_last_as_long_as_a_graph_needs_them() -> None:
    module = Mlp()
    replicas = Replicas(module, THREE, COPIED)
    first = replicas.refresh()
    copies: list[weakref.ref[Tensor]] = []
    losses = []
    for number in range(3):
        x, y = batch(number, 0, 6)
        modules = replicas.refresh()
        assert modules == first
        assert not any(ref() is not None for ref in copies), "kept beside the present ones"
        copies = [weakref.ref(param) for replica in modules for param in replica.parameters()]
        losses.append(loss_of(gather(parallel_apply(modules, list(x.chunk(3))), "cpu"), y))
        losses[-1].backward()  # graphs whose backward has run keep no values
        step(module)
    module.zero_grad()
    loss_of(module(x), y).backward()
    expected = take_grads(module)
    pending = loss_of(call(replicas, x), y)
    step(module)
    call(replicas, x)
    pending.backward()
    assert_same(take_grads(module), expected)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "replaced parameter": lambda mlp: setattr(mlp.head, "weight", nn.Parameter(torch.full_like(mlp.head.weight, 0.3))),
    "other strides": lambda mlp: setattr(mlp.layers[0].weight, "data", mlp.layers[0].weight.data.t().contiguous().t()),
    "added layer": lambda mlp: mlp.layers.append(nn.Linear(16, 16)),
    "shared layer": lambda mlp: mlp.layers.__setitem__(1, mlp.layers[2]),
    "parametrization": lambda mlp: nn.utils.parametrizations.weight_norm(mlp.layers[1]),
    "added buffer": lambda mlp: mlp.layers[1].register_buffer("extra", torch.ones(2)),
    "frozen": lambda mlp: mlp.layers.requires_grad_(False),
    "double": lambda mlp: mlp.double(),
    "removed bias": lambda mlp: mlp.layers[1].register_parameter("bias", None),
}


@both_ways
def test_changes_of_the_module_between_steps_are_followed(share: bool) -> None:
    for change in CHANGES:
        module = Mlp()
        replicas = Replicas(module, THREE, share)
        compare(partial(call, replicas), module, *batch(0, 0, 6))
        CHANGES[change](module)
        for _ in range(2):
            compare(partial(call, replicas), module, *(tensor.to(module.head.bias.dtype) for tensor in batch(0, 0, 6)))
            step(module)
        assert {replica.layers[0].weight.requires_grad for replica in replicas.refresh()} == {change != "frozen"}
        module.requires_grad_()
        assert all(param.requires_grad for replica in replicas.refresh() for param in replica.parameters())


class Referring(nn.Module):
    """Refers to itself and its layers in every way, and sets things in forward."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.layer = nn.Linear(4, 4)
        self.stages = {"x": [self.layer, (self.layer.weight, 1)]}
        self.doubled = partial(self.scaled, scale=2)
        self.nested = lambda x: self.scaled(x, 3)
        seen = self.seen

        @torch.no_grad()
        def hook(module: nn.Module, *_: Any, key: str = "a") -> None:
            assert module is self.layer
            seen.append((key, self))

        self.layer.register_forward_hook(hook)

    def scaled(self, x: Tensor, scale: int) -> Tensor:
        return self.layer(x) * scale

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.register_forward_hook(lambda *_: None)
        return self.doubled(x) + self.nested(x)


def test_references_to_the_module_lead_to_the_replicas_own() -> None:
    module = Referring()
    replicas = Replicas(module, THREE, COPIED)
    for number in range(2):
        modules: list[Any] = replicas.refresh()
        assert not any(net.calls or net._forward_hooks for net in (module, *modules)), "a forward's are gone"
        parallel_apply(modules, list(torch.ones(3, 1, 4)))
        for replica in modules:
            assert replica.stages["x"][0] is replica.layer
            assert replica.stages["x"][1][0] is replica.layer.weight is not module.layer.weight
            assert replica.doubled.func.__self__ is replica
            assert module.seen.count(("a", replica)) == 2
            assert number == 0 or replica.later.__self__ is replica
        assert len(module.seen) == 6
        module.seen.clear()
        module.later = module.scaled  # set after the replicas were made
    assert module.stages["x"][0] is module.layer
    module.layer._forward_hooks.clear()
    module.layer.__class__ = nn.modules.linear.NonDynamicallyQuantizableLinear
    assert {type(replica.layer) for replica in replicas.refresh()} == {type(module.layer)}
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"between 1 and 3 replicas, found {count}"):
            replicas.refresh(count)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # since torch 2.15
def test_traced_graphs_are_replicated_and_compiled_code_is_refused() -> None:
    module = fx.symbolic_trace(Mlp())
    replicas = Replicas(module, THREE, COPIED)
    compare(partial(call, replicas), module, *batch(0, 0, 6))
    module.compile(backend="eager")
    with pytest.raises(TypeError, match="not compiled"):
        replicas.refresh()
    for refused, kind, message in (
        (nn.Sequential(torch.jit.script(nn.Linear(2, 2))), TypeError, r"submodule '0' is a .*ScriptModule"),
        (torch.compile(nn.Linear(2, 2)), TypeError, "the module is. Its compiled code"),
        (nn.LazyLinear(2), ValueError, "found 'weight' that waits for its first batch"),
    ):
        with pytest.raises(kind, match=message):
            Replicas(refused, THREE)


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor | None = None) -> Tensor:
        return torch.ones(2, 1) if x is None else self.weight @ x


def test_data_parallel_gives_the_modules_output_and_gradients() -> None:
    module: nn.Module = Mlp()
    for number, samples in enumerate((7, 1, 2)):  # fewer than devices too
        compare(partial(data_parallel, module, devices=THREE), module, *batch(number, 0, samples))
    assert data_parallel(module, torch.ones(0, 8), THREE).shape == (0, 4)
    module, x = Branches(), batch(0, 0)[0]
    assert_same(data_parallel(module, (x, "left"), THREE), module(x, "left"))
    assert_same(data_parallel(module, None, THREE, module_kwargs={"x": x, "take": "right"}), module(x, "right"))
    with pytest.raises(RuntimeError):
        data_parallel(module, torch.ones(6, 3), THREE)
    assert_same(data_parallel(module, x, THREE), module(x))  # as before the error
    columns, seen = Columns(), []
    assert_same(data_parallel(columns, None, THREE), torch.ones(2, 1))
    assert_same(data_parallel(columns, torch.ones(4, 5), THREE, dim=1), columns(torch.ones(4, 5)))
    columns.register_forward_pre_hook(lambda net, args: seen.extend([net.weight.device.type, args[0].device.type]))
    output = data_parallel(columns, torch.ones(4, 2), ["meta"])  # the module itself goes there, and its inputs
    assert [*seen, output.device.type] == ["meta"] * 3
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="at least one device, found none; pass some"):
            data_parallel(module, x)


def test_module_buffers_on_none_of_the_devices_are_brought_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU under another name is as good as another device: nothing is shared."""
    monkeypatch.setattr(replicas_file, "as_devices", lambda devices: (torch.device("cpu", 0),) * len(devices))
    module: Any = ALL["conv_batchnorm_channels_last"]()
    for number in range(2):
        compare_copies(partial(data_parallel, module, devices=THREE), module, *batch(number, 0, 6))
    after, x = state(module), batch(0, 0, 6)[0]
    assert after["norm.num_batches_tracked"] == 2
    assert_same(data_parallel(module.eval(), x, THREE), module(x))
    assert_same(state(module), after)


def test_replicas_are_kept_as_long_as_the_module() -> None:
    module, x = Mlp(), torch.ones(3, 8)
    found: set[int] = set()
    hook = module.register_forward_pre_hook(lambda replica, _: found.add(id(replica)))
    for _ in range(2):
        data_parallel(module, x, THREE)
    assert len(found) == 3
    hook.remove()
    pickled = pickle.dumps(module)
    assert b"lightning_bucketddp" not in pickled, "a pickle can be read where this package is not"
    for twin in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickled)):
        compare(partial(data_parallel, twin, devices=THREE), twin, *batch(0, 0, 6))
    gone = weakref.ref(module)
    del module, twin, hook
    gc.collect()
    assert gone() is None
