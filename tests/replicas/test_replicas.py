"""Replicas inside one process give the gradients of one device, and are kept between steps."""

import copy
import gc
import io
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_bucketddp.replicas import replicas as replicas_file
from lightning_bucketddp.replicas.replicas import Replicas, data_parallel, gather, parallel_apply, replicate, scatter
from tests.models import MODELS, REPLICATED, AllKinds, Bits, Branches, Mlp, Outputs, batch, loss_of

THREE = ["cpu"] * 3
ALL = {**MODELS, **REPLICATED}
SINGLE = {"mixed_dtypes", "all_kinds"}  # cast to fp32 inside
ACROSS_SAMPLES = {"conv_batchnorm_channels_last", "all_kinds"}  # BatchNorm
SHARED, COPIED = True, False
both_ways = pytest.mark.parametrize("share", [SHARED, COPIED], ids=["shared", "copied"])


def make(name: str = "mlp") -> Any:
    torch.manual_seed(7)
    module = ALL[name]()
    if name not in SINGLE:
        module.double()
    for part in module.modules():  # double() makes a buffer that requires grad one that is computed
        for key, buffer in part.named_buffers(recurse=False):
            part.register_buffer(key, buffer.detach().requires_grad_(buffer.requires_grad))
    return module


def data(step: int = 0, samples: int = 6, name: str = "") -> tuple[Tensor, Tensor]:
    x, y = batch(step, 0, samples)
    if name == "all_kinds":
        y = y[:, :3]
    return (x, y) if name in SINGLE else (x.double(), y.double())


def call(replicas: Replicas, x: Tensor) -> Any:
    parts = scatter((x,), replicas.devices)
    return gather(parallel_apply(replicas.refresh(len(parts)), parts), "cpu")


def one_by_one(module: nn.Module, x: Tensor, y: Tensor, count: int = 3) -> tuple[Any, nn.Module]:
    """Call copies of ``module``, each with its chunk. Returns the output, and the first with the sum of gradients."""
    parts = x.chunk(count)
    copies = [copy.deepcopy(module) for _ in parts]
    output = gather([net(part) for net, part in zip(copies, parts, strict=True)], "cpu")
    loss_of(output, y).backward()
    for net in copies[1:]:
        for tensor, other in zip(trained(copies[0]), trained(net), strict=True):
            if other.grad is not None:
                tensor.grad = other.grad if tensor.grad is None else tensor.grad + other.grad
    return output, copies[0]


def trained(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.requires_grad)]


def assert_same(found: Any, expected: Any, what: str = "") -> None:
    if isinstance(expected, Outputs):
        found, expected = [found.logits, found.extras], [expected.logits, expected.extras]
    torch.testing.assert_close(found, expected, msg=lambda text: f"{what}: {text}")


def assert_same_grads(module: nn.Module, expected: nn.Module, what: str = "") -> None:
    for number, (tensor, other) in enumerate(zip(trained(module), trained(expected), strict=True)):
        where = f"{what} {number}"
        assert (tensor.grad is None) == (other.grad is None), f"{where}: {tensor.grad} and {other.grad}"
        if tensor.grad is not None:
            assert other.grad is not None
            assert tensor.grad.layout is other.grad.layout
            tolerance = {"rtol": 0.02, "atol": 0.01} if tensor.dtype is torch.bfloat16 else {}
            found, wanted = tensor.grad.to_dense(), other.grad.to_dense()
            torch.testing.assert_close(found, wanted, **tolerance, msg=lambda text, n=where: f"{n}: {text}")


def assert_same_state(module: nn.Module, expected: nn.Module) -> None:
    for (name, value), other in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        assert_same(value.to_dense(), other.to_dense(), name)


def clear(*modules: nn.Module) -> None:
    for module in modules:
        for tensor in trained(module):
            tensor.grad = None


def compare(replicas: Replicas, reference: nn.Module, x: Tensor, y: Tensor, what: str = "") -> None:
    """Compare the gradients with those that the reference has for the whole batch."""
    loss_of(call(replicas, x), y).backward()
    loss_of(reference(x), y).backward()
    assert_same_grads(replicas.module, reference, what)


