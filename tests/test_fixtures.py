"""Checkpoints that version 0.1.0 has written load, and training goes on from them as it would have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_bucketddp import BucketDDP
from tests.fixtures import checkpoints
from tests.fixtures.checkpoints import EPOCHS, FOLDER, KINDS, At, Saved, copies, held, precision_of, samples
from tests.test_sharded_checkpoints import assert_equal

RunRanks = Callable[..., list[Any]]
EXPECTED: dict[str, Any] = torch.load(FOLDER / "expected.pt", weights_only=True)
CASES = [*((kind, 2) for kind in KINDS), ("directory.ckpt", 1), ("sharded.ckpt", 1)]


def assert_next(module: nn.Module, kind: str) -> None:
    """The weights after one more step, up to what processors round differently."""
    tolerance = 2e-2 if precision_of(kind) == "bf16-true" else 1e-4
    expected = EXPECTED[kind]["next"]
    torch.testing.assert_close(dict(module.state_dict()), dict(expected), rtol=tolerance, atol=tolerance)


def resumed(kind: str) -> None:
    expected = EXPECTED[kind]
    seen: list[int] = []

    def look(trainer: pl.Trainer) -> None:
        assert_equal(held(trainer), expected["saved"])
        seen.append(trainer.global_step)

    path = str(FOLDER / kind)
    runs = checkpoints.run(kind, EPOCHS + 1, At("on_train_start", look), seed=1, ckpt_path=path, weights_only=False)
    assert seen == [EPOCHS]
    assert runs.global_step == EPOCHS + 1
    assert_next(runs.lightning_module, kind)


@pytest.mark.parametrize(("kind", "ranks"), CASES, ids=str)
def test_a_trainer_goes_on_from_a_checkpoint_of_0_1_0(run_ranks: RunRanks, kind: str, ranks: int) -> None:
    run_ranks(ranks, resumed, kind)


def loaded(kind: str) -> None:
    expected, path = EXPECTED[kind], FOLDER / kind
    module = Saved(seed=1)
    if precision_of(kind) == "bf16-true":
        module.bfloat16()
    options = {name: value for name, value in KINDS[kind].items() if name != "state_dict_type"}
    model = BucketDDP(module, bucket_cap_mb=0.0003, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)  # the checkpoint has the rate
    if path.is_dir():
        assert model.load_sharded(path, [optimizer])["epoch"] == EPOCHS - 1
    else:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["state_dict"])
        (state,) = saved["optimizer_states"]
        model.load_optimizer_state_dict(optimizer, state)
    assert_equal(copies(model, optimizer), expected["saved"])
    inputs, target = (tensor.to(model.module.head.weight.dtype) for tensor in samples())
    nn.functional.mse_loss(model(inputs), target).backward()
    optimizer.step()
    assert_next(model, kind)
    model.close()


@pytest.mark.parametrize(("kind", "ranks"), CASES, ids=str)
def test_a_wrapper_goes_on_from_a_checkpoint_of_0_1_0(run_ranks: RunRanks, kind: str, ranks: int) -> None:
    run_ranks(ranks, loaded, kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if precision_of(kind) == "32-true"])
def test_the_values_expected_are_those_of_one_process(kind: str) -> None:
    module = Saved()
    optimizer = module.configure_optimizers()
    for epoch in range(EPOCHS + 1):
        if epoch == EPOCHS:
            saved = EXPECTED[kind]["saved"]["weights"]
            torch.testing.assert_close(dict(module.state_dict()), dict(saved), rtol=1e-4, atol=1e-4)
        optimizer.zero_grad()
        module.training_step(samples(), 0).backward()
        optimizer.step()
    assert_next(module, kind)


def test_the_checkpoints_are_small() -> None:
    files = [
        path for path in Path(FOLDER).rglob("*") if path.suffix in (".ckpt", ".distcp", ".pt", "") and path.is_file()
    ]
    assert len(files) == 7
    assert sum(path.stat().st_size for path in files) < 100_000
