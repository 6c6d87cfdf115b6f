"""Megatron-LM's contiguous-buffer DDP: fp32 gradients, its calls, its options."""

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP, GradientError, PeerFailureError
from lightning_bucketddp.optim.swap import swap_of
from tests import reference
from tests.inside import reducer_of, views_of
from tests.models import Branches, Mlp, batch, build
from tests.pool import on_ranks
from tests.reference import (
    TINY,
    Twins,
    assert_grads,
    backward,
    grads,
    loss_at,
    mean_grads,
    mse,
    noted,
    run_backward,
    taking,
    train,
)

BF16, FP32 = torch.bfloat16, torch.float32
COALESCED = {"use_contiguous_buffers": False}


def assert_means(module: nn.Module, plain: nn.Module) -> None:
    for name, mean in mean_grads(plain).items():
        grad = module.get_parameter(name).grad
        if mean is None:
            assert grad is None or not grad.any(), name
        else:
            torch.testing.assert_close(grad, mean)


@on_ranks(2, cases={"ours": [{"grad_dtype": FP32}], "Megatron's": [{"accumulate_allreduce_grads_in_fp32": True}]})
def test_low_precision_gradients_add_up_in_fp32(spelling: dict[str, Any]) -> None:
    twins = Twins(Mlp().to(BF16), **spelling)
    ours, module = twins.ours, twins.ours.module
    for param in twins.plain.parameters():
        param.grad_dtype = FP32
    for step in range(3):
        twins.zero_grad()
        for param in module.parameters() if step == 2 else ():
            param.grad_dtype = BF16  # whatever loses it, it is set again
        for micro in range(3):
            twins.backward(mse(3 * step + micro), local=micro < 2)
        twins.check()
        for param in module.parameters():
            assert (param.dtype, param.grad.dtype, param.grad_dtype) == (BF16, FP32, FP32)
            assert param.main_grad is param.grad
    assert [buffer.dtype for buffer in ours.layout.buffers] == [FP32]
    ours.close()
    assert not any(hasattr(param, "main_grad") for param in module.parameters())
    assert all(param.grad.dtype is param.grad_dtype is BF16 for param in module.parameters())


@on_ranks(2)
def test_main_grad_exists_for_fp32_parameters_too() -> None:
    module = build("mixed_dtypes")
    twins = Twins(module, grad_dtype=FP32)
    for param in twins.plain.parameters():
        param.grad_dtype = FP32
    params = dict(twins.ours.module.named_parameters())
    assert {param.dtype for param in params.values()} == {BF16, FP32}
    for step in range(3):
        twins.zero_grad()
        twins.backward(mse(step), local=True)
        expected = grads(twins.plain)
        torch.testing.assert_close({name: param.main_grad for name, param in params.items()}, expected)
        twins.ours.finish_grad_sync()
        twins.check()
        assert all(param.main_grad is param.grad for param in params.values())
        twins.ours.zero_grad_buffer()
        assert not any(param.main_grad.any() for param in params.values())
    twins.ours.close()
    assert not any(hasattr(param, "main_grad") for param in params.values())
    assert not hasattr(BucketDDP(Mlp()).module.head.weight, "main_grad"), "pickles would hold it"


@on_ranks(2)
def test_gradient_dtypes_may_be_given_by_name() -> None:
    module = Mlp(depth=1).to(BF16)
    ours = BucketDDP(module, grad_dtype={"layers.0.weight": torch.float64, "*.weight": FP32})
    backward(ours)
    found = {name: param.grad.dtype for name, param in module.named_parameters()}
    assert found == {"layers.0.weight": torch.float64, "layers.0.bias": BF16, "head.weight": FP32, "head.bias": BF16}
    assert len(ours.layout.buffers) == 3
    ours = BucketDDP(Mlp().to(BF16), grad_dtype=FP32, master_params=False)
    assert swap_of(ours.prepare_optimizer(torch.optim.SGD(ours.parameters()))) is None