@torch.no_grad()
def step(*modules: nn.Module) -> None:
    for module in modules:
        for tensor in trained(module):
            if tensor.grad is not None:
                tensor.sub_(tensor.grad.to_dense(), alpha=0.1)
    clear(*modules)


# -- gradients ---------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("name", sorted(ALL))
def test_replicas_do_what_modules_called_one_by_one_do(name: str, share: bool) -> None:
    module = make(name)
    replicas = Replicas(module, THREE, share)
    for number in range(2):
        x, y = data(number, 8, name)
        expected_output, expected = one_by_one(module, x, y)
        output = call(replicas, x)
        assert_same(output, expected_output)
        loss_of(output, y).backward()
        assert_same_grads(module, expected)
        assert_same_state(module, expected)
        if name not in ACROSS_SAMPLES and number == 0:
            whole = make(name)
            loss_of(whole(x), y).backward()
            assert_same_grads(module, whole)
        step(module)


def test_sparse_and_dense_gradients_of_one_parameter_add_up() -> None:
    module, reference = Bits().double(), Bits(sparse=False).double()
    reference.load_state_dict(module.state_dict())
    x, _ = data()
    outputs = parallel_apply(replicate(module, THREE), list(x.chunk(3)), [{}, {"tied": True}, {}])
    sum(output.square().sum() for output in outputs).backward()
    sum(reference(p, tied=t).square().sum() for p, t in zip(x.chunk(3), (False, True, False), strict=True)).backward()
    assert_same_grads(module, reference)


def test_replicas_share_tensors_or_have_memory_of_their_own() -> None:
    module = AllKinds(low=False)
    for replica in Replicas(module, THREE, SHARED).refresh():
        assert all(p is q for p, q in zip(replica.parameters(), module.parameters(), strict=True))
    first, second, _ = Replicas(module, THREE, COPIED).refresh()
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert not own & {p.untyped_storage().data_ptr() for p in first.parameters() if p.numel()}
    assert first.norm.running_mean is module.norm.running_mean is not second.norm.running_mean
    assert second.conv.weight.stride() == module.conv.weight.stride()
    assert second.first.weight is second.last.weight is not module.first.weight
    names = [{name: p.requires_grad for name, p in net.named_parameters()} for net in (module, second)]
    assert names[0] == names[1]
    buffers = make("trained_buffer")
    for index, replica in enumerate(Replicas(buffers, THREE).refresh()):
        assert replica.prompt is buffers.prompt, "it requires grad, as parameters do"
        assert (replica.calls is buffers.calls) == (replica.graph is buffers.graph) == (index == 0)


def test_each_gradient_comes_home_while_backward_still_runs() -> None:
    order: list[str] = []
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)).double()
    modules = Replicas(module, THREE, COPIED).refresh()
    for number, layer in enumerate(module):
        layer.weight.register_post_accumulate_grad_hook(lambda _, n=number: order.append(f"{n} home"))
    total = torch.zeros((), dtype=torch.double)
    for replica, x in zip(modules, data()[0].chunk(3), strict=True):
        for number, layer in enumerate(replica):
            x = layer(x)
            x.register_hook(lambda _, n=number: order.append(f"{n} reached"))
        total = total + x.sum()
    total.backward()
    assert order[-6:] == ["2 reached", "2 home", "1 reached", "1 home", "0 reached", "0 home"]


@both_ways
def test_gradients_can_be_asked_for_and_differentiated_again(share: bool) -> None:
    found = []
    x, y = data()
    for replicated in (True, False):
        module = make()
        output = call(Replicas(module, THREE, share), x) if replicated else module(x)
        weight = module.layers[0].weight
        [grad] = torch.autograd.grad(loss_of(output, y), [weight], create_graph=True)
        found.append([grad, *torch.autograd.grad(grad.square().sum(), [weight])])
        assert weight.grad is None
    assert_same(*found)


# -- from step to step -------------------------------------------------------------------------------


