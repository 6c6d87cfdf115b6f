"""fp32 masters: the optimizer's own update on fp32 copies, bit for bit, seen from outside as if there were none."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.optim.swap import Swap, master_params
from tests.models import Bits, Build, ConvBatchNorm, MixedDtypes, Mlp
from tests.optim.common import assert_equal
from tests.pool import on_ranks
from tests.reference import backward, loss_at

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Prepared = tuple[nn.Module, Optimizer, Swap]


class Child(optim.AdamW):
    """Calls its parent's step, which torch has hooked too."""

    fail = False

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise ArithmeticError("no step today")
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd_momentum": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd_fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adamw": partial(optim.AdamW, lr=0.01, foreach=True),
    "adamw_fused": partial(optim.AdamW, lr=0.01, fused=True),
    "adafactor": optim.Adafactor,
    "rprop": optim.Rprop,
    "child": partial(Child, lr=0.01, foreach=False),
    "lbfgs": partial(optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe"),
}


def mixed() -> nn.Module:
    module = MixedDtypes()
    module.head.bias.requires_grad_(False)
    module.low.bias.requires_grad_(False)
    return module


def low(model: Build = Mlp, dtype: torch.dtype = BF16) -> nn.Module:
    torch.manual_seed(3)
    module = model() if model is mixed else model().to(dtype)
    for param in module.parameters():
        param.grad_dtype = FP32
    return module


