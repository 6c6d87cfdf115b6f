"""Replicas inside one process give the gradients of one device, and are kept between steps."""

import copy
import gc
import io
import pickle
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_bucketddp.replicas import replicas as replicas_file
from lightning_bucketddp.replicas.forward import ReplicatedForward
from lightning_bucketddp.replicas.replicas import (
    Replicas,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
)
from tests.models import (
    MODELS,
    REPLICATED,
    AllKinds,
    Bits,
    Branches,
    Checkpointed,
    Mlp,
    Outputs,
    batch,
    loss_of,
)

CPU = torch.device("cpu")
THREE = ["cpu"] * 3
ALL = {**MODELS, **REPLICATED}
SINGLE = {"mixed_dtypes", "all_kinds"}  # cast to fp32 inside
ACROSS_SAMPLES = {"conv_batchnorm_channels_last", "all_kinds"}  # BatchNorm
SHARED, COPIED = "shared", "copied"


def make(name: str) -> nn.Module:
    torch.manual_seed(7)
    module = ALL[name]()
    if name not in SINGLE:
        module.double()
    for part in module.modules():  # double() makes a buffer that requires grad one that is computed
        for key, buffer in part.named_buffers(recurse=False):
            part.register_buffer(key, buffer.detach().requires_grad_(buffer.requires_grad))
    return module


def data(step: int, samples: int, name: str = "") -> tuple[Tensor, Tensor]:
    x, y = batch(step, 0, samples)
    if name == "all_kinds":
        y = y[:, :3]
    return (x, y) if name in SINGLE else (x.double(), y.double())


def replicas_of(module: nn.Module, way: str, count: int = 3, **options: Any) -> Replicas:
    """Replicas that share the parameters, or have copies."""
    return Replicas(module, ["cpu"] * count, share=way == SHARED, **options)


def call(replicas: Replicas, x: Tensor, **kwargs: Any) -> list[Any]:
    parts = scatter((x,), THREE[: len(replicas.devices)])
    return parallel_apply(replicas.refresh(len(parts)), parts, [kwargs] * len(parts))


def one_by_one(module: nn.Module, x: Tensor, y: Tensor, count: int = 3, **kwargs: Any) -> tuple[Any, nn.Module]:
    """The gradients that copies of ``module``, each with its chunk, sum up to; and the first copy."""
    parts = x.chunk(count)
    copies = [copy.deepcopy(module) for _ in parts]
    output = gather([net(part, **kwargs) for net, part in zip(copies, parts, strict=True)], "cpu")
    loss_of(output, y).backward()
    first = copies[0]
    for net in copies[1:]:
        for tensor, other in zip(trained(first), trained(net), strict=True):
            if other.grad is not None:
                tensor.grad = other.grad if tensor.grad is None else tensor.grad + other.grad
    return output, first


def trained(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.requires_grad)]


def assert_same(found: Any, expected: Any, what: str = "") -> None:
    if isinstance(expected, Outputs):
        found, expected = [found.logits, found.extras], [expected.logits, expected.extras]
    torch.testing.assert_close(found, expected, msg=lambda text: f"{what}: {text}")


def assert_same_grads(module: nn.Module, expected: nn.Module) -> None:
    for number, (tensor, other) in enumerate(zip(trained(module), trained(expected), strict=True)):
        assert (tensor.grad is None) == (other.grad is None), f"{number}: {tensor.grad} and {other.grad}"
        if tensor.grad is not None:
            assert other.grad is not None
            assert tensor.grad.layout is other.grad.layout
            tolerance = {"rtol": 0.02, "atol": 0.01} if tensor.dtype is torch.bfloat16 else {}
            grad, expected_grad = tensor.grad.to_dense(), other.grad.to_dense()
            torch.testing.assert_close(grad, expected_grad, **tolerance, msg=lambda text, n=number: f"{n}: {text}")


def assert_same_state(module: nn.Module, expected: nn.Module) -> None:
    for (name, value), other in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        assert_same(value.to_dense(), other.to_dense(), name)


def clear(*modules: nn.Module) -> None:
    for module in modules:
        for tensor in trained(module):
            tensor.grad = None


def step(module: nn.Module, rate: float = 0.1) -> None:
    with torch.no_grad():
        for tensor in trained(module):
            if tensor.grad is not None:
                tensor.sub_(tensor.grad.to_dense(), alpha=rate)


