"""Features that meet: several wrappers, state dicts, copies, ignored parameters, uneven ranks, one rank."""

import copy
import io
import pickle
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from tests.models import Branches, Mlp
from tests.pool import RunRanks, case, on_ranks
from tests.reference import TINY, assert_grads, both, grads, inputs_of, mean_over_ranks, pair

BF16 = torch.bfloat16


@on_ranks(2)
def test_two_wrappers_meet_in_one_backward() -> None:
    """In one backward of two wrappers, one rank takes a branch of one of them."""
    cases = [(25.0, True, True), (25.0, False, False), (0.0001, True, False), (0.0001, False, True)]
    for cap, in_order, first_branches in cases:
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
                with case(cap, in_order, first_branches, step):
                    assert_grads(model.module, mean_over_ranks(reference))
        for model in ours:
            model.close()


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def assert_loads(model: nn.Module, state: dict[str, Tensor], names: dict[str, Tensor]) -> None:
    """Asserts that other values under the names of ``state`` arrive, under ``names``."""
    expected = [value + 1 for value in state.values()]
    model.load_state_dict(dict(zip(state, expected, strict=True)))
    loaded = model.state_dict()
    assert list(loaded) == list(names)
    assert all(torch.equal(value, other) for value, other in zip(loaded.values(), expected, strict=True))


@on_ranks(2)
def test_state_dicts_are_those_of_the_module() -> None:
    outer = nn.ModuleDict({"net": BucketDDP(Mlp()), "head": nn.Linear(8, 1)})
    expected = nn.ModuleDict({"net": Mlp(), "head": nn.Linear(8, 1)}).state_dict()
    for model in (outer, copy.deepcopy(copy.deepcopy(outer))):
        assert list(model.state_dict()) == list(expected)
        assert_loads(model, expected, expected)
    outer["net"].close()
    model = Mlp()
    plain = copied(model.state_dict())
    torchs = copied(DistributedDataParallel(model).state_dict())
    ours = BucketDDP(copy.deepcopy(model))
    assert all(name.startswith("module.") for name in torchs)
    assert_loads(ours, torchs, plain)
    assert_loads(ours, plain, plain)
    with pytest.raises(RuntimeError, match="nonsense"):
        ours.load_state_dict({**plain, "nonsense": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        ours.load_state_dict({name: value for name, value in torchs.items() if not name.endswith("bias")})
    assert list(ours.state_dict_for_save_checkpoint(None, "p.", False)) == [f"p.{name}" for name in plain]
    ours.close()
    for names in (["module"], ["module", "head"]):  # a child that is called as the wrapper's is
        model = nn.ModuleDict({name: nn.Linear(8, 4) for name in names})
        plain = copied(model.state_dict())
        ours = BucketDDP(model)
        assert_loads(ours, plain, plain)
        ours.close()


@on_ranks(2, cases=[(allreduce_hook, True), (noop_hook, False)])
def test_copies_keep_the_hook_and_its_state(hook: Any, means: bool) -> None:
    plain, ours = pair()
    ours.register_comm_hook(dist.group.WORLD, hook)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        both([plain, other], inputs_of(0))
        assert_grads(other.module, mean_over_ranks(plain) if means else grads(plain))
        other.close()


@on_ranks(2)
def test_pickles_leave_gradient_buffers_out() -> None:
    plain, ours = pair(lambda: nn.Sequential(*(nn.Linear(200, 200) for _ in range(5))).to(BF16), grad_dtype="float32")
    inputs = torch.ones(2, 200, dtype=BF16) * (1 + dist.get_rank())
    ours(inputs).sum().backward()
    ours.zero_grad()
    size, saved = len(pickle.dumps(ours)), io.BytesIO()
    torch.save(ours.module, saved)
    for param in plain.parameters():
        param.grad_dtype = torch.float32
    for model in (plain, ours):
        model(inputs).sum().backward()
    assert_grads(ours.module, mean_over_ranks(plain))
    assert all(param.main_grad is param.grad for param in ours.parameters())
    ours.close()
    plain.zero_grad()
    assert max(size, len(saved.getvalue())) < 1.5 * len(pickle.dumps(plain))


@on_ranks(2, cases=("0.weight", "2.weight"))
def test_a_shared_weight_is_ignored_by_all_its_names(name: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    module[2].weight = module[0].weight
    module._ddp_params_and_buffers_to_ignore = [name]
    ours = BucketDDP(module)
    plain = copy.deepcopy(module)
    both([plain, ours], inputs_of(0))
    assert_grads(module, mean_over_ranks(plain))


def error_inside_join() -> str | None:
    group = dist.new_group(timeout=timedelta(seconds=3))  # for how long the other rank waits inside torch's Join
    ours = BucketDDP(Mlp(), process_group=group, timeout=timedelta(seconds=20))
    try:
        with ours.join():
            for step in range(2 + 3 * dist.get_rank()):
                if step == 3:
                    raise ValueError("no more of this")
                ours(inputs_of(step)).sum().backward()
    except Exception as error:
        return repr(error)
    return None


def test_a_rank_raises_its_own_error_inside_join(run_ranks: RunRanks) -> None:
    assert run_ranks(2, error_inside_join, fresh=True)[1] == "ValueError('no more of this')"


@on_ranks(2)
def test_close_gives_gradients_their_dtype_back() -> None:
    plain, ours = pair(lambda: Mlp().to(BF16), grad_dtype=torch.float32)
    both([ours], inputs_of(0).to(BF16))
    ours.close()
    assert {(param.grad_dtype, param.grad.dtype) for param in ours.parameters()} == {(BF16, BF16)}
    for model in (plain, ours.module):
        both([model], inputs_of(0).to(BF16))
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for expected, param in zip(plain.parameters(), ours.module.parameters(), strict=True):
        torch.testing.assert_close(param, expected)
    again = BucketDDP(ours.module)
    assert {buffer.dtype for buffer in again.layout.buffers} == {BF16}


ALONE: list[dict[str, Any]] = [
    {},
    {"comm_hook": allreduce_hook},
    {"comm_hook": "bf16"},
    {"comm_hook": "powersgd"},
    {"wire_dtype": BF16},
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
