"""Random models through random schedules: gradients are those that one process works out for all ranks.

A seed draws a case (``random_cases.py``): a model, options, and rounds of forwards, backwards and an optimizer step.
Each rank runs it with ``BucketDDP``, and beside it a ``Reference`` for all ranks; both are compared after each
backward. A sharded case runs once more with a sharded optimizer, and must have the same weights after each step.

A failure prints the seed and the case as far as it came. ``pytest tests/reducer/test_fuzz.py --fuzz-seed=123`` runs one
seed again, ``--fuzz-cases=500`` runs many.
"""

import copy
import hashlib
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.grads import buffers
from tests.inside import views_of
from tests.pool import RunRanks
from tests.reducer.random_cases import BATCH, WIDTH, Backward, Case, RandomModel, Round, draw_case, synchronised
from tests.reference import copying, local_if, run_backward, several_machines

RERUN = "again: pytest tests/reducer/test_fuzz.py --fuzz-seed="
TOLERANCE = {torch.bfloat16: 2.0**-5}
DEFAULT_TOLERANCE = 2e-5

Grads = dict[str, Tensor]
"""Without the parameters that have none."""


class Reference:
    """The gradients of all ranks, worked out in this process, in double precision.

    Attributes:
        module: A copy of the module.
        grads: By rank, what each parameter's ``.grad`` is to be.
        pending: By rank, the parameters that got a gradient since the last reduction.
        scale: The largest number in each parameter's gradients, by which rounding is measured.
    """

    def __init__(self, module: nn.Module, world_size: int) -> None:
        self.module = module
        self.params = dict(module.named_parameters())
        self.grads: list[Grads] = [{} for _ in range(world_size)]
        self.pending: list[set[str]] = [set() for _ in range(world_size)]
        self.scale = dict.fromkeys(self.params, 0.0)

    def add(self, rank: int, grads: Grads) -> None:
        """A backward on a rank adds these gradients."""
        for name, grad in grads.items():
            self.grads[rank][name] = total = self.grads[rank].get(name, 0) + grad
            self.pending[rank].add(name)
            if grad.numel():
                self.scale[name] = max(self.scale[name], grad.abs().max().item(), total.abs().max().item())

    def reduce(self) -> set[str]:
        """A synchronised pass ends: take means over the ranks. Return the parameters that no rank used."""
        used = {name for mine, grads in zip(self.pending, self.grads, strict=True) for name in mine & grads.keys()}
        for name in used:
            mean = sum(grads[name] for grads in self.grads if name in grads) / len(self.grads)
            for grads in self.grads:
                grads[name] = mean
        for mine in self.pending:
            mine.clear()
        return self.params.keys() - used

    def zero(self, how: str) -> None:
        self.grads = [{n: grad * 0 for n, grad in grads.items() if how != "none"} for grads in self.grads]
        self.scale = dict.fromkeys(self.params, 0.0)


