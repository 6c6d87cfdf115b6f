"""What users combine, on four ranks of the simulated device: options in a Trainer, programs with their own streams."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from tests.accelerator import BACKEND, DEVICE, on_stream, simulated
from tests.lightning_models import Regression, data, ours, trainer
from tests.models import Mlp, batch
from tests.pool import RunRanks, on_ranks
from tests.reference import seeded
from tests.sampling import pairs, some_slow
from tests.simulated.test_streams import Averages
from tests.simulated.training import CPU, SMALL, Case, Checkpointed, TwoStreams, compare

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
    """Weights after some batches of each of four ranks."""
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
    trainer(ours(**options), **settings).fit(module, data(2 * max(every, 2), 4 * RANKS // dist.get_world_size()))
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


class Program:
    """A plain loop: what else the user's program does in each step."""

    model: Any = Mlp

    def __init__(self) -> None:
        self.stream = torch.Stream(DEVICE)

    def prepare(self, wrapper: nn.Module) -> None: ...

    def before_step(self, module: nn.Module, step: int) -> None: ...

    def after_backward(self, wrapper: nn.Module, module: nn.Module, device: torch.device) -> None: ...

    def after_step(self, wrapper: nn.Module, module: nn.Module, device: torch.device) -> None: ...

    def end(self) -> None: ...

    def aside(self, device: torch.device, run: Any) -> None:
        """Call ``run`` on a stream of the program's own, with the waits that plain PyTorch needs."""
        if device == CPU:
            run()
        else:
            current = torch.accelerator.current_stream()
            self.stream.wait_stream(current)
            with on_stream(self.stream):
                run()
            current.wait_stream(self.stream)


class Turns(Program):
    """Trains two parts in turn, as a GAN does."""

    def before_step(self, module: nn.Module, step: int) -> None:
        for at, layer in enumerate([*module.layers, module.head]):  # type: ignore[misc]
            layer.requires_grad_(at % 2 == step % 2)


class LooksAtGradients(Program):
    """Looks at each gradient in a hook, on another stream."""

    def prepare(self, wrapper: nn.Module) -> None:
        self.seen = 0
        for param in wrapper.parameters():
            param.register_post_accumulate_grad_hook(self.look)

    def look(self, param: Tensor) -> None:
        self.aside(param.device, lambda: param.grad.square().sum())  # type: ignore[union-attr]
        self.seen += 1

    def after_step(self, wrapper: nn.Module, module: nn.Module, device: torch.device) -> None:
        assert self.seen


class ReplacesGradients(Program):
    """Puts other tensors into ``.grad``, made on another stream."""

    def after_backward(self, wrapper: nn.Module, module: nn.Module, device: torch.device) -> None:
        def replace() -> None:
            for param in module.parameters():
                param.grad = param.grad * 0.5  # type: ignore[operator]

        self.aside(device, replace)
        if device != CPU:  # the step reads them on the present stream
            for param in module.parameters():
                param.grad.record_stream(torch.accelerator.current_stream())  # type: ignore[union-attr]


class OtherCollectives(Program):
    """Has collectives of its own under way, in a group of its own."""

    def prepare(self, wrapper: nn.Module) -> None:
        self.group = dist.new_group(backend="gloo" if next(wrapper.parameters()).is_cpu else BACKEND)

    def before_step(self, module: nn.Module, step: int) -> None:
        self.sum = torch.ones(1000, device=next(module.parameters()).device)
        self.work = dist.all_reduce(self.sum, group=self.group, async_op=True)

    def after_step(self, wrapper: nn.Module, module: nn.Module, device: torch.device) -> None:
        self.work.wait()
        assert self.sum.cpu()[0] == RANKS


class Compiled(Program):
    @staticmethod
    def model() -> nn.Module:
        return torch.compile(Mlp(), backend="eager")  # type: ignore[return-value]


class StreamsOfForward(Program):
    model = TwoStreams


class Checkpoints(Program):
    model = Checkpointed


class MovesAverages(Program):
    """Works out moving averages of the parameters on a stream of its own."""

    def __init__(self) -> None:
        averages = self.averages = Averages()
        self.after_backward, self.after_step = averages.after_backward, averages.after_step  # type: ignore[method-assign]

    def end(self) -> None:
        torch.accelerator.synchronize()
        expected, found = self.averages.of.values()
        torch.testing.assert_close([one.cpu() for one in found], expected, rtol=1e-5, atol=1e-5)


PROGRAMS = [
    *(Turns, LooksAtGradients, ReplacesGradients, OtherCollectives, Compiled, StreamsOfForward, Checkpoints),
    MovesAverages,
]
QUICK_PROGRAMS = [
    (LooksAtGradients, "sharded"),
    (ReplacesGradients, "bf16 hook"),
    (OtherCollectives, "shard groups"),
]
"""The other programs have quick tests in ``test_streams.py`` and ``test_training.py``, on two ranks."""
REFUSED = [(ReplacesGradients, "sharded"), (ReplacesGradients, "shard groups")]
"""A sharded gradient lets nobody put another tensor in its place."""


@pytest.mark.parametrize(
    ("program", "strategy"),
    some_slow([case for case in product(PROGRAMS, STRATEGIES) if case not in REFUSED], QUICK_PROGRAMS),
)
@on_ranks(RANKS)
def test_programs_train_as_on_the_cpu(program: type[Program], strategy: str) -> None:
    runs = program()
    compare(
        Case(
            STRATEGIES[strategy],
            program.model,
            prepare=runs.prepare,
            before_step=runs.before_step,
            after_backward=runs.after_backward,
            after_step=runs.after_step,
            tolerance=1e-5,  # communicators add up four values in another order
        ),
        from_pass=100 if program is Turns else 4,
    )
    runs.end()


def two_trained(device: torch.device, strategies: tuple[str, str]) -> list[Tensor]:
    """The weights of two wrappers whose gradients come in one backward."""
    wrappers = [BucketDDP(seeded(Mlp).to(device), bucket_cap_mb=SMALL, **STRATEGIES[name]) for name in strategies]
    optimizers = [torch.optim.SGD(wrapper.parameters(), lr=0.1) for wrapper in wrappers]
    for wrapper, optimizer in zip(wrappers, optimizers, strict=True):
        wrapper.prepare_optimizer(optimizer)
    for step in range(4):
        inputs, targets = (each.to(device) for each in batch(step, dist.get_rank()))
        first, second = (wrapper(inputs) for wrapper in (wrappers if step % 2 else wrappers[::-1]))
        nn.functional.mse_loss(first + second, targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for wrapper in wrappers:
        wrapper.wait_for_parameters()
    weights = [param.detach().cpu().clone() for wrapper in wrappers for param in wrapper.parameters()]
    for wrapper in wrappers:
        wrapper.close()
    return weights


PAIRS = {"plain, sharded": ("plain", "sharded"), "hook, groups": ("bf16 hook", "shard groups")}


@on_ranks(RANKS, cases=PAIRS, quick=["hook, groups"])
def test_two_wrappers_in_one_backward_train_as_on_the_cpu(first: str, second: str) -> None:
    expected = two_trained(CPU, (first, second))
    simulated().clear()
    found = two_trained(DEVICE, (first, second))
    simulated().check_ranks()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