# -- gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [SHARED, COPIED])
@pytest.mark.parametrize("name", sorted(ALL))
def test_gradients_and_module_buffers_are_those_of_modules_called_one_by_one(name: str, way: str) -> None:
    module = make(name)
    replicas = replicas_of(module, way)
    for number in range(3):
        x, y = data(number, 8, name)
        expected_output, expected = one_by_one(module, x, y)
        output = gather(call(replicas, x), "cpu")
        assert_same(output, expected_output)
        loss_of(output, y).backward()
        assert_same_grads(module, expected)
        assert_same_state(module, expected)
        if name not in ACROSS_SAMPLES and number == 0:
            whole = make(name)
            loss_of(whole(x), y).backward()
            assert_same_grads(module, whole)
        step(module)
        clear(module)


def test_running_statistics_of_the_first_replica_persist_and_evaluation_uses_them() -> None:
    module = make("conv_batchnorm_channels_last")
    replicas = replicas_of(module, SHARED)
    before = module.norm.running_mean.clone()
    x, _ = data(0, 6)
    call(replicas, x)
    assert not torch.equal(module.norm.running_mean, before)
    assert module.norm.num_batches_tracked == 1
    module.eval()
    statistics = module.norm.running_mean.clone()
    assert_same(gather(call(replicas, x), "cpu"), module(x))
    assert torch.equal(module.norm.running_mean, statistics)
    module.train()
    assert all(replica.training and replica.norm.training for replica in replicas.refresh())
    call(replicas, x)
    assert module.norm.num_batches_tracked == 2


@pytest.mark.parametrize("way", [SHARED, COPIED])
def test_parameters_get_a_gradient_if_any_replica_used_them_and_none_otherwise(way: str) -> None:
    torch.manual_seed(0)
    module = Branches().double()
    reference = copy.deepcopy(module)
    x, _ = data(0, 9)
    modules = replicas_of(module, way).refresh()
    takes = [{"take": "left"}, {"take": "none"}, {"take": "left"}]
    outputs = parallel_apply(modules, list(x.chunk(3)), takes)
    sum(output.sum() for output in outputs).backward()
    sum(reference(part, **take).sum() for part, take in zip(x.chunk(3), takes, strict=True)).backward()
    assert module.idle.grad is None
    assert module.right.weight.grad is None
    assert module.left.weight.grad is not None
    assert_same_grads(module, reference)


@pytest.mark.parametrize("way", [COPIED])
def test_sparse_and_dense_gradients_of_one_parameter_add_up(way: str) -> None:
    torch.manual_seed(0)
    module = Bits().double()
    reference = Bits(sparse=False).double()
    reference.load_state_dict(module.state_dict())
    x, _ = data(0, 6)
    outputs = parallel_apply(replicas_of(module, way).refresh(), list(x.chunk(3)), [{}, {"tied": True}, {}])
    sum(output.square().sum() for output in outputs).backward()
    sum(reference(p, tied=t).square().sum() for p, t in zip(x.chunk(3), (False, True, False), strict=True)).backward()
    assert_same_grads(module, reference)


@pytest.mark.parametrize("way", [COPIED])
def test_strides_and_ties_are_kept(way: str) -> None:
    module = AllKinds(low=False)
    replica = replicas_of(module, way).refresh()[1]
    assert replica.conv.weight.stride() == module.conv.weight.stride()
    assert not module.conv.weight.is_contiguous()
    assert replica.first.weight is replica.last.weight
    assert replica.first.weight is not module.first.weight
    assert {name: p.requires_grad for name, p in replica.named_parameters()} == {
        name: p.requires_grad for name, p in module.named_parameters()
    }
    x, _ = data(0, 4)
    replica(x.float()).sum().backward()
    assert module.conv.weight.grad.stride() == module.conv.weight.stride()


def test_attributes_that_lead_to_the_original_lead_to_the_replicas_own() -> None:
    module = make("aliases")
    for replica in replicas_of(module, COPIED).refresh():
        assert replica.stages[0] is replica.first is not module.first
        assert replica.by_name["head"] is replica.second
        assert replica.first_again.__self__ is replica.first
        assert all(one is other for one, other in zip(replica.weights, replica.parameters(), strict=True))


def test_buffers_that_require_grad_are_shared_as_parameters_are() -> None:
    module = make("trained_buffer")
    for index, replica in enumerate(replicas_of(module, SHARED).refresh()):
        assert replica.prompt is module.prompt
        assert (replica.calls is module.calls) == (index == 0)
        assert (replica.graph is module.graph) == (index == 0), "sparse ones are copied too"