def params_in(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def assert_at_rest(optimizer: Optimizer, module: nn.Module) -> None:
    known = set(module.parameters())
    assert all(param in known for param in params_in(optimizer))
    assert all(key in known for key in optimizer.state)


def train(module: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        found: list[Tensor] = []

        def closure(step: int = step, found: list[Tensor] = found) -> Tensor:
            assert_at_rest(optimizer, module)
            found.append(loss_at(module, step, rank=0))
            optimizer.zero_grad()
            found[-1].backward()
            return found[-1]

        if step % 3 == 2 and not isinstance(optimizer, optim.LBFGS):
            closure()
            assert optimizer.step() is None
        else:
            assert (optimizer.step(closure=closure) if step % 3 else optimizer.step(closure)) is found[0]


def prepared(name: str = "adamw", model: Build = Mlp, dtype: torch.dtype = BF16, steps: int = 0) -> Prepared:
    module = low(model, dtype)
    optimizer = OPTIMIZERS[name](module.parameters())
    masters = master_params(optimizer)
    train(module, optimizer, range(steps))
    return module, optimizer, masters


class ByHand:
    """The reference: an optimizer on fp32 copies, whose rounded values are the module's parameters."""

    def __init__(self, steps: int, name: str = "adamw", *which: Any) -> None:
        self.module = low(*which)
        self.params = list(self.module.parameters())
        self.copies = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizer = OPTIMIZERS[name](self.copies)
        for step in range(steps):
            self.optimizer.step(partial(self.closure, step))
            self.round_copies()

    @torch.no_grad()
    def round_copies(self) -> None:
        for param, fp32 in zip(self.params, self.copies, strict=True):
            param.copy_(fp32)

    def closure(self, step: int) -> Tensor:
        self.round_copies()
        self.module.zero_grad()
        loss = backward(self.module, step, rank=0)
        for param, fp32 in zip(self.params, self.copies, strict=True):
            fp32.grad = param.grad
        return loss


@pytest.mark.parametrize(
    ("name", "model", "dtype"),
    [
        *((name, Mlp, BF16) for name in OPTIMIZERS),
        ("adamw", mixed, BF16),
        ("sgd_fused", Mlp, FP16),
        ("sgd", Bits, BF16),
        ("adamw", ConvBatchNorm, BF16),
    ],
)
def test_the_update_is_the_optimizers_own_on_fp32_copies(name: str, model: Build, dtype: torch.dtype) -> None:
    start = list(low(model, dtype).parameters())
    module, optimizer, masters = prepared(name, model, dtype, steps=6)
    reference = ByHand(6, name, model, dtype)
    assert_at_rest(optimizer, module)
    assert not all(map(torch.equal, module.parameters(), start))
    assert_equal(list(module.parameters()), reference.params)
    for param, fp32 in zip(module.parameters(), reference.copies, strict=True):
        master = masters.master(param)
        assert (master is not None) == (param.dtype is dtype and param.requires_grad)
        if master is not None:
            assert_equal(master, fp32.detach())
            assert master.stride() == param.stride()
            assert master.untyped_storage().nbytes() == 4 * param.numel()
    state, expected = optimizer.state_dict()["state"], reference.optimizer.state_dict()["state"]
    assert_equal({index: state[index] for index in expected}, expected)
    assert any(param.grad.is_sparse for param in module.parameters() if param.requires_grad) == (model is Bits)
    assert not masters._swapped
    assert masters._state is None


def test_grad_scaler_skips_a_step_with_an_overflow() -> None:
    module, optimizer, _ = prepared("sgd_fused", dtype=FP16)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step, factor in [(0, 1.0), (1, math.inf), (1, 1.0)]:
        module.zero_grad()
        (scaler.scale(loss_at(module, step, rank=0)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 128.0
    torch.testing.assert_close(list(module.parameters()), ByHand(2, "sgd_fused", Mlp, FP16).params)


def failed_step() -> Prepared:
    module, optimizer, masters = prepared("child", steps=3)
    optimizer.fail = True
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert params_in(optimizer)[0].dtype is FP32, "torch calls post hooks after a failure now"
    optimizer.fail = False
    return module, optimizer, masters


@pytest.mark.parametrize("what", ["restore", "save", "step"])
def test_after_a_step_that_raised_the_parameters_are_back(what: str) -> None:
    module, optimizer, masters = failed_step()
    if what == "restore":
        masters.restore()
    elif what == "save":
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        optimizer.zero_grad()
        module.zero_grad()
        backward(module, 3, rank=0)
        optimizer.step()
    assert_at_rest(optimizer, module)
    assert_equal(list(module.parameters()), ByHand(4 if what == "step" else 3, "child").params)
    optimizer.fail = True
    with pytest.raises(ArithmeticError), masters.restored_after():
        optimizer.step()
    assert_at_rest(optimizer, module)


@pytest.mark.parametrize(
    ("name", "model", "model_first"),
    [("adamw_fused", mixed, False), ("sgd_momentum", ConvBatchNorm, True), ("lbfgs", Mlp, True)],
)
def test_resumed_training_is_the_same_bit_for_bit(name: str, model: Build, model_first: bool) -> None:
    through, optimizer, _ = prepared(name, model, steps=3)
    module_state, optimizer_state, kept = map(copy.deepcopy, (through.state_dict(), *[optimizer.state_dict()] * 2))
    train(through, optimizer, range(3, 6))
    fresh, resumed, masters = prepared(name, model)
    with torch.no_grad():
        for param in fresh.parameters():
            param.mul_(2)
    loads = [(fresh, module_state), (resumed, optimizer_state)]
    for target, state in loads if model_first else loads[::-1]:
        target.load_state_dict(state)
    assert_equal(resumed.state_dict(), kept)
    train(fresh, resumed, range(3, 6))
    assert_equal(optimizer_state["master_params"], kept["master_params"])
    assert_equal(list(fresh.parameters()), list(through.parameters()))
    assert_equal(resumed.state_dict(), optimizer.state_dict())
    for param in fresh.parameters():
        made = [masters.master(param), resumed.state[param].get("momentum_buffer")]
        assert {tensor.stride() for tensor in made if tensor is not None} <= {param.stride()}


def test_state_of_plain_training_loads_and_masters_are_made_anew() -> None:
    plain = Mlp().bfloat16()
    theirs = OPTIMIZERS["adamw"](plain.parameters())
    train(plain, theirs, range(3))
    module, optimizer, masters = prepared(steps=1)
    module.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    param, twin = module.head.weight, plain.head.weight
    assert_equal(optimizer.state[param]["exp_avg"], theirs.state[twin]["exp_avg"].float())
    assert masters.master(param) is None
    module.zero_grad()
    optimizer.step()
    assert torch.equal(masters.master(param), twin.float())
    train(module, optimizer, range(3, 4))
    state_dict = copy.deepcopy(optimizer.state_dict())
    assert state_dict["state"][6]["step"] == 4
    state_dict["master_params"][1] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"master parameter 1 .* parameter, \(16,\), found \(1,\)"):
        optimizer.load_state_dict(state_dict)


def test_masters_follow_changed_elements_and_keep_the_others() -> None:
    module, optimizer, masters = prepared("sgd", steps=3)
    param = module.head.weight
    state, expected = {"head.weight": param.detach().clone()}, masters.master(param).clone()
    assert not torch.equal(expected, expected.bfloat16().float())
    for values in (state["head.weight"], expected):
        values[0, :2] = torch.tensor([3.0, float("nan")])
    module.load_state_dict(state, strict=False)
    module.zero_grad()
    optimizer.step()
    torch.testing.assert_close(masters.master(param), expected, rtol=0, atol=0, equal_nan=True)
    param.data.fill_(0.5)  # which cannot be noticed
    masters.refresh()
    optimizer.step()
    assert torch.equal(masters.master(param), torch.full_like(param, 0.5, dtype=FP32))


@on_ranks(2, cases=(False, True))
def test_masters_follow_writes_through_data_when_the_wrapper_is_told(shard: bool) -> None:
    module = nn.Linear(4, 4).bfloat16()
    ours = BucketDDP(module, grad_dtype=FP32, shard_optimizer=shard)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    for told in (False, True):
        ours(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        ours.wait_for_parameters()
        before = module.weight.detach().clone()
        module.weight.data.fill_(0.5)
        if told:
            ours.refresh_masters()
        optimizer.step()
        ours.wait_for_parameters()
        assert torch.equal(module.weight, torch.full_like(before, 0.5) if told else before)


def hook_counts(optimizer: Optimizer) -> list[int]:
    return [len(value) for name, value in vars(optimizer).items() if name.endswith("_hooks")]


def test_masters_are_attached_once_and_leave_with_close() -> None:
    module, optimizer, masters = failed_step()
    assert master_params(optimizer) is masters
    assert hook_counts(copy.deepcopy(optimizer)) == [0] * 6, "copies are plain"
    with pytest.raises(ValueError, match="has master parameters already"):
        Swap(optimizer)
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, found Mlp; pass the optimizer that"):
        master_params(module)  # type: ignore[arg-type]
    masters.close()
    assert_at_rest(optimizer, module)
    assert hook_counts(optimizer) == [0] * 6
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    assert master_params(optimizer) is not masters


@on_ranks(1)
def test_an_optimizer_nobody_prepared_has_masters_from_its_first_step() -> None:
    module, other = low(), low()
    ours = BucketDDP(module, grad_dtype=FP32)
    train(other, other_optimizer := OPTIMIZERS["sgd"](other.parameters()), range(1))
    assert sum(hook_counts(other_optimizer)) == 0, "an optimizer of other parameters"
    train(module, OPTIMIZERS["adamw"](module.parameters()), range(2))
    assert_equal(list(module.parameters()), ByHand(2).params)
    ours.close()
    for param in module.parameters():
        param.grad, param.grad_dtype = None, FP32
    with pytest.raises(RuntimeError, match=r"same dtype|expected scalar type|expected dtype"):  # torch's own refusal
        train(module, OPTIMIZERS["adamw"](module.parameters()), range(1))


@on_ranks(2)
def test_the_optimizer_inside_zero_has_the_masters() -> None:
    found = []
    for kind in (optim.SGD, partial(ZeroRedundancyOptimizer, optimizer_class=optim.SGD)):
        ours = BucketDDP(low(), grad_dtype=FP32)
        optimizer = kind(ours.parameters(), lr=0.1)
        for step in range(3):
            ours.zero_grad()
            backward(ours, step, rank=0)
            optimizer.step()
        found.append([param.detach() for param in ours.module.parameters()])
    assert_equal(*found)


MIXED: list[tuple[str, torch.dtype, torch.dtype, dict[str, Any], bool]] = [
    ("Adam", torch.float32, torch.float64, {}, True),
    ("AdamW", torch.float32, torch.float64, {"master_params": False}, True),
    ("RAdam", torch.bfloat16, torch.float64, {}, True),
    ("NAdam", torch.bfloat16, torch.float32, {"master_params": False}, True),
    ("Adamax", torch.bfloat16, torch.float32, {}, False),
    ("Adamax", torch.float64, torch.float64, {}, False),
    ("Adam", torch.float32, torch.float64, {"shard_optimizer": True}, False),
    ("SGD", torch.float32, torch.float64, {}, False),
    ("RMSprop", torch.bfloat16, torch.float64, {}, False),
]


@on_ranks(1, cases=MIXED)
def test_an_optimizer_that_refuses_the_gradients_dtype_is_named(
    kind: str, dtype: torch.dtype, grad_dtype: torch.dtype, options: dict[str, Any], refuses: bool
) -> None:
    """Where it is prepared, in its first step at the latest. The others step."""
    for prepared in (True, False):
        module = nn.Linear(4, 4).to(dtype)
        ours = BucketDDP(module, grad_dtype=grad_dtype, **options)
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.1)
        ours(torch.ones(2, 4, dtype=dtype)).sum().backward()
        refused = pytest.raises(ValueError, match=rf"'weight', found {kind}, which takes its own dtype alone")
        with refused if refuses else nullcontext():
            if prepared:
                ours.prepare_optimizer(optimizer)
            optimizer.step()
        ours.close()


@on_ranks(1)
def test_a_fused_optimizer_that_refuses_the_gradients_dtype_is_named() -> None:
    module = nn.Linear(4, 4)
    ours = BucketDDP(module, grad_dtype=torch.float64)
    with pytest.raises(ValueError, match="found SGD"):
        ours.prepare_optimizer(torch.optim.SGD(module.parameters(), lr=0.1, fused=True))
