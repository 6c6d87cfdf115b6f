"""Megatron-LM's contiguous-buffer DDP: fp32 gradients, its calls, its options."""

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP, GradientError, Options, PeerFailureError
from tests.inside import reducer_of, views_of
from tests.models import MODELS, Branches, Mlp, batch, build
from tests.reference import assert_grads, grads, largest_difference_between_ranks, mean_over_ranks
from tests.wrapper.cases import TINY, RunRanks, backward, check_each

BF16 = torch.bfloat16
FP32 = torch.float32
COALESCED = {"use_contiguous_buffers": False}
TAKES = ["left", "right", "both"]


def local_if(ours: BucketDDP, local: bool) -> Any:
    return ours.no_sync() if local else nullcontext()


def assert_means(module: nn.Module, plain: nn.Module) -> None:
    """Asserts that gradients are the means of another module's, and None or zero where no rank has one."""
    for name, mean in mean_over_ranks(plain).items():
        grad = module.get_parameter(name).grad
        if mean is None:
            assert grad is None or not grad.any(), name
        else:
            torch.testing.assert_close(grad, mean)


# -- fp32 gradients ----------------------------------------------------------------------------------


def fp32_gradients(spelling: dict[str, Any]) -> None:
    torch.manual_seed(1)
    module = Mlp().to(BF16)
    plain = copy.deepcopy(module)
    for param in plain.parameters():
        param.grad_dtype = FP32
    ours = BucketDDP(module, bucket_cap_mb=TINY, **spelling)
    for step in range(3):
        plain.zero_grad()
        ours.zero_grad()
        if step == 2:
            for param in module.parameters():
                param.grad_dtype = BF16  # whatever loses it, it is set again
        for micro in range(3):
            backward(plain, 3 * step + micro, BF16)
            with local_if(ours, micro < 2):
                backward(ours, 3 * step + micro, BF16)
        assert_grads(module, mean_over_ranks(plain))
        for name, param in module.named_parameters():
            assert (param.dtype, param.grad.dtype, param.grad_dtype) == (BF16, FP32, FP32)
            assert param.main_grad is param.grad, name
    assert [buffer.dtype for buffer in ours.layout.buffers] == [FP32]
    assert len(ours.layout.buckets) > 1
    ours.close()
    assert not any(hasattr(param, "main_grad") for param in module.parameters())
    assert all(param.grad.dtype is param.grad_dtype is BF16 for param in module.parameters())


def dtypes_by_name() -> None:
    module = Mlp(depth=1).to(BF16)
    ours = BucketDDP(module, grad_dtype={"layers.0.weight": torch.float64, "*.weight": FP32})
    backward(ours, 0, BF16)
    found = {name: param.grad.dtype for name, param in module.named_parameters()}
    expected = {"layers.0.weight": torch.float64, "layers.0.bias": BF16, "head.weight": FP32, "head.bias": BF16}
    assert found == expected
    assert len(ours.layout.buffers) == 3
    ours.close()


def gradient_dtypes() -> None:
    check_each({"ours": [{"grad_dtype": FP32}]}, fp32_gradients)
    check_each({"Megatron's": [{"accumulate_allreduce_grads_in_fp32": True}]}, fp32_gradients)
    dtypes_by_name()


def test_gradients_have_the_dtype_that_was_asked_for(run_ranks: RunRanks) -> None:
    run_ranks(2, gradient_dtypes)


# -- other ways to reduce ----------------------------------------------------------------------------


def mean_after_backward(model: str, accumulate: int, set_to_none: bool, options: dict[str, Any]) -> None:
    module = build(model)
    plain = copy.deepcopy(module)
    ours = BucketDDP(module, bucket_cap_mb=TINY, **options)
    for step in range(2):
        for wrapped in (ours, plain):
            wrapped.zero_grad(set_to_none=set_to_none)
        for micro in range(accumulate):
            backward(plain, step * accumulate + micro)
            with local_if(ours, micro < accumulate - 1):
                backward(ours, step * accumulate + micro)
        tolerance = {"rtol": 2**-6, "atol": 2**-6} if model == "mixed_dtypes" else {}
        assert_grads(module, mean_over_ranks(plain), **tolerance)
    assert ours.early_launches == 0
    assert len(ours.layout.buckets) == len(ours.layout.buffers) == (2 if model == "mixed_dtypes" else 1)
    ours.close()


