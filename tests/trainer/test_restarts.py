"""A job that torchrun starts again after a rank was killed, or that was preempted, ends as an undisturbed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launchers import free_port
from tests.pool import ROOT

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys
from pathlib import Path
import lightning.pytorch as pl, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_bucketddp import BucketDDPStrategy, PreemptionCheckpoint

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(8, 4), torch.nn.Dropout(0.2)

    def training_step(self, batch, batch_idx):
        step, rank = self.trainer.global_step, self.global_rank
        with open(f"steps{rank}", "a") as steps:
            print(step, *batch[0].tolist(), file=steps)
        if sys.argv[1] == "SIGKILL" and step == 5 and rank == 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "SIGTERM" and step == 5 and rank == 0 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getppid(), signal.SIGTERM)  # torchrun, as a scheduler does
        return self.layer(self.dropout(batch[1])).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

pl.seed_everything(3)
data = [(index, torch.randn(8)) for index in range(28)]
saves = [ModelCheckpoint("saved", every_n_train_steps=3, save_last=True), PreemptionCheckpoint("saved", resume=True)]
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy=BucketDDPStrategy(exact_resume=True), max_epochs=2, callbacks=saves,
    logger=False, enable_progress_bar=False, enable_model_summary=False,
)
model = Model()
trainer.fit(model, torch.utils.data.DataLoader(data, 2, num_workers=int(sys.argv[1] == "SIGKILL")), ckpt_path="last")
if trainer.is_global_zero:
    torch.save(model.state_dict(), "end.pt")
"""


def start(folder: Path, how: str, restarts: int = 0) -> int:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    options = [f"--master-port={free_port()}", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py", how]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=240
    ).returncode


def steps(folder: Path, rank: int) -> list[list[str]]:
    return [line.split() for line in (folder / f"steps{rank}").read_text().splitlines()]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_job_that_is_started_again_ends_as_an_undisturbed_one(tmp_path: Path, how: str) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert start(undisturbed, "none") == 0
    code = start(disturbed, how, restarts=1)
    assert (disturbed / "killed").exists()
    if how == "SIGTERM":
        assert code != 0
        assert start(disturbed, how) == 0
    else:
        assert code == 0
    for rank in range(2):
        wanted, found = steps(undisturbed, rank), steps(disturbed, rank)
        assert {tuple(each) for each in found} == {tuple(each) for each in wanted}
        lost = len(found) - len(wanted)
        assert lost <= (3 if how == "SIGKILL" else 0), "steps since the last checkpoint"
    ends = [torch.load(folder / "end.pt") for folder in (undisturbed, disturbed)]
    assert all(map(torch.equal, ends[0].values(), ends[1].values()))