def double(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def digest(tensors: Grads) -> str:
    found = hashlib.sha256(str(list(tensors)).encode())
    for tensor in tensors.values():
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


class Run:
    """One case on this rank.

    Attributes:
        number: The round that it has come to.
        nudged: Parameters whose gradients differ between the ranks until they are reduced again.
        digests: A hash of the gradients after each reduction, and of the weights after each step. They must be the same
            on every rank.
        weights: The parameters after each optimizer step.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.module = RandomModel(case.stages, case.seed)
        self.reference = Reference(copy.deepcopy(self.module), self.world_size)
        if self.rank != 0:
            with torch.no_grad():
                for param in self.module.parameters():
                    param.zero_()  # the values are taken from rank 0
        self.freeze(case.trainable)
        self.ours = BucketDDP(self.module, device_ids=["cpu"] * 2 if case.replicas else None, **case.options)
        if case.replicas == "copied":
            self.ours._replicated = copying(self.ours._replicated)
        self.params = dict(self.module.named_parameters())
        self.travels_as_it_is = not case.options.keys() & {"wire_dtype", "comm_hook"}
        self.optimizer = torch.optim.SGD(self.params.values(), lr=0.05)
        self.passes = self.number = 0
        self.nudged: set[str] = set()
        self.digests: list[str] = []
        self.weights: list[Tensor] = []

    def run(self) -> None:
        for number, this_round in enumerate(self.case.rounds):
            self.number = number
            self.round(this_round)
        before = {name: grad.to(self.params[name].dtype, copy=True) for name, grad in self.grads().items()}
        self.ours.close()
        assert self.grads().keys() == before.keys()
        assert all(torch.equal(grad, before[name]) for name, grad in self.grads().items()), "after close()"

    def round(self, this_round: Round) -> None:
        self.freeze(this_round.trainable)
        if this_round.zero:
            self.zero(this_round.zero)
        if this_round.nudge:
            self.nudge()
        self.aside(this_round.aside)
        fail = this_round.backwards[0].fail
        losses = [self.forward(self.ours, call, self.rank, fail) for call in range(len(this_round.forwards))]
        for at, backward in enumerate(this_round.backwards):
            used_later = {call for later in this_round.backwards[at + 1 :] for call in later.of}
            added = [self.added(this_round, backward, rank) for rank in range(self.world_size)]
            self.backward(this_round, backward, losses, retain=bool(used_later & set(backward.of)), added=added)
        reduced = synchronised(this_round, this_round.backwards[-1])
        if this_round.step and reduced and not fail and not self.nudged:
            self.optimizer.step()
            self.digests.append(digest(self.params))
            self.stepped(list(map(double, self.params.values())))
            for param, other in zip(self.params.values(), self.reference.params.values(), strict=True):
                other.data.copy_(param.data)

    def grads(self) -> Grads:
        return {name: param.grad for name, param in self.params.items() if param.grad is not None}

    def stepped(self, weights: list[Tensor]) -> None:
        self.weights += weights

    def freeze(self, trainable: tuple[bool, ...] | None) -> None:
        if trainable is not None:
            for module in (self.module, self.reference.module):
                for param, flag in zip(module.parameters(), trainable, strict=True):
                    param.requires_grad_(flag)

    def inputs(self, number: int, call: int, rank: int) -> tuple[Tensor, Tensor]:
        """A rank's batch for a forward of a round."""
        generator = torch.Generator().manual_seed(hash((self.case.seed, number, call, rank)) % 2**31)
        return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)

    def forward(self, module: nn.Module, call: int, rank: int, fail: str = "") -> Tensor:
        """The loss of one of this round's forwards."""
        forward = self.case.rounds[self.number].forwards[call]
        x, target = self.inputs(self.number, call, rank)
        x.requires_grad_(forward.inputs_require_grad)
        module.train(forward.training)
        with local_if(self.ours, forward.local and module is self.ours):
            output = (self.module if forward.direct and module is self.ours else module)(x, forward.take[rank], fail)
        return (output - target).square().mean()

    def loss(self, module: nn.Module, backward: Backward, losses: list[Tensor], rank: int) -> Tensor:
        """What a backward starts from."""
        if backward.constant[rank]:
            return torch.zeros((), requires_grad=True)
        loss = torch.stack([losses[call] for call in backward.of]).sum()
        return loss + module.penalised.square().sum() if backward.penalty else loss

    def inputs_argument(self, module: nn.Module, backward: Backward) -> list[nn.Parameter] | None:
        """The parameters for ``backward(inputs=...)``; None for all."""
        if backward.only is None:
            return None
        params = list(module.parameters())
        chosen = [p for p, flag in zip(params, backward.only, strict=True) if flag and p.requires_grad]
        return chosen or [p for p in params if p.requires_grad]

    def added(self, this_round: Round, backward: Backward, rank: int) -> Grads:
        """What one backward of one rank adds to its gradients."""
        module = self.reference.module
        module.zero_grad()
        losses = [self.forward(module, call, rank) for call in range(len(this_round.forwards))]
        loss = self.loss(module, backward, losses, rank)
        if loss.requires_grad:
            loss.backward(inputs=None if backward.constant[rank] else self.inputs_argument(module, backward))
        grads = {name: double(p.grad) for name, p in self.reference.params.items() if p.grad is not None}
        module.zero_grad()
        return grads

    def zero(self, how: str) -> None:
        self.optimizer.zero_grad(set_to_none=how == "none")
        self.reference.zero(how)
        self.nudged.clear()

    def nudge(self) -> None:
        """Change every gradient, in place or elsewhere, as a user may; on each rank by another factor."""
        for grad in self.grads().values():
            grad.data = grad.mul_(1 + self.rank / 8) if self.case.seed % 2 else grad * (1 + self.rank / 8)
        for rank, grads in enumerate(self.reference.grads):
            for name, grad in grads.items():
                grads[name] = grad * (1 + rank / 8)
                self.nudged.add(name)

    def aside(self, kind: str) -> None:
        """Run a forward that no backward follows."""
        if kind:
            x, _ = self.inputs(-1, 0, self.rank)
            self.ours.train(kind != "eval")
            with torch.set_grad_enabled(kind == "dropped"):
                self.ours(x, (True,) * len(self.case.stages))
            self.ours.train()

    def backward(
        self, this_round: Round, backward: Backward, losses: list[Tensor], retain: bool, added: list[Grads]
    ) -> None:
        """Run a backward, and compare its gradients. ``added`` are those that it adds, by rank."""
        reduced = synchronised(this_round, backward)
        everyone_takes_part = all(
            self.takes_part(this_round, backward, rank, grads) for rank, grads in enumerate(added)
        )
        past_the_wrapper = any(this_round.forwards[call].direct for call in backward.of)
        if (reduced or past_the_wrapper) and not backward.guarded and not everyone_takes_part:
            backward = replace(backward, guarded=True, local=not reduced)  # which is what the guard is for
        loss = self.loss(self.module, backward, losses, self.rank)
        before = {name: grad.clone() for name, grad in self.grads().items()}
        try:
            with local_if(self.ours, backward.local):
                only = None if backward.constant[self.rank] else self.inputs_argument(self.module, backward)
                run_backward(self.ours, loss, backward.guarded, retain_graph=retain, inputs=only)
        except ArithmeticError:
            assert backward.fail
            assert not reduced
            for pending in self.reference.pending:
                pending.clear()
            self.zero("none")
            return
        assert not backward.fail
        for rank, grads in enumerate(added):
            self.reference.add(rank, grads)
        untouched = self.reference.reduce() if reduced else set()
        self.passes += reduced
        self.compare(untouched, before, reduced)
        if reduced:
            self.nudged &= untouched
            same = {name: grad for name, grad in self.grads().items() if name not in self.nudged}
            self.digests.append(digest(same))
            for grads in self.reference.grads:  # rounding does not add up over the rounds
                grads.update({name: double(grad) for name, grad in same.items()})

    def takes_part(self, this_round: Round, backward: Backward, rank: int, grads: Grads) -> bool:
        """Whether a rank takes part in a reduction without a guard: by a gradient, or where the root opens the pass."""
        # A forward of no stage returns its input. A root that is a leaf is followed up to the next forward only.
        if grads:
            return True
        if not self.case.options["find_unused_parameters"] or backward.only is not None:
            return False
        forwards = [this_round.forwards[call] for call in backward.of]
        forwards = [forward for forward in forwards if forward.inputs_require_grad and not forward.direct]
        return any(any(forward.take[rank]) or forward is this_round.forwards[-1] for forward in forwards)

    def compare(self, untouched: set[str], before: Grads, reduced: bool) -> None:
        """Compare this rank's gradients after a backward with the reference.

        Args:
            untouched: Parameters that no rank used: their gradients must stay as they were.
            before: The gradients before it.
            reduced: Whether it was synchronised.
        """
        assert self.ours.passes == self.passes, f"{self.ours.passes} passes, expected {self.passes}"
        views = views_of(self.ours)
        everything = self.reference.grads[self.rank]
        assert self.grads().keys() == everything.keys()
        for name, grad in self.grads().items():
            if reduced and name not in untouched and views:
                assert grad is views[name], f"{name}.grad is not its view"
            if name in untouched:
                assert torch.equal(grad, before[name]), f"{name}.grad was changed though no rank used it"
            # A small gradient may be the sum of large terms, as before a BatchNorm: rounding is measured by both.
            rounded = self.params[name].dtype if self.travels_as_it_is else torch.bfloat16
            tolerance = TOLERANCE.get(rounded, 0.0) * self.reference.scale[name]
            tolerance += DEFAULT_TOLERANCE * max(self.reference.scale.values())
            message = partial("{}: {}".format, name)
            torch.testing.assert_close(double(grad), everything[name], rtol=0, atol=tolerance, msg=message)