def test_module_objects_are_kept_and_the_last_copies_are_not() -> None:
    module = make()
    replicas = Replicas(module, THREE, COPIED)
    seen: list[list[nn.Module]] = []
    copies: list[weakref.ref[Tensor]] = []
    losses = []
    for number in range(3):
        x, y = data(number)
        seen.append(replicas.refresh())
        assert not any(it() is not None for it in copies), "kept beside the present ones"
        copies = [weakref.ref(param) for replica in seen[-1] for param in replica.parameters()]
        assert len(copies) == 3 * len(list(module.parameters()))
        loss = loss_of(gather(parallel_apply(seen[-1], list(x.chunk(3))), "cpu"), y)
        loss.backward()
        losses.append(loss)  # graphs whose backward has run keep no values
        step(module)
    assert all(modules == seen[0] for modules in seen)


@both_ways
def test_values_that_a_graph_still_needs_are_not_overwritten(share: bool) -> None:
    module, reference = make(), make()
    replicas = Replicas(module, THREE, share)
    batches = [data(number) for number in range(3)]
    sum(loss_of(call(replicas, x), y) for x, y in batches).backward()
    sum(loss_of(reference(x), y) for x, y in batches).backward()
    assert_same_grads(module, reference)
    if share is COPIED:
        clear(module, reference)
        x, y = batches[0]
        pending = loss_of(call(replicas, x), y)
        with torch.no_grad():
            module.head.weight.zero_()
        call(replicas, x)
        pending.backward()
        loss_of(reference(x), y).backward()
        assert_same_grads(module, reference)


