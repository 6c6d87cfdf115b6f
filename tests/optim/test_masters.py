"""fp32 masters: the optimizer's own update on fp32 copies, bit for bit, seen from outside as if there were none."""

import copy
import gc
import io
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.optim.optimizers import Optimizers
from lightning_bucketddp.optim.stepped import Stepped
from lightning_bucketddp.optim.swap import Swap, master_params
from tests.models import Branches, MixedDtypes, Mlp, batch, loss_of
from tests.optim.common import assert_equal

Make = Callable[[Any], Optimizer]


class Child(torch.optim.AdamW):
    """Calls its parent's step, which torch has hooked too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class ThroughData(Optimizer):
    """Writes parameters through ``.data``, as old ones do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data.add_(param.grad.data, alpha=-0.1)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_for_loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
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
    "child": lambda p: Child(p, lr=0.01, foreach=False),
    "through_data": ThroughData,
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


def loss(module: nn.Module, step: int, *args: Any) -> Tensor:
    inputs, target = batch(step, rank=0)
    return loss_of(module(inputs.to(next(module.parameters()).dtype), *args).float(), target)


def closure_for(module: nn.Module, optimizer: Optimizer, step: int, *args: Any) -> Callable[[], Tensor]:
    """What Lightning passes: forward, zero_grad, backward."""

    def closure() -> Tensor:
        value = loss(module, step, *args)
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


def prepared(
    make: str | Make = "adamw", model: Callable[[], nn.Module] = Mlp, steps: int = 0
) -> tuple[nn.Module, Optimizer, Swap]:
    """A low-precision module, its optimizer, and the masters, after some steps."""
    module = low(model=model)
    optimizer = (OPTIMIZERS[make] if isinstance(make, str) else make)(module.parameters())
    masters = master_params(optimizer)
    train(module, optimizer, range(steps))
    return module, optimizer, masters


class ByHand:
    """The reference: an optimizer on fp32 copies, whose rounded values are the module's parameters."""

    def __init__(self, module: nn.Module, make: Make) -> None:
        self.module = module
        self.params = list(module.parameters())
        self.copies = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizer = make(self.copies)

    def round_copies(self) -> None:
        with torch.no_grad():
            for param, fp32 in zip(self.params, self.copies, strict=True):
                param.copy_(fp32)

    def take_gradients(self) -> None:
        for param, fp32 in zip(self.params, self.copies, strict=True):
            fp32.grad = param.grad

    def train(self, steps: range) -> None:
        for step in steps:

            def closure(step: int = step) -> Tensor:
                self.round_copies()
                backward(self.module, step)
                self.take_gradients()
                return loss(self.module, step)

            self.optimizer.step(closure)
            self.round_copies()


def assert_trained(module: nn.Module, steps: int, make: str | Make = "adamw") -> None:
    """Asserts the parameters that the reference has after a number of steps."""
    reference = ByHand(low(), OPTIMIZERS[make] if isinstance(make, str) else make)
    reference.train(range(steps))
    assert_equal([param.detach() for param in module.parameters()], [param.detach() for param in reference.params])


def params_in(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def assert_at_rest(optimizer: Optimizer, module: nn.Module) -> None:
    """The optimizer holds the module's parameters and nothing else."""
    assert all(mine is param for mine, param in zip(params_in(optimizer), module.parameters(), strict=True))
    known = set(module.parameters())
    assert all(key in known for key in optimizer.state)


# -- the update ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in OPTIMIZERS), ("adamw", torch.float16), ("sgd_fused", torch.float16)],
)
def test_the_update_is_the_optimizers_own_on_fp32_copies(name: str, dtype: torch.dtype) -> None:
    module, reference = low(dtype), ByHand(low(dtype), OPTIMIZERS[name])
    start = [param.detach().clone() for param in module.parameters()]
    optimizer = OPTIMIZERS[name](module.parameters())
    masters = master_params(optimizer)
    train(module, optimizer, range(6))
    reference.train(range(6))
    assert_at_rest(optimizer, module)
    assert any(not torch.equal(param, before) for param, before in zip(module.parameters(), start, strict=True))
    assert_equal(list(module.parameters()), reference.params)
    assert_equal([masters.master(param) for param in module.parameters()], [p.detach() for p in reference.copies])
    state, expected = optimizer.state_dict()["state"], reference.optimizer.state_dict()["state"]
    assert_equal({index: state[index] for index in expected}, expected)


