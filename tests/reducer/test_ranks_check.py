"""The comparison of parameters: drifts that ``ddp`` has without a word are told; sound training is left alone."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, RankMismatchError
from lightning_bucketddp.comm.host_copy import HostCopy
from lightning_bucketddp.optim.lazy_all_gather import AwaitedParameter
from lightning_bucketddp.reducer.ranks_check import RanksCheck
from tests.lightning_models import Regression, data, ours, trainer
from tests.models import MODELS, Branches, Mlp, build
from tests.pool import on_ranks
from tests.reference import TINY, backward, drift, inputs_of, loss_at, seeded, train


class MaxNorm(nn.Module):
    """An embedding that scales the rows of the batch down in forward, other rows on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.table = nn.Linear(8, 4), nn.Embedding(60, 4, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.table(torch.arange(len(x)) + dist.get_rank() * 20)


class ActNorm(nn.Module):
    """A scale that the first batch sets, as in normalising flows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, 4)
        self.initialised = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialised:
            self.initialised = True
            self.scale.data = 1 / x.std(0)
        return self.head(x * self.scale)


STRICT: dict[str, Any] = {"check_ranks_every": 1, "check_ranks": "error", "bucket_cap_mb": TINY}


def step_by_hand(model: nn.Module, step: int) -> None:
    """Step on this rank's gradients, as they come from `torch.autograd.grad`."""
    params = list(model.parameters())
    through = model if isinstance(model, BucketDDP) else model.module  # torch's DDP would wait for a backward
    for param, grad in zip(params, torch.autograd.grad(loss_at(through, step), params), strict=True):
        param.grad = grad
    torch.optim.SGD(params, lr=0.1).step()
    model.zero_grad()


def nothing(model: nn.Module, step: int) -> None:
    """Forward writes."""


@contextmanager
def warns_of(*expected: str) -> Iterator[list[warnings.WarningMessage]]:
    """Exactly these parts of warnings are told inside."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found
    texts = [str(warning.message) for warning in found]
    assert len(texts) == len(expected), texts
    assert all(part in text for text, part in zip(texts, expected, strict=True)), texts


DRIFTS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], None], int, str]] = {
    "max_norm": (MaxNorm, nothing, 0, "found 1 of 3 that differ in pass 0: 'table.weight'; rank 1 and rank 0 differ"),
    "data sets it": (ActNorm, nothing, 0, "found 1 of 3 that differ in pass 0: 'scale'; rank 1 and rank 0 differ"),
    "autograd.grad": (Mlp, step_by_hand, 2, "found 8 of 8 that differ in pass 2: 'layers.0.weight', 'layers.0.bias', "),
}


@on_ranks(2, cases=DRIFTS)
def test_a_drift_that_ddp_has_without_a_word_is_told_once(
    make: Callable[[], nn.Module], by_hand: Callable[[nn.Module, int], None], at: int, text: str
) -> None:
    """Every second pass is compared, from pass 0 on. The gradients are ``ddp``'s all the same."""
    theirs, mine = DistributedDataParallel(seeded(make)), BucketDDP(seeded(make), check_ranks_every=2)
    for step in range(5):
        with warns_of():
            backward(theirs, step)
        with warns_of(*[text] * (step == at)):
            backward(mine, step)
        for model in (theirs, mine):
            by_hand(model, step)
    assert drift(theirs) > 0.01
    torch.testing.assert_close(list(mine.parameters()), list(theirs.parameters()))


@on_ranks(2)
def test_gradients_by_hand_that_are_reduced_before_the_step_are_no_drift() -> None:
    mine = BucketDDP(seeded(Mlp), **STRICT)
    params = list(mine.parameters())
    for step in range(3):
        for param, grad in zip(params, torch.autograd.grad(loss_at(mine, step), params), strict=True):
            param.grad = grad
        mine.allreduce_gradients()
        torch.optim.SGD(params, lr=0.1).step()
    assert mine.passes == 3
    assert drift(mine) == 0


@on_ranks(2, 3, cases={"plain": {}, "sharded": {"shard_optimizer": True}}, fresh=True)
def test_as_an_error_a_drift_ends_training_on_all_ranks(options: dict[str, Any]) -> None:
    mine = BucketDDP(seeded(MaxNorm), check_ranks_every=1, check_ranks="error", **options)
    with pytest.raises(RankMismatchError, match=r"'table.weight'; ranks? 1.* and rank 0 differ"):
        backward(mine)
    with pytest.raises(RuntimeError, match=r"'table.weight'"):
        backward(mine)


SOUND: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"shard_optimizer": True},
    "groups of shards": {"shard_optimizer": True, "shard_group_size": 1},
    "coalesced": {"use_contiguous_buffers": False},
    "bf16 wire": {"wire_dtype": "bf16"},
}


