"""Modules that change after wrapping, that lend their parameters for a call, or that are wrapped again or no more."""

import copy
import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.optim import optimizer as optimizer_file

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from tests.models import Mlp, batch, loss_of
from tests.pool import on_ranks
from tests.reference import (
    TINY,
    Twins,
    assert_grads,
    backward,
    both,
    drift,
    everyones,
    grads,
    inputs_of,
    mean_grads,
    mse,
    train,
)
from tests.sampling import in_turn, some_slow


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 16, sparse=True)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x.abs() * 3).long().clamp(max=4)[:, 0])
        return self.out(self.norm(x) + rows)


class Table(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(float(length)), persistent=False)


class Caching(Table):
    """Has a table as long as its longest input, and a module with one for each length."""

    def __init__(self) -> None:
        super().__init__(2)
        self.layers, self.tables = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), nn.ModuleDict()

    def forward(self, x: Tensor, length: int) -> Tensor:
        if length > len(self.table):
            self.register_buffer("table", torch.arange(float(length)), persistent=False)
        if str(length) not in self.tables:
            self.tables[str(length)] = Table(length)
        return self.layers(x) * self.table[:length].sum() / self.tables[str(length)].table.sum()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "replace head": lambda module: setattr(module, "head", nn.Linear(16, 4)),
    "remove and add head": lambda module: (delattr(module, "head"), setattr(module, "head", nn.Linear(16, 4))),
    "replace head by another kind": lambda module: setattr(module, "head", Looked()),
    "add layer": lambda module: module.layers.append(nn.Linear(16, 16)),
    "remove layer": lambda module: delattr(module.layers, "1"),
    "replace parameter": lambda module: setattr(module.head, "weight", nn.Parameter(module.head.weight.detach() * 2)),
    "add unused copy": lambda module: setattr(module, "average", copy.deepcopy(module.head)),
    "to double": lambda module: module.double(),
    "assign": lambda module: module.load_state_dict({n: 2 * v for n, v in module.state_dict().items()}, assign=True),
    "nothing": lambda module: None,
}
COALESCED: dict[str, Any] = {"use_contiguous_buffers": False}
WAYS: dict[str, tuple[dict[str, Any], set[int]]] = {
    "plain": ({}, set()),
    "local before": ({}, {1}),
    "local before and after": ({}, {1, 2}),
    "coalesced": (COALESCED, set()),
    "coalesced, local before": (COALESCED, {1}),
    "fp16 hook": ({"comm_hook": "fp16"}, set()),
}
"""Options, and which passes are local: the change is made before pass 2."""


@on_ranks(1)
def test_parameters_keep_their_hooks() -> None:
    swap = patch.object(torch.__future__, "_swap_module_params_on_conversion", True)
    with swap, pytest.raises(RuntimeError, match="Couldn't swap"):  # as with torch DDP
        BucketDDP(Mlp()).double()


@pytest.mark.parametrize(("change", "way"), some_slow(product(CHANGES, WAYS), in_turn([*CHANGES], [*WAYS])))
@on_ranks(2)
def test_changed_parameters_are_taken_in(change: str, way: str) -> None:
    """Five passes, some of them inside ``no_sync``, and a change before the third."""
    options, local = WAYS[way]
    torch.manual_seed(1)
    twins = Twins(Mlp(depth=3), **options)
    plain, ours = twins.plain, twins.ours
    for number in range(5):
        if number == 2:
            for module in twins.modules:
                torch.manual_seed(2)
                CHANGES[change](module)
        if number - 1 not in local:
            twins.zero_grad()
        twins.backward(mse(number), local=number in local)
        if number not in local:
            tolerance = {"rtol": 2e-3, "atol": 1e-3} if "comm_hook" in options else {}
            assert_grads(ours.module, mean_grads(plain), **tolerance)
    assert ours.passes == 5 - len(local)
    dtype = next(plain.parameters()).dtype
    dense = {(name, dtype) for name, _ in ours.module.named_parameters() if not name.endswith("table.weight")}
    assert {(slot.spec.name, slot.spec.dtype) for slot in ours.layout.slots} == dense
    ours.synchronise_module_buffers()
    torch.optim.SGD(ours.module.parameters(), lr=0.1).step()
    assert drift(ours.module) == 0
    ours.close()
    assert not any(param._post_accumulate_grad_hooks for param in ours.module.parameters())


