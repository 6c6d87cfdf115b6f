"""Ranks that the main process has forked or spawned."""

from unittest.mock import patch

import pytest
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.trainer.strategy import TellingLauncher


@pytest.mark.parametrize(("raised", "code"), [(SIGTERMException(), 1), (SystemExit(), 1), (SystemExit(3), 3)])
def test_a_rank_that_ends_early_has_an_exit_code(raised: SystemExit, code: int) -> None:
    # With code 0 the main process takes it for done, and waits for its result without end, as under ddp_spawn.
    launcher = TellingLauncher(BucketDDPStrategy(start_method="spawn"), "spawn")
    with (
        patch.object(_MultiProcessingLauncher, "_wrapping_function", side_effect=raised),
        pytest.raises(SystemExit) as caught,
    ):
        launcher._wrapping_function(0)
    assert caught.value.code == code
