"""Ray Train: the strategy is one of Ray's, and a run survives a killed worker."""

import os
import re
import subprocess
import sys

import pytest

from tests.launchers import ROOT

pytest.importorskip("ray", reason="Ray is not installed; the extra `ray` brings it, where it has a wheel")


def test_ray_takes_the_strategy_for_one_of_its_own() -> None:
    from lightning.pytorch.strategies import DDPStrategy
    from ray.train.lightning import RayDDPStrategy

    from lightning_bucketddp import BucketDDPStrategy
    from lightning_bucketddp.trainer.ray import RayBucketDDPStrategy

    strategy = RayBucketDDPStrategy(shard_optimizer=True)
    assert isinstance(strategy, RayDDPStrategy)
    assert isinstance(strategy, BucketDDPStrategy)
    assert RayBucketDDPStrategy.root_device is RayDDPStrategy.root_device
    assert RayBucketDDPStrategy.__mro__.index(RayDDPStrategy) < RayBucketDDPStrategy.__mro__.index(DDPStrategy)


@pytest.mark.slow
def test_a_killed_worker_is_restarted() -> None:
    command = [sys.executable, ROOT / "examples" / "ray_train.py", "--sharded", "--epochs", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    output = ran.stdout + ran.stderr
    assert all(re.search(rf"rank {rank}: resumes from epoch \d", output) for rank in (0, 1))
    assert "4 epochs" in output
    assert "largest difference between the ranks' weights 0\n" in output
