"""Steps that all ranks skip together: what is dropped, what the warning names, and when ranks stop."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP, GradientError, convert_sync_batchnorm
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.peers.control import HEADER, MAX_RANKS_IN_FP32, Control, Report, write
from tests.hooks import options_for
from tests.models import ConvBatchNorm, Mlp
from tests.pool import case, on_ranks
from tests.reference import TINY, drift, inputs_of, raises_soon, seeded


@contextmanager
def warns_of(*expected: str) -> Iterator[list[str]]:
    """On rank 0 exactly these parts of warnings of skipped steps are told inside, on other ranks none."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True, action="always") as found:
        yield texts
    texts += [text for warning in found if "skip the step" in (text := str(warning.message))]
    expected = expected if dist.get_rank() == 0 else ()
    assert len(texts) == len(expected), texts
    assert all(part in text for part, text in zip(expected, texts, strict=True)), texts


class OutOfMemory(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory, for this test")


def nan_grad(model: BucketDDP, step: int) -> Tensor:
    hidden = model(inputs_of(step)).square().mean()
    hidden.register_hook(lambda grad: grad * math.nan)
    return hidden


def late_inf(model: BucketDDP, step: int) -> Tensor:
    """Infinite from a layer in the middle on, backwards."""
    handle = model.module.layers[1].register_forward_hook(
        lambda layer, args, output: output.register_hook(lambda grad: grad * math.inf) and None
    )
    loss = model(inputs_of(step)).square().mean()
    handle.remove()
    return loss


def oom_in_backward(model: BucketDDP, step: int) -> Tensor:
    """After the gradients of the head."""
    handle = model.module.layers[1].register_forward_hook(lambda layer, args, output: OutOfMemory.apply(output))
    loss = model(inputs_of(step)).square().mean()
    handle.remove()
    return loss


def oom_in_forward(model: BucketDDP, step: int) -> Tensor:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory, for this test")

    handle = model.module.layers[1].register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(inputs_of(step))
    handle.remove()
    return model.skip_step("ran out of memory in forward")


Loss = Callable[[BucketDDP, int], Tensor]


def good(model: BucketDDP, step: int) -> Tensor:
    return model(inputs_of(step)).square().mean()


class Training:
    """A wrapped model with AdamW, that some step may go wrong for."""

    def __init__(self, build: Callable[[], nn.Module] = Mlp, **options: Any) -> None:
        self.model = BucketDDP(seeded(build), bucket_cap_mb=TINY, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)  # weight decay: a step without gradients

    def step(self, *numbers: int, bad: Loss = good, rank: int = 1) -> None:
        """One step of one backward per number; the first goes wrong on one rank."""
        for place, number in enumerate(numbers):
            with nullcontext() if place == len(numbers) - 1 else self.model.no_sync():
                loss = (bad if place == 0 and dist.get_rank() == rank else good)(self.model, number)
                with self.model.backward_pass(loss):
                    loss.backward()
        if self.model.step_skipped():
            assert all(param.grad is None for param in self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[Tensor]:
        self.model.wait_for_parameters()
        return [param.detach().clone() for param in self.model.parameters()]


FAULTS: dict[str, tuple[Loss, str]] = {
    "NaN": (nan_grad, "rank 1 has NaN or Inf in 8 gradient(s), first in that of 'head."),
    "Inf": (late_inf, "rank 1 has NaN or Inf in 4 gradient(s), first in that of 'layers.1."),
    "oom in backward": (oom_in_backward, "rank 1 ran out of memory in backward"),
    "oom in forward": (oom_in_forward, "rank 1 ran out of memory in forward"),
}
STORAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "coalesced": lambda: {"use_contiguous_buffers": False},
    "sharded": lambda: {"shard_optimizer": True},
    "wire": lambda: {"wire_dtype": "bf16"},
    "powersgd": lambda: options_for("powersgd"),
}


CASES = [*product(STORAGES, [1]), *product(["plain", "sharded"], [3])]
QUICK = ["coalesced, 1", "powersgd, 1", "wire, 1", "sharded, 3", "plain, 3"]


@on_ranks(2, 3, cases=CASES, quick=QUICK)
def test_all_ranks_skip_a_step_that_goes_wrong_on_one(storage: str, passes: int) -> None:
    """Weights are those of a run that never saw the batches. Steps in between are ordinary ones."""
    ours, never = (Training(skip_step_on=["oom", "nonfinite"], **STORAGES[storage]()) for _ in range(2))
    for step, (bad, words) in enumerate(FAULTS.values()):
        with case(words), warns_of():
            for training in (ours, never):
                training.step(*range(2 * step * passes, (2 * step + 1) * passes))
            assert not ours.model.step_skipped()
        before = ours.parameters()
        told = f"rank 0: all ranks skip the step of pass {2 * step + 1}, 1 in a row so far: {words}"
        with case(words), warns_of(told):
            ours.step(*range((2 * step + 1) * passes, (2 * step + 2) * passes), bad=bad)
            assert ours.model.step_skipped()
            torch.testing.assert_close(ours.parameters(), before, rtol=0, atol=0)
    ours.step(100)
    never.step(100)
    assert drift(ours.model) == 0
    if storage != "powersgd":  # whose memory starts anew
        torch.testing.assert_close(ours.parameters(), never.parameters())
    assert all(param.isfinite().all() for param in ours.parameters())


@on_ranks(4)
def test_ranks_with_other_shards_of_a_bucket_skip_alike() -> None:
    """Only the shard of one rank in each group of two holds the head, whose gradient is infinite."""
    ours = Training(skip_step_on=["nonfinite"], shard_optimizer=True, shard_group_size=2)
    before = ours.parameters()
    hook = ours.model.module.head.bias.register_hook(lambda grad: grad * math.inf)
    with warns_of("rank 0 has NaN or Inf in 1 gradient(s), first in that of 'head.bias'; rank 1 has"):
        ours.step(0)
    torch.testing.assert_close(ours.parameters(), before, rtol=0, atol=0)
    hook.remove()
    ours.step(1)
    assert not torch.equal(ours.parameters()[0], before[0])
    assert drift(ours.model) == 0


def large(model: BucketDDP, step: int) -> Tensor:
    return good(model, step) * 1000


@on_ranks(3, 2, cases=["plain", "sharded"], quick=["sharded"])
def test_a_norm_far_above_its_median_is_skipped(storage: str) -> None:
    options = {"skip_norm_above": 5, **STORAGES[storage]()}
    ours, never = (Training(**options) for _ in range(2))
    with warns_of():
        ours.step(0, bad=large)  # no median yet
        never.step(0, bad=large)
        for step in range(1, 10):
            ours.step(step)
            never.step(step)
    unskipped = BucketDDP(seeded(Mlp))
    unskipped.load_state_dict(ours.model.state_dict())
    loss = (large if dist.get_rank() == 1 else good)(unskipped, 10)
    loss.backward()
    norm = float(unskipped.grad_norm())
    words = f"the gradient norm {norm:.4g} is above 5 times its median, "
    with warns_of(words) as told:
        ours.step(10, bad=large)
    assert all(", is rank 1's, in the gradient of '" in text for text in told)
    assert ours.model.step_skipped()
    ours.step(11)
    never.step(11)
    torch.testing.assert_close(ours.parameters(), never.parameters())


@on_ranks(2)
def test_what_is_not_asked_for_is_not_skipped() -> None:
    for options, bad in (({"skip_step_on": ["oom"]}, nan_grad), ({"skip_norm_above": 2.0}, nan_grad)):
        ours = Training(**options)
        with warns_of():
            ours.step(0, bad=bad)
        assert all(param.isnan().all() for param in ours.parameters())
    ours = Training(skip_step_on=["nonfinite"])
    with warns_of():  # the loss is NaN, its gradients are not
        ours.step(0, bad=lambda model, step: good(model, step) + math.nan)
    assert not ours.model.step_skipped()
    with pytest.raises(RuntimeError, match="expected the option skip_step_on or skip_norm_above"):
        Training().model.skip_step()


@on_ranks(2, cases=["tokens", "samples"])
def test_a_step_is_skipped_whether_its_rank_has_counted_or_not(what: str) -> None:
    ours = Training(skip_step_on=["oom"], gradient_divide_by=what)
    count = getattr(ours.model, f"count_{what}")
    with warns_of("rank 1 ran out of memory in forward", "rank 1 ran out of memory in backward"):
        if dist.get_rank() == 0:
            count(3)
        ours.step(0, bad=oom_in_forward)
        count(3)
        ours.step(1, bad=oom_in_backward)
        count(3)
        ours.step(2)
    assert drift(ours.model) == 0
    assert not ours.model.step_skipped()


@on_ranks(2)
def test_a_mean_that_overflows_on_its_way_is_skipped() -> None:
    ours = Training(skip_step_on=["nonfinite"], wire_dtype="fp16")
    with warns_of("the mean over the ranks has NaN or Inf, though the gradients of every rank are finite"):
        ours.step(0, bad=lambda model, step: good(model, step) * 1e8)


@on_ranks(2)
def test_sparse_gradients_are_looked_at_and_dropped() -> None:
    module = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    model = BucketDDP(module, skip_step_on=["nonfinite"])
    rows = torch.tensor([0, 1])

    def scale(value: float) -> None:
        handle = model.module[0].register_forward_hook(
            lambda layer, args, output: output.register_hook(lambda grad: grad * value) and None
        )
        model(rows).sum().backward()
        handle.remove()

    with warns_of("rank 0 has NaN or Inf in 1 gradient(s), first in that of '0.weight'"):
        scale(math.nan)
    assert all(param.grad is None for param in model.parameters())
    with warns_of():
        scale(1.0)
    assert model.module[0].weight.grad.is_sparse


@on_ranks(2, 3, fresh=True)
def test_too_many_skipped_steps_in_a_row_are_an_error_on_all_ranks() -> None:
    ours = Training(skip_step_on=["nonfinite"], max_skipped=2)
    with warns_of("1 in a row", "1 in a row", "2 in a row"):
        ours.step(0, bad=nan_grad)
        ours.step(1)
        ours.step(2, bad=nan_grad)
        ours.step(3, bad=nan_grad)
        words = (
            "expected at most max_skipped=2 skipped steps in a row, found another one in pass 4: rank 1 has NaN or Inf"
        )
        with raises_soon(GradientError, match=words):
            ours.step(4, bad=nan_grad)


@on_ranks(3)
def test_ranks_that_ran_out_of_data_skip_too() -> None:
    """And a rank with data may run out of memory while they have none."""
    ours = Training(skip_step_on=["nonfinite", "oom"])
    rank = dist.get_rank()
    with warns_of("of pass 2, 1 in a row", "of pass 3, 2 in a row"), ours.model.join():
        for step in range(2 if rank == 0 else 4):
            ours.step(step, bad={2: nan_grad, 3: oom_in_backward}.get(step, good))
    assert drift(ours.model) == 0


@on_ranks(2)
def test_synchronised_batch_norm_is_refused_where_a_rank_may_run_out_of_memory() -> None:
    module = convert_sync_batchnorm(ConvBatchNorm())
    with pytest.raises(ValueError, match="expected no SyncBatchNorm with skip_step_on that has 'oom', found 'norm'"):
        BucketDDP(module, skip_step_on=["oom"])
    BucketDDP(module, skip_step_on=["nonfinite"])


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"skip_step_on": "oom"}, TypeError, "expected skip_step_on to be a list of"),
    ({"skip_step_on": ["nan"]}, ValueError, "expected skip_step_on to be a list of"),
    ({"skip_norm_above": 1}, ValueError, "expected skip_norm_above to be None or a number above 1"),
    ({"skip_step_on": ["oom"], "max_skipped": 0}, ValueError, "expected max_skipped to be"),
    ({"max_skipped": 3}, ValueError, "max_skipped=3 limits skipped steps"),
    ({"skip_step_on": ["nonfinite"], "max_abs_grad": 1.0}, ValueError, "cannot be combined with skip_step_on"),
    ({"skip_norm_above": 2, "shard_optimizer": True, "scatter_every_pass": True}, ValueError, "scatter_every_pass"),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Options(**options)


def test_reasons_have_one_order() -> None:
    """Ranks compare options."""
    assert Options(skip_step_on=["oom", "nonfinite"]) == Options(skip_step_on=("nonfinite", "oom"))


def test_asking_for_a_skip_adds_up_beside_joined_ranks() -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        vectors = torch.zeros(4, HEADER, dtype=dtype)
        for vector, report in zip(vectors, [{"joined": True}, {"drop": True}, {"drop": True}, {}], strict=True):
            write(vector, Report(7, **report), ())
        control = Control(vectors.sum(0), 4)
        assert (control.joined_ranks, control.dropping_ranks) == (1, 2)
        write(vectors[0], Report(7, drop=True), ())
        assert Control(vectors[0] * MAX_RANKS_IN_FP32, MAX_RANKS_IN_FP32).dropping_ranks == MAX_RANKS_IN_FP32