@on_ranks(2, cases={"no overlap": ["mlp", {"overlap": False}], "coalesced": ["mixed_dtypes", COALESCED]})
def test_buffers_are_reduced_whole(model: str, options: dict[str, Any]) -> None:
    module = build(model)
    ours = BucketDDP(module, bucket_cap_mb=TINY, **options)
    backward(ours)
    assert ours.last_pass().early_launches == 0
    assert len(ours.layout.buckets) == len(ours.layout.buffers) == (2 if model == "mixed_dtypes" else 1)
    if "overlap" in options:  # packed before the end: gradients do not pile up outside of a large bucket
        seen: list[Tensor | None] = []
        module.layers[0].weight.register_hook(lambda _: seen.append(module.head.weight.grad))
        ours.zero_grad()
        backward(ours, 1)
        assert seen == [views_of(ours)["head.weight"]]


@on_ranks(2)
def test_coalesced_gradients_stay_where_they_are() -> None:
    twins = Twins(Branches(), **COALESCED)
    ours, module = twins.ours, twins.ours.module
    held: dict[str, Any] = {}
    for step, takes in enumerate([("both", "both"), ("left", "right"), ("left", "left"), ("none", "none")]):
        for model in twins.modules:
            model.zero_grad(set_to_none=False)
        twins.backward(taking(step, takes[dist.get_rank()]))
        assert_means(module, twins.plain)
        held = held or {name: param.grad for name, param in module.named_parameters()}
        assert all(param.grad is held[name] for name, param in module.named_parameters())
    assert module.idle.grad is None
    assert all(bucket.flat.numel() == 0 for bucket in reducer_of(ours).buckets.all), "memory is held between passes"


@on_ranks(2, cases={"default": [{}], "no overlap": [{"overlap": False}], "coalesced": [COALESCED]})
def test_gradients_may_be_reduced_by_hand(options: dict[str, Any]) -> None:
    twins = Twins(Branches(), **options)
    ours, module = twins.ours, twins.ours.module
    for step in range(3):
        twins.plain.zero_grad()
        ours.zero_grad() if step == 2 else ours.zero_grad_buffer()
        for _ in range(2):
            twins.backward(taking(step, ["left", "right"][dist.get_rank()]), local=True)
        ours.start_grad_sync()
        ours.finish_grad_sync()
        assert_means(module, twins.plain)
        before = grads(module)
        ours.allreduce_gradients()  # of gradients that are the same everywhere
        assert_grads(module, before)
        ours.scale_gradients(0.5)
        assert_grads(module, {n: None if g is None else g * 0.5 for n, g in before.items()})
        for param in module.parameters():
            if param.grad is not None:
                param.grad.data = param.grad.clone()  # no longer in the buffer
    assert ours.passes == 6


@on_ranks(2, cases={"default": [{}], "no overlap": [{"overlap": False}], "coalesced": [COALESCED]})
def test_finish_grad_sync_starts_what_was_not_started(options: dict[str, Any]) -> None:
    twins = Twins(Branches(), **options)
    ours, module, rank = twins.ours, twins.ours.module, dist.get_rank()
    for step in range(3):
        twins.zero_grad()
        for _ in range(2 - rank if step == 1 else 2):  # ranks may have different numbers of batches
            twins.backward(taking(step, ["left", "right"][rank]), local=True)
        if step == 2 and rank == 1:
            ours.zero_grad()  # this rank has no batch at all
            twins.plain.zero_grad()
        ours.finish_grad_sync(force_all_reduce=bool(step))
        assert_means(module, twins.plain)
        assert ours.passes == 3 * step + 1
        reduced = grads(module)
        ours.finish_grad_sync()  # of gradients that are the same everywhere
        assert_grads(module, reduced)
        ours.start_grad_sync()
        ours.finish_grad_sync()
        assert_grads(module, reduced)
    with pytest.raises(ValueError, match=r"force_all_reduce=False with shard_optimizer=True, found True.*full_grad"):
        BucketDDP(Mlp(), shard_optimizer=True).finish_grad_sync(force_all_reduce=True)


