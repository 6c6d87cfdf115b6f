"""What Megatron-LM's contiguous-buffer DDP does: fp32 gradients, its calls, its options."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, GradientError, PeerFailureError
from tests.inside import reducer_of, views_of
from tests.models import MODELS, Branches, Mlp, batch, build, loss_of
from tests.reference import assert_grads, grads, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003
BF16 = torch.bfloat16


# -- fp32 gradients ----------------------------------------------------------------------------------


def fp32_gradients(spelling: dict[str, Any]) -> None:
    torch.manual_seed(1)
    module = Mlp().to(BF16)
    plain = copy.deepcopy(module)
    for param in plain.parameters():
        param.grad_dtype = torch.float32
    ours = BucketDDP(module, bucket_cap_mb=TINY, **spelling)
    rank = dist.get_rank()
    for step in range(3):
        plain.zero_grad()
        ours.zero_grad()
        for micro in range(3):
            inputs, target = batch(3 * step + micro, rank)
            loss_of(plain(inputs.to(BF16)), target.to(BF16)).backward()
            with ours.no_sync() if micro < 2 else nullcontext():
                loss_of(ours(inputs.to(BF16)), target.to(BF16)).backward()
        assert_grads(module, mean_over_ranks(plain))
        for name, param in module.named_parameters():
            assert param.dtype is BF16
            assert param.grad is not None
            assert param.grad.dtype is torch.float32
            assert param.main_grad is param.grad, name
    assert [buffer.dtype for buffer in ours.layout.buffers] == [torch.float32]
    assert len(ours.layout.buckets) > 1
    ours.close()
    assert not any(hasattr(param, "main_grad") for param in module.parameters())


@pytest.mark.parametrize(
    "spelling",
    [{"grad_dtype": torch.float32}, {"accumulate_allreduce_grads_in_fp32": True}],
    ids=["grad_dtype", "megatron"],
)
def test_fp32_gradients_of_bf16_parameters(run_ranks: RunRanks, spelling: dict[str, Any]) -> None:
    run_ranks(2, fp32_gradients, spelling)


def wire_dtypes_of(patterns: dict[str, torch.dtype]) -> dict[str, str]:
    module = Mlp(depth=2).to(BF16)
    ours = BucketDDP(module, grad_dtype=patterns)
    inputs, target = batch(0, dist.get_rank())
    loss_of(ours(inputs.to(BF16)), target.to(BF16)).backward()
    found = {name: str(param.grad.dtype) for name, param in module.named_parameters()}
    assert len(ours.layout.buffers) == len(set(found.values()))
    ours.close()
    return found


def test_gradient_dtypes_by_parameter_name(run_ranks: RunRanks) -> None:
    patterns = {"layers.0.weight": torch.float64, "*.weight": torch.float32}
    for found in run_ranks(2, wire_dtypes_of, patterns):
        assert found == {
            "layers.0.weight": "torch.float64",
            "layers.0.bias": "torch.bfloat16",
            "layers.1.weight": "torch.float32",
            "layers.1.bias": "torch.bfloat16",
            "head.weight": "torch.float32",
            "head.bias": "torch.bfloat16",
        }


def error_of_64_micro_batches() -> tuple[float, float]:
    """The error of the accumulated and reduced gradient, relative to fp64, with bf16 and with fp32 gradients."""
    torch.manual_seed(1)
    module = Mlp(width=64).to(BF16)
    rank, world = dist.get_rank(), dist.get_world_size()

    def gradient(model: nn.Module, ours: BucketDDP | None) -> list[list[Tensor]]:
        """Each micro-batch's gradients where there is no wrapper."""
        each = []
        for micro in range(64):
            inputs, target = batch(micro, rank)
            run = ours if ours is not None else model
            with ours.no_sync() if ours is not None and micro < 63 else nullcontext():
                loss_of(run(inputs.to(BF16)), target.to(BF16)).backward()
            if ours is None:
                each.append([param.grad.double() for param in model.parameters()])
                model.zero_grad()
        return each

    exact = [torch.stack(column).sum(0) for column in zip(*gradient(copy.deepcopy(module), None), strict=True)]
    for value in exact:
        dist.all_reduce(value)
        value /= world
    errors = []
    for grad_dtype in (None, torch.float32):
        ours = BucketDDP(copy.deepcopy(module), grad_dtype=grad_dtype)
        gradient(ours.module, ours)
        difference = torch.cat([(p.grad.double() - e).flatten() for p, e in zip(ours.parameters(), exact, strict=True)])
        errors.append(float(difference.norm() / torch.cat([e.flatten() for e in exact]).norm()))
        ours.close()
    return errors[0], errors[1]