@on_ranks(2, cases=SOUND, quick=["groups of shards", "bf16 wire"])
def test_sound_training_is_left_alone(options: dict[str, Any]) -> None:
    """Sums of bits are equal where parameters are: whatever their strides, dtypes and places in memory."""
    for kind in MODELS:
        mine = BucketDDP(build(kind), **STRICT, **options)
        with counted_looks() as looks:
            train(mine, torch.optim.SGD(mine.parameters(), lr=0.1), range(4))
        assert looks == [0, 1, 2, 3]
        mine.synchronise_module_buffers()
        assert drift(mine) == 0, kind
        mine.close()
    if options in ({}, {"shard_optimizer": True}):
        masters = BucketDDP(seeded(Mlp).bfloat16(), grad_dtype="fp32", **STRICT, **options)
        train(masters, torch.optim.AdamW(masters.parameters()), range(4))
        assert drift(masters) == 0


@contextmanager
def counted_looks() -> Iterator[list[int]]:
    """The passes whose comparisons are looked at inside."""
    look, found = RanksCheck.look, []

    def note(check: RanksCheck) -> None:
        if check._comparison is not None:
            found.append(check._comparison.number)
        look(check)

    with patch.object(RanksCheck, "look", note):
        yield found


@on_ranks(2)
def test_shards_are_compared_when_they_have_been_gathered() -> None:
    """A branch that this forward does not use has been updated by the last step, and nobody has waited for it."""
    mine = BucketDDP(seeded(Branches), shard_optimizer=True, **{**STRICT, "bucket_cap_mb": 0})
    optimizer, late = torch.optim.SGD(mine.parameters(), lr=0.1), []
    start = RanksCheck.start

    def note(check: RanksCheck, *args: Any) -> None:
        late.append(any(isinstance(param, AwaitedParameter) for param in mine.parameters()))
        start(check, *args)

    with patch.object(RanksCheck, "start", note):
        for step, take in enumerate(["both", "both", "left", "right", "left"]):
            optimizer.zero_grad()
            mine(inputs_of(step), take).square().mean().backward()
            optimizer.step()
    assert any(late), "the comparison had to wait for nothing"
    mine.wait_for_parameters()
    assert drift(mine) == 0


RATES: dict[str, tuple[dict[str, Any], Callable[[float], Any]]] = {
    "plain": ({}, float),
    "sharded": ({"shard_optimizer": True}, float),
    "sharded, a tensor": ({"shard_optimizer": True}, torch.tensor),
}


@on_ranks(2, 3, cases=RATES)
def test_learning_rates_that_differ_are_told(options: dict[str, Any], of: Callable[[float], Any]) -> None:
    """Where the optimizer is sharded, parameters do not differ: each part has been updated with a rate of its own."""
    mine = BucketDDP(seeded(Mlp), check_ranks_every=1, bucket_cap_mb=TINY, **options)
    params = list(mine.parameters())
    optimizer = torch.optim.Adam([{"params": params[:3]}, {"params": params[3:]}], lr=of(0.1))
    with warns_of():
        for step in range(4):
            backward(mine, step)
            if step < 3:
                optimizer.step()
    if dist.get_rank() == 1:  # as a ReduceLROnPlateau that follows a metric of its rank
        optimizer.param_groups[1]["lr"] = of(0.05)
    optimizer.step()
    told = f"lr of group 1 of Adam was {of(0.1).item() if of is torch.tensor else 0.1} on rank 0"
    with warns_of(told) as found:
        backward(mine, 4)
    text = str(found[0].message)
    assert "on rank 1 in the last step before pass 4" in text
    assert ("expected the same parameters" in text) == (not options), text
    optimizer.step()
    with warns_of():
        backward(mine, 5)
    assert (drift(mine) == 0) == bool(options)


