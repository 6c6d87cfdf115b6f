"""A child process that user code forks has a rank's memory, and speaks for nobody."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_bucketddp import BucketDDP, Options
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers.abort_listener import listen, tell_failure
from lightning_bucketddp.peers.end_signals import end_signals
from lightning_bucketddp.trainer import common
from lightning_bucketddp.trainer.sigterm import quieten_sigterm
from tests.lightning_models import QUIET, Regression, data, ours, trainer
from tests.models import Mlp
from tests.pool import on_ranks
from tests.reference import inputs_of


def in_child(function: Callable[[], Any]) -> int:
    """Run a function in a forked child, which then ends as a script does; its exit code, negative for a signal."""
    if (pid := os.fork()) == 0:
        signal.alarm(20)
        try:
            function()
        except BaseException as error:
            sys.excepthook(type(error), error, None)
        atexit._run_exitfuncs()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def leave() -> None:
    try:
        sys.exit(0)
    except SystemExit as error:
        tell_failure(error)
        raise


@on_ranks(2, fresh=True)
def test_its_end_is_not_the_ranks() -> None:
    common.set_up_group(lambda: None, Options())
    model, listener = BucketDDP(Mlp()), listen(Collectives(None))
    dist.barrier()
    if dist.get_rank() == 1:
        assert in_child(leave) == 0
    dist.barrier()
    assert listener.failure is None
    assert not listener.store.check(["news"])
    dist.barrier()
    assert [status.ended for status in listener.roll_call.ask(1)] == [False, False]
    model(inputs_of(0)).sum().backward()
    assert model.passes == 1


@on_ranks(2, fresh=True, cases={"of shards": [True], "of all ranks": [False]})
def test_its_garbage_collection_leaves_the_ranks_groups_alone(shard: bool) -> None:
    gc.disable()
    model = BucketDDP(Mlp(), shard_optimizer=shard)
    model(inputs_of(0)).sum().backward()
    model.itself = model
    model.close()
    if not shard:
        dist.destroy_process_group()
    del model
    assert in_child(gc.collect) == 0


class Forks(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank == 1:
            if (pid := os.fork()) == 0:
                sys.exit(0)
            os.waitpid(pid, 0)
        return super().training_step(batch, batch_idx)


@on_ranks(2, fresh=True)
def test_a_child_that_leaves_the_trainer_disturbs_nobody() -> None:
    model = Forks()
    fits = trainer(ours())
    parent = os.getpid()
    try:
        fits.fit(model, data())
    except SystemExit:
        assert os.getpid() != parent
        os._exit(0)
    assert fits.state.finished
    assert fits.global_step == 6


@on_ranks(1, fresh=True)
def test_a_signal_ends_it_and_not_the_rank() -> None:
    fits = pl.Trainer(**QUIET, accelerator="cpu")
    quieten_sigterm(fits)
    for handler in (signal.SIG_DFL, fits._signal_connector._sigterm_notifier_fn):
        signal.signal(signal.SIGTERM, handler)
        end_signals.watch()
        assert in_child(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM
        assert not end_signals.received
        end_signals.release()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert not fits._signal_connector.received_sigterm