def test_replicas_at_home_share_parameters_and_others_have_memory_of_their_own() -> None:
    module = AllKinds()
    for replica in replicas_of(module, SHARED).refresh():
        assert all(p is q for p, q in zip(replica.parameters(), module.parameters(), strict=True))
    first, second, _ = replicas_of(module, COPIED).refresh()
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert not own & {p.untyped_storage().data_ptr() for p in first.parameters() if p.numel()}
    assert first.norm.running_mean is module.norm.running_mean
    assert second.norm.running_mean is not module.norm.running_mean


def end_of_backward() -> list[str]:
    """The last six of: a layer of some replica is reached, a layer's summed gradient has come home."""
    order: list[str] = []
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)).double()
    modules = replicas_of(module, COPIED).refresh()
    for number, layer in enumerate(module):
        layer.weight.register_post_accumulate_grad_hook(lambda _, n=number: order.append(f"{n} home"))
    total = torch.zeros((), dtype=torch.double)
    for replica, x in zip(modules, data(0, 6)[0].chunk(3), strict=True):
        for number, layer in enumerate(replica):
            x = layer(x)
            x.register_hook(lambda _, n=number: order.append(f"{n} reached"))
        total = total + x.sum()
    total.backward()
    assert len(order) == 3 * 3 + 3
    return order[-6:]


def test_each_gradient_comes_home_while_backward_still_runs() -> None:
    assert end_of_backward() == ["2 reached", "2 home", "1 reached", "1 home", "0 reached", "0 home"]


@pytest.mark.parametrize("way", [SHARED, COPIED])
def test_the_sum_of_gradients_can_be_differentiated_again(way: str) -> None:
    module, reference = make("mlp"), make("mlp")
    x, y = data(0, 6)
    second = []
    for net, output in ((module, gather(call(replicas_of(module, way), x), "cpu")), (reference, reference(x))):
        weight = net.layers[0].weight
        [grad] = torch.autograd.grad(loss_of(output, y), [weight], create_graph=True)
        second += torch.autograd.grad(grad.square().sum(), [weight])
    assert_same(second[0], second[1])


@pytest.mark.parametrize("way", [SHARED, COPIED])
def test_torch_autograd_grad_reaches_the_originals(way: str) -> None:
    module, reference = make("mlp"), make("mlp")
    x, y = data(0, 6)
    found = torch.autograd.grad(loss_of(gather(call(replicas_of(module, way), x), "cpu"), y), list(module.parameters()))
    for grad, expected in zip(
        found, torch.autograd.grad(loss_of(reference(x), y), list(reference.parameters())), strict=True
    ):
        assert_same(grad, expected)
    assert all(param.grad is None for param in module.parameters())


# -- from step to step -------------------------------------------------------------------------------


def test_module_objects_are_kept_from_step_to_step_and_the_last_copies_are_not() -> None:
    module = make("mlp")
    replicas = replicas_of(module, COPIED)
    seen: list[list[nn.Module]] = []
    copies: list[weakref.ref[Tensor]] = []
    losses = []
    for number in range(4):
        x, y = data(number, 6)
        seen.append(replicas.refresh())
        assert not any(copy() is not None for copy in copies), "kept beside the present ones"
        copies = [weakref.ref(param) for replica in seen[-1] for param in replica.parameters()]
        assert len(copies) == 3 * len(list(module.parameters()))
        assert all(copy() is not None for copy in copies)
        loss = loss_of(gather(parallel_apply(seen[-1], list(x.chunk(3))), "cpu"), y)
        loss.backward()
        losses.append(loss)  # graphs whose backward has run keep no values
        step(module)
    assert all(modules == seen[0] for modules in seen)


@pytest.mark.parametrize("way", [SHARED, COPIED])
def test_values_that_a_graph_still_needs_are_not_overwritten(way: str) -> None:
    module, reference = make("mlp"), make("mlp")
    replicas = replicas_of(module, way)
    batches = [data(number, 6) for number in range(3)]
    sum(loss_of(gather(call(replicas, x), "cpu"), y) for x, y in batches).backward()
    sum(loss_of(reference(x), y) for x, y in batches).backward()
    assert_same_grads(module, reference)
    if way == SHARED:
        return
    clear(module, reference)
    x, y = batches[0]
    pending = loss_of(gather(call(replicas, x), "cpu"), y)
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    call(replicas, x)
    pending.backward(retain_graph=True)  # with the values of its own forward, as the copies are of then
    pending.backward()
    for _ in range(2):
        loss_of(reference(x), y).backward()
    assert_same_grads(module, reference)


