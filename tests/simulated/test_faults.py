"""Ranks run out of data, do not come, raise or are preempted while the device has collectives to do."""

import os
import signal
import tempfile
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from lightning_bucketddp import BucketDDP, PeerFailureError, PreemptionCheckpoint, RankMismatchError
from lightning_bucketddp.comm.groups import Group
from lightning_bucketddp.peers import roll_call
from lightning_bucketddp.peers.abort_listener import tell_failure
from lightning_bucketddp.trainer import strategy
from lightning_bucketddp.trainer.random_state import random_state
from tests.accelerator import DEVICE, simulated
from tests.lightning_models import Regression, data, ours, trainer
from tests.models import Branches, Fragile, Mlp, batch, loss_of
from tests.pool import on_ranks
from tests.reference import eventually, group_store, logged, raises_soon, without_where
from tests.simulated.training import CPU, SMALL


def joined(device: torch.device) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = BucketDDP(Mlp().to(device), bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            x, target = (tensor.to(device) for tensor in batch(step, dist.get_rank()))
            loss_of(model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = {name: value.detach().cpu() for name, value in model.module.state_dict().items()}
    model.close()
    return state


@on_ranks(2)
def test_uneven_inputs_end_with_the_bits_of_the_cpu() -> None:
    expected = joined(CPU)
    for name, value in joined(DEVICE).items():
        assert torch.equal(value, expected[name])


@on_ranks(2, fresh=True)
def test_a_rank_that_raises_in_backward_is_heard_of_by_the_others() -> None:
    model, rank, began = BucketDDP(Fragile().to(DEVICE), bucket_cap_mb=SMALL), dist.get_rank(), time.monotonic()

    def train() -> None:
        for step in range(50):
            x, target = (tensor.to(DEVICE) for tensor in batch(step, rank))
            try:
                loss_of(model(x, fail=rank == 1 and step == 3), target).backward()
            except ArithmeticError as error:
                tell_failure(error)  # as a Trainer does, and Python's hook for exceptions that nobody catches
                raise

    with pytest.raises(ArithmeticError if rank else PeerFailureError, match="no gradient today" if rank else "rank 1"):
        train()
    assert time.monotonic() - began < 30
    simulated().clear()  # collectives of the pass are left under way


@on_ranks(2, fresh=True)
def test_a_rank_that_trains_another_part_than_expected_is_named() -> None:
    """The parts have equal sizes. The host of rank 0 does not wait in a pass, and goes on."""
    parts, rank = nn.ModuleList(nn.Linear(8, 4) for _ in range(2)).to(DEVICE), dist.get_rank()
    model, optimizer = BucketDDP(parts), torch.optim.SGD(parts.parameters(), lr=0.1)

    def train() -> None:
        for step in range(50):
            trained = (step + (rank == 1 and step == 9)) % 2
            for at, part in enumerate(parts):
                part.requires_grad_(at == trained)
            optimizer.zero_grad()
            parts[trained](batch(step, rank)[0].to(DEVICE)).square().mean().backward()
            optimizer.step()

    words = "rank 0 .* is in pass 9 .* while rank 1 .* wants to agree on the trainable parameters of pass 9"
    with raises_soon(RankMismatchError, match=words):
        train()
    assert model.passes < 20, "rank 0 heard of it soon"
    simulated().clear()  # collectives of the pass are left under way


@on_ranks(2, fresh=True)
def test_a_rank_whose_backward_raised_does_not_wait_for_ranks_that_do_not_come() -> None:
    model, rank = BucketDDP(Mlp().to(DEVICE), bucket_cap_mb=SMALL), dist.get_rank()
    for step in range(3):
        x, target = (tensor.to(DEVICE) for tensor in batch(step, rank))
        if step == 2 and rank == 1:
            group_store().wait(["rank 0 has raised"])
            break
        loss, began = loss_of(model(x), target), time.monotonic()
        if step < 2:
            loss.backward()
            continue
        with pytest.raises(ArithmeticError), model.backward_pass(loss):
            raise ArithmeticError("no backward today")
        group_store().set("rank 0 has raised", "")
        assert time.monotonic() - began < 20
    simulated().clear()  # collectives of the pass are left under way


@on_ranks(2, fresh=True)
def test_no_state_is_given_that_may_hold_gradients_of_a_failed_pass() -> None:
    model = BucketDDP(Mlp().to(DEVICE), bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        x, target = (tensor.to(DEVICE) for tensor in batch(step, dist.get_rank()))
        loss = loss_of(model(x), target)
        if step == 2 and dist.get_rank() == 1:
            group_store().wait(["rank 0 has stepped"])
            tell_failure(ArithmeticError("no backward today"))
            group_store().wait(["rank 0 has ended"])
            break
        loss.backward()
        optimizer.step()
    else:
        group_store().set("rank 0 has stepped", "")
        with pytest.raises(PeerFailureError, match=r"rank 1 .*raised ArithmeticError: no backward today"):
            model.state_dict()
        group_store().set("rank 0 has ended", "")
    simulated().clear()


@on_ranks(2, fresh=True)
def test_no_state_is_given_of_ranks_that_met_from_different_steps() -> None:
    """Rank 1 has skipped a backward. The host of rank 0 ends the pass before the device can tell."""
    model, rank = BucketDDP(Mlp().to(DEVICE), bucket_cap_mb=SMALL), dist.get_rank()

    def train(step: int) -> None:
        model.begin_step()
        x, target = (tensor.to(DEVICE) for tensor in batch(step, rank))
        loss_of(model(x), target).backward()

    def train_and_save() -> None:
        if rank == 1:
            train(2)
        model.state_dict()

    train(0)
    if rank == 1:
        model.begin_step()
        group_store().wait(["rank 0 has ended its pass"])
    else:
        train(1)
        group_store().set("rank 0 has ended its pass", "")
    with pytest.raises(RankMismatchError, match="from different steps"):
        train_and_save()
    group_store().wait(["rank 0 has ended"]) if rank == 1 else group_store().set("rank 0 has ended", "")
    simulated().clear()


class Raising(Regression):
    """Rank 1 raises in its sixth step, once rank 0 has started the collectives of that step.

    Args:
        heard: Whether rank 0 waits in its seventh step until it has heard of that.
        path: Where rank 0 saves a checkpoint after its sixth step; None for nowhere.
    """

    records = False

    def __init__(self, heard: bool, path: Path | None) -> None:
        super().__init__()
        self.heard, self.path = heard, path

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5 and self.global_rank == 1:
            group_store().wait(["rank 0 has started collectives"])
            raise ArithmeticError("no step today")
        if batch_idx == 6 and self.heard:
            eventually(lambda: self.trainer.strategy._listener.failure is not None)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 5:
            group_store().set("rank 0 has started collectives", "")

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 6 and self.path is not None:
            self.trainer.save_checkpoint(self.path)


HEARD = {"in a step": (True, False), "at the end of fit": (False, False), "as it saves": (False, True)}


@on_ranks(2, fresh=True, cases=HEARD)
def test_a_fit_that_failed_ends_though_the_device_waits_for_a_rank(heard: bool, saves: bool) -> None:
    tmp_path = Path(tempfile.mkdtemp())
    expected, words = (ArithmeticError, "no step") if dist.get_rank() else (PeerFailureError, "rank 1 .*raised Arithm")
    options = {"callbacks": [OnExceptionCheckpoint(tmp_path)], "enable_checkpointing": True}
    fit, began = trainer(ours(), accelerator="sim", **options), time.monotonic()
    with patch.object(strategy, "DEVICE_SECONDS", 0.5), pytest.raises(expected, match=words):
        fit.fit(Raising(heard, tmp_path / "saved.ckpt" if saves else None), data(10))
    assert time.monotonic() - began < 20
    assert dist.get_rank() == 1 or not list(tmp_path.iterdir()), "parameters of aborted gradients"
    store = group_store()
    store.set("rank 0 has ended", "") if dist.get_rank() == 0 else store.wait(["rank 0 has ended"])
    simulated().clear()


class Apart(Regression):
    """Both ranks raise, rank 1 before its second step, once rank 0 has made it: parameters are on their way then."""

    records = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 1 and self.global_rank == 1:
            group_store().wait(["rank 0 has made its step"])
            raise ArithmeticError("no step today")

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2 and self.global_rank == 0:
            group_store().set("rank 0 has made its step", "")
            eventually(lambda: self.trainer.strategy._listener.failure is not None)
            raise KeyError("after the step")


@on_ranks(2, fresh=True)
def test_a_fit_that_failed_ends_though_parameters_of_another_rank_never_come() -> None:
    fit, began = trainer(ours(shard_optimizer=True), accelerator="sim"), time.monotonic()
    with patch.object(strategy, "DEVICE_SECONDS", 0.5), pytest.raises(ArithmeticError if dist.get_rank() else KeyError):
        fit.fit(Apart(), data(10))
    assert time.monotonic() - began < 20
    store = group_store()
    store.set("rank 0 has ended", "") if dist.get_rank() == 0 else store.wait(["rank 0 has ended"])
    simulated().clear()


class Aborted(Callback):
    """Has collectives aborted, as far as the Trainer's strategy knows."""

    def on_train_start(self, *_: Any) -> None:
        self.patched = patch.object(Group, "left_behind", lambda group: "rank 1 has gone")
        self.patched.start()

    def on_train_end(self, *_: Any) -> None:
        self.patched.stop()


@on_ranks(2)
def test_gradients_of_aborted_collectives_reach_no_checkpoint(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    fit = trainer(ours(), accelerator="sim", callbacks=[Aborted(), saves], enable_checkpointing=True)
    with warnings.catch_warnings(record=True, action="always") as warned:
        fit.fit(Regression(), data(3))
    told = [str(warning.message) for warning in warned if "not saved" in str(warning.message)]
    assert len(told) == (dist.get_rank() == 0)
    assert not list(tmp_path.iterdir())


@on_ranks(2, fresh=True, timeout=60)
def test_ranks_with_different_numbers_of_batches_say_what_each_waits_for(tmp_path: Path) -> None:
    limits = {"limit_train_batches": 6 if dist.get_rank() else 4, "max_epochs": 1}
    saves = {"callbacks": [ModelCheckpoint(tmp_path)], "enable_checkpointing": True}
    with raises_soon(RankMismatchError) as caught:
        trainer(ours(), accelerator="sim", **limits, **saves).fit(Regression(), data(6))
    assert "rank 1 is in pass 4" in without_where(str(caught.value))
    assert "rank 0 waits for the Trainer's" in without_where(str(caught.value))
    simulated().clear()


WAITS_FOR_REPORTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "nothing": (Mlp, {}, "on the device"),
    "a parameter that is unused on some ranks": (Branches, {}, "what the other ranks report"),
    "an option": (Mlp, {"skip_step_on": ["oom"]}, "what the other ranks report"),
}


@on_ranks(2, cases=WAITS_FOR_REPORTS)
def test_a_rank_that_does_not_come_is_reported(make: Any, options: dict[str, Any], what: str) -> None:
    """The host need not wait for it. It knows what the device waits for."""
    model, rank = BucketDDP(make().to(DEVICE), bucket_cap_mb=SMALL, report_after=0.3, **options), dist.get_rank()
    deadline = time.monotonic() + 20
    with patch.object(roll_call, "ANSWER_SECONDS", 1), logged("lightning_bucketddp.peers") as said:
        for step in range(5):
            while step == 4 and rank == 1 and not said and time.monotonic() < deadline:
                time.sleep(0.02)
            x, target = (tensor.to(DEVICE) for tensor in batch(step, rank))
            taken = ["left"] if make is Branches else []
            loss_of(model(x, *taken), target).backward()
            torch.accelerator.synchronize()
    assert any("rank 1: not waiting" in without_where(text) for text in said), said
    assert any(what in text for text in said), said


class Preempted(Regression):
    """Rank 1 gets a signal in its third step."""

    records = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


@on_ranks(2)
def test_a_preempted_run_ends_on_all_ranks_after_one_step_with_a_checkpoint() -> None:
    folder: list[Any] = [None]
    if dist.get_rank() == 0:
        folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0, device=CPU)
    fit = trainer(ours(), accelerator="sim", callbacks=[PreemptionCheckpoint(folder[0])], max_epochs=5)
    with pytest.raises(SIGTERMException):
        fit.fit(Preempted(), data(10))
    steps: list[Any] = [None, None]
    dist.all_gather_object(steps, fit.global_step)
    assert steps[0] == steps[1]
    assert 3 <= steps[0] < 10, "in which step it came"
    (saved,) = Path(folder[0]).rglob("*.ckpt")
    assert torch.load(saved, weights_only=False)["global_step"] == steps[0]


@on_ranks(1)
def test_random_states_move_between_kinds_of_machines() -> None:
    saved = {device: random_state(device) for device in (CPU, DEVICE)}
    for here, there in product(saved, saved):
        torch.rand(3), torch.rand(3, device=DEVICE)
        with patch.object(torch.sim, "set_rng_state") as set_of_device:
            random_state(here, saved[there])
        assert torch.equal(torch.get_rng_state(), saved[there][2])
        assert set_of_device.called == (here == there == DEVICE)


@pytest.mark.slow  # it waits until nobody answers
@on_ranks(2, fresh=True, timeout=90)
def test_an_abort_reaches_all_communicators() -> None:
    model = BucketDDP(Mlp().to(DEVICE), bucket_cap_mb=SMALL, shard_optimizer=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        x, target = (tensor.to(DEVICE) for tensor in batch(step, dist.get_rank()))
        loss_of(model(x), target).backward()
        if step == 3 and dist.get_rank() == 1:
            error = ArithmeticError("no step today")
            group_store().wait(["gathering"])
            tell_failure(error)
            group_store().wait(["rank 0 has raised"])
            return
        optimizer.step()  # rank 0 gathers, and rank 1 never does
    group_store().set("gathering", "")
    torch.accelerator.synchronize()
    group_store().set("rank 0 has raised", "")
