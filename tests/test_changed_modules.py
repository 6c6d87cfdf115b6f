"""Parameters that are added, replaced or re-typed after wrapping, and ones swapped in for a call."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from tests.lightning_models import Regression, close_to, data, ours, trainer
from tests.models import Mlp, batch, loss_of
from tests.reference import assert_grads, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003


def backward(model: nn.Module, number: int, dtype: torch.dtype = torch.float32) -> None:
    inputs, target = batch(number, dist.get_rank())
    loss_of(model(inputs.to(dtype)), target.to(dtype)).backward()


class Looked(nn.Module):
    """An embedding whose gradient is sparse, and a layer with module buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 16, sparse=True)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x.abs() * 3).long().clamp(max=4)[:, 0])
        return self.out(self.norm(x) + rows)


def replace_head(module: Mlp) -> None:
    module.head = nn.Linear(16, 4)


def replace_by_another_kind(module: Mlp) -> None:
    module.head = Looked()


def add_layer(module: Mlp) -> None:
    module.layers.append(nn.Linear(16, 16))


def remove_layer(module: Mlp) -> None:
    del module.layers[1]


def replace_parameter(module: Mlp) -> None:
    module.head.weight = nn.Parameter(module.head.weight.detach() * 2)


def add_unused_copy(module: Mlp) -> None:
    module.average = copy.deepcopy(module.head)


def to_double(module: Mlp) -> None:
    module.double()


def assign(module: Mlp) -> None:
    state = {name: value * 2 for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


CHANGES = [
    replace_head,
    replace_by_another_kind,
    add_layer,
    remove_layer,
    replace_parameter,
    add_unused_copy,
    to_double,
    assign,
]


def change_between_passes(change: Callable[[Mlp], None], options: dict[str, Any], local: set[int]) -> float:
    """Five passes, those in ``local`` inside ``no_sync``, and a change before the third."""
    torch.manual_seed(1)
    plain = Mlp(depth=3)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY, **options)
    for number in range(5):
        if number == 2:
            for module in (plain, ours.module):
                torch.manual_seed(2)
                change(module)
        dtype = next(plain.parameters()).dtype
        if number - 1 not in local:
            plain.zero_grad()
            ours.zero_grad()
        backward(plain, number, dtype)
        with ours.no_sync() if number in local else nullcontext():
            backward(ours, number, dtype)
        if number not in local:
            tolerance = {"rtol": 2e-3, "atol": 1e-3} if "comm_hook" in options else {}
            assert_grads(ours.module, mean_over_ranks(plain), **tolerance)
    assert ours.passes == 5 - len(local)
    dense = {name for name, param in ours.module.named_parameters() if not name.endswith("table.weight")}
    assert {slot.spec.name for slot in ours.layout.slots} == dense
    assert {slot.spec.dtype for slot in ours.layout.slots} == {dtype}
    ours.synchronise_module_buffers()
    torch.optim.SGD(ours.module.parameters(), lr=0.1).step()
    difference = largest_difference_between_ranks(ours.module)
    ours.close()
    assert not any(param._post_accumulate_grad_hooks for param in ours.module.parameters())
    return difference


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("options", [{}, {"use_contiguous_buffers": False}, {"comm_hook": "fp16"}], ids=str)
def test_changed_parameters_are_taken_in(
    run_ranks: RunRanks, change: Callable[[Mlp], None], options: dict[str, Any]
) -> None:
    assert run_ranks(2, change_between_passes, change, options, set()) == [0.0, 0.0]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("local", [{1}, {1, 2}], ids=["before a reduction", "in accumulation"])
def test_parameters_change_while_gradients_accumulate(
    run_ranks: RunRanks, change: Callable[[Mlp], None], local: set[int]
) -> None:
    assert run_ranks(2, change_between_passes, change, {}, local) == [0.0, 0.0]


def different_values() -> float:
    """Each rank makes a head of its own values; rank 0's hold from the first step on."""
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY)
    backward(ours, 0)
    torch.manual_seed(dist.get_rank())
    replace_by_another_kind(ours.module)
    for number in range(3):
        ours.zero_grad()
        backward(ours, number)
        torch.optim.SGD(ours.module.parameters(), lr=0.1).step()
    ours.synchronise_module_buffers()
    backward(ours, 3)
    ours.synchronise_module_buffers()
    difference = largest_difference_between_ranks(ours.module)
    ours.close()
    return difference