class ShardedRun(Run):
    """A case again with a sharded optimizer: after each step weights must be those of the run before.

    Gradients are not compared, as a rank has parts of them.
    """

    def __init__(self, whole: Run) -> None:
        seed, options = whole.case.seed, {"shard_optimizer": True, **whole.case.options}
        fails = any(backward.fail for each in whole.case.rounds for backward in each.backwards)
        scatters = seed % 4 == 0 and not fails  # else a local backward that raises is for good
        options |= {"scatter_every_pass": scatters, "shard_group_size": 1 if seed % 5 == 0 else None}
        super().__init__(replace(whole.case, options=options))
        coarse = not self.travels_as_it_is or any(param.dtype is torch.bfloat16 for param in self.params.values())
        self.tolerance, self.expected = 0.05 if coarse else 1e-4, whole.weights

    def grads(self) -> Grads:
        return {}

    def compare(self, untouched: set[str], before: Grads, reduced: bool) -> None:
        pass

    def stepped(self, weights: list[Tensor]) -> None:
        begin = len(self.weights)
        super().stepped(weights)
        expected = self.expected[begin : len(self.weights)]
        torch.testing.assert_close(weights, expected, rtol=0, atol=self.tolerance)
        for param, weight in zip(self.params.values(), expected, strict=True):
            param.data.copy_(weight)  # rounding does not add up over the steps