def test_fp32_gradients_keep_what_64_bf16_micro_batches_add(run_ranks: RunRanks) -> None:
    for in_bf16, in_fp32 in run_ranks(2, error_of_64_micro_batches):
        assert in_fp32 < in_bf16 / 10


def lost_grad_dtype() -> None:
    """Whatever loses ``Tensor.grad_dtype`` on a parameter, the next gradients are fp32 all the same."""
    torch.manual_seed(1)
    module = Mlp(depth=2).to(BF16)
    ours = BucketDDP(module, grad_dtype=torch.float32)
    inputs, target = batch(0, dist.get_rank())
    for step in range(3):
        ours.zero_grad()
        if step:
            for param in module.parameters():
                param.grad_dtype = BF16
        with ours.no_sync() if step == 2 else nullcontext():
            loss_of(ours(inputs.to(BF16)), target.to(BF16)).backward()
        assert all(param.grad.dtype is torch.float32 for param in module.parameters())
        assert all(param.grad_dtype is torch.float32 for param in module.parameters())
    ours.close()


def test_a_lost_gradient_dtype_is_set_again(run_ranks: RunRanks) -> None:
    run_ranks(2, lost_grad_dtype)


# -- other ways to reduce ----------------------------------------------------------------------------


def against_torch_ddp(model: str, accumulate: int, set_to_none: bool, options: dict[str, Any]) -> tuple[int, int]:
    module = build(model)
    reference = DistributedDataParallel(copy.deepcopy(module), gradient_as_bucket_view=True)
    ours = BucketDDP(module, bucket_cap_mb=TINY, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, reference)]
    rank = dist.get_rank()
    exact = not (model == "mixed_dtypes" and dist.get_world_size() == 3)
    for step in range(4 if exact else 1):
        for wrapped, optimizer in zip((ours, reference), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            for micro in range(accumulate):
                with wrapped.no_sync() if micro < accumulate - 1 else nullcontext():
                    inputs, target = batch(step * accumulate + micro, rank)
                    loss_of(wrapped(inputs), target).backward()
        for (name, param), other in zip(module.named_parameters(), reference.module.parameters(), strict=True):
            tolerance = {} if exact else {"rtol": 2**-6, "atol": 2**-6}
            torch.testing.assert_close(param.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance)
        for optimizer in optimizers:
            optimizer.step()
    ours.synchronise_module_buffers()
    assert largest_difference_between_ranks(module) == 0
    assert ours.early_launches == 0
    found = len(ours.layout.buckets), len(ours.layout.buffers)
    ours.close()
    return found


@pytest.mark.parametrize(
    "options", [{"overlap": False}, {"use_contiguous_buffers": False}], ids=lambda o: next(iter(o))
)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_one_reduction_per_buffer_after_backward(
    run_ranks: RunRanks, model: str, accumulate: int, set_to_none: bool, options: dict[str, Any]
) -> None:
    for buckets, buffers in run_ranks(2, against_torch_ddp, model, accumulate, set_to_none, options):
        assert buckets == buffers == (2 if model == "mixed_dtypes" else 1)


def packed_before_the_end() -> list[bool]:
    module = Mlp(depth=3)
    ours = BucketDDP(module, overlap=False)
    seen: list[bool] = []
    views = views_of(ours)
    module.layers[0].weight.register_hook(lambda _: seen.append(module.head.weight.grad is views["head.weight"]))
    for step in range(2):
        inputs, target = batch(step, dist.get_rank())
        ours.zero_grad()
        loss_of(ours(inputs), target).backward()
    ours.close()
    return seen


def test_gradients_do_not_pile_up_outside_of_a_large_bucket(run_ranks: RunRanks) -> None:
    assert run_ranks(2, packed_before_the_end) == [[True, True]] * 2


def gradients_stay_where_they_are() -> None:
    module = Branches()
    ours = BucketDDP(module, use_contiguous_buffers=False)
    rank = dist.get_rank()
    inputs, _ = batch(0, rank)
    ours(inputs, take="left").square().mean().backward()
    held = {name: param.grad for name, param in module.named_parameters()}
    assert held["right.weight"] is None
    for take in (["left", "right"][rank], "left"):
        for param in module.parameters():
            if param.grad is not None:
                param.grad.zero_()
        plain = copy.deepcopy(module)
        plain(inputs, take=take).square().mean().backward()
        ours(inputs, take=take).square().mean().backward()
        assert (plain.left.weight.grad is None) == (take == "right")
        assert module.left.weight.grad is held["left.weight"]
        if take == "left" and rank == 0:
            torch.testing.assert_close(module.left.weight.grad, mean_over_ranks(plain)["left.weight"])
        else:
            mean_over_ranks(plain)
    assert module.right.weight.grad is not None
    assert module.idle.grad is None
    assert all(bucket.flat.numel() == 0 for bucket in reducer_of(ours).buckets.all), "memory is held between passes"
    ours.close()


def test_without_contiguous_buffers_gradients_stay_where_autograd_put_them(run_ranks: RunRanks) -> None:
    run_ranks(2, gradients_stay_where_they_are)


def branches_without_contiguous_buffers() -> None:
    for take in ("both", ["left", "right"][dist.get_rank()], "none"):
        module = Branches()
        plain = copy.deepcopy(module)
        ours = BucketDDP(module, use_contiguous_buffers=False)
        for step in range(2):
            inputs, _ = batch(step, dist.get_rank())
            for model in (plain, ours):
                model.zero_grad()
                model(inputs, take=take).square().mean().backward()
            assert_grads(module, mean_over_ranks(plain))
        ours.close()


def test_branches_without_contiguous_buffers(run_ranks: RunRanks) -> None:
    run_ranks(2, branches_without_contiguous_buffers)


# -- calls -------------------------------------------------------------------------------------------


def reduction_by_hand(options: dict[str, Any], in_two: bool) -> None:
    torch.manual_seed(1)
    module = Branches()
    plain = copy.deepcopy(module)
    ours = BucketDDP(module, bucket_cap_mb=TINY, **options)
    rank = dist.get_rank()
    take = ["left", "right"][rank]
    for step in range(3):
        plain.zero_grad()
        ours.zero_grad_buffer()
        assert all(param.grad is None or not param.grad.any() for param in module.parameters())
        for micro in range(2):
            inputs, _ = batch(2 * step + micro, rank)
            plain(inputs, take=take).square().mean().backward()
            with ours.no_sync():
                ours(inputs, take=take).square().mean().backward()
        if in_two:
            ours.start_grad_sync()
            ours.finish_grad_sync()
        else:
            ours.allreduce_gradients()
        expected = mean_over_ranks(plain)
        for name, param in module.named_parameters():
            if expected[name] is None:
                assert param.grad is None or not param.grad.any()
            else:
                torch.testing.assert_close(param.grad, expected[name])
        before = grads(module)
        ours.allreduce_gradients()  # of what is the same everywhere
        assert_grads(module, before)
        ours.scale_gradients(0.5)
        assert_grads(module, {n: None if g is None else g * 0.5 for n, g in before.items()})
    assert ours.passes == 6
    ours.close()


@pytest.mark.parametrize("in_two", [False, True], ids=["allreduce_gradients", "start_and_finish"])
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"use_contiguous_buffers": False}], ids=str)
def test_gradients_reduced_by_hand(run_ranks: RunRanks, options: dict[str, Any], in_two: bool) -> None:
    run_ranks(2, reduction_by_hand, options, in_two)


