"""What users combine in a Trainer: four ranks on the simulated device train as one process does on all samples."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from tests.accelerator import simulated
from tests.lightning_models import Regression, data, ours, trainer
from tests.pool import RunRanks
from tests.sampling import pairs, some_slow

RANKS = 4
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"shard_optimizer": True},
    "shard groups": {"shard_optimizer": True, "shard_group_size": 2},
    "bf16 hook": {"comm_hook": "bf16"},
}
CLIPPING: dict[str, dict[str, Any]] = {
    "no clipping": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}
TOLERANCES = {"32-true": 1e-5, "16-mixed": 2e-3, "bf16-mixed": 1e-2, "bf16-true": 1e-2}
"""Of weights, by precision. Ranks add up other rounding errors than one process."""


class Zeroes(Regression):
    """Zeroes gradients in place, or frees them."""

    records = False

    def __init__(self, set_to_none: bool) -> None:
        super().__init__()
        self.set_to_none = set_to_none

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=self.set_to_none)


def trained(
    accelerator: str, strategy: str, precision: Any, clipping: str, every: int, none: bool
) -> dict[str, Tensor]:
    """Weights after eight batches of each of four ranks."""
    options = dict(STRATEGIES[strategy])
    if precision == "bf16-true":
        options["grad_dtype"] = torch.float32
    settings: dict[str, Any] = {"accelerator": accelerator, "accumulate_grad_batches": every, **CLIPPING[clipping]}
    if "mixed" in precision:  # by its name, Trainer takes it for CUDA's
        scaler = torch.amp.GradScaler(accelerator, init_scale=256) if precision == "16-mixed" else None
        settings["plugins"] = MixedPrecision(precision, accelerator, scaler=scaler)
    else:
        settings["precision"] = precision
    module = Zeroes(none)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer(ours(**options), **settings).fit(module, data(8, 4 * RANKS // dist.get_world_size()))
    after = {name: value.cpu().float() for name, value in module.cpu().state_dict().items()}
    assert all(not torch.equal(after[name], value) for name, value in before.items()), "it has trained"
    if accelerator == "sim":
        simulated().check_ranks()
    return after


QUICK = [
    ("plain", "bf16-mixed", "norm", 4, True),
    ("sharded", "16-mixed", "value", 1, False),
    ("shard groups", "bf16-true", "no clipping", 4, False),
    ("bf16 hook", "32-true", "norm", 1, True),
]
"""Each value occurs."""


@pytest.mark.parametrize(
    ("strategy", "precision", "clipping", "every", "none"),
    some_slow(dict.fromkeys([*QUICK, *pairs([*STRATEGIES], [*TOLERANCES], [*CLIPPING], [1, 4], [True, False])]), QUICK),
)
def test_it_trains_as_one_process_does(
    ranks_on_cpu: RunRanks,
    ranks_on_simulated: RunRanks,
    strategy: str,
    precision: str,
    clipping: str,
    every: int,
    none: bool,
) -> None:
    (expected,) = ranks_on_cpu(1, trained, "cpu", "plain", precision, clipping, every, none)
    first, *others = ranks_on_simulated(RANKS, trained, "sim", strategy, precision, clipping, every, none)
    tolerance = max(TOLERANCES[precision], 1e-2 if strategy == "bf16 hook" else 0)
    for name, value in first.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
        assert all(torch.equal(other[name], value) for other in others), name
