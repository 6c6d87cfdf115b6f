"""``strategy="bucketdp"``: what it cannot do is refused before training, and says what to do instead."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

from lightning_bucketddp import BucketDPStrategy
from tests.dp import fit, one_process, samples
from tests.lightning_models import Digits, PoolEnvironment


class Plain(pl.LightningModule):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_several_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one node with strategy=\"bucketdp\".*found num_nodes=2"):
        one_process(2, num_nodes=2)


def test_several_processes_are_refused() -> None:
    class OfTwo(PoolEnvironment):
        def world_size(self) -> int:
            return 2

    with pytest.raises(ValueError, match=r"expected one process .* found 2 in OfTwo"):
        fit(Plain(), 2, plugins=[OfTwo()], loader=samples((8,)))


def test_synchronised_batchnorm_is_refused_and_its_layers_are_warned_of() -> None:
    with pytest.raises(ValueError, match=r"expected Trainer\(sync_batchnorm=False\)"):
        fit(Plain(), 2, sync_batchnorm=True, loader=samples((8,)))
    model = Plain(nn.Sequential(nn.SyncBatchNorm(8), nn.Linear(8, 1)))
    with pytest.warns(UserWarning, match=r"SyncBatchNorm synchronises processes, .* has one: net\.0"):
        fit(model, 2, loader=samples((8,)))


def test_compiled_modules_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"compiled model is incompatible with .* `BucketDPStrategy`"):
        fit(torch.compile(Plain(), backend="eager"), 2, loader=samples((8,)))  # by Lightning

    model = Plain()
    model.net = torch.compile(model.net, backend="eager")
    with pytest.raises(TypeError, match="submodule 'net' is"):
        fit(model, 2, loader=samples((8,)))


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_steps_that_take_no_batch_or_belong_to_the_instance_are_refused() -> None:
    class TakesLoader(Plain):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return super().training_step(batch, 0)

    with pytest.raises(TypeError, match=r"expected a batch as argument of training_step, .* found dataloader_iter"):
        fit(TakesLoader(), 2, loader=samples((8,)))
    model = Plain()
    step = model.training_step
    model.training_step = lambda batch, batch_idx: step(batch, batch_idx)  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="expected training_step as a method of Plain"):
        fit(model, 2, loader=samples((8,)))


@pytest.mark.filterwarnings("ignore")  # of jsonargparse, of its own use by Lightning
def test_the_lightning_cli_takes_the_class_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's
    monkeypatch.setattr("sys.argv", ["script"])
    cli = LightningCLI(
        Digits,
        run=False,
        save_config_callback=None,
        args=[
            "--trainer.accelerator=cpu",
            "--trainer.devices=2",
            "--trainer.strategy.class_path=lightning_bucketddp.BucketDPStrategy",
            "--trainer.logger=false",
            "--seed_everything=0",
        ],
    )
    assert isinstance(cli.trainer.strategy, BucketDPStrategy)
    assert cli.trainer.strategy.root_device == torch.device("cpu")
    assert cli.trainer.num_devices == 2