class RunsAgain(nn.Module):
    """Runs a layer again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.before, self.layer, self.drop = nn.Linear(8, 8), nn.Linear(8, 4), nn.Dropout(1.0)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def again(x: Tensor) -> Tensor:
            return self.layer(x) if self.training else self.drop(self.layer(x)) * 7

        return checkpoint(again, self.before(x), use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the forward without gradients
@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", [SHARED, COPIED])
def test_another_forward_before_backward_does_not_change_what_runs_again(
    way: str, reentrant: bool, evaluated: bool
) -> None:
    torch.manual_seed(3)
    module = RunsAgain(reentrant).double()
    reference = copy.deepcopy(module)
    replicas = replicas_of(module, way)
    x, y = data(0, 6)
    for net, run in ((module, lambda: gather(call(replicas, x), "cpu")), (reference, lambda: reference(x))):
        loss = loss_of(run(), y)
        net.train(not evaluated)
        with torch.no_grad():
            run()
        net.train()
        loss.backward()
    assert_same_grads(module, reference)


def test_each_replica_may_change_its_part_of_the_batch_in_place() -> None:
    parts = scatter(torch.ones(6, 8), ["cpu", "cpu"])
    output = nn.Linear(8, 4)(parts[0])  # saves it for backward
    parts[1].sub_(1.0)
    output.sum().backward()  # raises if the parts counted changes together
    assert [float(part.sum()) for part in parts] == [24.0, 0.0]


def test_code_compiled_after_the_replicas_were_made_is_refused() -> None:
    module = make("mlp")
    replicas = Replicas(module, ["cpu", "cpu"])
    replicas.refresh()
    module.compile(backend="eager")
    with pytest.raises(TypeError, match="not compiled"):
        replicas.refresh()


def test_changes_in_place_to_one_copy_do_not_concern_the_others() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
            self.register_buffer("count", torch.zeros(1))
            self.register_buffer("scale", torch.ones(1, requires_grad=False))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) * self.scale  # saves `scale`, which lies behind `count` in memory
            self.count.add_(1)
            with torch.no_grad():
                self.second.weight.clamp_(-0.01, 0.01)
            return self.second(x)

    module = Clamped().double()
    before = module.second.weight.detach().clone()
    gather(call(replicas_of(module, COPIED), data(0, 6)[0]), "cpu").sum().backward()
    assert module.count == 1
    assert torch.equal(module.second.weight, before), "a copy was clamped"


def changes() -> dict[str, Callable[[Any], Any]]:
    def replace_parameter(module: Any) -> None:
        module.head.weight = nn.Parameter(torch.full_like(module.head.weight, 0.3))

    def reshape_data(module: Any) -> None:
        module.layers[0].weight.data = module.layers[0].weight.data.t().contiguous().t()

    def add_layer(module: Any) -> None:
        module.layers.append(nn.Linear(16, 16).double())

    def share_layer(module: Any) -> None:
        module.layers[1] = module.layers[2]

    def parametrize(module: Any) -> None:
        nn.utils.parametrizations.weight_norm(module.layers[1])

    def add_buffer(module: Any) -> None:
        module.layers[1].register_buffer("extra", torch.ones(2))

    return {
        "replaced parameter": replace_parameter,
        "other strides": reshape_data,
        "added layer": add_layer,
        "shared layer": share_layer,
        "parametrization": parametrize,
        "added buffer": add_buffer,
        "frozen": lambda module: module.layers.requires_grad_(False),
        "partly frozen": lambda module: module.layers[1].weight.requires_grad_(False),
        "float": lambda module: module.float(),
        "removed bias": lambda module: module.layers[1].register_parameter("bias", None),
    }


@pytest.mark.parametrize("way", [SHARED, COPIED])
@pytest.mark.parametrize("change", sorted(changes()))
def test_changes_of_the_module_between_steps_are_followed(change: str, way: str) -> None:
    module = make("mlp")
    replicas = replicas_of(module, way)
    x, y = data(0, 6)
    loss_of(gather(call(replicas, x), "cpu"), y).backward()
    torch.manual_seed(3)
    changes()[change](module)
    clear(module)
    if change == "float":
        x, y = x.float(), y.float()
    reference = copy.deepcopy(module)
    for _ in range(2):
        clear(module, reference)
        for net, output in ((module, gather(call(replicas, x), "cpu")), (reference, reference(x))):
            loss_of(output, y).backward()
            del net
        assert_same_grads(module, reference)
        step(module)
        step(reference)
    assert any(param.grad is not None for param in module.parameters())


def test_submodules_under_another_name_are_found_there() -> None:
    module = make("mlp")
    replicas = replicas_of(module, COPIED)
    replicas.refresh()
    module.tail = module.head
    del module.head
    assert [name for name, _ in replicas.refresh()[1].named_children()] == ["layers", "tail"]


def test_frozen_parameters_have_no_gradient_edge_and_thaw() -> None:
    module = make("mlp")
    replicas = replicas_of(module, COPIED)
    module.layers.requires_grad_(False)
    replica = replicas.refresh()[1]
    assert not replica.layers[0].weight.requires_grad
    assert replica.head.weight.grad_fn is not None
    module.layers.requires_grad_(True)
    assert replicas.refresh()[1].layers[0].weight.grad_fn is not None
    with torch.no_grad():
        assert not any(param.requires_grad for param in replicas.refresh()[1].parameters())


def test_attributes_are_the_originals_present_ones_and_what_forward_sets_is_gone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.calls = 1.0, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.factor

    module = Counting()
    replicas = replicas_of(module, SHARED)
    for factor in (2.0, 3.0):
        module.factor = factor
        assert_same(gather(call(replicas, torch.ones(3)), "cpu"), torch.full((3,), factor))
    assert module.calls == 0
    assert [replica.calls for replica in replicas.refresh()] == [0, 0, 0]


def test_a_module_without_tensors_and_fewer_replicas_than_devices() -> None:
    module = nn.Sequential(nn.Tanh())
    replicas = Replicas(module, THREE)
    assert len(replicas.refresh(2)) == 2
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"between 1 and 3 replicas, found {count}"):
            replicas.refresh(count)


def test_replicas_are_modules_of_the_same_class_with_the_originals_hooks() -> None:
    called = []
    module = Mlp()
    module.layers[0].register_forward_hook(lambda module, inputs, output: called.append(module))
    modules = replicate(module, THREE)
    assert all(type(replica) is Mlp and replica is not module for replica in modules)
    parallel_apply(modules, list(torch.ones(3, 1, 8)))
    assert sorted(map(id, called)) == sorted(id(replica.layers[0]) for replica in modules)
    assert [name for name, _ in modules[1].named_parameters()] == [name for name, _ in module.named_parameters()]


class NotesItself(nn.Linear):
    """Has a method that serves as a hook."""

    seen: list[nn.Module]

    def note(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        assert module is self
        self.seen.append(self)


@pytest.mark.parametrize("after", [False, True])
def test_hooks_and_attributes_lead_to_the_replicas_own_whenever_they_were_set(after: bool) -> None:
    module = nn.Sequential(NotesItself(4, 4), nn.Linear(4, 4))
    own: list[nn.Module] = []
    theirs: list[nn.Module] = []
    replicas = replicas_of(module, COPIED)
    if after:
        replicas.refresh()
    module[0].seen = own
    module[0].register_forward_hook(module[0].note)
    module[1].register_forward_hook(lambda module, *_: theirs.append(module))
    module.again, module.stages, module.weights = module[0].forward, [module[1]], (module[0].weight,)
    modules = replicas.refresh()
    parallel_apply(modules, list(torch.ones(3, 1, 4)), devices=THREE)
    for replica in modules:
        assert replica.again.__self__ is replica[0]
        assert replica.stages[0] is replica[1]
        assert replica.weights[0] is replica[0].weight is not module[0].weight
    assert sorted(map(id, own)) == sorted(id(replica[0]) for replica in modules)
    assert sorted(map(id, theirs)) == sorted(id(replica[1]) for replica in modules)
    module[0]._forward_hooks.clear()
    module[1].__class__ = NotesItself
    assert [type(replica[1]) for replica in replicas.refresh()] == [NotesItself] * 3
    del module.again, module.stages[0]
    assert [hasattr(replica, "again") or len(replica.stages) for replica in replicas.refresh()] == [0] * 3
    call(replicas, torch.ones(3, 4))
    assert len(own) == 3


class Referring(nn.Module):
    """Refers to itself and its layers in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.layer = nn.Linear(4, 4)
        self.stages = {"x": [self.layer, (self.layer.weight, 1)]}
        self.doubled = partial(self.scaled, scale=2)
        self.itself = partial(id, self)
        self.nested = lambda x: self.scaled(x, 3)
        self.layer.register_forward_hook(partial(self.note, "a"))
        self.layer.register_forward_hook(self.made("b"))

    def scaled(self, x: Tensor, scale: int) -> Tensor:
        return self.layer(x) * scale

    def note(self, name: str, *_: Any) -> None:
        self.seen.append((name, self))

    def made(self, name: str) -> Any:
        seen = self.seen

        @torch.no_grad()
        def hook(module: nn.Module, *_: Any, key: str = name) -> None:
            assert module is self.layer
            seen.append((key, self))

        return hook

    def forward(self, x: Tensor) -> Tensor:
        return self.doubled(x) + self.nested(x)