class RunsAgain(nn.Module):
    """Runs a layer again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.before, self.layer, self.drop = nn.Linear(8, 8), nn.Linear(8, 4), nn.Dropout(1.0)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def again(x: Tensor) -> Tensor:
            return self.layer(x) if self.training else self.drop(self.layer(x)) * 7

        return checkpoint(again, self.before(x), use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the forward without gradients
@pytest.mark.parametrize(("share", "reentrant"), [(SHARED, True), (COPIED, False), (COPIED, True)])
def test_a_forward_before_backward_does_not_change_what_runs_again(share: bool, reentrant: bool) -> None:
    module = RunsAgain(reentrant).double()
    reference = copy.deepcopy(module)
    replicas = Replicas(module, THREE, share)
    x, y = data()
    for evaluated, gradients in ((True, False), (False, False), (True, True)):
        clear(module, reference)
        for net, run in ((module, lambda: call(replicas, x)), (reference, lambda: reference(x))):
            loss = loss_of(run(), y)
            net.train(not evaluated)
            with torch.set_grad_enabled(gradients):
                run()
            net.train()
            loss.backward()
        assert_same_grads(module, reference, f"evaluated {evaluated}, gradients {gradients}")


def reshape_data(module: Any) -> None:
    module.layers[0].weight.data = module.layers[0].weight.data.t().contiguous().t()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "replaced parameter": lambda it: setattr(it.head, "weight", nn.Parameter(torch.full_like(it.head.weight, 0.3))),
    "other strides": reshape_data,
    "added layer": lambda it: it.layers.append(nn.Linear(16, 16).double()),
    "shared layer": lambda it: it.layers.__setitem__(1, it.layers[2]),
    "parametrization": lambda it: nn.utils.parametrizations.weight_norm(it.layers[1]),
    "added buffer": lambda it: it.layers[1].register_buffer("extra", torch.ones(2)),
    "frozen": lambda it: it.layers.requires_grad_(False),
    "float": lambda it: it.float(),
    "removed bias": lambda it: it.layers[1].register_parameter("bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_module_between_steps_are_followed(change: str) -> None:
    for share in (SHARED, COPIED):
        module = make()
        replicas = Replicas(module, THREE, share)
        x, y = data()
        loss_of(call(replicas, x), y).backward()
        CHANGES[change](module)
        clear(module)
        if change == "float":
            x, y = x.float(), y.float()
        reference = copy.deepcopy(module)
        for _ in range(2):
            compare(replicas, reference, x, y, f"shared: {share}")
            step(module, reference)


def test_renamed_and_frozen_parts_are_followed() -> None:
    module = make()
    replicas = Replicas(module, THREE, COPIED)
    module.layers.requires_grad_(False)
    replica: Any = replicas.refresh()[1]
    assert not replica.layers[0].weight.requires_grad
    assert replica.head.weight.grad_fn is not None
    module.layers.requires_grad_(True)
    module.tail = module.head
    del module.head
    replica = replicas.refresh()[1]
    assert [name for name, _ in replica.named_children()] == ["layers", "tail"]
    assert replica.layers[0].weight.grad_fn is not None
    with torch.no_grad():
        assert not any(param.requires_grad for param in replicas.refresh()[1].parameters())
    module.compile(backend="eager")
    with pytest.raises(TypeError, match="not compiled"):
        replicas.refresh()


def test_attributes_are_the_originals_and_what_forward_sets_is_gone() -> None:
    class Counting(nn.Module):
        factor, calls = 1.0, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.register_forward_hook(lambda *_: None)
            return x * self.factor

    module = Counting()
    replicas = Replicas(module, THREE)
    for factor in (2.0, 3.0):
        module.factor = factor
        assert_same(call(replicas, torch.ones(3)), torch.full((3,), factor))
    assert module.calls == 0
    assert not module._forward_hooks, "a replica's hook is for its own samples"
    assert [replica.calls for replica in replicas.refresh()] == [0, 0, 0]
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"between 1 and 3 replicas, found {count}"):
            replicas.refresh(count)


class Referring(nn.Module):
    """Refers to itself and its layers in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.layer = nn.Linear(4, 4)
        self.stages = {"x": [self.layer, (self.layer.weight, 1)]}
        self.again = self.layer.forward
        self.doubled = partial(self.scaled, scale=2)
        self.itself = partial(id, self)
        self.nested = lambda x: self.scaled(x, 3)
        self.layer.register_forward_hook(partial(self.note, "a"))
        self.layer.register_forward_hook(self.made("b"))

    def scaled(self, x: Tensor, scale: int) -> Tensor:
        return self.layer(x) * scale

    def note(self, name: str, *_: Any) -> None:
        self.seen.append((name, self))

    def made(self, name: str) -> Any:
        seen = self.seen

        @torch.no_grad()
        def hook(module: nn.Module, *_: Any, key: str = name) -> None:
            assert module is self.layer
            seen.append((key, self))

        return hook

    def forward(self, x: Tensor) -> Tensor:
        return self.doubled(x) + self.nested(x)


def test_references_to_the_module_lead_to_the_replicas_own() -> None:
    module = Referring()
    replicas = Replicas(module, THREE, COPIED)
    for number in range(2):
        modules: list[Any] = replicas.refresh()
        parallel_apply(modules, list(torch.ones(3, 1, 4)), devices=THREE)
        for replica in modules:
            assert type(replica) is Referring
            assert replica.stages["x"][0] is replica.layer
            assert replica.stages["x"][1][0] is replica.layer.weight is not module.layer.weight
            assert replica.again.__self__ is replica.layer
            assert replica.doubled.func.__self__ is replica
            assert replica.itself() == id(replica)
            assert Counter(name for name, seer in module.seen if seer is replica) == {"a": 2, "b": 2}
            assert number == 0 or replica.later.__self__ is replica
        assert len(module.seen) == 12
        module.seen.clear()
        module.later = module.note  # set after the replicas were made
    assert module.stages["x"][0] is module.layer
    assert module.doubled.func.__self__ is module
    module.layer._forward_hooks.clear()
    module.layer.__class__ = nn.modules.linear.NonDynamicallyQuantizableLinear
    assert {type(replica.layer) for replica in replicas.refresh()} == {type(module.layer)}
    call(replicas, torch.ones(3, 4))
    assert not module.seen