def test_new_parameters_get_rank_0s_values(run_ranks: RunRanks) -> None:
    assert run_ranks(2, different_values) == [0.0, 0.0]


def replaced_between_forward_and_backward(with_root: bool) -> None:
    """The gradient of a parameter that was replaced since forward is its own."""
    module = Mlp()
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    backward(ours, 0)
    ours.zero_grad()
    inputs, target = batch(1, dist.get_rank())
    loss = loss_of((ours if with_root else module)(inputs), target)
    old = module.head.weight
    replace_head(module)
    loss.backward()
    assert old.grad is not None
    assert module.head.weight.grad is None
    assert module.layers[0].weight.grad is not None
    ours.zero_grad()
    plain = copy.deepcopy(module)
    for model in (plain, ours):
        backward(model, 2)
    assert_grads(module, mean_over_ranks(plain))
    ours.close()


@pytest.mark.parametrize("with_root", [True, False])
def test_a_parameter_replaced_between_forward_and_backward(run_ranks: RunRanks, with_root: bool) -> None:
    run_ranks(2, replaced_between_forward_and_backward, with_root)


def change_on_one_rank(change: Callable[[Mlp], None], other: Callable[[Mlp], None] | None) -> str:
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY)
    backward(ours, 0)
    mine = [change, other][dist.get_rank()]
    if mine is not None:
        mine(ours.module)
    with pytest.raises((RankMismatchError, PeerFailureError)) as error:
        backward(ours, 1)
    return str(error.value)


@pytest.mark.parametrize(
    ("other", "words"),
    [(None, "the parameters of pass 1"), (replace_by_another_kind, "parameter 'head"), (add_layer, "parameter '")],
    ids=["nothing", "another kind", "more layers"],
)
def test_ranks_that_change_alone_are_an_error_on_all(
    run_ranks: RunRanks, other: Callable[[Mlp], None] | None, words: str
) -> None:
    for message in run_ranks(2, change_on_one_rank, replace_head, other, fresh=True):
        assert words in message


def stale_optimizer(options: dict[str, Any]) -> str:
    module = Mlp().to(torch.bfloat16) if "grad_dtype" in options else Mlp()
    dtype = next(module.parameters()).dtype
    ours = BucketDDP(module, **options)
    optimizer = torch.optim.AdamW(module.parameters())
    ours.prepare_optimizer(optimizer)
    backward(ours, 0, dtype)
    optimizer.step()
    ours.zero_grad()
    module.head = nn.Linear(16, 4, dtype=dtype)
    if not options:
        with pytest.warns(UserWarning, match=r"AdamW still holds the old ones \('head.weight', 'head.bias'\)") as found:
            backward(ours, 1, dtype)
        backward(ours, 2, dtype)  # and is said once
        message = str(found[0].message)
    else:
        with pytest.raises(RuntimeError) as error:
            backward(ours, 1, dtype)
        message = str(error.value)
    ours.close()
    return message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "make a new optimizer, or give it the new ones"),
        (
            {"grad_dtype": torch.float32},
            "AdamW has fp32 masters of the old ones ('head.weight', 'head.bias'); make a new",
        ),
        ({"shard_optimizer": True}, "shards of the old ones ('head.weight', 'head.bias'); close() the wrapper"),
    ],
    ids=["plain", "masters", "shards"],
)
def test_an_optimizer_of_the_old_parameters_is_named(run_ranks: RunRanks, options: dict[str, Any], words: str) -> None:
    for message in run_ranks(2, stale_optimizer, options, fresh=True):
        assert words in message


# -- parameters swapped in for one call --------------------------------------------------------------