@on_ranks(2)
def test_a_parameter_whose_data_got_another_shape_is_named() -> None:
    model = BucketDDP(nn.Linear(8, 4))
    for step in range(2):
        backward(model, step)
    model.module.bias.data = torch.ones(1)  # its gradient, of one element, would fit into any view
    with pytest.raises(RuntimeError, match=r"'bias' cannot be reduced: expected .*shape \(4,\).*found .*shape \(1,\)"):
        backward(model, 2)


@on_ranks(2)
def test_new_parameters_start_as_rank_0_has_them() -> None:
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY)
    backward(ours)
    torch.manual_seed(dist.get_rank())
    CHANGES["replace head by another kind"](ours.module)
    backward(ours)
    ours.synchronise_module_buffers()
    assert drift(ours.module) == 0


@on_ranks(2, cases=[(mode, longest) for mode in ("broadcast", "mean") for longest in (0, 1)])
def test_a_rank_may_make_module_buffers_for_itself(mode: str, longest: int) -> None:
    ours = BucketDDP(Caching(), module_buffers=mode)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for step, length in enumerate((2, 3, 5, 5, 3)):
        length += 2 * (dist.get_rank() == longest)
        optimizer.zero_grad()
        ours(batch(length, dist.get_rank())[0], length).square().mean().backward()
        optimizer.step()
        tables = [ours.module.table, *(module.table for module in ours.module.tables.values())]
        assert all(torch.equal(table, torch.arange(float(len(table)))) for table in tables)
        if step == 2:  # is taken in
            ours.module.layers.append(nn.BatchNorm1d(4))
    ours.synchronise_module_buffers()
    assert drift(ours.module.layers) == 0


@on_ranks(2, cases={"by a root": [True], "without": [False]})
def test_a_parameter_replaced_after_forward_has_its_own_gradient(with_root: bool) -> None:
    module = Mlp()
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    backward(ours)
    ours.zero_grad()
    loss = mse(1, direct=not with_root)(ours)
    old = module.head.weight
    CHANGES["replace head"](module)
    loss.backward()
    assert [param.grad is None for param in (old, module.head.weight, module.layers[0].weight)] == [False, True, False]
    plain = copy.deepcopy(module)
    both((plain, ours), inputs_of(2))
    assert_grads(module, mean_grads(plain))


@on_ranks(2, cases=[("module.", {}), ("", {}), ("", {"shard_optimizer": True})])
def test_swapped_in_parameters_have_their_own_gradients(prefix: str, options: dict[str, Any]) -> None:
    module = Mlp()
    ours = BucketDDP(module, bucket_cap_mb=TINY, **options)
    backward(ours)  # with shards the next forward lays buckets out anew
    ours.zero_grad()
    inputs, target = batch(1, dist.get_rank())
    others = {name: param.detach().clone().requires_grad_() for name, param in module.named_parameters()}
    output = functional_call(ours, {prefix + name: value for name, value in others.items()}, (inputs,))
    loss_of(output, target).backward()
    reference = copy.deepcopy(module)
    backward(reference, 1)
    torch.testing.assert_close({name: other.grad for name, other in others.items()}, grads(reference))
    assert all(param.grad is None for param in module.parameters())
    backward(ours, 1)
    found = {name: ours.full_grad(param) for name, param in module.named_parameters()}
    torch.testing.assert_close(found, mean_grads(reference))
    ours.close()
    layer = nn.Linear(8, 4)
    ours = BucketDDP(layer)
    others = {name: nn.Parameter(param.detach() * 2) for name, param in layer.named_parameters()}
    torch.testing.assert_close(functional_call(ours, others, (inputs,)), 2 * layer(inputs))
    assert not {"weight", "bias"} & {*vars(ours), *ours._parameters}


