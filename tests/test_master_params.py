"""fp32 masters: the optimizer's own update on fp32 copies, bit for bit, seen from outside as if there were none."""

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.optim.optimizers import Optimizers
from lightning_bucketddp.optim.stepped import Stepped
from lightning_bucketddp.optim.swap import Swap, master_params
from tests.models import Branches, MixedDtypes, Mlp, batch, loss_of

Make = Callable[[Any], Optimizer]
MIXED = "same dtype|expected scalar type|expected dtype"  # torch's refusals of a bf16 parameter with an fp32 gradient

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw_for_loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "lbfgs_strong_wolfe": lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
}


def low(dtype: torch.dtype = torch.bfloat16, model: Callable[[], nn.Module] = Mlp) -> nn.Module:
    """A model in a low precision that accumulates fp32 gradients."""
    torch.manual_seed(3)
    module = model()
    if model is not MixedDtypes:
        module.to(dtype)
    for param in module.parameters():
        param.grad_dtype = torch.float32
    return module


def loss(module: nn.Module, step: int) -> Tensor:
    inputs, target = batch(step, rank=0)
    return loss_of(module(inputs.to(next(module.parameters()).dtype)).float(), target)


def closure_for(module: nn.Module, optimizer: Optimizer, step: int) -> Callable[[], Tensor]:
    """What Lightning passes: forward, zero_grad, backward."""

    def closure() -> Tensor:
        value = loss(module, step)
        optimizer.zero_grad()
        value.backward()
        return value

    return closure