@pytest.mark.parametrize("how", ["no closure", "positional", "keyword"])
def test_closures_run_on_the_modules_parameters(how: str) -> None:
    module, optimizer, _ = prepared()

    def closure() -> Tensor:
        assert_at_rest(optimizer, module)
        value = closure_for(module, optimizer, 0)()
        assert all(param.grad.dtype is torch.float32 for param in params_in(optimizer))
        return value

    if how == "no closure":
        closure()
        assert optimizer.step() is None
    else:
        result = optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)
        assert torch.equal(result, loss(low(), 0))
    assert_trained(module, 1)


def test_a_step_is_on_masters_with_the_very_gradients() -> None:
    module, optimizer, masters = prepared()
    backward(module)
    module.requires_grad_(False)  # after backward: it is stepped on all the same
    grads = [param.grad for param in module.parameters()]
    seen: list[Tensor] = []

    def look(inside: Optimizer, *_: Any) -> None:
        seen.extend(params_in(inside))
        assert all(param.grad is grad for param, grad in zip(seen, grads, strict=True))

    optimizer.register_step_pre_hook(look)
    optimizer.step()
    assert_equal([param.detach() for param in seen], [masters.master(param) for param in module.parameters()])
    assert all(param.grad is grad for param, grad in zip(module.parameters(), grads, strict=True))