@pytest.mark.parametrize(("share", "own_thread"), [(SHARED, False), (SHARED, True), (COPIED, True)])
def test_gradients_do_not_depend_on_the_cache_of_autocast(share: bool, own_thread: bool) -> None:
    """Threads have one cache in common, which each empties when it ends."""
    found = []
    x, y = batch(0, 0, 24)
    for cache in (False, True):
        torch.manual_seed(1)
        module = Mlp(depth=3)
        replicas = Replicas(module, THREE, share)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                modules, parts = replicas.refresh(), list(x.chunk(3))
                output = gather(parallel_apply(modules, parts, devices=THREE, thread_per_device=own_thread), "cpu")
            assert output.dtype is torch.bfloat16
            loss_of(output.float(), y).backward()
        found.append([param.grad for param in module.parameters()])
    torch.testing.assert_close(*found, rtol=0.02, atol=2e-3)


def test_traced_graphs_are_replicated_and_compiled_code_is_refused() -> None:
    module = fx.symbolic_trace(make())
    reference = copy.deepcopy(module)
    compare(Replicas(module, THREE, COPIED), reference, *data())
    compiled = nn.Linear(2, 2)
    compiled.compile()
    for refused, kind, message in (
        (nn.Sequential(torch.jit.script(nn.Linear(2, 2))), TypeError, r"submodule '0' is a .*ScriptModule"),
        (torch.compile(nn.Linear(2, 2)), TypeError, "the module is. Its compiled code"),
        (compiled, TypeError, "the module is. Its compiled code"),
        (nn.LazyLinear(2), ValueError, "found 'weight' that waits for its first batch"),
    ):
        with pytest.raises(kind, match=message):
            Replicas(refused, THREE)


@both_ways
def test_training_after_evaluation_in_inference_mode(share: bool) -> None:
    module, reference = (make("conv_batchnorm_channels_last") for _ in range(2))
    x, y = data()
    with torch.inference_mode():
        replicas = Replicas(module.eval(), THREE, share)
        outputs = call(replicas, x)
        assert outputs.is_inference()
        assert_same(outputs, reference.eval()(x))
    assert module.norm.num_batches_tracked == 0
    compare(replicas, reference, x, y)
    module.train()
    call(replicas, x)
    assert module.norm.num_batches_tracked == 1


# -- data_parallel -----------------------------------------------------------------------------------


def test_data_parallel_gives_the_modules_output_and_gradients() -> None:
    module, reference = make(), make()
    for number, samples in enumerate((7, 1, 2, 0)):  # fewer than devices too, and none
        x, y = data(number, samples)
        output = data_parallel(module, x, THREE)
        assert_same(output, reference(x))
        if samples:
            clear(module, reference)
            loss_of(output, y).backward()
            loss_of(reference(x), y).backward()
            assert_same_grads(module, reference)