def gradients_from_elsewhere() -> None:
    module = Mlp(depth=1)
    ours = BucketDDP(module)
    rank = dist.get_rank()
    for param in module.parameters():
        param.grad = torch.full_like(param, float(rank))
    ours.allreduce_gradients()
    for param in module.parameters():
        assert param.grad.eq((dist.get_world_size() - 1) / 2).all()
    with pytest.raises(RuntimeError, match="expected a reduction under way, found none"):
        ours.finish_grad_sync()
    ours.close()


def test_gradients_that_no_backward_made_are_averaged_by_hand(run_ranks: RunRanks) -> None:
    run_ranks(2, gradients_from_elsewhere)


class MegatronModule(Mlp):
    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, str]:
        return {f"{prefix}own": f"keep_vars={keep_vars}"}


def parameters_and_checkpoints() -> None:
    module = Mlp(depth=1)
    ours = BucketDDP(module)
    with torch.no_grad():
        module.head.bias.fill_(float(dist.get_rank() + 3))
    inputs, target = batch(0, 0)
    loss = loss_of(ours(inputs), target)
    ours.broadcast_params()
    assert module.head.bias.eq(3).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss_of(ours(inputs), target).backward()
    assert ours.state_dict_for_save_checkpoint(prefix="p.").keys() == module.state_dict(prefix="p.").keys()
    ours.close()
    own = BucketDDP(MegatronModule(depth=1))
    assert own.state_dict_for_save_checkpoint(prefix="p.", keep_vars=True) == {"p.own": "keep_vars=True"}
    own.close()


