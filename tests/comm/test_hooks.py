"""Communication hooks: against torch DDP with the same hook, and what a pass guarantees with them."""

import copy
import time
from datetime import timedelta
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from lightning_bucketddp.comm.hooks import CommHookError
from tests.hooks import HOOKS, disguised
from tests.models import Branches, Containers, Mlp, build
from tests.pool import on_ranks
from tests.reference import (
    TINY,
    assert_grads,
    backward,
    drift,
    everyones,
    grads,
    mean_grads,
    mse,
    raises_soon,
    train,
    without_where,
)

MODELS = ["mlp", "conv_batchnorm_channels_last", "mixed_dtypes"]
ROUNDING = {"fp16": 2.0**-9, "bf16": 2.0**-6}


def future_of(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


@on_ranks(2, 3, cases=[(name, MODELS[at % 3]) for at, name in enumerate(HOOKS)])
def test_hooks_give_torch_ddps_gradients(name: str, model: str) -> None:
    module = build(model)
    reference = DistributedDataParallel(copy.deepcopy(module))
    reference.register_comm_hook(None, disguised(HOOKS[name]))
    named = name in ("bf16", "fp16")
    ours = BucketDDP(module, bucket_cap_mb=TINY, comm_hook=name if named else None)
    if not named:
        ours.register_comm_hook(None, HOOKS[name])
    rounding = max(ROUNDING.get(name.split("_")[0], 1e-6), 2.0**-6 if model == "mixed_dtypes" else 0.0)
    for step in range(3):
        for each in (reference, ours):
            each.zero_grad()
            backward(each, step)
        largest = max(float(param.grad.abs().max()) for param in reference.parameters())
        assert_grads(module, grads(reference.module), rtol=rounding, atol=rounding * largest)
    grad = next(module.parameters()).grad
    alike = all(torch.equal(grad, other) for other in everyones(grad))
    assert alike == (name != "noop"), "noop leaves each rank its own gradients"
    assert ours.last_pass().early_launches > 0


@on_ranks(3, cases=[{"comm_hook": "bf16"}, {"comm_hook": "powersgd"}, {"wire_dtype": torch.bfloat16}])
def test_hooks_use_the_wrappers_own_group(options: dict[str, Any]) -> None:
    """Ranks 1 and 2 of three train together; rank 0 must not be needed."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    plain = Containers()  # whose complex gradients travel as real ones
    ours = BucketDDP(copy.deepcopy(plain), process_group=group, **options)
    for rank in (1, 2):
        backward(plain, rank=rank)
    backward(ours)
    for param, other in zip(ours.parameters(), plain.parameters(), strict=True):
        mean = other.grad / 2
        torch.testing.assert_close(param.grad, mean, rtol=2**-6, atol=2**-6 * float(mean.abs().max()))


@on_ranks(3)
def test_power_sgd_keeps_its_order_across_buckets() -> None:
    """Ranks at different speeds, chains of collectives in many buckets, and other buckets later."""
    rank, module = dist.get_rank(), Mlp(width=48, depth=8)
    module.head.requires_grad_(False)  # comes before all others when it is unfrozen
    for index, layer in enumerate(module.layers):
        layer.weight.register_hook(lambda _, index=index: time.sleep(0.002 * ((index + rank) % 3)))
    state = PowerSGDState(None, start_powerSGD_iter=2)
    ours = BucketDDP(module, bucket_cap_mb=0.001, comm_hook="powersgd", comm_hook_state=state)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.2)
    sizes: list[list[int]] = []
    for frozen in (True, False):
        module.head.requires_grad_(not frozen)
        train(ours, optimizer, range(5))
        assert state.iter > state.start_powerSGD_iter
        assert state.compression_stats()[0] > 4, "compression was active"
        sizes.append([bucket.numel for bucket in ours.layout.buckets])
        assert [len(state.error_dict[index]) for index in range(len(state.error_dict))] == sizes[-1]
    assert sizes[0] != sizes[1][: len(sizes[0])]
    assert len(sizes[0]) >= 8
    assert ours.last_pass().early_launches > 0
    assert drift(module) == 0


@on_ranks(2, cases=[(0.0, True), (1e-8, False)])
def test_power_sgd_recovers_from_unused_parameters(epsilon: float, zeroed: bool) -> None:
    module = Branches()
    state = PowerSGDState(None, 1, start_powerSGD_iter=2, orthogonalization_epsilon=epsilon)
    ours = BucketDDP(module, comm_hook="powersgd", comm_hook_state=state)
    weight = module.left.weight
    for step, use in enumerate([True, True, False, False, True, True, False, True, True, True]):
        before = copy.deepcopy(weight.grad)
        if zeroed or use:
            ours.zero_grad()
        plain = copy.deepcopy(module)
        for model in (plain, ours):
            backward(model, step, take="both" if use else "right")
        if use:
            mean = mean_grads(plain)["left.weight"]
            assert weight.grad.norm() > 0.1 * mean.norm(), "what was zero once does not stay so"
        else:
            assert weight.grad is None if zeroed else torch.equal(weight.grad, before), "bit for bit"


@on_ranks(2)
def test_a_hook_sees_what_torchs_bucket_shows() -> None:
    module = build("conv_batchnorm_channels_last")
    seen: list[tuple[int, bool]] = []

    def hook(state: str, bucket: Any) -> torch.futures.Future[Tensor]:
        assert state == "state"
        seen.append((bucket.index(), bucket.is_last()))
        params, gradients = bucket.parameters(), bucket.gradients()
        names = [ours.layout.slots[slot].spec.name for slot in ours.layout.buckets[bucket.index()].slots]
        assert [id(p) for p in params] == [id(module.get_parameter(name)) for name in names]
        assert [g.shape for g in gradients] == [p.shape for p in params]
        assert all(g.is_contiguous() for g in gradients)
        gradients[0].add_(1.0)  # a view of the buffer
        assert bucket.buffer()[: gradients[0].numel()].sub(gradients[0].view(-1)).eq(0).all()
        used = sum(gradient.count_nonzero() for gradient in gradients)
        assert bucket.buffer().count_nonzero() == used, "padding has no noise of an earlier pass"
        gradients[-1].fill_(6.0)
        return future_of(bucket.buffer().double().add(1.0).view(-1, 1))  # another tensor, dtype and shape

    ours = BucketDDP(module, bucket_cap_mb=TINY)
    ours.register_comm_hook("state", hook)
    for step in range(3):  # from the second pass on buckets are laid out in their order
        seen.clear()
        backward(ours, step)
        last = len(ours.layout.buckets) - 1
        assert seen == [(index, index == last) for index in range(last + 1)]
        for bucket in ours.layout.buckets:
            assert module.get_parameter(ours.layout.slots[bucket.slots[-1]].spec.name).grad.eq(7.0).all()


def raises_on_rank_1(state: list[int], bucket: Any) -> torch.futures.Future[Tensor]:
    state[0] -= 1
    if dist.get_rank() == 1 and state[0] == 0:
        raise OSError("out of sorts")
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def returns_no_future(_: object, bucket: Any) -> Any:
    return bucket.buffer()


def returns_too_little(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
    return future_of(bucket.buffer()[1:])


def fails_later(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket).then(lambda _: {}["later"])


FAILING = [
    (raises_on_rank_1, 20, False, "OSError: out of sorts"),
    (returns_no_future, 0, True, "callback must return a torch.futures.Future object, but got Tensor"),
    (returns_too_little, 0, False, "expected its future to hold a tensor of "),
    (fails_later, 0, False, "KeyError: 'later'"),
]


@on_ranks(2, cases=FAILING, fresh=True)
def test_a_hook_that_fails_is_named_on_all_ranks(hook: Any, call: int, guarded: bool, expected: str) -> None:
    ours = BucketDDP(Mlp(depth=6), bucket_cap_mb=TINY)
    ours.register_comm_hook([call], hook)
    told = call and dist.get_rank() == 0
    # Where it fails on both, either may hear of the other first.
    errors = [PeerFailureError] if told else [CommHookError] if call else [CommHookError, PeerFailureError]
    with raises_soon(*errors, match=expected) as error:
        for step in range(4):
            backward(ours, step, guarded=guarded)
    assert f"hook 'tests.comm.test_hooks.{hook.__name__}' failed for the bucket of '" in str(error.value)
    assert not told or "rank 1 raised CommHookError" in without_where(str(error.value))
    with pytest.raises(PeerFailureError):
        backward(ours, 1)


@on_ranks(2)
def test_hooks_registered_wrongly_are_refused() -> None:
    ours = BucketDDP(Mlp(), bucket_cap_mb=TINY)
    backward(ours)
    ours.register_comm_hook(None, noop_hook)  # between passes it may
    torchs_words = r"register_comm_hook or register_builtin_comm_hook can only be called once\..*noop_hook"
    with pytest.raises(RuntimeError, match=torchs_words):
        ours.register_comm_hook(None, noop_hook)
    ours.close()
    other = BucketDDP(Mlp())
    other.start_grad_sync()
    with pytest.raises(RuntimeError, match="between passes, found one under way"):
        other.register_comm_hook(None, noop_hook)
    other.finish_grad_sync()
    with pytest.raises(RuntimeError, match="after close"):
        ours.register_comm_hook(None, noop_hook)

    ours = BucketDDP(Mlp(), wire_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"either comm_hook or wire_dtype, found both.*wire_dtype=torch.bfloat16"):
        ours.register_comm_hook(None, noop_hook)
    for options, message in [
        ({"comm_hook": noop_hook, "wire_dtype": torch.float16}, "either comm_hook or wire_dtype, found"),
        ({"comm_hook": "fp16", "comm_hook_state": 1}, "comm_hook_state to be None with comm_hook='fp16', found 1"),
        ({"comm_hook": "powersgd", "comm_hook_state": 1}, "to be a PowerSGDState, found a int"),
        ({"comm_hook_state": 1}, "comm_hook_state to be None with comm_hook=None, found 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            BucketDDP(Mlp(), **options)


class Bucket(Protocol):
    def buffer(self) -> Tensor: ...


def takes(annotation: Any, returns: Any = torch.futures.Future[Tensor]) -> Any:
    def hook(state, bucket):
        return future_of(bucket.buffer())

    hook.__annotations__ = {"state": object, "bucket": annotation, "return": returns}
    return hook


FUTURE = "Communication hook: return annotation should be torch.futures.Future"
BUCKET = "bucket annotation should be dist.GradBucket."
MISTAKEN: dict[str, list[Any]] = {
    "not callable": [1, TypeError, "Communication hook must be callable."],
    "another bucket": [takes(int), ValueError, BUCKET],
    "another bucket in quotes": [takes("int"), ValueError, BUCKET],
    "no future": [takes(dist.GradBucket, int), ValueError, FUTURE],
    "a tensor": [takes(dist.GradBucket, Tensor), ValueError, FUTURE],
    "nothing": [takes(dist.GradBucket, None), ValueError, FUTURE],
}
SOUND = {
    "torch's": takes(dist.GradBucket),
    "in quotes": takes("dist.GradBucket", "torch.futures.Future[Tensor]"),
    "anything": takes(Any, Any),
    "any object": takes(object, object),
    "a protocol": takes(Bucket),
    "a union": takes(dist.GradBucket | int, torch.futures.Future[Tensor] | None),
    "names of another file": takes("Elsewhere", "Elsewhere"),
    "a future of a list": takes(dist.GradBucket, torch.futures.Future[list[Tensor]]),
    "no signature": type("Own", (), {"__call__": staticmethod(HOOKS["allreduce"]), "__signature__": 1})(),
}


@on_ranks(2, cases=MISTAKEN)
def test_a_mistaken_hook_is_refused_when_it_is_registered(hook: Any, kind: type[Exception], words: str) -> None:
    theirs, ours = DistributedDataParallel(Mlp()), BucketDDP(Mlp())
    if hook is not MISTAKEN["another bucket in quotes"][0]:
        for model in (theirs, ours):
            with pytest.raises(kind, match=words):
                model.register_comm_hook(None, hook)
    if callable(hook):
        with pytest.raises(kind, match=words):
            BucketDDP(Mlp(), comm_hook=hook)
    backward(ours)  # has no hook
    assert ours.passes == 1


@on_ranks(2, cases=SOUND)
def test_a_hook_with_other_annotations_is_called(hook: Any) -> None:
    ours = BucketDDP(Mlp())
    ours.register_comm_hook(None, hook)
    backward(ours)
    assert ours.passes == 1


@on_ranks(3)
def test_ranks_with_different_hooks_are_told_both() -> None:
    last = dist.get_rank() == 2
    state = PowerSGDState(None, matrix_approximation_rank=3 if last else 2)
    for options, expected in [
        ({"comm_hook": "bf16" if last else "fp16"}, r"fp16_compress_hook.*bf16_compress_hook"),
        ({"wire_dtype": torch.bfloat16 if last else torch.float16}, r"torch\.float16.*torch\.bfloat16"),
        ({"comm_hook": powerSGD_hook, "comm_hook_state": state}, r"approximation_rank: rank 0 has 2, rank 2 has 3"),
    ]:
        with pytest.raises(RankMismatchError, match=expected):
            BucketDDP(Mlp(), **options)
    with pytest.raises(RankMismatchError, match=r"allreduce_hook.*noop_hook"):
        BucketDDP(Mlp()).register_comm_hook(None, noop_hook if last else default_hooks.allreduce_hook)


@on_ranks(2, fresh=True)
def test_a_hook_on_one_rank_is_an_error_on_all() -> None:
    ours = BucketDDP(Mlp(), timeout=timedelta(seconds=60))
    backward(ours, 0)
    loss = mse(0)(ours)
    with raises_soon(RankMismatchError, PeerFailureError, match="is in pass 1") as error:
        if dist.get_rank() == 0:
            ours.register_comm_hook(None, noop_hook)
        loss.backward()
    assert "the communication hook from pass 1 on" in str(error.value)