class Columns(nn.Module):
    """Takes and returns its batch along dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor | None = None) -> Tensor:
        return torch.ones(2) if x is None else self.weight @ x


def test_arguments_are_split_by_place_by_name_or_not() -> None:
    module, x = Branches().double(), data()[0]
    assert_same(data_parallel(module, (x, "left"), THREE), module(x, "left"))
    assert_same(data_parallel(module, (x,), THREE, module_kwargs={"take": "right"}), module(x, take="right"))
    assert_same(data_parallel(module, None, THREE, module_kwargs={"x": x}), module(x=x))
    assert_same(data_parallel(Columns(), None, THREE), torch.ones(2))
    assert_same(data_parallel(Columns(), torch.ones(4, 5), THREE, dim=1), Columns()(torch.ones(4, 5)))


def test_one_device_takes_the_module_and_its_inputs() -> None:
    seen: list[Any] = []

    class Where(Columns):
        def forward(self, x: Tensor, more: dict[str, Tensor]) -> Tensor:
            seen.append((self, self.weight.device, x.device, more["y"].device))
            return x

    module, meta = Where(), torch.device("meta")
    output = data_parallel(module, torch.ones(2), ["meta"], module_kwargs={"more": {"y": torch.ones(1)}})
    assert seen == [(module, meta, meta, meta)]
    assert output.device == meta
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="at least one device, found none; pass some"):
            data_parallel(Mlp(), torch.ones(2, 8))


def test_the_next_call_works_after_an_error_in_one_replica() -> None:
    class Picky(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            if (x > 50).any():
                raise OverflowError("too large")
            return super().forward(x)

    module, x = Picky(), torch.ones(3, 8)
    x[1] = 100
    with pytest.raises(OverflowError, match="too large"):
        data_parallel(module, x, THREE)
    assert_same(data_parallel(module, torch.ones(3, 8), THREE), module(torch.ones(3, 8)))


def test_module_buffers_on_none_of_the_devices_are_brought_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU under another name is as good as another device: nothing is shared."""
    monkeypatch.setattr(replicas_file, "as_devices", lambda devices: (torch.device("cpu", 0),) * len(devices))
    module, reference = (make("conv_batchnorm_channels_last") for _ in range(2))
    before = copy.deepcopy(module.state_dict())
    for number in range(2):
        x, y = data(number)
        expected_output, expected = one_by_one(reference, x, y)
        output = data_parallel(module, x, THREE)
        assert_same(output, expected_output)
        loss_of(output, y).backward()
        assert_same_grads(module, expected)
        assert_same_state(module, expected)
        reference.load_state_dict(expected.state_dict())
        clear(module)
    assert any(not torch.equal(buffer.to_dense(), before[key].to_dense()) for key, buffer in module.named_buffers())
    after_training = copy.deepcopy(module)
    assert_same(data_parallel(module.eval(), x, THREE), reference.eval()(x))
    assert_same_state(module, after_training)


def test_replicas_are_kept_as_long_as_the_module() -> None:
    module = Mlp()
    seen: set[int] = set()
    hook = module.register_forward_pre_hook(lambda replica, _: seen.add(id(replica)))
    for _ in range(2):
        data_parallel(module, torch.ones(3, 8), THREE)
    assert len(seen) == 3
    hook.remove()
    stream = io.BytesIO()
    pickle.dump(module, stream)
    assert b"lightning_bucketddp" not in stream.getvalue(), "a pickle can be read where this package is not"
    for twin in (copy.deepcopy(module), copy.copy(module), pickle.loads(stream.getvalue())):
        output = data_parallel(twin, torch.ones(3, 8), THREE)
        output.sum().backward()
        assert_same(output, twin(torch.ones(3, 8)))
        assert list(twin.state_dict()) == list(module.state_dict())
    gone = weakref.ref(module)
    del module, twin, hook
    gc.collect()
    assert gone() is None


def test_calls_leave_attributes_for_other_threads_to_iterate_over() -> None:
    module = Mlp()
    attributes, sizes = vars(module), set()
    module.register_forward_pre_hook(lambda *_: sizes.add(len(attributes)))
    data_parallel(module, torch.ones(3, 8), THREE)
    sizes.add(len(attributes))
    data_parallel(module, torch.ones(3, 8), THREE)
    assert len(sizes) == 1


def test_calls_from_threads_and_inside_calls_do_not_disturb_each_other() -> None:
    class Slow(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            barrier.wait()  # replicas of both calls are in their forward at the same time
            return super().forward(x)

    class Nested(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return data_parallel(self.inner, x, ["cpu"] * 2)

    barrier = threading.Barrier(2, timeout=30)
    module, reference = Slow().double(), Mlp().double()
    reference.load_state_dict(module.state_dict())
    batches = [data(number) for number in range(2)]
    outputs: list[Any] = [None, None]

    def run(number: int) -> None:
        outputs[number] = data_parallel(module, batches[number][0], THREE)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for (x, y), output in zip(batches, outputs, strict=True):
        loss_of(output, y).backward()
        loss_of(reference(x), y).backward()
    assert_same_grads(module, reference)
    clear(reference)
    nested = Nested(copy.deepcopy(reference))
    x, y = batches[0]
    loss_of(data_parallel(nested, x, THREE), y).backward()
    loss_of(reference(x), y).backward()
    assert_same_grads(nested.inner, reference)