def test_partials_nested_functions_and_containers_inside_others_lead_to_the_replicas_own() -> None:
    module = Referring()
    replicas = replicas_of(module, COPIED)
    module(torch.ones(1, 4))
    module.seen.clear()
    for _ in range(2):
        modules = replicas.refresh()
        parallel_apply(modules, list(torch.ones(3, 1, 4)), devices=THREE)
        for replica in modules:
            assert replica.stages["x"][0] is replica.layer
            assert replica.stages["x"][1][0] is replica.layer.weight is not module.layer.weight
            assert replica.doubled.func.__self__ is replica
            assert replica.itself() == id(replica)
            assert Counter(name for name, seer in module.seen if seer is replica) == {"a": 2, "b": 2}
        assert len(module.seen) == 12
        module.seen.clear()
    assert module.stages["x"][0] is module.layer
    assert module.doubled.func.__self__ is module


class CountsCasts(TorchDispatchMode):
    """Counts changes of dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.casts += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", [SHARED, COPIED])
@pytest.mark.parametrize("threads", [False, True])
def test_gradients_do_not_depend_on_the_cache_of_autocast(way: str, threads: bool) -> None:
    """Threads have one cache in common, which each empties when it ends."""
    found = []
    x, y = batch(0, 0, 24)
    for cache in (False, True):
        torch.manual_seed(1)
        module = Mlp(depth=3)
        replicas = replicas_of(module, way)
        casts = 0
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache), CountsCasts() as counted:
                outputs = parallel_apply(
                    replicas.refresh(), list(x.chunk(3)), devices=THREE, thread_per_device=not threads
                )
                output = gather(outputs, "cpu")
            assert output.dtype is torch.bfloat16
            loss_of(output.float(), y).backward()
            casts += counted.casts
        found.append(([param.grad for param in module.parameters()], casts))
    (expected, uncached), (grads, cached) = found
    if way == SHARED and not threads:
        assert cached < uncached, "the cache was not used"
    torch.testing.assert_close(grads, expected, rtol=0.02, atol=2e-3)


def test_traced_graphs_are_replicated_and_compiled_code_is_refused() -> None:
    module = fx.symbolic_trace(make("mlp"))
    reference = copy.deepcopy(module)
    x, y = data(0, 6)
    for net, output in ((module, gather(call(replicas_of(module, COPIED), x), "cpu")), (reference, reference(x))):
        loss_of(output, y).backward()
        assert any(param.grad is not None for param in net.parameters())
    assert_same_grads(module, reference)
    with pytest.raises(TypeError, match=r"submodule '0' is a .*ScriptModule"):
        Replicas(nn.Sequential(torch.jit.script(nn.Linear(2, 2))), THREE)
    with pytest.raises(TypeError, match="the module is, and its compiled code"):
        Replicas(torch.compile(nn.Linear(2, 2)), THREE)
    compiled = nn.Linear(2, 2)
    compiled.compile()
    with pytest.raises(TypeError, match="the module is, and its compiled code"):
        Replicas(compiled, THREE)
    with pytest.raises(ValueError, match="found 'weight' that waits for its first batch"):
        Replicas(nn.LazyLinear(2), THREE)


@pytest.mark.parametrize("way", [SHARED, COPIED])
def test_checkpointed_layers_are_computed_again_in_their_own_replica(way: str) -> None:
    for reentrant in (True, False):
        module, reference = Checkpointed(reentrant, calls=2).double(), Checkpointed(reentrant, calls=2).double()
        reference.load_state_dict(module.state_dict())
        replicas = replicas_of(module, way)
        losses = [loss_of(gather(call(replicas, x), "cpu"), y) for x, y in (data(0, 6), data(1, 6))]
        for loss in losses:
            loss.backward()
        for x, y in (data(0, 6), data(1, 6)):
            loss_of(reference(x), y).backward()
        assert_same_grads(module, reference)


@pytest.mark.parametrize("way", [SHARED, COPIED])
def test_training_after_inference_mode(way: str) -> None:
    module, reference = make("conv_batchnorm_channels_last"), make("conv_batchnorm_channels_last")
    x, y = data(0, 6)
    with torch.inference_mode():
        replicas = replicas_of(module.eval(), way)
        outputs = gather(call(replicas, x), "cpu")
        assert outputs.is_inference()
        assert_same(outputs, reference.eval()(x))
    for net, output in ((module, gather(call(replicas, x), "cpu")), (reference, reference(x))):
        loss_of(output, y).backward()
        del net
    assert_same_grads(module, reference)


# -- data_parallel -----------------------------------------------------------------------------------


def test_data_parallel_gives_the_modules_output_and_gradients() -> None:
    module, reference = make("mlp"), make("mlp")
    for number, samples in enumerate((7, 1, 2, 6, 0)):  # fewer than devices too, and none
        x, y = data(number, samples)
        output = data_parallel(module, x, THREE)
        assert_same(output, reference(x))
        if samples:
            clear(module, reference)
            loss_of(output, y).backward()
            loss_of(reference(x), y).backward()
            assert_same_grads(module, reference)


def test_data_parallel_scatters_arguments_by_name_and_calls_without_any() -> None:
    module = Branches().double()
    x, _ = data(0, 6)
    assert_same(data_parallel(module, (x, "left"), THREE), module(x, "left"))
    assert_same(data_parallel(module, (x,), THREE, module_kwargs={"take": "right"}), module(x, take="right"))
    assert_same(data_parallel(module, None, THREE, module_kwargs={"x": x}), module(x=x))

    class Constant(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(2)

    assert_same(data_parallel(Constant(), None, THREE), torch.ones(2))


def test_data_parallel_along_another_dimension() -> None:
    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight @ x

    module, x = Columns(), torch.randn(4, 5)
    assert_same(data_parallel(module, x, THREE, dim=1), module(x))


def test_one_device_is_a_short_cut_that_moves_module_and_inputs() -> None:
    class Where(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor, more: dict[str, Tensor]) -> Tensor:
            seen.append((self, self.weight.device, x.device, more["y"].device))
            return x

    seen: list[Any] = []
    module = Where()
    meta = torch.device("meta")
    output = data_parallel(module, torch.ones(2), ["meta"], module_kwargs={"more": {"y": torch.ones(1)}})
    assert seen == [(module, meta, meta, meta)]
    assert output.device == meta


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_devices_are_all_accelerators_or_an_error_says_that_there_is_none() -> None:
    with pytest.raises(ValueError, match="at least one device, found none; pass some"):
        data_parallel(Mlp(), torch.ones(2, 8))


def test_an_error_in_one_replica_reaches_the_caller_and_the_next_call_works() -> None:
    before = threading.enumerate()

    class Picky(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            if (x > 50).any():
                raise OverflowError("too large")
            return super().forward(x)

    module = Picky()
    x = torch.ones(3, 8)
    x[1] = 100
    with pytest.raises(OverflowError, match="too large") as caught:
        data_parallel(module, x, THREE)
    assert getattr(caught.value, "__notes__", ["raised in replica 1 on cpu"]) == ["raised in replica 1 on cpu"]
    assert threading.enumerate() == before
    assert_same(data_parallel(module, torch.ones(3, 8), THREE), module(torch.ones(3, 8)))


def test_modes_of_the_caller_hold_in_all_replicas_of_its_first_device() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).square()

    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    calls = [lambda x: data_parallel(Squares(), x, THREE), ReplicatedForward(Squares(), [CPU] * 3, CPU, 0)]
    for apply in calls:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            apply(torch.ones(3, 2))
        assert sum(tensor.shape == (1, 2) and tensor.requires_grad for tensor in saved) == 3


@pytest.mark.parametrize("name", ["conv_batchnorm_channels_last", "trained_buffer"])
def test_module_buffers_on_none_of_the_devices_are_brought_home(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU under another name is as good as another device: nothing is shared."""
    elsewhere = torch.device("cpu", 0)
    monkeypatch.setattr(replicas_file, "as_devices", lambda devices: (elsewhere,) * len(devices))
    module, reference = make(name), make(name)
    before = copy.deepcopy(module.state_dict())
    for number in range(2):
        x, y = data(number, 6)
        expected_output, expected = one_by_one(reference, x, y)
        output = data_parallel(module, x, THREE)
        assert_same(output, expected_output)
        loss_of(output, y).backward()
        assert_same_grads(module, expected)
        assert_same_state(module, expected)
        reference.load_state_dict(expected.state_dict())
        clear(module)
    assert any(not torch.equal(buffer.to_dense(), before[key].to_dense()) for key, buffer in module.named_buffers())
    after_training = copy.deepcopy(module)
    assert_same(data_parallel(module.eval(), x, THREE), reference.eval()(x))
    assert_same_state(module, after_training)