def swapped_in(names: str) -> None:
    torch.manual_seed(1)
    module = Mlp()
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    backward(ours, 0)
    layout, prefix = ours.layout, "module." if names == "module." else ""
    inputs, target = batch(1, dist.get_rank())
    others = {name: param.detach().clone().requires_grad_() for name, param in module.named_parameters()}
    ours.zero_grad()
    for _ in range(2):  # gradients of others accumulate as without a wrapper
        output = functional_call(ours, {prefix + name: value for name, value in others.items()}, (inputs,))
        loss_of(output, target).backward()
    expected = {name: value.detach().clone().requires_grad_() for name, value in others.items()}
    for _ in range(2):
        loss_of(functional_call(module, expected, (inputs,)), target).backward()
    for name, value in others.items():
        torch.testing.assert_close(value.grad, expected[name].grad)
    assert all(param.grad is None for param in module.parameters())
    mixed = {prefix + name: others[name] for name in ("head.weight", "head.bias")}
    mixed |= {prefix + "layers.0.weight": module.layers[0].weight}  # the module's own counts as its own
    loss_of(functional_call(ours, mixed, (inputs,)), target).backward()
    assert module.head.weight.grad is None
    reference = copy.deepcopy(module)
    reference.zero_grad()
    loss_of(reference(inputs), target).backward()
    means = mean_over_ranks(reference)
    torch.testing.assert_close(module.layers[0].weight.grad, means["layers.0.weight"])
    torch.testing.assert_close(module.layers[1].bias.grad, means["layers.1.bias"])
    ours.zero_grad()
    backward(ours, 1)
    assert_grads(module, means)
    assert ours.layout == layout or ours.passes > 1
    ours.close()


def swapped_in_at_the_top() -> None:
    module = nn.Linear(8, 4)
    ours = BucketDDP(module)
    others = {name: nn.Parameter(param.detach() * 2) for name, param in module.named_parameters()}
    inputs = batch(0, 0)[0]
    own = list(module.parameters())
    torch.testing.assert_close(functional_call(ours, others, (inputs,)), 2 * module(inputs))
    assert [id(param) for param in module.parameters()] == [id(param) for param in own]
    assert not {"weight", "bias"} & {*vars(ours), *ours._parameters}
    ours.close()


def test_functional_call_swaps_the_wrapped_modules_own_parameters(run_ranks: RunRanks) -> None:
    run_ranks(2, swapped_in_at_the_top)


@pytest.mark.parametrize("names", ["module.", "the module's"])
def test_functional_call_goes_through_the_wrapper(run_ranks: RunRanks, names: str) -> None:
    run_ranks(2, swapped_in, names)


# -- in a Trainer ------------------------------------------------------------------------------------


class Unfreeze(pl.Callback):
    """Unfreezes the head when training starts, the rest before batch 2, and replaces the head before batch 4."""

    def __init__(self, replace: bool) -> None:
        self.replace = replace

    def on_train_start(self, trainer: pl.Trainer, module: Regression) -> None:
        module.net.head.requires_grad_(True)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Regression, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            module.requires_grad_(True)
        if batch_idx == 4 and self.replace:
            torch.manual_seed(3)
            module.net.head = nn.Linear(16, 4)
            trainer.optimizers = [module.configure_optimizers()]


def fit_frozen(replace: bool) -> float:
    """A fit that starts with all parameters frozen, and the same by hand in one process on the full batches."""
    fitted, alone = Regression().requires_grad_(False), Regression().requires_grad_(False)
    unfreeze, loader = Unfreeze(replace), data()
    trainer(ours(), callbacks=[unfreeze]).fit(fitted, loader)
    by_hand = SimpleNamespace(optimizers=[alone.configure_optimizers()])
    unfreeze.on_train_start(by_hand, alone)
    for index in range(len(loader)):
        unfreeze.on_train_batch_start(by_hand, alone, None, index)
        inputs, target = loader.dataset[8 * index : 8 * (index + 1)]
        by_hand.optimizers[0].zero_grad()
        nn.functional.mse_loss(alone.net(inputs), target).backward()
        by_hand.optimizers[0].step()
    close_to(fitted, alone)
    return largest_difference_between_ranks(fitted)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.filterwarnings("ignore:.*still holds the old ones")
def test_a_trainer_starts_with_frozen_parameters(run_ranks: RunRanks, replace: bool) -> None:
    assert run_ranks(2, fit_frozen, replace) == [0.0, 0.0]