@on_ranks(2)
def test_learning_rates_that_differ_can_be_an_error() -> None:
    mine = BucketDDP(seeded(Mlp), shard_optimizer=True, **STRICT)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1 * (1 + dist.get_rank()))
    backward(mine)
    optimizer.step()
    with pytest.raises(RankMismatchError, match=r"lr of group 0 of SGD was 0.1 on rank 0 and 0.2 on rank 1"):
        backward(mine, 1)


class OneOf(nn.Module):
    """A parameter of some dtype, frozen, beside a trained one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)
        values = torch.arange(24).remainder(2) if dtype is torch.bool else torch.linspace(-3, 3, 24)
        self.kept = nn.Parameter(values.to(dtype).view(4, 6).t(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.float())


FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
OTHERS = (torch.complex64, torch.complex128, torch.int64, torch.int32, torch.uint8, torch.bool)


@on_ranks(2, cases=[*FLOATING, *OTHERS])
def test_one_element_of_any_dtype_is_a_difference(dtype: torch.dtype) -> None:
    mine = BucketDDP(OneOf(dtype), check_ranks_every=1)
    with warns_of():
        backward(mine)
    if dist.get_rank() == 1:
        whole = mine.module.kept.data
        bits = torch.view_as_real(whole) if dtype.is_complex else whole
        last = bits.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])[-1, -1]
        last.bitwise_xor_(1)  # the sign of -0 and 0 is in no sum of values; the last bit is in no rounded one
    with warns_of("found 1 of 3 that differ in pass 1: 'kept'; rank 1 and rank 0 differ"):
        backward(mine)


class LateCopy(HostCopy):
    """A copy as from an accelerator, which is read in the next pass."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.waits = True


@on_ranks(2)
def test_on_an_accelerator_a_comparison_is_looked_at_in_the_next_pass() -> None:
    with patch("lightning_bucketddp.reducer.ranks_check.HostCopy", LateCopy), counted_looks() as looks:
        mine = BucketDDP(seeded(ActNorm), check_ranks_every=3)
        with warns_of():
            backward(mine, 0)
        assert looks == []
        with warns_of("that differ in pass 0: 'scale'"):
            backward(mine, 1)
        with warns_of():
            for step in range(2, 8):
                backward(mine, step)
    assert looks == [0], "what has been told is not compared again"


@on_ranks(2)
def test_parameters_that_are_taken_in_are_compared_too() -> None:
    mine = BucketDDP(seeded(Mlp), check_ranks_every=1)
    with warns_of():
        backward(mine)
        mine.module.head = nn.Linear(16, 4)
        backward(mine)
    with torch.no_grad():
        mine.module.head.bias.add_(dist.get_rank())
    with warns_of("found 1 of 8 that differ in pass 2: 'head.bias'"):
        backward(mine)


@on_ranks(2)
def test_ranks_that_have_joined_may_differ() -> None:
    mine = BucketDDP(seeded(Mlp), **STRICT)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    with counted_looks() as looks, mine.join():
        train(mine, optimizer, range(2 + 2 * dist.get_rank()))
    assert looks == [0, 1, 2, 3]
    train(mine, optimizer, range(2))
    assert drift(mine) == 0


class ByHand(Regression):
    """Never runs a backward: gradients come from `torch.autograd.grad`."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        params = list(self.parameters())
        loss = super().training_step(batch, batch_idx)
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad
        self.optimizers().step()


@on_ranks(2)
def test_a_trainer_compares_at_the_end_of_fit() -> None:
    """Without a pass nothing else would tell."""
    with pytest.raises(RankMismatchError, match=r"found 8 of 8 that differ .*'net.layers.0.weight'"):
        trainer(ours(check_ranks_every=100, check_ranks="error")).fit(ByHand(), data())
    with counted_looks() as looks:
        trainer(ours(check_ranks_every=4, check_ranks="error")).fit(Regression(), data(6))
    assert looks == [0, 4, 6]