def test_parameters_are_broadcast_and_checkpoints_delegated(run_ranks: RunRanks) -> None:
    run_ranks(2, parameters_and_checkpoints)


# -- divisors ----------------------------------------------------------------------------------------


def divided_by(divisor: int, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    module = Branches()
    plain = copy.deepcopy(module)
    ours = BucketDDP(module, bucket_cap_mb=TINY, gradient_divide_by=divisor, **options)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        plain.zero_grad()
        ours.zero_grad()
        take = ["left", "right", "both"][rank]
        for micro in range(2):
            inputs, _ = batch(2 * step + micro, rank)
            plain(inputs, take=take).square().sum().backward()
            with ours.no_sync() if micro == 0 else nullcontext():
                ours(inputs, take=take).square().sum().backward()
        expected = mean_over_ranks(plain)
        assert_grads(module, {n: None if g is None else g * (world / divisor) for n, g in expected.items()})
    ours.close()


@pytest.mark.parametrize("options", [{}, {"use_contiguous_buffers": False}], ids=str)
@pytest.mark.parametrize("divisor", [1, 7])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_constant_divisor(run_ranks: RunRanks, world_size: int, divisor: int, options: dict[str, Any]) -> None:
    run_ranks(world_size, divided_by, divisor, options)


def per_token_mean(as_tensor: bool, guarded: bool) -> None:
    """Batches of different lengths, a loss summed over tokens: one process on all of them."""
    torch.manual_seed(1)
    module = Mlp()
    alone = copy.deepcopy(module)
    ours = BucketDDP(module, bucket_cap_mb=TINY, gradient_divide_by="tokens")
    rank, world = dist.get_rank(), dist.get_world_size()

    def micro_batch(step: int, micro: int, r: int) -> tuple[Tensor, Tensor]:
        size = (5 * step + 3 * micro + 7 * r) % 6  # none at all, now and then
        return batch(10 * step + micro, r, size)

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (module, alone)]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(3):
            inputs, target = micro_batch(step, micro, rank)
            ours.count_tokens(torch.tensor(len(inputs)) if as_tensor else len(inputs))
            with ours.no_sync() if micro < 2 else nullcontext():
                loss = (ours(inputs) - target).square().sum()
                with ours.backward_pass(loss) if guarded else nullcontext():
                    loss.backward()
        everything = [micro_batch(step, micro, r) for micro in range(3) for r in range(world)]
        inputs, target = (torch.cat(parts) for parts in zip(*everything, strict=True))
        ((alone(inputs) - target).square().sum() / len(inputs)).backward()
        for (name, param), other in zip(module.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}", rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    assert largest_difference_between_ranks(module) == 0
    ours.close()


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
def test_a_loss_weighted_by_tokens_is_exact_under_accumulation(
    run_ranks: RunRanks, as_tensor: bool, guarded: bool
) -> None:
    run_ranks(3, per_token_mean, as_tensor, guarded)