ALONE = [("nothing", "the parameters of pass 1"), ("replace head by another kind", "parameter 'head")]


@on_ranks(2, cases=ALONE, fresh=True)
def test_ranks_that_change_alone_are_an_error_on_all(other: str, words: str) -> None:
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY)
    backward(ours)
    CHANGES[["replace head", other][dist.get_rank()]](ours.module)
    with pytest.raises((RankMismatchError, PeerFailureError), match=words):
        backward(ours, 1)


FP32, BF16 = torch.float32, torch.bfloat16
MASTERS = {"grad_dtype": FP32}
OLD = r"of the old ones \('head.weight', 'head.bias'\); "
STALE: dict[str, list[Any]] = {
    "plain": [{}, FP32, r"after the module was wrapped.*AdamW still holds the old ones \('head.weight', 'head.bi"],
    "masters": [MASTERS, BF16, f"AdamW has fp32 masters {OLD}make a new"],
    "shards": [{"shard_optimizer": True}, FP32, rf"shards {OLD}do it before"],
}


@on_ranks(2, cases=STALE, fresh=True)
def test_an_optimizer_of_the_old_parameters_is_named(options: dict[str, Any], dtype: torch.dtype, words: str) -> None:
    module = Mlp().to(dtype)
    ours = BucketDDP(module, **options)
    optimizer = torch.optim.AdamW(module.parameters())
    ours.prepare_optimizer(optimizer)
    train(ours, optimizer, [0])
    ours.zero_grad()
    module.head = nn.Linear(16, 4, dtype=dtype)
    with pytest.raises(RuntimeError, match=words) if options else pytest.warns(UserWarning, match=words):
        backward(ours, 1)
    if not options:
        with warnings.catch_warnings(action="error"):
            backward(ours, 2)  # it is said once