def train(module: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.step(closure_for(module, optimizer, step))


def backward(module: nn.Module, step: int = 0) -> None:
    module.zero_grad()
    loss(module, step).backward()


class ByHand:
    """The reference: an optimizer on fp32 copies, whose rounded values the module's parameters are."""

    def __init__(self, module: nn.Module, make: Make) -> None:
        self.module = module
        self.params = list(module.parameters())
        self.copies = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizer = make(self.copies)

    def round_copies(self) -> None:
        with torch.no_grad():
            for param, fp32 in zip(self.params, self.copies, strict=True):
                param.copy_(fp32)

    def train(self, steps: range) -> None:
        for step in steps:

            def closure(step: int = step) -> Tensor:
                self.round_copies()
                backward(self.module, step)
                for param, fp32 in zip(self.params, self.copies, strict=True):
                    fp32.grad = param.grad
                return loss(self.module, step)

            self.optimizer.step(closure)
            self.round_copies()


def params_in(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def assert_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.dtype is other.dtype, index
        assert torch.equal(mine, other), index


def assert_same(value: Any, other: Any) -> None:
    """Nested state, bit for bit."""
    if isinstance(value, Tensor):
        assert value.dtype is other.dtype
        assert torch.equal(value, other)
    elif isinstance(value, dict):
        assert value.keys() == other.keys()
        for key in value:
            assert_same(value[key], other[key])
    elif isinstance(value, list | tuple):
        assert len(value) == len(other)
        for mine, theirs in zip(value, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert value == other


def assert_at_rest(optimizer: Optimizer, module: nn.Module) -> None:
    """The optimizer holds the module's parameters and nothing else."""
    assert all(mine is param for mine, param in zip(params_in(optimizer), module.parameters(), strict=True))
    known = set(module.parameters())
    assert all(key in known for key in optimizer.state)


# -- the update ------------------------------------------------------------------------------------


def test_torch_rejects_bf16_parameters_with_fp32_gradients() -> None:
    for name in ("adam", "adam_foreach", "adamw_fused"):
        module = low()
        optimizer = OPTIMIZERS[name](module.parameters())
        backward(module)
        with pytest.raises(RuntimeError, match=MIXED):
            optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_is_the_optimizers_own_on_fp32_copies(name: str, dtype: torch.dtype) -> None:
    module, reference = low(dtype), ByHand(low(dtype), OPTIMIZERS[name])
    start = [param.detach().clone() for param in module.parameters()]
    optimizer = OPTIMIZERS[name](module.parameters())
    masters = master_params(optimizer)
    train(module, optimizer, range(6))
    reference.train(range(6))
    assert_at_rest(optimizer, module)
    assert any(not torch.equal(param, before) for param, before in zip(module.parameters(), start, strict=True))
    assert_bits(list(module.parameters()), reference.params)
    assert_bits([masters.master(param) for param in module.parameters()], [p.detach() for p in reference.copies])
    state, expected = optimizer.state_dict()["state"], reference.optimizer.state_dict()["state"]
    for index in expected:
        assert_same(state[index], expected[index])


def test_small_updates_add_up() -> None:
    """In bf16 alone 1 + 0.001 is 1, however often."""
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    optimizer = torch.optim.SGD([param], lr=1.0)
    master_params(optimizer)
    for _ in range(20):
        param.grad = torch.full((4,), -0.001)
        optimizer.step()
    assert param.tolist() == [torch.tensor(1.02).bfloat16().item()] * 4


@pytest.mark.parametrize("how", ["no closure", "positional", "keyword"])
def test_closures_run_on_the_modules_parameters(how: str) -> None:
    module, reference = low(), ByHand(low(), OPTIMIZERS["adamw_foreach"])
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    master_params(optimizer)
    seen = []
    for step in range(3):
        inner = closure_for(module, optimizer, step)

        def closure(inner: Callable[[], Tensor] = inner) -> Tensor:
            assert_at_rest(optimizer, module)
            value = inner()
            assert all(param.grad.dtype is torch.float32 for param in params_in(optimizer))
            seen.append(value)
            return value

        if how == "no closure":
            closure()
            assert optimizer.step() is None
        elif how == "positional":
            assert optimizer.step(closure) is seen[-1]
        else:
            assert optimizer.step(closure=closure) is seen[-1]
    reference.train(range(3))
    assert len(seen) == 3
    assert_bits(list(module.parameters()), reference.params)


def test_inside_a_step_the_optimizer_sees_masters_with_the_very_gradients() -> None:
    module = low()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    masters = master_params(optimizer)
    backward(module)
    grads = [param.grad for param in module.parameters()]
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.extend(params_in(opt)))

    class Look(dict[str, Any]):
        """Also the step itself, when it reads the learning rate."""

        def __getitem__(self, key: str) -> Any:
            if key == "lr":
                assert all(param.grad is grad for param, grad in zip(seen, grads, strict=True))
            return super().__getitem__(key)

    optimizer.param_groups[0] = Look(optimizer.param_groups[0])
    optimizer.step()
    assert [param.dtype for param in seen] == [torch.float32] * 8
    assert_bits([param.detach() for param in seen], [masters.master(param) for param in module.parameters()])
    assert all(param.grad is grad for param, grad in zip(module.parameters(), grads, strict=True))
    assert all(param.grad is None for param in seen)


def test_groups_mix_dtypes_learning_rates_and_frozen_parameters() -> None:
    module = low(model=MixedDtypes)
    module.head.bias.requires_grad_(False)
    module.low.bias.requires_grad_(False)
    reference = ByHand(copy.deepcopy(module), lambda copies: torch.optim.AdamW(copies, lr=0.01))
    for param, twin in zip(module.parameters(), reference.params, strict=True):
        twin.grad_dtype = param.grad_dtype
    reference.optimizer = torch.optim.AdamW(
        [{"params": reference.copies[:3], "lr": 0.1}, {"params": reference.copies[3:]}], lr=0.01
    )
    params = list(module.parameters())
    optimizer = torch.optim.AdamW([{"params": params[:3], "lr": 0.1}, {"params": params[3:]}], lr=0.01)
    masters = master_params(optimizer)
    train(module, optimizer, range(4))
    reference.train(range(4))
    assert_bits(params, reference.params)
    assert [name for name, param in module.named_parameters() if masters.master(param) is not None] == ["low.weight"]
    assert_at_rest(optimizer, module)


def test_optimizers_without_low_precision_parameters_are_left_as_they_are() -> None:
    module = Mlp()
    optimizer = OPTIMIZERS["adam"](module.parameters())
    master_params(optimizer)
    train(module, optimizer, range(2))
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    assert all(value.dtype is torch.float32 for state in optimizer.state.values() for value in state.values())


def test_bf16_parameters_with_bf16_gradients_are_left_as_they_are() -> None:
    module = Mlp().bfloat16()
    optimizer = OPTIMIZERS["adam"](module.parameters())
    master_params(optimizer)
    train(module, optimizer, range(2))
    assert optimizer.state[module.head.weight]["exp_avg"].dtype is torch.bfloat16
    assert optimizer.state_dict().keys() == {"state", "param_groups"}


def test_parameters_added_or_unfrozen_later_get_masters() -> None:
    module = low()
    module.head.requires_grad_(False)
    params = list(module.parameters())
    optimizer = torch.optim.AdamW(params[:2] + params[6:], lr=0.01)
    masters = master_params(optimizer)
    train(module, optimizer, range(2))
    assert [masters.master(param) is not None for param in params] == [True] * 2 + [False] * 6
    optimizer.add_param_group({"params": params[2:6], "lr": 0.1})
    module.head.requires_grad_(True)
    train(module, optimizer, range(2, 4))
    assert all(masters.master(param) is not None for param in params)
    for param in params:
        assert torch.equal(masters.master(param).bfloat16(), param)
        assert optimizer.state[param]["exp_avg"].dtype is torch.float32


def test_parameters_frozen_between_backward_and_step_are_stepped_on_like_torch_does() -> None:
    module, reference = low(), ByHand(low(), OPTIMIZERS["adamw_foreach"])
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    master_params(optimizer)
    backward(module)
    module.requires_grad_(False)
    optimizer.step()
    reference.train(range(1))
    assert_bits([param.detach() for param in module.parameters()], [p.detach() for p in reference.params])


def test_state_from_before_becomes_fp32_with_the_first_master() -> None:
    module = Mlp().bfloat16()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    train(module, optimizer, range(2))
    master_params(optimizer)
    module.zero_grad()
    for param in module.parameters():
        param.grad_dtype = torch.float32
    before = {param: optimizer.state[param]["exp_avg_sq"].clone() for param in module.parameters()}
    train(module, optimizer, range(2, 3))
    for param, rounded in before.items():
        state = optimizer.state[param]
        assert state["exp_avg_sq"].dtype is torch.float32
        assert state["step"] == 3
        assert rounded.dtype is torch.bfloat16


def test_only_parameters_with_a_gradient_are_written() -> None:
    module = low(model=Branches)
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    master_params(optimizer)
    for take in ("both", "left"):
        versions = {name: param._version for name, param in module.named_parameters()}
        module.zero_grad()
        inputs, target = batch(0, 0)
        loss_of(module(inputs.bfloat16(), take).float(), target).backward()
        optimizer.step()
        written = {name for name, param in module.named_parameters() if param._version > versions[name]}
        expected = {name for name, param in module.named_parameters() if param.grad is not None}
        assert written == expected
    assert "right.weight" not in written
    assert "left.weight" in written


def test_what_the_optimizer_moves_without_a_gradient_is_written_too() -> None:
    """LBFGS moves along its history."""
    module = low(model=Branches)
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
    masters = master_params(optimizer)
    inputs, target = batch(0, 0)

    def closure(take: str) -> Tensor:
        optimizer.zero_grad()
        value = loss_of(module(inputs.bfloat16(), take).float(), target)
        value.backward()
        return value

    optimizer.step(lambda: closure("both"))
    before = module.right.weight.detach().clone()
    optimizer.step(lambda: closure("left"))
    assert module.right.weight.grad is None
    assert not torch.equal(module.right.weight, before)
    assert torch.equal(masters.master(module.right.weight).bfloat16(), module.right.weight)


def test_a_step_writes_each_parameter_once_also_with_a_closure() -> None:
    module = low()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    master_params(optimizer)
    for step in range(3):
        before = module.head.weight._version
        train(module, optimizer, range(step, step + 1))
        assert module.head.weight._version == before + 1


def test_sparse_gradients() -> None:
    def embedding() -> nn.Embedding:
        torch.manual_seed(3)
        module = nn.Embedding(6, 4, sparse=True, dtype=torch.bfloat16)
        module.weight.grad_dtype = torch.float32
        return module

    module, twin = embedding(), embedding()
    optimizer = torch.optim.SparseAdam(module.parameters())
    masters = master_params(optimizer)
    fp32 = nn.Parameter(twin.weight.detach().float())
    reference = torch.optim.SparseAdam([fp32])
    for _ in range(3):
        for each in (module, twin):
            each.zero_grad()
            each(torch.tensor([1, 4, 4])).float().square().sum().backward()
        fp32.grad = twin.weight.grad.float()
        optimizer.step()
        reference.step()
        with torch.no_grad():
            twin.weight.copy_(fp32)
    assert module.weight.grad.is_sparse
    assert_bits([module.weight, masters.master(module.weight)], [twin.weight, fp32.detach()])


def test_strides_are_kept() -> None:
    module = nn.Conv2d(2, 3, 3).to(torch.bfloat16, memory_format=torch.channels_last)
    module.weight.grad_dtype = torch.float32
    optimizer = OPTIMIZERS["adamw_foreach"]([module.weight])
    masters = master_params(optimizer)
    module.weight.grad = torch.ones_like(module.weight, dtype=torch.float32)
    optimizer.step()
    strides = module.weight.stride()
    assert masters.master(module.weight).stride() == strides
    assert optimizer.state[module.weight]["exp_avg"].stride() == strides
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert masters.master(module.weight).stride() == strides


def test_masters_cost_four_bytes_per_element_and_nothing_else() -> None:
    module = low()
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    masters = master_params(optimizer)
    train(module, optimizer, range(2))
    kept = list(masters.stepped._masters.values())
    assert sum(t.untyped_storage().nbytes() for t in kept) == 4 * sum(p.numel() for p in module.parameters())
    assert all(t.grad is None for t in kept)
    assert not masters._swapped
    assert masters._state is None


def test_gradients_that_lost_their_dtype_are_converted() -> None:
    """As after ``close()`` of the wrapper, or a deepcopy of the module before the optimizer was made."""
    module = low()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    masters = master_params(optimizer)
    train(module, optimizer, range(1))
    module.zero_grad()
    for param in module.parameters():
        param.grad_dtype = torch.bfloat16
    before = masters.master(module.head.weight).clone()
    train(module, optimizer, range(1, 2))
    assert module.head.weight.grad.dtype is torch.bfloat16
    assert not torch.equal(masters.master(module.head.weight), before)


def test_a_module_moved_to_fp32_drops_its_masters() -> None:
    module = low()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    masters = master_params(optimizer)
    train(module, optimizer, range(1))
    module.zero_grad()
    module.float()
    train(module, optimizer, range(1, 3))
    assert masters.master(module.head.weight) is None
    assert "master_params" not in optimizer.state_dict()


# -- everything around a step ----------------------------------------------------------------------


def test_the_optimizer_may_clear_gradients_in_its_step() -> None:
    class Clearing(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            self.zero_grad()

    module = low()
    optimizer = Clearing(module.parameters())
    master_params(optimizer)
    backward(module)
    optimizer.step()
    assert all(param.grad is None for param in module.parameters())
    assert_at_rest(optimizer, module)


def test_a_step_that_calls_the_parents_hooked_step_steps_once() -> None:
    OPTIMIZERS["adamw_foreach"](Mlp().parameters())  # torch hooks the step of each class that was ever instantiated

    class Child(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    assert Child.__mro__[1].step.hooked
    module, reference = low(), ByHand(low(), OPTIMIZERS["adamw_for_loop"])
    optimizer = Child(module.parameters(), lr=0.01, foreach=False)
    master_params(optimizer)
    train(module, optimizer, range(3))
    reference.train(range(3))
    assert_bits(list(module.parameters()), reference.params)
    assert_at_rest(optimizer, module)


def test_third_party_optimizers_that_write_through_data() -> None:
    class Old(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            if closure is not None:
                closure()
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.data.add_(param.grad.data, alpha=-group["lr"])

    module, reference = low(), ByHand(low(), Old)
    optimizer = Old(module.parameters())
    master_params(optimizer)
    with torch.enable_grad():
        train(module, optimizer, range(3))
    reference.train(range(3))
    assert_bits(list(module.parameters()), reference.params)


def test_schedulers() -> None:
    module, reference = low(), ByHand(low(), OPTIMIZERS["adamw_foreach"])
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    before = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    master_params(optimizer)
    schedulers = [before, torch.optim.lr_scheduler.StepLR(optimizer, 2)]
    schedulers += [
        torch.optim.lr_scheduler.ExponentialLR(reference.optimizer, 0.5),
        torch.optim.lr_scheduler.StepLR(reference.optimizer, 2),
    ]
    for step in range(4):
        train(module, optimizer, range(step, step + 1))
        reference.train(range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == reference.optimizer.param_groups[0]["lr"] < 0.01
    assert_bits(list(module.parameters()), reference.params)


def test_clipping_between_backward_and_step() -> None:
    module, twin = low(), low()
    reference = ByHand(twin, OPTIMIZERS["sgd"])
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    master_params(optimizer)
    for step in range(3):
        backward(module, step)
        norm = nn.utils.clip_grad_norm_(params_in(optimizer), 0.01)
        assert norm > 0.01
        optimizer.step()
        backward(twin, step)
        for param, fp32 in zip(reference.params, reference.copies, strict=True):
            fp32.grad = param.grad
        nn.utils.clip_grad_norm_(reference.copies, 0.01)
        reference.optimizer.step()
        reference.round_copies()
    assert_bits(list(module.parameters()), reference.params)


@pytest.mark.parametrize("name", ["sgd", "adamw_foreach", "adamw_fused"])
def test_grad_scaler_skips_a_step_with_an_overflow(name: str) -> None:
    module, reference = low(torch.float16), ByHand(low(torch.float16), OPTIMIZERS[name])
    optimizer = OPTIMIZERS[name](module.parameters())
    masters = master_params(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    other_scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(4):
        overflow = float("inf") if step == 2 else 1.0
        kept = [masters.master(param) for param in module.parameters()]
        kept = [None if tensor is None else tensor.clone() for tensor in kept]
        module.zero_grad()
        (scaler.scale(loss(module, step)) * overflow).backward()
        scaler.step(optimizer)
        scaler.update()
        reference.module.zero_grad()
        (other_scaler.scale(loss(reference.module, step)) * overflow).backward()
        for param, fp32 in zip(reference.params, reference.copies, strict=True):
            fp32.grad = param.grad
        other_scaler.step(reference.optimizer)
        other_scaler.update()
        reference.round_copies()
        assert_at_rest(optimizer, module)
        if step == 2:
            assert scaler.get_scale() == 128.0
            assert_bits(kept, [masters.master(param) for param in module.parameters()])
    assert_bits(list(module.parameters()), reference.params)
    assert torch.isfinite(module.head.weight).all()


# -- when a step fails -----------------------------------------------------------------------------


def test_a_closure_that_raises_leaves_the_parameters_in_place() -> None:
    module, reference = low(), ByHand(low(), OPTIMIZERS["adamw_foreach"])
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    master_params(optimizer)
    train(module, optimizer, range(2))

    def closure() -> Tensor:
        raise ArithmeticError("no loss today")

    with pytest.raises(ArithmeticError, match="no loss today"):
        optimizer.step(closure)
    assert_at_rest(optimizer, module)
    train(module, optimizer, range(2, 4))
    reference.train(range(4))
    assert_bits(list(module.parameters()), reference.params)


class Failing(torch.optim.AdamW):
    fail = False

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise ArithmeticError("no step today")
        return super().step(closure)


def failed_step() -> tuple[nn.Module, Optimizer, Swap]:
    module = low()
    optimizer = Failing(module.parameters(), lr=0.01)
    masters = master_params(optimizer)
    train(module, optimizer, range(2))
    optimizer.fail = True
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert params_in(optimizer)[0].dtype is torch.float32, "torch calls post hooks after a failure now"
    optimizer.fail = False
    return module, optimizer, masters


def test_restore_gives_the_parameters_back_after_a_step_that_raised() -> None:
    module, optimizer, masters = failed_step()
    masters.restore()
    masters.restore()
    assert_at_rest(optimizer, module)


def test_state_dicts_are_right_after_a_step_that_raised() -> None:
    module, optimizer, _ = failed_step()
    state_dict = optimizer.state_dict()
    assert_at_rest(optimizer, module)
    assert state_dict["master_params"].keys() == set(range(8))
    module, optimizer, _ = failed_step()
    optimizer.load_state_dict(state_dict)
    assert_at_rest(optimizer, module)


@pytest.mark.parametrize("closure", [True, False])
def test_the_next_step_is_right_after_a_step_that_raised(closure: bool) -> None:
    module, optimizer, _ = failed_step()
    reference = ByHand(low(), OPTIMIZERS["adamw_foreach"])
    if closure:
        train(module, optimizer, range(2, 3))
    else:
        backward(module, 2)
        optimizer.step()
    reference.train(range(3))
    assert_bits(list(module.parameters()), reference.params)
    assert_at_rest(optimizer, module)


def test_the_owner_of_the_step_restores_at_once() -> None:
    module = low()
    optimizer = Failing(module.parameters(), lr=0.01)
    masters = master_params(optimizer)
    backward(module)
    with masters.restored_after():
        optimizer.step()
    optimizer.fail = True
    with pytest.raises(ArithmeticError), masters.restored_after():
        optimizer.step()
    assert_at_rest(optimizer, module)


# -- state dicts -----------------------------------------------------------------------------------


def saved_and_read(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("name", ["adamw_foreach", "adamw_fused", "sgd_momentum_foreach", "adagrad", "lbfgs"])
def test_resumed_training_is_the_same_bit_for_bit(name: str, model_first: bool) -> None:
    through = low(model=MixedDtypes) if name != "lbfgs" else low()
    optimizer = OPTIMIZERS[name](through.parameters())
    masters = master_params(optimizer)
    train(through, optimizer, range(3))
    module_state = saved_and_read(through.state_dict())
    optimizer_state = saved_and_read(optimizer.state_dict())
    train(through, optimizer, range(3, 6))

    fresh = low(model=type(through))
    with torch.no_grad():
        for param in fresh.parameters():
            param.mul_(2)
    resumed = OPTIMIZERS[name](fresh.parameters())
    loaded_masters = master_params(resumed)
    if model_first:
        fresh.load_state_dict(module_state)
    resumed.load_state_dict(optimizer_state)
    if not model_first:
        fresh.load_state_dict(module_state)
    assert_same(resumed.state_dict(), optimizer_state)
    train(fresh, resumed, range(3, 6))
    assert_bits(list(fresh.parameters()), list(through.parameters()))
    assert_same(resumed.state_dict(), optimizer.state_dict())
    for param, twin in zip(fresh.parameters(), through.parameters(), strict=True):
        if param.dtype is torch.bfloat16:
            assert_bits([loaded_masters.master(param)], [masters.master(twin)])


def test_masters_matter_for_resuming() -> None:
    """Without them the same resumption differs: the test above would notice."""
    through = low()
    optimizer = OPTIMIZERS["adamw_foreach"](through.parameters())
    masters = master_params(optimizer)
    train(through, optimizer, range(3))
    fresh = low()
    resumed = OPTIMIZERS["adamw_foreach"](fresh.parameters())
    resumed_masters = master_params(resumed)
    fresh.load_state_dict(through.state_dict())
    state_dict = copy.deepcopy(optimizer.state_dict())
    del state_dict["master_params"]
    resumed.load_state_dict(state_dict)
    train(through, optimizer, range(3, 4))
    train(fresh, resumed, range(3, 4))
    assert not torch.equal(masters.master(through.head.weight), resumed_masters.master(fresh.head.weight))


def test_loading_does_not_share_masters_or_state_with_the_state_dict() -> None:
    module = low()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    master_params(optimizer)
    train(module, optimizer, range(2))
    state_dict = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state_dict)
    optimizer.load_state_dict(state_dict)
    train(module, optimizer, range(2, 4))
    assert_same(state_dict["master_params"], kept["master_params"])
    for index, state in kept["state"].items():
        assert_same(state["exp_avg"], state_dict["state"][index]["exp_avg"])


def test_a_state_dict_of_plain_bf16_training_loads() -> None:
    plain = Mlp().bfloat16()
    theirs = OPTIMIZERS["adamw_foreach"](plain.parameters())
    train(plain, theirs, range(3))
    module = low()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    masters = master_params(optimizer)
    train(module, optimizer, range(1))
    module.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    param, twin = module.head.weight, plain.head.weight
    assert_bits([optimizer.state[param]["exp_avg"]], [theirs.state[twin]["exp_avg"].float()])
    assert masters.master(param) is None, "made from the parameters in the next step"
    module.zero_grad()
    optimizer.step()
    assert torch.equal(masters.master(param), twin.float())
    train(module, optimizer, range(3, 4))
    assert optimizer.state[param]["step"] == 4


def test_a_state_dict_with_masters_loads_into_a_plain_optimizer() -> None:
    module = low()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    master_params(optimizer)
    train(module, optimizer, range(3))
    plain = Mlp().bfloat16()
    theirs = OPTIMIZERS["adamw_foreach"](plain.parameters())
    theirs.load_state_dict(saved_and_read(optimizer.state_dict()))
    assert theirs.state[plain.head.weight]["exp_avg"].dtype is torch.bfloat16
    train(plain, theirs, range(3, 4))
    assert theirs.state[plain.head.weight]["step"] == 4
    assert theirs.state_dict().keys() == {"state", "param_groups"}


def test_masters_of_another_shape_are_refused() -> None:
    module = low()
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    master_params(optimizer)
    train(module, optimizer, range(1))
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["master_params"][1] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"master parameter 1 .* shape \(1,\), the optimizer's parameter \(16,\)"):
        optimizer.load_state_dict(state_dict)


def test_one_ranks_part_of_a_sharded_optimizer_is_refused() -> None:
    optimizer = OPTIMIZERS["sgd_momentum_foreach"](low().parameters())
    master_params(optimizer)
    state_dict = {**optimizer.state_dict(), "bucketddp_shard": {0: (0, 5)}}
    with pytest.raises(ValueError, match=r"expected a whole optimizer state dict.*found one of another shard"):
        optimizer.load_state_dict(state_dict)


# -- parameters changed from outside ---------------------------------------------------------------


def test_masters_follow_loaded_weights() -> None:
    module, other = low(), low()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    masters = master_params(optimizer)
    train(module, optimizer, range(3))
    with torch.no_grad():
        other.head.weight.add_(1)
    module.load_state_dict(other.state_dict())
    module.zero_grad()
    optimizer.step()
    assert_bits(list(module.parameters()), list(other.parameters()))
    for param in module.parameters():
        assert torch.equal(masters.master(param).bfloat16(), param)


def test_masters_follow_parameters_that_a_hook_of_the_step_changes() -> None:
    module = low(model=Branches)
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    weight = module.right.weight

    @torch.no_grad()
    def halve(*_: Any) -> None:
        if weight.grad is None:
            weight.mul_(0.5)

    optimizer.register_step_post_hook(halve)  # before the masters' own
    masters = master_params(optimizer)
    for take in ("both", "left", "left"):
        module.zero_grad()
        inputs, target = batch(0, 0)
        loss_of(module(inputs.bfloat16(), take).float(), target).backward()
        before = weight.detach().clone()
        optimizer.step()
    assert torch.equal(weight, before / 2)
    assert torch.equal(masters.master(weight), before.float()), "as it was when the last step began"


def test_elements_that_did_not_change_keep_their_master() -> None:
    module = low()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    masters = master_params(optimizer)
    train(module, optimizer, range(3))
    param = module.head.weight
    before = masters.master(param).clone()
    assert not torch.equal(before, before.bfloat16().float())
    with torch.no_grad():
        param[0, :2] = torch.tensor([3.0, float("nan")])
    module.zero_grad()
    optimizer.step()
    expected = before.clone()
    expected[0, :2] = torch.tensor([3.0, float("nan")])
    torch.testing.assert_close(masters.master(param), expected, rtol=0, atol=0, equal_nan=True)


def test_weights_swapped_out_and_back_cost_no_precision() -> None:
    """As an EMA callback does around validation."""
    module, reference = low(), ByHand(low(), OPTIMIZERS["adamw_foreach"])
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    master_params(optimizer)
    train(module, optimizer, range(3))
    kept = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    module.load_state_dict(kept)
    train(module, optimizer, range(3, 5))
    reference.train(range(5))
    assert_bits(list(module.parameters()), reference.params)


def test_masters_are_not_compared_when_nothing_changed_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Tensor] = []
    follow = Stepped._follow

    def counted(self: Stepped, param: Tensor) -> None:
        compared.append(param)
        follow(self, param)

    monkeypatch.setattr(Stepped, "_follow", counted)
    module = low()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    master_params(optimizer)
    train(module, optimizer, range(3))
    assert not compared
    with torch.no_grad():
        module.head.bias.add_(1)
    train(module, optimizer, range(3, 5))
    assert [param is module.head.bias for param in compared] == [True]


def test_refresh_notices_writes_through_data() -> None:
    module = low()
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    masters = master_params(optimizer)
    train(module, optimizer, range(2))
    param = module.head.weight
    param.data.clamp_(-0.01, 0.01)
    masters.refresh()
    assert masters.master(param).abs().max() <= torch.tensor(0.01).bfloat16()
    module.zero_grad()
    optimizer.step()
    assert param.abs().max() <= torch.tensor(0.01).bfloat16()


# -- attaching and detaching -----------------------------------------------------------------------


def test_attaching_twice_is_the_same() -> None:
    module, reference = low(), ByHand(low(), OPTIMIZERS["adamw_foreach"])
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    masters = master_params(optimizer)
    assert master_params(optimizer) is masters
    with pytest.raises(ValueError, match="already"):
        Swap(optimizer)
    train(module, optimizer, range(2))
    reference.train(range(2))
    assert_bits(list(module.parameters()), reference.params)


def test_wrappers_around_optimizers_are_refused() -> None:
    class Wrapped:
        pass

    with pytest.raises(TypeError, match="found Wrapped"):
        master_params(Wrapped())  # type: ignore[arg-type]


def hook_counts(optimizer: Optimizer) -> list[int]:
    return [len(value) for name, value in vars(optimizer).items() if name.endswith("_hooks")]


def test_close_leaves_a_plain_optimizer() -> None:
    module, optimizer, masters = failed_step()
    masters.close()
    masters.close()
    assert_at_rest(optimizer, module)
    assert hook_counts(optimizer) == [0] * 6
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    optimizer.load_state_dict(optimizer.state_dict())
    module.zero_grad()
    for param in module.parameters():
        param.grad_dtype = torch.bfloat16
    train(module, optimizer, range(2, 3))
    assert optimizer.state[module.head.weight]["exp_avg"].dtype is torch.bfloat16
    assert master_params(optimizer) is not masters


def test_copies_of_the_optimizer_are_plain() -> None:
    module = low()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    masters = master_params(optimizer)
    train(module, optimizer, range(2))
    other_module, other = copy.deepcopy((module, optimizer))
    assert hook_counts(other) == [0] * 6
    assert_at_rest(other, other_module)
    before = masters.master(module.head.weight).clone()
    for param in other_module.parameters():
        param.grad = None
        param.grad_dtype = torch.float32
    copied = master_params(other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch itself shares "step" otherwise
    train(other_module, other, range(2, 4))
    assert torch.equal(masters.master(module.head.weight), before)
    train(module, optimizer, range(2, 4))
    for mine, theirs in zip(module.parameters(), other_module.parameters(), strict=True):
        assert_bits([masters.master(mine)], [copied.master(theirs)])


def test_nothing_outlives_the_optimizer() -> None:
    module = low()
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    masters = weakref.ref(master_params(optimizer))
    train(module, optimizer, range(2))
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
        assert masters() is None
    finally:
        gc.enable()


# -- prepared at the first step --------------------------------------------------------------------


def at_first_step(module: nn.Module) -> tuple[RemovableHandle, WeakSet[Optimizer]]:
    """Prepares optimizers of the module in their first step; the handle that ends it, and those that were prepared."""
    known: WeakSet[Optimizer] = WeakSet()
    upkeep = SimpleNamespace(trains=lambda: {id(param) for param in module.parameters()})
    passes: Any = SimpleNamespace(reducer=SimpleNamespace(storage=None), upkeep=upkeep)
    group: Any = None
    handle = Optimizers(module, known, passes, group, Options(grad_dtype=torch.float32)).prepare_at_first_step()
    assert handle is not None
    return handle, known


@pytest.fixture
def prepared() -> Iterator[tuple[nn.Module, WeakSet[Optimizer]]]:
    module = low()
    handle, known = at_first_step(module)
    yield module, known
    handle.remove()


@pytest.mark.parametrize("closure", [True, False])
def test_an_optimizer_nobody_prepared_has_masters_from_its_first_step(
    prepared: tuple[nn.Module, WeakSet[Optimizer]], closure: bool
) -> None:
    module, found = prepared
    reference = ByHand(low(), OPTIMIZERS["adamw_foreach"])
    optimizer = OPTIMIZERS["adamw_foreach"](module.parameters())
    for step in range(3):
        if closure:
            train(module, optimizer, range(step, step + 1))
        else:
            backward(module, step)
            optimizer.step()
    reference.train(range(3))
    assert list(found) == [optimizer]
    assert_bits(list(module.parameters()), reference.params)
    assert_at_rest(optimizer, module)


def test_optimizers_of_other_parameters_are_left_alone(prepared: tuple[nn.Module, WeakSet[Optimizer]]) -> None:
    _, found = prepared
    other = low()
    optimizer = OPTIMIZERS["sgd"](other.parameters())
    train(other, optimizer, range(1))
    assert not found
    assert "master_params" not in optimizer.state_dict()


def test_the_handle_ends_it() -> None:
    module = low()
    at_first_step(module)[0].remove()
    optimizer = OPTIMIZERS["adam"](module.parameters())
    backward(module)
    with pytest.raises(RuntimeError, match=MIXED):
        optimizer.step()


# -- in a Trainer ----------------------------------------------------------------------------------


class LowRegression(pl.LightningModule):
    """A bf16 module with one optimizer, or two in manual optimisation; its batches are step numbers."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.net = low()
        self.automatic_optimization = not manual

    def training_step(self, numbers: Tensor, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return loss(self.net, int(numbers))
        body, head = self.optimizers()
        for optimizer in (body, head):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(self.net, int(numbers)))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return None

    def configure_optimizers(self) -> Any:
        params = list(self.net.parameters())
        parts = [params] if self.automatic_optimization else [params[:6], params[6:]]
        optimizers = [OPTIMIZERS["adamw_foreach"](part) for part in parts]
        self.masters = [master_params(optimizer) for optimizer in optimizers]
        if not self.automatic_optimization:
            return optimizers
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)]


def trainer(epochs: int, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": 1}
    return pl.Trainer(max_epochs=epochs, **quiet, **options)


def numbers() -> DataLoader[int]:
    return DataLoader(range(4))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize(
    "options", [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}, {"manual": True}], ids=str
)
def test_trainers_train_and_resume_bit_for_bit(tmp_path: Any, options: dict[str, Any]) -> None:
    manual = options.pop("manual", False)
    through = LowRegression(manual)
    trainer(2, **options).fit(through, numbers())

    first, resumed = LowRegression(manual), LowRegression(manual)
    half = trainer(1, **options)
    half.fit(first, numbers())
    half.save_checkpoint(tmp_path / "half.ckpt")
    trainer(2, **options).fit(resumed, numbers(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert_bits(list(resumed.parameters()), list(through.parameters()))

    def fp32(module: LowRegression) -> list[Tensor]:
        return [it.detach() for masters in module.masters for it in masters.stepped._masters.values()]

    assert len(fp32(through)) == 8
    assert_bits(fp32(resumed), fp32(through))
    if not options and not manual:  # and it is the plain loop's training
        reference = ByHand(low(), OPTIMIZERS["adamw_foreach"])
        schedule = torch.optim.lr_scheduler.ExponentialLR(reference.optimizer, 0.9)
        for _ in range(2):
            reference.train(range(4))
            schedule.step()
        assert_bits(list(through.net.parameters()), reference.params)