def test_groups_mix_dtypes_learning_rates_and_frozen_parameters() -> None:
    def make(params: list[Any]) -> Optimizer:
        return torch.optim.AdamW([{"params": params[:3], "lr": 0.1}, {"params": params[3:]}], lr=0.01)

    module = low(model=MixedDtypes)
    module.head.bias.requires_grad_(False)
    module.low.bias.requires_grad_(False)
    reference = ByHand(copy.deepcopy(module), make)
    for param, twin in zip(module.parameters(), reference.params, strict=True):
        twin.grad_dtype = param.grad_dtype
    optimizer = make(list(module.parameters()))
    masters = master_params(optimizer)
    train(module, optimizer, range(4))
    reference.train(range(4))
    assert_equal(list(module.parameters()), reference.params)
    assert [name for name, param in module.named_parameters() if masters.master(param) is not None] == ["low.weight"]
    assert_at_rest(optimizer, module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_without_fp32_gradients_of_their_own_have_no_masters(dtype: torch.dtype) -> None:
    module = Mlp().to(dtype)
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    master_params(optimizer)
    train(module, optimizer, range(2))
    assert optimizer.state[module.head.weight]["exp_avg"].dtype is dtype
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
    for param in params:
        assert torch.equal(masters.master(param).bfloat16(), param)
        assert optimizer.state[param]["exp_avg"].dtype is torch.float32


def test_a_step_writes_each_parameter_with_a_gradient_once() -> None:
    module, optimizer, _ = prepared(model=Branches)
    for take in ("both", "left"):
        versions = {name: param._version for name, param in module.named_parameters()}
        optimizer.step(closure_for(module, optimizer, 0, take))
        written = {name: param._version - versions[name] for name, param in module.named_parameters()}
        assert written == {name: int(param.grad is not None) for name, param in module.named_parameters()}
    assert not written["right.weight"]


def test_what_the_optimizer_moves_without_a_gradient_is_written_too() -> None:
    """LBFGS moves along its history."""
    module, optimizer, masters = prepared("lbfgs", Branches)
    weight = module.right.weight
    optimizer.step(closure_for(module, optimizer, 0, "both"))
    before = weight.detach().clone()
    optimizer.step(closure_for(module, optimizer, 0, "left"))
    assert weight.grad is None
    assert not torch.equal(weight, before)
    assert torch.equal(masters.master(weight).bfloat16(), weight)


def test_sparse_gradients() -> None:
    def embedding() -> nn.Embedding:
        torch.manual_seed(3)
        module = nn.Embedding(6, 4, sparse=True, dtype=torch.bfloat16)
        module.weight.grad_dtype = torch.float32
        return module

    module, reference = embedding(), ByHand(embedding(), torch.optim.SparseAdam)
    optimizer = torch.optim.SparseAdam(module.parameters())
    masters = master_params(optimizer)
    for _ in range(3):
        for each in (module, reference.module):
            each.zero_grad()
            each(torch.tensor([1, 4, 4])).float().square().sum().backward()
        reference.take_gradients()
        for each in (optimizer, reference.optimizer):
            each.step()
        reference.round_copies()
    assert module.weight.grad.is_sparse
    assert_equal([module.weight, masters.master(module.weight)], [reference.params[0], reference.copies[0].detach()])


def test_strides_are_kept() -> None:
    module = nn.Conv2d(2, 3, 3).to(torch.bfloat16, memory_format=torch.channels_last)
    module.weight.grad_dtype = torch.float32
    optimizer = OPTIMIZERS["adamw"]([module.weight])
    masters = master_params(optimizer)
    module.weight.grad = torch.ones_like(module.weight, dtype=torch.float32)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    strides = module.weight.stride()
    assert masters.master(module.weight).stride() == optimizer.state[module.weight]["exp_avg"].stride() == strides


def test_masters_cost_four_bytes_per_element_and_nothing_else() -> None:
    module, _, masters = prepared("sgd", steps=2)
    kept = list(masters.stepped._masters.values())
    assert sum(t.untyped_storage().nbytes() for t in kept) == 4 * sum(p.numel() for p in module.parameters())
    assert all(t.grad is None for t in kept)
    assert not masters._swapped
    assert masters._state is None


def test_dtypes_may_change_afterwards() -> None:
    module, optimizer, masters = prepared(steps=1)
    module.zero_grad()
    for param in module.parameters():
        param.grad_dtype = torch.bfloat16  # as after close() of the wrapper, or a deepcopy
    before = masters.master(module.head.weight).clone()
    train(module, optimizer, range(1, 2))
    assert module.head.weight.grad.dtype is torch.bfloat16
    assert not torch.equal(masters.master(module.head.weight), before)
    module.zero_grad()
    for param in module.parameters():
        param.grad_dtype = None
    module.float()
    train(module, optimizer, range(2, 4))
    assert masters.master(module.head.weight) is None
    assert "master_params" not in optimizer.state_dict()


def test_the_optimizer_may_clear_gradients_in_its_step() -> None:
    module, optimizer, _ = prepared()
    optimizer.register_step_pre_hook(lambda inside, *_: inside.zero_grad())
    backward(module)
    optimizer.step()
    assert all(param.grad is None for param in module.parameters())
    assert_at_rest(optimizer, module)


def test_grad_scaler_skips_a_step_with_an_overflow() -> None:
    module, reference = low(torch.float16), ByHand(low(torch.float16), OPTIMIZERS["adamw_fused"])
    optimizer = OPTIMIZERS["adamw_fused"](module.parameters())
    masters = master_params(optimizer)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in range(2)]
    for step in range(4):
        overflow = float("inf") if step == 2 else 1.0
        kept = [master.clone() for param in module.parameters() if (master := masters.master(param)) is not None]
        for each, scaler in zip((module, reference.module), scalers, strict=True):
            each.zero_grad()
            (scaler.scale(loss(each, step)) * overflow).backward()
        reference.take_gradients()
        for each, scaler in zip((optimizer, reference.optimizer), scalers, strict=True):
            scaler.step(each)
            scaler.update()
        reference.round_copies()
        if step == 2:
            assert scalers[0].get_scale() == 128.0
            assert_equal([masters.master(param) for param in module.parameters()], kept)
    assert_equal(list(module.parameters()), reference.params)
    assert torch.isfinite(module.head.weight).all()


# -- when a step fails -----------------------------------------------------------------------------