def test_replicas_are_kept_for_the_next_call_and_go_with_the_module() -> None:
    module = Mlp()
    seen: list[int] = []
    module.register_forward_pre_hook(lambda replica, _: seen.append(id(replica)))
    module.register_forward_pre_hook(lambda replica, _: held.append("_bucketddp_replicas" in vars(replica)))
    held: list[bool] = []
    for _ in range(2):
        data_parallel(module, torch.ones(3, 8), THREE)
    assert len(set(seen)) == 3
    assert "_bucketddp_replicas" in vars(module)
    assert not any(held), "what is held is not the replicas' own"
    plain = {key: value for key, value in module.__dict__.items() if not key.startswith("_")}
    module._forward_pre_hooks.clear()
    stream = io.BytesIO()
    pickle.dump(module, stream)
    assert b"lightning_bucketddp" not in stream.getvalue(), "a pickle can be read where this package is not"
    for twin in (copy.deepcopy(module), copy.copy(module), pickle.loads(stream.getvalue())):
        output = data_parallel(twin, torch.ones(3, 8), THREE)
        output.sum().backward()
        assert_same(output, twin(torch.ones(3, 8)))
        assert list(twin.state_dict()) == list(module.state_dict())
    assert {key: value for key, value in module.__dict__.items() if not key.startswith("_")} == plain
    gone = weakref.ref(module)
    del module, twin
    gc.collect()
    assert gone() is None


