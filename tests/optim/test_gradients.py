"""``.grad`` with a sharded optimizer: what can be done with it, what raises, norms, clipping, scaling."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bucketddp import BucketDDP, PeerFailureError
from lightning_bucketddp.grads.sharded_grad import ShardedGrad
from tests.models import Mlp, batch
from tests.optim.common import TINY, average, values
from tests.pool import case, on_ranks
from tests.reference import backward, drift, everyones, loss_at, run_backward, seeded


def pair(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[BucketDDP, nn.Module]:
    """A sharded Mlp and a plain one, after one backward whose gradients are averaged."""
    plain = seeded(Mlp).to(dtype)
    ours = BucketDDP(copy.deepcopy(plain), shard_optimizer=True, bucket_cap_mb=TINY, **options)
    run_pass(ours, plain)
    return ours, plain


def run_pass(ours: BucketDDP, plain: nn.Module, step: int = 0) -> None:
    """Run a backward of each; the plain one's gradients are averaged then."""
    for model in (ours, plain):
        backward(model, step)
    average(plain)


def assert_full(ours: BucketDDP, plain: nn.Module) -> None:
    for (name, mine), theirs in zip(ours.module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.full_grad(mine), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")


LOOKS: dict[str, Callable[[Tensor], object]] = {
    "norm": lambda grad: grad.norm(),
    "clone": lambda grad: grad.clone(),
    "data": lambda grad: grad.data,
    "item": lambda grad: grad.flatten()[0].item(),
    "copy": lambda grad: torch.zeros(grad.shape).copy_(grad),
    "deepcopy": copy.deepcopy,
}


@on_ranks(3)
def test_sharded_gradients_change_element_wise_and_show_no_values() -> None:
    ours, plain = pair()
    param = ours.module.head.weight
    assert isinstance(param.grad, ShardedGrad)
    assert "head.weight" in repr(param.grad)
    for name, look in LOOKS.items():
        with pytest.raises(RuntimeError, match=r"the gradient of parameter 'head.weight' is sharded.*full_grad"):
            pytest.fail(f"{name}: {look(param.grad)}")
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
    assert_full(ours, plain)
    for model in (ours, plain):
        for param in model.parameters():
            param.grad.mul_(3).div_(2).neg_().clamp_(-0.01, 0.02)
        nn.utils.clip_grad_value_(model.parameters(), 0.015, foreach=True)
        torch._foreach_mul_([param.grad for param in model.parameters()], 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.004, foreach=False)
    assert_full(ours, plain)
    ours.clip_grad_value_(0.001)
    nn.utils.clip_grad_value_(plain.parameters(), 0.001)
    assert_full(ours, plain)


class Recorded(TorchDispatchMode):
    """Notes what operations run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func.name())
        return func(*args, **kwargs or {})


LOOK_AT_MEMORY = {
    "__complex__", "__cuda_array_interface__", "__dlpack__", "__float__", "__index__", "__int__", "__invert__",
    "__long__", "_cdata", "const_data_ptr", "data_ptr", "new_tensor", "storage", "tolist",
}  # fmt: skip
"""They run no operation, but read values, or give memory away through which one can."""
ABOUT_THE_TENSOR = {"aten::dense_dim", "aten::sparse_dim", "aten::is_pinned", "aten::empty.memory_format"}
OTHER_FOR_EACH_TENSOR = {
    "__class__", "__dict__", "__doc__", "__firstlineno__", "__getstate__", "__hash__", "__init__", "__init_subclass__",
    "__module__", "__new__", "__repr__", "__static_attributes__", "__str__", "_base", "_is_view", "_use_count",
    "_version", "detach_", "storage_offset",
}  # fmt: skip


def outcome(tensor: Tensor, name: str) -> Any:
    """What an attribute is, or a method without arguments returns; for an error, its class."""
    try:
        found = getattr(tensor, name)
        found = found() if callable(found) else found
    except Exception as error:
        return type(error)
    return "itself" if found is tensor else found


@pytest.mark.filterwarnings("ignore")
@on_ranks(1)
def test_a_sharded_gradient_answers_whatever_needs_no_values() -> None:
    """Every attribute and method of a tensor that runs no operation without arguments does, or changes nothing."""
    model = BucketDDP(nn.Linear(3, 2), shard_optimizer=True)
    model(torch.ones(1, 3)).sum().backward()
    sharded = model.module.weight.grad
    asked = 0
    for name in sorted(set(dir(Tensor)) - OTHER_FOR_EACH_TENSOR):
        plain = torch.ones(2, 3)
        with Recorded() as recorded:
            expected = outcome(plain, name)
        if set(recorded.operations) <= ABOUT_THE_TENSOR:
            with case(name):
                found = outcome(sharded, name)
                if name in LOOK_AT_MEMORY:
                    assert found is RuntimeError
                elif isinstance(expected, str | int | bool | torch.Size | torch.dtype | torch.device | type | None):
                    an_error = isinstance(expected, type)  # if perhaps another one
                    assert isinstance(found, type) if an_error else found == expected
                    asked += 1
    assert asked > 80


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "to the device where it is": lambda module: module.to("cpu"),
    "to the dtype that it has": lambda module: module.to(torch.float32).float().type(torch.float32),
    "to a tensor like it": lambda module: module.to(next(module.parameters()).grad),
    "cpu": lambda module: module.cpu(),
    "fake": lambda module: [FakeTensorMode().from_tensor(param) for param in module.parameters()],
    "export": lambda module: torch.export.export(module, (torch.ones(2, 8),), strict=False),
    "others like it": lambda module: [torch.zeros_like(p.grad) + p.grad.new_ones(p.shape) for p in module.parameters()],
    "others of its shape": lambda module: [
        torch.ones(p.numel()).view_as(p.grad).type_as(p.grad) for p in [module.head.weight]
    ],
    "as text": lambda module: f"{[param.grad for param in module.parameters()]} {module.head.weight.grad}",
}


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_conversions_that_change_nothing_leave_sharded_gradients() -> None:
    ours, plain = pair()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    for step in range(2):
        for name, convert in CONVERSIONS.items():
            with case(name, step):
                convert(ours.module)
        assert_full(ours, plain)
        optimizer.step()  # parameters are on their way then
    grad = ours.module.head.weight.grad
    before = grad.own_part.clone()
    with pytest.raises(RuntimeError, match="is sharded"):
        torch.conj_physical(torch.ones(grad.shape), out=grad)
    assert torch.equal(grad.own_part, before)
    assert torch.positive(input=grad) is grad
    with pytest.raises(RuntimeError, match="an operation with more than one number would read all of it"):
        grad.mul_(torch.ones(grad.shape))
    conversions = (Tensor.double, Tensor.half, lambda tensor: tensor.to("meta"), lambda tensor: tensor.to(torch.int64))
    for convert_really in conversions:
        with pytest.raises(RuntimeError, match=r"'head.weight' is sharded.*full_grad"):
            convert_really(grad)
    with pytest.raises(RuntimeError, match="is sharded"):
        ours.module.double()


@on_ranks(2, cases=(torch.float32, torch.float64))
def test_norms_and_clipping_are_those_of_whole_gradients(dtype: torch.dtype) -> None:
    ours, plain = pair(dtype)
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        theirs = nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
        torch.testing.assert_close(ours.grad_norm(norm_type), theirs)
    chosen = [ours.module.head.weight, ours.module.layers[0].bias]
    theirs = nn.utils.get_total_norm([plain.head.weight.grad, plain.layers[0].bias.grad])
    torch.testing.assert_close(ours.grad_norm(parameters=chosen), theirs)
    for module in (ours.module, plain):
        module.extra = nn.Parameter(torch.ones(3, dtype=dtype))  # not of the wrapper: whole on every rank
        module.extra.grad = torch.full((3,), 2.0, dtype=dtype)
    for max_norm in (100.0, 0.5):
        mine = ours.clip_grad_norm_(max_norm)
        torch.testing.assert_close(mine, nn.utils.clip_grad_norm_(plain.parameters(), max_norm))
        torch.testing.assert_close(ours.module.extra.grad, plain.extra.grad)
    del plain.extra, ours.module.extra
    assert_full(ours, plain)
    for model in (ours, plain):
        model.zero_grad_buffer() if model is ours else model.zero_grad(set_to_none=False)
        torch._foreach_add_([param.grad for param in model.parameters()], 2.0)
    run_backward(ours, torch.zeros((), requires_grad=True), guarded=True)  # no rank has a gradient: they stay
    torch.testing.assert_close(ours.grad_norm(), nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    if dist.get_rank() == 0:  # of one rank's shard, yet every rank must know
        next(param.grad.own_part for param in ours.parameters() if len(param.grad.own_part))[0] = math.nan
    with pytest.raises(RuntimeError, match="is non-finite"):
        ours.clip_grad_norm_(1.0, error_if_nonfinite=True)


@on_ranks(3)
def test_gradients_of_inputs_leave_sharded_ones_alone() -> None:
    ours, plain = pair()
    inputs = batch(1, dist.get_rank())[0].requires_grad_()
    torch.autograd.grad(ours(inputs).sum(), inputs)  # between backward and step
    assert_full(ours, plain)


SHARDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"shard_group_size": 2},
    "scattered": {"scatter_every_pass": True},
}


@on_ranks(4, cases=SHARDS, quick=["groups", "scattered"])
def test_accumulated_gradients_stay_when_buckets_are_added(options: dict[str, Any]) -> None:
    """A parameter is frozen, another one becomes trainable; at last only some ranks clear their parts."""
    plain = seeded(Mlp)
    plain.layers[0].bias.requires_grad_(False)
    ours = BucketDDP(copy.deepcopy(plain), shard_optimizer=True, bucket_cap_mb=TINY, **options)
    layouts = set()
    for step, (frozen, thawed) in enumerate([(False, False), (True, False), (True, True), (False, True)]):
        for module in (plain, ours.module):
            module.layers[1].weight.requires_grad_(not frozen)
            module.layers[0].bias.requires_grad_(thawed)
        with ours.no_sync():
            backward(ours, step + 10)
        backward(plain, step + 10)
        run_pass(ours, plain, step)
        assert_full(ours, plain)
        layouts.add(ours.layout)
    assert len(layouts) == 2
    if dist.get_rank() % 2:
        ours.zero_grad()
    ours.module.head.weight.requires_grad_(False)
    backward(ours, 4)
    full = [ours.full_grad(param) for param in ours.parameters()]
    assert all(map(torch.equal, full, everyones(full)[0]))
    with pytest.raises(RuntimeError, match=r"added to the sharded gradient|single memory location"):
        ours.module.layers[0].bias.sum().backward()  # past forward


@on_ranks(2, cases=[(True, False), (True, True), (False, True), (False, False)])
def test_reduced_gradients_outlive_a_backward_that_raises(local: bool, early: bool) -> None:
    ours, plain = pair()
    inputs, target = batch(1, dist.get_rank())
    with ours.no_sync() if local else nullcontext():
        output = ours(inputs.requires_grad_())
    fail = Mock(side_effect=ArithmeticError)
    (output if early else inputs).register_hook(fail)  # before the first gradient, or after the last
    with pytest.raises(ArithmeticError):
        nn.functional.mse_loss(output, target).backward()
    if not (local or early):
        with pytest.raises(PeerFailureError, match="left backward with an exception"):
            run_pass(ours, plain, 2)
        return
    assert_full(ours, plain)
    ours.zero_grad()
    plain.zero_grad()
    run_pass(ours, plain, 2)
    assert_full(ours, plain)


@on_ranks(4, cases=SHARDS, quick=["groups"])
def test_an_overflow_in_one_part_concerns_all(options: dict[str, Any]) -> None:
    """One element is infinite, which the ranks with its part see: none steps, and every scale shrinks."""
    ours = BucketDDP(seeded(Mlp), shard_optimizer=True, bucket_cap_mb=TINY, **options)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01, fused=True)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3), []
    for step in range(6):
        before = values(ours)
        scaler.scale(loss_at(ours, step)).backward()
        whole = ours.module.head.weight.grad
        if step == 2 and whole.own_part.numel():
            whole.own_part[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(value, before[name]) for name, value in values(ours).items()]
        assert all(same) if step == 2 else not any(same)
        scales.append(scaler.get_scale())
    assert scales == [64, 64, 32, 32, 32, 64]
    assert drift(ours.module) == 0