def test_a_closure_that_raises_leaves_the_parameters_in_place() -> None:
    module, optimizer, _ = prepared(steps=2)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert_at_rest(optimizer, module)
    train(module, optimizer, range(2, 4))
    assert_trained(module, 4)


class Failing(torch.optim.AdamW):
    fail = False

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise ArithmeticError("no step today")
        return super().step(closure)


def failed_step() -> tuple[nn.Module, Optimizer, Swap]:
    module, optimizer, masters = prepared(lambda params: Failing(params, lr=0.01), steps=2)
    optimizer.fail = True
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert params_in(optimizer)[0].dtype is torch.float32, "torch calls post hooks after a failure now"
    optimizer.fail = False
    return module, optimizer, masters


def step_without_closure(module: nn.Module, optimizer: Optimizer) -> None:
    backward(module, 2)
    optimizer.step()


AFTER_A_FAILURE: dict[str, tuple[Callable[[nn.Module, Optimizer, Swap], object], int]] = {
    "restore twice": (lambda module, optimizer, masters: (masters.restore(), masters.restore()), 2),
    "save": (lambda module, optimizer, masters: optimizer.state_dict()["master_params"][7], 2),
    "load": (lambda module, optimizer, masters: optimizer.load_state_dict(optimizer.state_dict()), 2),
    "step with a closure": (lambda module, optimizer, masters: train(module, optimizer, range(2, 3)), 3),
    "step without": (lambda module, optimizer, masters: step_without_closure(module, optimizer), 3),
}


@pytest.mark.parametrize("what", AFTER_A_FAILURE)
def test_after_a_step_that_raised_the_parameters_are_back(what: str) -> None:
    module, optimizer, masters = failed_step()
    do, steps = AFTER_A_FAILURE[what]
    do(module, optimizer, masters)
    assert_at_rest(optimizer, module)
    assert_trained(module, steps)


def test_the_owner_of_the_step_restores_at_once() -> None:
    module, optimizer, masters = prepared(lambda params: Failing(params, lr=0.01))
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


@pytest.mark.parametrize(
    ("name", "model_first"),
    [("adamw", True), ("adamw_fused", False), ("sgd_momentum", True), ("adagrad", False), ("lbfgs", True)],
)
def test_resumed_training_is_the_same_bit_for_bit(name: str, model_first: bool) -> None:
    model = Mlp if name == "lbfgs" else MixedDtypes
    through, optimizer, _ = prepared(name, model, steps=3)
    module_state, optimizer_state = saved_and_read(through.state_dict()), saved_and_read(optimizer.state_dict())
    train(through, optimizer, range(3, 6))
    fresh, resumed, fresh_masters = prepared(name, model)
    with torch.no_grad():
        for param in fresh.parameters():
            param.mul_(2)
    if model_first:
        fresh.load_state_dict(module_state)
    resumed.load_state_dict(optimizer_state)
    if not model_first:
        fresh.load_state_dict(module_state)
    assert_equal(resumed.state_dict(), optimizer_state)
    kept = copy.deepcopy(optimizer_state["master_params"])
    train(fresh, resumed, range(3, 6))
    assert_equal(optimizer_state["master_params"], kept)
    assert_equal(list(fresh.parameters()), list(through.parameters()))
    assert_equal(resumed.state_dict(), optimizer.state_dict())
    pairs = zip(fresh.parameters(), through.parameters(), strict=True)
    assert any(fresh_masters.master(mine) is not None for mine, _ in pairs)


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
    assert optimizer.state[param]["step"] == 4


def test_state_dicts_of_another_model_or_shard_are_refused() -> None:
    _, optimizer, _ = prepared("sgd", steps=1)
    state_dict = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"expected a whole optimizer state dict.*found one of another shard"):
        optimizer.load_state_dict({**state_dict, "bucketddp_shard": {0: (0, 5)}})
    state_dict["master_params"][1] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"master parameter 1 .* parameter, \(16,\), found \(1,\)"):
        optimizer.load_state_dict(state_dict)


# -- parameters changed from outside ---------------------------------------------------------------