def run_case(seed: int, sharded: bool) -> list[str]:
    """Run a case on this rank. Return the digests."""
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")  # frozen and checkpointed
    warnings.filterwarnings("ignore", message="device_ids has 2 entries")
    case = draw_case(seed, dist.get_world_size(), sharded)
    print(f"rank {dist.get_rank()}: fuzz seed {seed}", file=sys.stderr, flush=True)  # for one that ends the process
    more_are_large = patch.object(buffers, "LARGE_BYTES", 64 if seed % 2 else buffers.LARGE_BYTES)
    run = None
    try:
        with more_are_large, several_machines() if seed % 4 in (1, 2) else nullcontext():
            run = Run(case)
            run.run()
            if sharded:
                run = ShardedRun(run)
                run.run()
                assert len(run.weights) == len(run.expected), "as many steps"
    except BaseException as error:
        number = run.number if run else 0
        so_far = replace(case, rounds=case.rounds[: number + 1])
        raise AssertionError(f"{RERUN}{seed}\nfailed in the last round of\n{so_far}") from error
    return run.digests


class Seeds(NamedTuple):
    """Which cases run on so many ranks."""

    world_size: int
    sharded: bool
    quick: Sequence[int]
    slow: Sequence[int]


SEEDS = [
    Seeds(world_size=2, sharded=False, quick=[1, 2, 3], slow=[0, *range(4, 16)]),
    Seeds(world_size=3, sharded=False, quick=[1], slow=[0, *range(2, 24)]),
    Seeds(world_size=2, sharded=True, quick=[1, 2], slow=[0, *range(3, 8)]),
    Seeds(world_size=3, sharded=True, quick=(), slow=range(8, 24)),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Take the seeds of the command line, else those above."""
    if "seed" not in metafunc.fixturenames:
        return
    one, count = (metafunc.config.getoption(f"--fuzz-{name}") for name in ("seed", "cases"))
    given = [one] if one is not None else range(count or 0)
    cases = []
    for world_size, sharded, quick, slow in SEEDS:
        kind = "sharded" if sharded else "whole"
        for seed in given or [*quick, *slow]:
            marks = [] if given or seed in quick else [pytest.mark.slow]
            cases.append(pytest.param(world_size, seed, sharded, id=f"{kind}-{world_size}-{seed}", marks=marks))
    metafunc.parametrize(("world_size", "seed", "sharded"), cases)


def test_gradients_are_what_one_process_works_out(
    run_ranks: RunRanks, world_size: int, seed: int, sharded: bool
) -> None:
    first, *others = run_ranks(world_size, run_case, seed, sharded, timeout=200)
    for rank, digests in enumerate(others, start=1):
        assert digests == first, f"ranks 0 and {rank} differ; {RERUN}{seed}"
    rounds = draw_case(seed, world_size, sharded).rounds
    reduces = any(synchronised(each, backward) for each in rounds for backward in each.backwards)
    assert first or not reduces, f"nothing was reduced; {RERUN}{seed}"