def misuse_of_divisors() -> None:
    inputs, target = batch(0, dist.get_rank())
    ours = BucketDDP(Mlp(depth=1), gradient_divide_by="tokens")
    with pytest.raises(RuntimeError, match=r"expected count_tokens\(\) before each synchronised backward"):
        loss_of(ours(inputs), target).backward()
    with ours.no_sync():
        ours.count_tokens(4)
        loss_of(ours(inputs), target).backward()
    ours.zero_grad()
    with pytest.raises(RuntimeError, match=r"expected count_tokens\(\) before each synchronised backward"):
        loss_of(ours(inputs), target).backward()
    with pytest.raises(ValueError, match="expected a whole number of tokens, found -1"):
        ours.count_tokens(-1)
    ours.close()
    ours = BucketDDP(Mlp(depth=1), gradient_divide_by=1)
    with pytest.raises(RuntimeError, match='expected gradient_divide_by="tokens"'):
        ours.count_tokens(1)
    loss_of(ours(inputs), target).backward()
    with pytest.raises(
        RuntimeError, match=r"expected cleared gradients .* found '.*' with the gradient of an earlier one"
    ):
        loss_of(ours(inputs), target).backward()
    ours.close()
    ours = BucketDDP(Mlp(depth=1), gradient_divide_by=1)
    loss_of(ours(inputs), target).backward()
    grads = [param.grad.clone() for param in ours.parameters() if param.grad is not None]
    ours.zero_grad_buffer()
    loss_of(ours(inputs), target).backward()
    torch.testing.assert_close([param.grad for param in ours.parameters()], grads)
    ours.zero_grad()
    with pytest.raises(RuntimeError, match="expected a backward through what forward returned"):
        loss_of(ours.module(inputs), target).backward()
    ours.close()


def test_a_divisor_that_cannot_be_honoured_is_an_error(run_ranks: RunRanks) -> None:
    run_ranks(2, misuse_of_divisors)


# -- checks ------------------------------------------------------------------------------------------


def unsound_gradient(value: float, limit: float, guarded: bool) -> str:
    module = Mlp(depth=2)
    ours = BucketDDP(module, bucket_cap_mb=TINY, max_abs_grad=limit)
    rank = dist.get_rank()
    for step in range(3):
        ours.zero_grad()
        inputs, target = batch(step, rank)
        loss = loss_of(ours(inputs), target)
        if step == 2 and rank == 1:
            module.layers[0].bias.register_hook(lambda grad: torch.full_like(grad, value))
            loss = loss_of(ours(inputs), target)
        try:
            with ours.backward_pass(loss) if guarded else nullcontext():
                loss.backward()
        except (GradientError, PeerFailureError) as error:
            ours.close()
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize(
    ("value", "limit", "words"),
    [(math.nan, math.inf, "NaN"), (-math.inf, math.inf, "Inf"), (-50.0, 10.0, "50 in absolute value")],
    ids=["nan", "inf", "large"],
)
def test_an_unsound_gradient_is_named_on_every_rank(
    run_ranks: RunRanks, value: float, limit: float, words: str, guarded: bool
) -> None:
    first, second = run_ranks(2, unsound_gradient, value, limit, guarded, fresh=True)
    assert second.startswith(f"GradientError: rank 1: found {words} in the gradient of parameter 'layers.0.bias'")
    assert first.startswith("PeerFailureError")
    assert f"rank 1: found {words} in the gradient of parameter 'layers.0.bias'" in first


def sound_gradients() -> None:
    module = Mlp(depth=1)
    ours = BucketDDP(module, max_abs_grad=1e4)
    with torch.no_grad():
        module.head.bias.fill_(0)
    inputs, target = batch(0, dist.get_rank())
    (1e4 * loss_of(ours(inputs), target) / 1e4).backward()
    assert ours.passes == 1
    ours.zero_grad()
    with pytest.raises(GradientError, match=r"max_abs_grad=10000\.0"):
        (1e9 * loss_of(ours(inputs), target)).backward()
    ours.zero_grad()
    loss_of(ours(inputs), target).backward()  # all ranks raised: training may go on
    assert ours.passes == 3
    ours.close()


