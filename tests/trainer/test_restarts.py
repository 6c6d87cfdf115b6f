"""A job that is killed or preempted, and started again by the same command, ends as an undisturbed one."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.launchers import free_port, run_as_torchrun
from tests.pool import RunRanks
from tests.trainer.test_launchers import Process, finish, start

pytestmark = pytest.mark.slow

KILLED, EVERY = 11, 3
"""The step that is disturbed, counted from 0, and the number of steps from checkpoint to checkpoint."""

SCRIPT = f"""
import os, signal, sys, time
from pathlib import Path
import lightning.pytorch as pl, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_bucketddp import BucketDDPStrategy, PreemptionCheckpoint
from lightning_bucketddp.peers.end_signals import end_signals

os.chdir(Path(__file__).parent)
how, nodes, is_lost = sys.argv[1], int(os.environ.get("GROUP_WORLD_SIZE", 1)), "IS_LOST" in os.environ


def disturb(rank):
    if not (is_lost if how == "node" else rank == 1) or Path("disturbed").exists():
        return
    Path("disturbed").touch()
    if how == "SIGTERM":
        os.kill(os.getppid(), signal.SIGTERM)  # torchrun, as a scheduler does
        while not end_signals.received:
            time.sleep(0.01)
    else:
        if how == "node":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(8, 4), torch.nn.Dropout(0.2)

    def on_fit_start(self):
        self.attempt = len(list(Path(".").glob(f"rank{{self.global_rank}}.*")))

    def training_step(self, batch, batch_idx):
        if self.global_step == {KILLED}:
            disturb(self.global_rank)
        loss = self.layer(self.dropout(batch[1])).square().mean()
        with open(f"rank{{self.global_rank}}.{{self.attempt}}", "a") as taken:
            print(self.global_step, *batch[0].tolist(), loss.item().hex(), file=taken)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


pl.seed_everything(3)
data = [(index, torch.randn(8)) for index in range(28)]
saves = [
    ModelCheckpoint("saved", every_n_train_steps={EVERY}, save_last=True),
    PreemptionCheckpoint("saved", resume=True),
]
quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
trainer = pl.Trainer(
    accelerator="cpu", devices=2 // nodes, num_nodes=nodes, max_epochs=2, callbacks=saves, **quiet,
    strategy=BucketDDPStrategy(exact_resume=True),
)
model = Model()
loader = torch.utils.data.DataLoader(data, 2, shuffle=True, num_workers=int(how != "SIGTERM"))
trainer.fit(model, loader, ckpt_path="last")
if trainer.is_global_zero:
    torch.save(model.state_dict(), "end.pt")
"""

Step = tuple[int, list[str]]


def torchrun(folder: Path, how: str, *options: str, **environment: str) -> Process:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    # Else ranks that are started again find the addresses of the former ones.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return start("-m", "torch.distributed.run", *options, str(folder / "train.py"), how, **environment)


def on_one_node(folder: Path, how: str) -> int:
    process = torchrun(folder, how, "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    finish(process)
    return process.returncode


def attempts(folder: Path, rank: int) -> list[list[Step]]:
    """What a rank has taken: each attempt's steps, with their samples and loss."""
    found = []
    for path in sorted(folder.glob(f"rank{rank}.*")):
        lines = [line.split() for line in path.read_text().splitlines()]
        found.append([(int(step), rest) for step, *rest in lines])
    return found


def require_as_undisturbed(run_ranks: RunRanks, disturbed: Path, goes_on: int) -> None:
    """Require the same samples, losses and weights, and that the second attempt went on with this step."""
    undisturbed = disturbed / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "train.py").write_text(SCRIPT)
    (undisturbed / "disturbed").touch()
    run_ranks(2, run_as_torchrun, free_port(), str(undisturbed / "train.py"), "none", fresh=True)
    for rank in range(2):
        (wanted,), found = attempts(undisturbed, rank), attempts(disturbed, rank)
        assert len(wanted) == 14
        assert [steps[0][0] for steps in found] == [0, goes_on]
        kept = [step for steps, later in pairwise(found) for step in steps if step[0] < later[0][0]] + found[-1]
        assert kept == wanted
    weights, others = (torch.load(folder / "end.pt") for folder in (undisturbed, disturbed))
    assert all(map(torch.equal, weights.values(), others.values()))


def test_after_the_kill_of_a_rank_torchrun_goes_on_from_the_last_checkpoint(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert on_one_node(tmp_path, "SIGKILL") == 0
    require_as_undisturbed(run_ranks, tmp_path, goes_on=KILLED - KILLED % EVERY)


def test_after_sigterm_the_same_command_goes_on_with_the_next_step(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_one_node(tmp_path, "SIGTERM") != 0
    assert not (tmp_path / "end.pt").exists()
    assert on_one_node(tmp_path, "SIGTERM") == 0
    require_as_undisturbed(run_ranks, tmp_path, goes_on=KILLED + 1)


def test_after_the_loss_of_a_node_the_other_waits_for_a_new_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    meets = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    options = [*meets, "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    first = torchrun(tmp_path, "node", *options, "--rdzv-conf=is_host=1")
    finish(torchrun(tmp_path, "node", *options, "--rdzv-conf=is_host=0", IS_LOST=""))
    new = torchrun(tmp_path, "node", *options, "--rdzv-conf=is_host=0")
    finish(first, new)
    assert [first.returncode, new.returncode] == [0, 0]
    require_as_undisturbed(run_ranks, tmp_path, goes_on=KILLED - KILLED % EVERY)