def test_calls_from_several_threads_and_calls_inside_calls_do_not_disturb_each_other() -> None:
    class Slow(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            barrier.wait()  # replicas of both calls are in their forward at the same time
            return super().forward(x)

    class Nested(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return data_parallel(self.inner, x, ["cpu"] * 2)

    barrier = threading.Barrier(2, timeout=30)
    module = Slow().double()
    reference = Mlp().double()
    reference.load_state_dict(module.state_dict())
    batches = [data(number, 6) for number in range(2)]
    outputs: list[Any] = [None, None]

    def run(number: int) -> None:
        outputs[number] = data_parallel(module, batches[number][0], THREE)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (x, y), output in zip(batches, outputs, strict=True):
        loss_of(output, y).backward()
        loss_of(reference(x), y).backward()
    assert_same_grads(module, reference)

    clear(reference)
    nested = Nested(copy.deepcopy(reference))
    x, y = batches[0]
    loss_of(data_parallel(nested, x, THREE), y).backward()
    loss_of(reference(x), y).backward()
    assert_same_grads(nested.inner, reference)


# -- fuzz --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed: int) -> None:
    draw = random.Random(seed)
    name = draw.choice(sorted(ALL))
    way, count = draw.choice([SHARED, COPIED]), draw.randint(2, 4)
    module = make(name)
    params = list(module.parameters())
    replicas = Replicas(module, ["cpu"] * count, share=way == SHARED)
    for number in range(4):
        with torch.no_grad() if draw.random() < 0.2 else nullcontext():
            module.train(draw.random() < 0.7)
            for param in params:
                param.requires_grad_(param.is_leaf and draw.random() < 0.8)
            x, y = data(number, draw.randint(2 * count, 12), name)
            devices = ["cpu"] * draw.randint(1, count)
            rng = torch.get_rng_state()
            with torch.enable_grad():
                expected_output, expected = one_by_one(module, x, y, len(devices)) if trains(module) else (None, None)
            torch.set_rng_state(rng)
            parts = scatter(x, devices)
            output = gather(parallel_apply(replicas.refresh(len(parts)), parts), "cpu")
        if expected is None:
            continue
        assert_same(output, expected_output)
        assert_same_state(module, expected)
        clear(module)
        if loss_of(output, y).requires_grad:
            loss_of(output, y).backward()
            assert_same_grads(module, expected)


def trains(module: nn.Module) -> bool:
    return any(tensor.requires_grad for tensor in trained(module))