class Surrounded(nn.Module):
    """A network that is trained, with BatchNorm, and a frozen head that is not used for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
        self.head = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.net.get_parameter(next(name for name, _ in self.net.named_parameters())).dtype))


@on_ranks(2)
def test_an_optimizer_with_shards_that_holds_an_old_frozen_parameter_is_named() -> None:
    module = Surrounded()
    ours = BucketDDP(module, shard_optimizer=True)
    optimizer = torch.optim.AdamW(module.parameters())
    for step in range(2):
        if step == 1:
            module.head = nn.Linear(4, 4).requires_grad_(False)
        with pytest.warns(UserWarning, match=STALE["plain"][2]) if step == 1 else nullcontext():
            ours(inputs_of(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def move_into_a_sequential(module: Any) -> None:
    module.net = nn.Sequential(module.net, nn.Identity())


def add_a_frozen_teacher(module: Any) -> None:
    module.teacher = copy.deepcopy(module.net).requires_grad_(False).half()
    module.teacher[0].weight.data += dist.get_rank()


def prune_and_make_it_permanent(module: Any) -> None:
    prune.l1_unstructured(module.net[0], "weight", amount=0.3)
    prune.remove(module.net[0], "weight")


NOTHING_TRAINED: dict[str, tuple[Callable[[Any], object], str]] = {
    "pruned": (lambda module: prune.l1_unstructured(module.net[0], "weight", amount=0.3), "net.0.weight_orig"),
    "pruned for good": (prune_and_make_it_permanent, "net.0.weight"),
    "compiled": (
        lambda module: setattr(module, "net", torch.compile(module.net, backend="eager")),
        "net._orig_mod.0.weight",
    ),
    "moved": (move_into_a_sequential, "net.0.0.weight"),
    "frozen teacher": (add_a_frozen_teacher, "net.0.weight"),
    "frozen head deleted": (lambda module: delattr(module, "head"), "net.0.weight"),
    "frozen head replaced": (
        lambda module: setattr(module, "head", nn.Linear(4, 4).requires_grad_(False)),
        "net.0.weight",
    ),
}
"""Changes that concern names and frozen parameters alone, and the name of the first weight after them."""
LIVE: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "shards": ({"shard_optimizer": True}, FP32),
    "masters": (MASTERS, BF16),
    "shards of masters": ({"shard_optimizer": True, "scatter_every_pass": True, **MASTERS}, BF16),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "kind"),
    some_slow(
        product(NOTHING_TRAINED, LIVE), in_turn([change for change in NOTHING_TRAINED if change != "compiled"], [*LIVE])
    ),
)
@on_ranks(2)
def test_shards_and_masters_stay_where_nothing_that_is_trained_changes(change: str, kind: str) -> None:
    """Compared with a run that leaves such things alone until training has ended, but for what pruning does."""
    options, dtype = LIVE[kind]
    do, name = NOTHING_TRAINED[change]
    torch.manual_seed(5)
    plain = Surrounded().to(dtype)
    module = copy.deepcopy(plain)
    ours, reference = BucketDDP(module, bucket_cap_mb=TINY, **options), BucketDDP(plain, bucket_cap_mb=TINY, **MASTERS)
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01) for model in (module, plain)
    ]
    for step in range(4):
        if step == 2:
            do(module)
            if "pruned" in change:
                do(plain)
        for model, optimizer in zip((ours, reference), optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs_of(step)).float().square().mean().backward()
            optimizer.step()
    slots = {slot.spec.name for slot in ours.layout.slots}
    trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
    assert slots == set(trained)
    assert name in slots
    if "shard_optimizer" in options:
        assert f"({name})" in repr(trained[name].grad)
    ours.synchronise_module_buffers()
    assert drift(module) == 0
    tolerance = 2e-2 if dtype is BF16 else 1e-5
    expected = [param for param in plain.parameters() if param.requires_grad]
    torch.testing.assert_close([*trained.values()], expected, rtol=tolerance, atol=tolerance)


@on_ranks(2, cases=LIVE, quick=["masters", "shards of masters"], fresh=True)
def test_a_late_parameter_that_is_to_be_trained_is_named(options: dict[str, Any], dtype: torch.dtype) -> None:
    module = Surrounded().to(dtype)
    ours = BucketDDP(module, **options)
    optimizer = torch.optim.AdamW(module.net.parameters())
    for step in range(3):
        if step == 1:
            module.teacher = copy.deepcopy(module.net).requires_grad_(False)
        optimizer.zero_grad()
        ours(inputs_of(step)).float().square().mean().backward()
        optimizer.step()
    module.teacher[3].bias.requires_grad_(True)
    refused = pytest.raises(RuntimeError, match=r"shards of the old ones \('teacher.3.bias'\)")
    with refused if "shard_optimizer" in options else nullcontext():
        ours(inputs_of(4)).float().square().mean().backward()


@on_ranks(2, cases=[{}, {"shard_optimizer": True}])
def test_module_buffers_are_synchronised_wherever_their_module_moves(options: dict[str, Any]) -> None:
    ours = BucketDDP(Surrounded(), **options)
    norm = ours.module.net[1]
    for step, change in enumerate([lambda module: None, move_into_a_sequential, move_into_a_sequential]):
        change(ours.module)
        ours(inputs_of(step)).square().mean().backward()
        assert everyones(norm.running_mean)[0].ne(everyones(norm.running_mean)[1]).any(), "each has its own batch"
        ours.synchronise_module_buffers()
        assert drift(norm) == 0


@on_ranks(2)
def test_the_last_wrapper_takes_over() -> None:
    module = Mlp()
    cells = []
    for step in range(3):  # a notebook cell that is run again
        wrapper = BucketDDP(module)
        train(wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.1), [step])
        assert wrapper.passes == 1
        cells.append(wrapper)
    old, inputs = cells[0], batch(0, dist.get_rank())[0]
    with torch.no_grad():
        torch.testing.assert_close(old(inputs), module(inputs))
    later = "found an earlier one: gradients are averaged by the later one"
    with pytest.raises(RuntimeError, match=later):
        old(inputs)
    with pytest.raises(RuntimeError, match=later), old.no_sync():
        pass
    with pytest.raises(RuntimeError, match="after close"), old.backward_pass(torch.zeros((), requires_grad=True)):
        pass
    assert all(len(param._post_accumulate_grad_hooks) == 1 for param in module.parameters())
    plain = copy.deepcopy(module)
    both((plain, wrapper), inputs_of(3))
    assert_grads(module, mean_grads(plain))
    assert drift(module) == 0


@on_ranks(2)
def test_wrappers_around_other_parameters_stay() -> None:
    """Around ones that are frozen there, too; a wrapper inside a wrapper only forwards."""
    plain = Mlp()
    module = copy.deepcopy(plain)
    module.head.requires_grad_(False)
    body = BucketDDP(module)
    head = BucketDDP(module.head.requires_grad_(True))
    module.head.requires_grad_(False)
    backward(body)
    assert body.passes == 1
    for wrapper in (head, body):
        wrapper.close()
    inner = BucketDDP(module.requires_grad_(True))
    outer = BucketDDP(inner)
    for step, model in enumerate((outer, inner, outer)):
        both((plain, model), inputs_of(step))
        assert_grads(module, mean_grads(plain))
    assert (inner.passes, outer.passes) == (0, 3)


@on_ranks(2, cases={"shards": [{"shard_optimizer": True}, FP32], "masters": [MASTERS, BF16]})
def test_a_wrapper_with_a_live_optimizer_is_not_replaced(options: dict[str, Any], dtype: torch.dtype) -> None:
    module = Mlp().to(dtype)
    wrapper = BucketDDP(module, **options)
    optimizer = torch.optim.AdamW(module.parameters())
    train(wrapper, optimizer, [0])
    with pytest.raises(RuntimeError, match=r"AdamW with shards or fp32 masters of its parameters; close\(\) that"):
        BucketDDP(module, **options)
    train(wrapper, optimizer, [1])  # goes on as before
    wrapper.close()
    BucketDDP(module)


@on_ranks(2, cases=[(MASTERS, BF16, False), ({"module_buffers": "mean"}, FP32, False), ({}, FP32, True)])
def test_a_closed_or_dropped_wrapper_leaves_nothing(options: dict[str, Any], dtype: torch.dtype, close: bool) -> None:
    module = Mlp().to(dtype)
    before, global_hooks = set(vars(module)), len(optimizer_file._global_optimizer_pre_hooks)
    wrapper = BucketDDP(module, **options)
    backward(wrapper)
    if close:
        means = grads(module)
        wrapper.close()
        assert_grads(module, means)
        backward(wrapper)  # forwards still, reduces nothing
        assert wrapper.passes == 1
    del wrapper
    gc.collect()
    assert len(optimizer_file._global_optimizer_pre_hooks) == global_hooks
    assert set(vars(module)) == before
    for param in module.parameters():
        assert not param._post_accumulate_grad_hooks
        assert param.grad_dtype in (None, dtype)
        assert not hasattr(param, "main_grad")
        assert param.grad.untyped_storage().nbytes() == param.grad.nbytes, "a plain tensor, not a view"
    backward(module)
    wrapper = BucketDDP(module, **options)
    backward(wrapper)
    for param in module.parameters():
        param.data = param.data.double()  # no longer the dtype of gradients
    wrapper.close()