LOOPS: dict[str, list[Any]] = {  # options, and the divisor of the sum over two ranks and two passes
    "default": [{}, 2],
    "tokens": [{"gradient_divide_by": "tokens"}, 4],
    "sharded": [{"shard_optimizer": True}, 2],
    "scattered": [{"shard_optimizer": True, "scatter_every_pass": True}, 2],
}


@on_ranks(2, cases=LOOPS)
def test_finish_grad_sync_has_nothing_to_do_after_a_synchronised_backward(options: dict[str, Any], by: int) -> None:
    """Megatron's loop: the last backward of a step is outside of no_sync, and finish_grad_sync() ends each step."""
    alone = Mlp()
    ours = BucketDDP(copy.deepcopy(alone), bucket_cap_mb=TINY, **options)
    for step in range(3):
        alone.zero_grad()
        ours.zero_grad()
        for micro in range(2):
            for rank in range(2):
                (loss_at(alone, 2 * step + micro, rank) / by).backward()
            if by == 4:
                ours.count_tokens(1)
            with ours.no_sync() if micro == 0 else nullcontext():
                backward(ours, 2 * step + micro)
        with noted("allreduce", "all_to_all_single") as sent:
            ours.finish_grad_sync()
        assert sent == []
        found = {name: ours.full_grad(param) for name, param in ours.module.named_parameters()}
        torch.testing.assert_close(found, grads(alone))


class MegatronModule(Mlp):
    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, str]:
        return {f"{prefix}own": f"keep_vars={keep_vars}"}


@on_ranks(2)
def test_parameters_are_broadcast_and_checkpoints_are_megatrons() -> None:
    module = Mlp(depth=1).to(BF16)
    ours = BucketDDP(module, grad_dtype=FP32)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    train(ours, optimizer, [0])
    with torch.no_grad():
        module.head.bias.fill_(float(dist.get_rank() + 3))
    ours.broadcast_params()
    assert module.head.bias.eq(3).all()
    train(ours, optimizer, [0])
    assert abs(float(module.head.bias[0]) - 3) < 0.1, "the step went on from the master of before"
    assert reference.drift(module) == 0
    assert ours.state_dict_for_save_checkpoint(prefix="p.").keys() == module.state_dict(prefix="p.").keys()
    ours.close()
    own = BucketDDP(MegatronModule(depth=1))
    assert own.state_dict_for_save_checkpoint(prefix="p.", keep_vars=True) == {"p.own": "keep_vars=True"}


@on_ranks(3, cases={"counted by number": [False, False], "by tensor": [True, True]})
def test_a_loss_that_sums_over_tokens_is_divided_by_tokens(as_tensor: bool, guarded: bool) -> None:
    alone = Mlp()
    ours = BucketDDP(copy.deepcopy(alone), bucket_cap_mb=TINY, gradient_divide_by="tokens")
    rank = dist.get_rank()

    def micro_batch(step: int, micro: int, r: int) -> tuple[Tensor, Tensor]:
        return batch(10 * step + micro, r, size=(5 * step + 3 * micro + 7 * r) % 6)  # some are empty

    for step in range(2):
        ours.zero_grad()
        alone.zero_grad()
        for micro in range(3):
            inputs, target = micro_batch(step, micro, rank)
            ours.count_tokens(torch.tensor(len(inputs)) if as_tensor else len(inputs))
            with ours.no_sync() if micro < 2 else nullcontext():
                run_backward(ours, (ours(inputs) - target).square().sum(), guarded)
        everything = [micro_batch(step, micro, r) for micro in range(3) for r in range(3)]
        inputs, target = (torch.cat(parts) for parts in zip(*everything, strict=True))
        ((alone(inputs) - target).square().sum() / len(inputs)).backward()
        assert_grads(ours.module, grads(alone), rtol=1e-4, atol=1e-5)