def test_training_may_go_on_where_all_ranks_refused_their_gradients(run_ranks: RunRanks) -> None:
    run_ranks(2, sound_gradients)


# -- options -----------------------------------------------------------------------------------------


def padded_buckets() -> list[int]:
    module = Mlp(width=40)
    plain = copy.deepcopy(module)
    ours = BucketDDP(module, bucket_cap_mb=0.003, pad_buckets_to=1000)
    for step in range(2):
        inputs, target = batch(step, dist.get_rank())
        for model in (plain, ours):
            model.zero_grad()
            loss_of(model(inputs), target).backward()
        assert_grads(module, mean_over_ranks(plain))
    sizes = [bucket.numel for bucket in ours.layout.buckets]
    ours.close()
    return sizes


def test_buckets_are_padded_for_the_bus(run_ranks: RunRanks) -> None:
    for sizes in run_ranks(2, padded_buckets):
        assert len(sizes) > 1
        assert all(size % 1000 == 0 for size in sizes)


def contradictions() -> None:
    for options, words in [
        ({"use_contiguous_buffers": False, "grad_dtype": torch.float32}, "cannot be had with use_contiguous_buffers"),
        ({"accumulate_allreduce_grads_in_fp32": True, "use_contiguous_buffers": False}, "cannot be had with use_cont"),
        (
            {"accumulate_allreduce_grads_in_fp32": True, "grad_dtype": torch.float64},
            "one choice for the gradients' dtype",
        ),
        ({"grad_dtype": torch.int32}, "expected grad_dtype to be None, one of bf16, .*found torch.int32"),
        ({"grad_dtype": {"*": BF16}}, "holds what parameter 'layers.0.weight' holds"),
        ({"master_params": True}, "give grad_dtype=torch.float32"),
        ({"gradient_divide_by": 0}, "gradient_divide_by"),
        ({"gradient_divide_by": "batch"}, "gradient_divide_by"),
        ({"max_abs_grad": 0.0}, "max_abs_grad"),
        ({"max_abs_grad": math.nan}, "max_abs_grad"),
        ({"pad_buckets_to": 0}, "pad_buckets_to"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            BucketDDP(Mlp(depth=1), **options)


def test_options_that_contradict_each_other_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(2, contradictions)


# -- master parameters -------------------------------------------------------------------------------

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def reference_step(copies: list[Tensor], optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """A step of the same optimizer on fp32 copies, with the module's gradients."""
    for copy_, param in zip(copies, module.parameters(), strict=True):
        copy_.grad = None if param.grad is None else param.grad.clone()
    optimizer.step()


def steps_on_masters(prepared: bool, fused: bool) -> None:
    torch.manual_seed(1)
    module = Branches().to(BF16)
    ours = BucketDDP(module, bucket_cap_mb=TINY, grad_dtype=torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused, **ADAMW)
    if prepared:
        masters = ours.prepare_optimizer(optimizer)
        assert masters is ours.prepare_optimizer(optimizer)
    copies = [param.detach().float().requires_grad_() for param in module.parameters()]
    full = torch.optim.AdamW(copies, fused=fused, **ADAMW)
    for step in range(4):
        optimizer.zero_grad()
        inputs, _ = batch(step, dist.get_rank())
        ours(inputs.to(BF16), take=["left", "right"][dist.get_rank()]).square().mean().backward()
        reference_step(copies, full, module)
        optimizer.step()
        for param, copy_ in zip(module.parameters(), copies, strict=True):
            assert torch.equal(param, copy_.to(BF16))
    assert module.idle.grad is None
    assert module.idle.eq(1).all()
    assert largest_difference_between_ranks(module) == 0
    ours.close()


@pytest.mark.parametrize("fused", [False, True], ids=["default", "fused"])
@pytest.mark.parametrize("prepared", [False, True], ids=["by_itself", "prepared"])
def test_the_optimizer_steps_on_fp32_masters(run_ranks: RunRanks, prepared: bool, fused: bool) -> None:
    run_ranks(2, steps_on_masters, prepared, fused)


def without_masters() -> None:
    module = Mlp(depth=1).to(BF16)
    ours = BucketDDP(module, grad_dtype=torch.float32, master_params=False)
    optimizer = torch.optim.AdamW(module.parameters())
    assert ours.prepare_optimizer(optimizer) is None
    inputs, target = batch(0, dist.get_rank())
    loss_of(ours(inputs.to(BF16)), target.to(BF16)).backward()
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        optimizer.step()
    ours.close()
    module = Mlp(depth=1).to(BF16)  # and nothing of a closed wrapper stays behind
    ours = BucketDDP(module, grad_dtype=torch.float32)
    loss_of(ours(inputs.to(BF16)), target.to(BF16)).backward()
    ours.close()
    assert all(param.grad.dtype is param.grad_dtype is BF16 for param in module.parameters())
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.step()
    assert "master_params" not in optimizer.state_dict()
    for param in module.parameters():
        param.grad = None
        param.grad_dtype = torch.float32
        param.grad = torch.zeros_like(param, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        torch.optim.AdamW(module.parameters()).step()  # nobody prepares optimizers any more


def test_master_params_may_be_switched_off(run_ranks: RunRanks) -> None:
    run_ranks(2, without_masters)


def resumed_with_masters() -> None:
    def steps(ours: BucketDDP, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for step in numbers:
            optimizer.zero_grad()
            inputs, target = batch(step, dist.get_rank())
            loss_of(ours(inputs.to(BF16)), target.to(BF16)).backward()
            optimizer.step()

    def fresh() -> tuple[BucketDDP, torch.optim.Optimizer]:
        torch.manual_seed(1)
        ours = BucketDDP(Mlp().to(BF16), grad_dtype=torch.float32)
        optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
        ours.prepare_optimizer(optimizer)
        return ours, optimizer

    straight, optimizer = fresh()
    steps(straight, optimizer, range(3))
    saved = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))
    steps(straight, optimizer, range(3, 6))
    resumed, optimizer = fresh()
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert "master_params" in saved[1]
    steps(resumed, optimizer, range(3, 6))
    for param, other in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(param, other)
    straight.close()
    resumed.close()


def test_training_with_masters_resumes_bit_for_bit(run_ranks: RunRanks) -> None:
    run_ranks(2, resumed_with_masters)


def broadcast_reaches_masters() -> float:
    module = Mlp(depth=1).to(BF16)
    ours = BucketDDP(module, grad_dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    inputs, target = batch(0, dist.get_rank())
    loss_of(ours(inputs.to(BF16)), target.to(BF16)).backward()
    optimizer.step()
    with torch.no_grad():
        module.head.bias.fill_(float(dist.get_rank() + 3))
    ours.broadcast_params()
    optimizer.step()
    assert abs(float(module.head.bias[0]) - 3) < 0.1, "the step went on from the master of before"
    difference = largest_difference_between_ranks(module)
    ours.close()
    return difference


def test_masters_follow_broadcast_parameters(run_ranks: RunRanks) -> None:
    assert run_ranks(2, broadcast_reaches_masters) == [0.0, 0.0]


def zeroed_with_frozen_parts() -> None:
    module = Mlp(depth=2)
    ours = BucketDDP(module)
    inputs, target = batch(0, dist.get_rank())
    loss_of(ours(inputs), target).backward()
    module.layers[0].requires_grad_(False)
    module.layers[0].bias.grad = None
    held = module.layers[0].weight.grad = module.layers[0].weight.grad.clone()
    ours.zero_grad_buffer()
    assert module.layers[0].weight.grad is held
    assert not held.any()
    assert module.layers[0].bias.grad is None, "an optimizer would decay a frozen parameter"
    assert not module.head.weight.grad.any()
    ours.close()


def test_zeroing_leaves_frozen_parameters_without_gradients(run_ranks: RunRanks) -> None:
    run_ranks(2, zeroed_with_frozen_parts)