def test_masters_follow_changed_elements_and_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Tensor] = []
    follow = Stepped._follow

    def counted(self: Stepped, param: Tensor) -> None:
        compared.append(param)
        follow(self, param)

    monkeypatch.setattr(Stepped, "_follow", counted)
    module, optimizer, masters = prepared("sgd", steps=3)
    assert not compared
    param = module.head.weight
    expected = masters.master(param).clone()
    assert not torch.equal(expected, expected.bfloat16().float())
    state = {"head.weight": param.detach().clone()}
    for values in (state["head.weight"], expected):
        values[0, :2] = torch.tensor([3.0, float("nan")])
    module.load_state_dict(state, strict=False)
    module.zero_grad()
    optimizer.step()
    assert [it is param for it in compared] == [True]
    torch.testing.assert_close(masters.master(param), expected, rtol=0, atol=0, equal_nan=True)
    param.data.fill_(0.5)  # which cannot be noticed
    masters.refresh()
    optimizer.step()
    assert torch.equal(param.float(), masters.master(param))
    assert torch.equal(param, torch.full_like(param, 0.5))


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
        before = weight.detach().clone()
        optimizer.step(closure_for(module, optimizer, 0, take))
    assert torch.equal(weight, before / 2)
    assert torch.equal(masters.master(weight), before.float()), "as it was when the last step began"


# -- attaching and detaching -----------------------------------------------------------------------


def hook_counts(optimizer: Optimizer) -> list[int]:
    return [len(value) for name, value in vars(optimizer).items() if name.endswith("_hooks")]


def test_masters_are_attached_once_and_to_optimizers_only() -> None:
    _, optimizer, masters = prepared()
    assert master_params(optimizer) is masters
    with pytest.raises(ValueError, match="has master parameters already"):
        Swap(optimizer)
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, found Mlp; pass the optimizer that"):
        master_params(Mlp())  # type: ignore[arg-type]


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
    module, optimizer, masters = prepared(steps=2)
    other_module, other = copy.deepcopy((module, optimizer))
    assert hook_counts(other) == [0] * 6
    assert_at_rest(other, other_module)
    for param in other_module.parameters():
        param.grad = None
        param.grad_dtype = torch.float32
    copied = master_params(other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch itself shares "step" otherwise
    for each in ((other_module, other), (module, optimizer)):
        train(*each, range(2, 4))
    pairs = zip(module.parameters(), other_module.parameters(), strict=True)
    assert all(torch.equal(masters.master(mine), copied.master(theirs)) for mine, theirs in pairs)


def test_nothing_outlives_the_optimizer() -> None:
    _, optimizer, swap = prepared(steps=2)
    gone, masters = weakref.ref(optimizer), weakref.ref(swap)
    gc.disable()
    try:
        del optimizer, swap
        assert gone() is None
        assert masters() is None
    finally:
        gc.enable()


# -- prepared at the first step --------------------------------------------------------------------


def test_an_optimizer_nobody_prepared_has_masters_from_its_first_step() -> None:
    module, other, known = low(), low(), WeakSet[Optimizer]()
    upkeep = SimpleNamespace(trains=lambda: {id(param) for param in module.parameters()})
    passes: Any = SimpleNamespace(reducer=SimpleNamespace(storage=None), upkeep=upkeep)
    group: Any = None
    handle = Optimizers(module, known, passes, group, Options(grad_dtype=torch.float32)).prepare_at_first_step()
    assert handle is not None
    try:
        train(other, OPTIMIZERS["sgd"](other.parameters()), range(1))
        assert not known, "an optimizer of other parameters"
        optimizer = OPTIMIZERS["adamw"](module.parameters())
        train(module, optimizer, range(1))
        backward(module, 1)
        optimizer.step()
        assert list(known) == [optimizer]
        assert_trained(module, 2)
    finally:
        handle.remove()
    module.zero_grad()
    later = OPTIMIZERS["adamw"](module.parameters())
    with pytest.raises(RuntimeError, match=r"same dtype|expected scalar type|expected dtype"):  # torch's own refusal
        train(module, later, range(1))