@on_ranks(2, cases={"dense": {}, "coalesced": {"use_contiguous_buffers": False}, "sharded": {"shard_optimizer": True}})
def test_tokens_of_gradients_that_wait_count_though_their_parameters_are_frozen_since(options: dict[str, Any]) -> None:
    """Between two passes of one accumulation all parameters of the first are frozen."""
    ours = BucketDDP(Branches(), bucket_cap_mb=TINY, gradient_divide_by="tokens", **options)
    alone, rank = copy.deepcopy(ours.module), dist.get_rank()

    def freeze(module: nn.Module, frozen: bool) -> None:
        for name, param in module.named_parameters():
            param.requires_grad_(not frozen or name.startswith("right"))

    for step in range(3):
        with ours.no_sync():
            ours.count_tokens(3 + rank)
            ours(batch(step, rank, size=3 + rank)[0], "left").square().sum().backward()
        freeze(ours.module, True)
        ours.count_tokens(5)
        ours(batch(9 + step, rank, size=5)[0], "right").square().sum().backward()
        for micro, take, sizes in ((step, "left", (3, 4)), (9 + step, "right", (5, 5))):
            freeze(alone, take == "right")
            inputs = torch.cat([batch(micro, r, size=sizes[r])[0] for r in range(2)])
            (alone(inputs, take).square().sum() / 17).backward()
        for (name, param), expected in zip(ours.module.named_parameters(), alone.parameters(), strict=True):
            if name != "idle":
                torch.testing.assert_close(ours.full_grad(param), expected.grad, msg=lambda m, n=name: f"{n}: {m}")
        for module in (ours.module, alone):
            freeze(module, False)
            module.zero_grad()


@on_ranks(2)
def test_a_divisor_that_cannot_be_honoured_is_an_error() -> None:
    ours = BucketDDP(Mlp(depth=1), gradient_divide_by="tokens")
    with ours.no_sync():
        ours.count_tokens(4)
        backward(ours)
    ours.zero_grad()  # and the count with it
    with pytest.raises(RuntimeError, match=r"expected count_tokens\(\) before each synchronised backward"):
        backward(ours)
    for count in (-1, 2.5, torch.tensor(2.75)):
        with pytest.raises(ValueError, match=f"expected a whole number of tokens from 0, found {float(count):g}"):
            ours.count_tokens(count)
    cleared, ours = (BucketDDP(Mlp(depth=1), gradient_divide_by=1) for _ in range(2))
    with pytest.raises(RuntimeError, match='expected gradient_divide_by="tokens"'):
        ours.count_tokens(1)
    for model in (ours, cleared):
        backward(model)
    with pytest.raises(RuntimeError, match=r"expected cleared gradients .* found '.*' with the gradient of an earlier"):
        backward(ours)
    with pytest.raises(RuntimeError, match="expected cleared gradients"):  # a sum is not reduced again
        cleared.allreduce_gradients()
    cleared.zero_grad()
    with pytest.raises(RuntimeError, match="expected a backward from an output of forward"):
        backward(cleared.module)


UNSOUND = [(math.nan, math.inf, "NaN"), (-math.inf, math.inf, "Inf"), (-50.0, 10.0, "50 in absolute value")]


@on_ranks(2, cases=UNSOUND, fresh=True)
def test_an_unsound_gradient_is_named_on_every_rank(value: float, limit: float, words: str) -> None:
    module, rank = Mlp(depth=2), dist.get_rank()
    ours = BucketDDP(module, bucket_cap_mb=TINY, max_abs_grad=limit)
    backward(ours)
    ours.zero_grad()
    if rank == 1:
        module.layers[0].bias.register_hook(lambda grad: torch.full_like(grad, value))
    loss = ours(batch(1, 0)[0]).square().mean()
    named = f"rank 1: found {words} in the gradient of parameter 'layers.0.bias'"
    with pytest.raises([PeerFailureError, GradientError][rank], match=named):
        run_backward(ours, loss, guarded=words == "Inf")
