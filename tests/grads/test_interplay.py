"""Features that meet: several wrappers, state dicts, copies, ignored parameters, uneven ranks, one rank."""

import copy
import pickle
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from tests.models import Branches, Mlp
from tests.pool import on_ranks
from tests.reference import TINY, assert_grads, both, grads, inputs_of, mean_over_ranks, pair

BF16 = torch.bfloat16


@on_ranks(2, cases=[(25.0, True, True), (25.0, False, False), (0.0001, True, False), (0.0001, False, True)])
def test_two_wrappers_meet_in_one_backward(cap: float, in_order: bool, first_branches: bool) -> None:
    """In one backward of two wrappers, one rank takes a branch of one of them."""
    plain, ours = zip(pair(Branches, cap), pair(Branches, 25.0), strict=True)
    for step in range(3):
        take = "both" if step == 0 or dist.get_rank() == 0 else "left"
        for models in (plain, ours):
            for model in models:
                model.zero_grad()
            first, second = models if in_order else reversed(models)
            hidden = first(inputs_of(step), take if first_branches else "both").repeat(1, 2)
            second(hidden, "both" if first_branches else take).square().sum().backward()
        for model, reference in zip(ours, plain, strict=True):
            assert_grads(model.module, mean_over_ranks(reference))


def assert_loads(model: nn.Module, names: Iterable[str], expected: Iterable[str]) -> None:
    """Asserts that other values under ``names`` arrive, under ``expected``."""
    values = [value + 1 for value in model.state_dict().values()]
    model.load_state_dict(dict(zip(names, values, strict=True)))
    loaded = model.state_dict()
    assert list(loaded) == list(expected)
    assert all(map(torch.equal, loaded.values(), values))


@on_ranks(2)
def test_state_dicts_are_those_of_the_module() -> None:
    names = list(Mlp().state_dict())
    outer = nn.ModuleDict({"net": BucketDDP(Mlp()), "head": nn.Linear(8, 1)})
    expected = [*(f"net.{name}" for name in names), "head.weight", "head.bias"]
    for model in (outer, copy.deepcopy(copy.deepcopy(outer))):
        assert list(model.state_dict()) == expected
        assert_loads(model, expected, expected)
    ours, torchs = BucketDDP(Mlp()), DistributedDataParallel(Mlp()).state_dict()
    assert all(name.startswith("module.") for name in torchs)
    for given in (torchs, names):
        assert_loads(ours, given, names)
    with pytest.raises(RuntimeError, match="nonsense"):
        ours.load_state_dict({**torchs, "nonsense": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        ours.load_state_dict({name: value for name, value in torchs.items() if not name.endswith("bias")})
    assert list(ours.state_dict_for_save_checkpoint(None, "p.", False)) == [f"p.{name}" for name in names]
    for names in (["module"], ["module", "head"]):  # a child that is called as the wrapper's is
        model = nn.ModuleDict({name: nn.Linear(8, 4) for name in names})
        assert_loads(BucketDDP(model), list(model.state_dict()), list(model.state_dict()))


@on_ranks(2, cases=[(allreduce_hook, True), (noop_hook, False)])
def test_copies_keep_the_hook_and_its_state(hook: Any, means: bool) -> None:
    plain, ours = pair()
    ours.register_comm_hook(dist.group.WORLD, hook)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        both([plain, other], inputs_of(0))
        assert_grads(other.module, mean_over_ranks(plain) if means else grads(plain))
        other.close()


@on_ranks(2, fresh=True)
def test_a_rank_raises_its_own_error_inside_join() -> None:
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=2))  # for how long the other rank waits inside torch's Join
    ours = BucketDDP(Mlp(), process_group=group, timeout=timedelta(seconds=20))
    with pytest.raises(ValueError, match="no more of this") if rank == 1 else suppress(Exception), ours.join():
        for step in range(2 + 3 * rank):
            if step == 3:
                raise ValueError("no more of this")
            ours(inputs_of(step)).sum().backward()


ALONE: list[dict[str, Any]] = [
    {},
    {"comm_hook": "bf16"},
    {"comm_hook": "powersgd"},
    {"wire_dtype": BF16, "use_contiguous_buffers": False},
    {"grad_dtype": torch.float64, "master_params": False},
    {"gradient_divide_by": "tokens"},
    {"gradient_divide_by": 4, "pad_buckets_to": 64, "overlap": False},
]


@on_ranks(1, cases=[(options, at % 2 == 0) for at, options in enumerate(ALONE)])
def test_one_rank_trains_as_without_a_wrapper(options: dict[str, Any], joined: bool) -> None:
    plain, ours = pair(Branches, TINY, **options)
    for param in plain.parameters():
        param.grad_dtype = options.get("grad_dtype")
    divisor = {"tokens": 8, 4: 4}.get(options.get("gradient_divide_by"), 1)
    rounding = {"rtol": 1e-2, "atol": 1e-2} if options.get("comm_hook") == "bf16" else {}
    with ours.join() if joined else nullcontext():
        for step in range(3):
            plain.zero_grad()
            ours.zero_grad()
            for micro in range(2):
                if divisor == 8:
                    ours.count_tokens(4)
                take = ["left", "right", "none", "both"][(step + micro) % 4]
                with ours.no_sync() if micro == 0 else nullcontext():
                    ours(inputs_of(2 * step + micro), take=take).square().sum().backward()
                plain(inputs_of(2 * step + micro), take=take).square().sum().div(divisor).backward()
            assert_grads(ours.module, grads(plain), **rounding)
    assert ours.passes == 3