def one_reduction_per_buffer() -> None:
    ways = [{"overlap": False}, COALESCED]
    cases = {}
    for index, model in enumerate(MODELS):  # all pairs of accumulation, clearing and way
        cases[model] = [model, 1 + 2 * (index % 2), index % 4 < 2, ways[(index + index // 2) % 2]]
        cases[f"{model}, other way"] = [model, 3 - 2 * (index % 2), index % 4 < 2, ways[(index + index // 2 + 1) % 2]]
    check_each(cases, mean_after_backward)


def packed_before_the_end() -> None:
    """Gradients do not pile up outside of a large bucket."""
    module = Mlp(depth=3)
    ours = BucketDDP(module, overlap=False)
    seen: list[bool] = []
    views = views_of(ours)
    module.layers[0].weight.register_hook(lambda _: seen.append(module.head.weight.grad is views["head.weight"]))
    for step in range(2):
        ours.zero_grad()
        backward(ours, step)
    assert seen == [True, True]
    ours.close()


def gradients_stay_where_they_are() -> None:
    module = Branches()
    ours = BucketDDP(module, **COALESCED)
    rank = dist.get_rank()
    held: dict[str, Any] = {}
    for step, takes in enumerate([("both", "both"), ("left", "right"), ("left", "left"), ("none", "none")]):
        inputs, _ = batch(step, rank)
        for param in module.parameters():
            if param.grad is not None:
                param.grad.zero_()
        plain = copy.deepcopy(module)
        for model in (plain, ours):
            model(inputs, take=takes[rank]).square().mean().backward()
        assert_means(module, plain)
        held = held or {name: param.grad for name, param in module.named_parameters()}
        assert all(param.grad is held[name] for name, param in module.named_parameters())
    assert module.idle.grad is None
    assert all(bucket.flat.numel() == 0 for bucket in reducer_of(ours).buckets.all), "memory is held between passes"
    ours.close()


def padded_buckets() -> None:
    module = Mlp(width=40)
    plain = copy.deepcopy(module)
    ours = BucketDDP(module, bucket_cap_mb=0.003, pad_buckets_to=1000)
    for model in (plain, ours):
        backward(model)
    assert_grads(module, mean_over_ranks(plain))
    assert len(ours.layout.buckets) > 1
    assert all(bucket.numel % 1000 == 0 for bucket in ours.layout.buckets)
    ours.close()


def other_ways() -> None:
    one_reduction_per_buffer()
    packed_before_the_end()
    gradients_stay_where_they_are()
    padded_buckets()


def test_buffers_are_reduced_whole_coalesced_or_padded(run_ranks: RunRanks) -> None:
    run_ranks(2, other_ways)


# -- calls -------------------------------------------------------------------------------------------


def reduction_by_hand(options: dict[str, Any], in_two: bool) -> None:
    torch.manual_seed(1)
    module = Branches()
    plain = copy.deepcopy(module)
    ours = BucketDDP(module, bucket_cap_mb=TINY, **options)
    rank = dist.get_rank()
    for step in range(3):
        plain.zero_grad()
        ours.zero_grad_buffer()
        assert all(param.grad is None or not param.grad.any() for param in module.parameters())
        for micro in range(2):
            inputs, _ = batch(2 * step + micro, rank)
            plain(inputs, take=TAKES[rank]).square().mean().backward()
            with ours.no_sync():
                ours(inputs, take=TAKES[rank]).square().mean().backward()
        if in_two:
            ours.start_grad_sync()
            ours.finish_grad_sync()
        else:
            ours.allreduce_gradients()
        assert_means(module, plain)
        before = grads(module)
        ours.allreduce_gradients()  # of gradients that are the same everywhere
        assert_grads(module, before)
        ours.scale_gradients(0.5)
        assert_grads(module, {n: None if g is None else g * 0.5 for n, g in before.items()})
    assert ours.passes == 6
    with pytest.raises(RuntimeError, match="expected a reduction under way, found none"):
        ours.finish_grad_sync()
    ours.close()


def reductions_by_hand() -> None:
    check_each(
        {"default": [{}, True], "no overlap": [{"overlap": False}, False], "coalesced": [COALESCED, True]},
        reduction_by_hand,
    )
    module = Mlp(depth=1)
    ours = BucketDDP(module)
    for param in module.parameters():
        param.grad = torch.full_like(param, float(dist.get_rank()))  # which no backward made
    ours.allreduce_gradients()
    assert all(param.grad.eq(0.5).all() for param in module.parameters())
    ours.close()


class MegatronModule(Mlp):
    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, str]:
        return {f"{prefix}own": f"keep_vars={keep_vars}"}


def parameters_and_checkpoints() -> None:
    module = Mlp(depth=1)
    ours = BucketDDP(module)
    with torch.no_grad():
        module.head.bias.fill_(float(dist.get_rank() + 3))
    loss = ours(batch(0, 0)[0]).square().mean()
    ours.broadcast_params()
    assert module.head.bias.eq(3).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    backward(ours)
    assert ours.state_dict_for_save_checkpoint(prefix="p.").keys() == module.state_dict(prefix="p.").keys()
    ours.close()
    own = BucketDDP(MegatronModule(depth=1))
    assert own.state_dict_for_save_checkpoint(prefix="p.", keep_vars=True) == {"p.own": "keep_vars=True"}
    own.close()


def zeroed_with_frozen_parts() -> None:
    module = Mlp(depth=2)
    ours = BucketDDP(module)
    backward(ours)
    module.layers[0].requires_grad_(False)
    module.layers[0].bias.grad = None
    held = module.layers[0].weight.grad = module.layers[0].weight.grad.clone()
    ours.zero_grad_buffer()
    assert module.layers[0].weight.grad is held
    assert not held.any()
    assert module.layers[0].bias.grad is None, "an optimizer would decay a frozen parameter"
    assert not module.head.weight.grad.any()
    ours.close()


def other_calls() -> None:
    reductions_by_hand()
    parameters_and_checkpoints()
    zeroed_with_frozen_parts()


def test_megatrons_calls(run_ranks: RunRanks) -> None:
    run_ranks(2, other_calls)


# -- divisors ----------------------------------------------------------------------------------------


def per_token_mean(as_tensor: bool, guarded: bool) -> None:
    """Batches of different lengths, and a loss that sums over tokens: one process on all of them."""
    torch.manual_seed(1)
    module = Mlp()
    alone = copy.deepcopy(module)
    ours = BucketDDP(module, bucket_cap_mb=TINY, gradient_divide_by="tokens")
    rank, world = dist.get_rank(), dist.get_world_size()

    def micro_batch(step: int, micro: int, r: int) -> tuple[Tensor, Tensor]:
        return batch(10 * step + micro, r, size=(5 * step + 3 * micro + 7 * r) % 6)  # some are empty

    for step in range(4):
        ours.zero_grad()
        alone.zero_grad()
        for micro in range(3):
            inputs, target = micro_batch(step, micro, rank)
            ours.count_tokens(torch.tensor(len(inputs)) if as_tensor else len(inputs))
            with local_if(ours, micro < 2):
                loss = (ours(inputs) - target).square().sum()
                with ours.backward_pass(loss) if guarded else nullcontext():
                    loss.backward()
        everything = [micro_batch(step, micro, r) for micro in range(3) for r in range(world)]
        inputs, target = (torch.cat(parts) for parts in zip(*everything, strict=True))
        ((alone(inputs) - target).square().sum() / len(inputs)).backward()
        assert_grads(module, grads(alone), rtol=1e-4, atol=1e-5)
    ours.close()


def by_tokens() -> None:
    check_each({"counted by number": [False, False], "by tensor": [True, True]}, per_token_mean)


def test_a_loss_that_sums_over_tokens_is_divided_by_tokens(run_ranks: RunRanks) -> None:
    run_ranks(3, by_tokens)


def misuse_of_divisors() -> None:
    ours = BucketDDP(Mlp(depth=1), gradient_divide_by="tokens")
    uncounted = r"expected count_tokens\(\) before each synchronised backward"
    with pytest.raises(RuntimeError, match=uncounted):
        backward(ours)
    with ours.no_sync():
        ours.count_tokens(4)
        backward(ours)
    ours.zero_grad()
    with pytest.raises(RuntimeError, match=uncounted):
        backward(ours)
    with pytest.raises(ValueError, match="expected a whole number of tokens, found -1"):
        ours.count_tokens(-1)
    ours.close()
    ours = BucketDDP(Mlp(depth=1), gradient_divide_by=1)
    with pytest.raises(RuntimeError, match='expected gradient_divide_by="tokens"'):
        ours.count_tokens(1)
    backward(ours)
    with pytest.raises(RuntimeError, match=r"expected cleared gradients .* found '.*' with the gradient of an earlier"):
        backward(ours)
    ours.close()
    ours = BucketDDP(Mlp(depth=1), gradient_divide_by=1)
    backward(ours)
    before = grads(ours.module)
    ours.zero_grad_buffer()
    backward(ours)
    assert_grads(ours.module, before)
    ours.zero_grad()
    with pytest.raises(RuntimeError, match="expected a backward from an output of forward"):
        backward(ours.module)
    ours.close()


def test_a_divisor_that_cannot_be_honoured_is_an_error(run_ranks: RunRanks) -> None:
    run_ranks(2, misuse_of_divisors)


# -- checks ------------------------------------------------------------------------------------------


def unsound_gradient(value: float, limit: float, guarded: bool) -> str:
    module = Mlp(depth=2)
    ours = BucketDDP(module, bucket_cap_mb=TINY, max_abs_grad=limit)
    backward(ours)
    ours.zero_grad()
    if dist.get_rank() == 1:
        module.layers[0].bias.register_hook(lambda grad: torch.full_like(grad, value))
    loss = ours(batch(1, 0)[0]).square().mean()
    with pytest.raises((GradientError, PeerFailureError)) as error:
        with ours.backward_pass(loss) if guarded else nullcontext():
            loss.backward()
    ours.close()
    return f"{error.typename}: {error.value}"


@pytest.mark.parametrize(
    ("value", "limit", "words", "guarded"),
    [
        (math.nan, math.inf, "NaN", False),
        (-math.inf, math.inf, "Inf", True),
        (-50.0, 10.0, "50 in absolute value", False),
    ],
    ids=["nan", "inf", "large"],
)
def test_an_unsound_gradient_is_named_on_every_rank(
    run_ranks: RunRanks, value: float, limit: float, words: str, guarded: bool
) -> None:
    first, second = run_ranks(2, unsound_gradient, value, limit, guarded, fresh=True)
    words = f"rank 1: found {words} in the gradient of parameter 'layers.0.bias'"
    assert second.startswith(f"GradientError: {words}")
    assert first.startswith("PeerFailureError")
    assert words in first


# -- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**COALESCED, "grad_dtype": FP32}, "cannot be combined with use_contiguous_buffers"),
        ({**COALESCED, "accumulate_allreduce_grads_in_fp32": True}, "cannot be combined with use_contiguous_buffers"),
        ({"accumulate_allreduce_grads_in_fp32": True, "grad_dtype": torch.float64}, "one choice for the gradients'"),
        ({"grad_dtype": torch.int32}, "expected grad_dtype to be None, one of bf16, .*found torch.int32"),
        ({"master_params": True}, "give grad_dtype=torch.float32"),
    ],
    ids=str,
)
def test_contradictory_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Options(**options)


def test_gradients_do_not_lose_precision_by_a_pattern() -> None:
    with pytest.raises(ValueError, match=r"less precise than parameter 'head\.weight'"):
        Options(grad_dtype={"*": BF16}).grad_dtype_of("head.weight", FP32)


# -- master parameters -------------------------------------------------------------------------------


def without_masters() -> None:
    module = Mlp(depth=1).to(BF16)
    ours = BucketDDP(module, grad_dtype=FP32, master_params=False)
    optimizer = torch.optim.AdamW(module.parameters())
    assert ours.prepare_optimizer(optimizer) is None
    backward(ours, 0, BF16)
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        optimizer.step()
    ours.close()
    BucketDDP(module, grad_dtype=FP32).close()
    for param in module.parameters():
        param.grad, param.grad_dtype = None, FP32
        param.grad = torch.zeros_like(param, dtype=FP32)
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        torch.optim.AdamW(module.parameters()).step()  # nobody prepares optimizers after close()


def broadcast_reaches_masters() -> None:
    module = Mlp(depth=1).to(BF16)
    ours = BucketDDP(module, grad_dtype=FP32)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    backward(ours, 0, BF16)
    optimizer.step()
    with torch.no_grad():
        module.head.bias.fill_(float(dist.get_rank() + 3))
    ours.broadcast_params()
    optimizer.step()
    assert abs(float(module.head.bias[0]) - 3) < 0.1, "the step went on from the master of before"
    assert largest_difference_between_ranks(module) == 0
    ours.close()


def masters() -> None:
    without_masters()
    broadcast_reaches_masters()


def test_masters_can_be_switched_off_and_follow_a_broadcast(run_ranks: RunRanks) -> None:
    run_ranks(2, masters)
