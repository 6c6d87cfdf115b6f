"""Several devices in one process: replicas' gradients are those of the whole batch, and ranks average over processes.

The CPU stands for the devices, named twice. Its replicas share the module's parameters, unless a test has them copied,
as on another device.
"""

import copy
import io
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_bucketddp import BucketDDP, PeerFailureError
from lightning_bucketddp.optim.lazy_all_gather import GatheredLater
from lightning_bucketddp.replicas.forward import warn_of_replicas
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.wrapper.sync_batchnorm import convert_sync_batchnorm
from tests.inside import passes_of, views_of
from tests.models import Branches, ConvBatchNorm, Lookup, Mlp, OutOfOrder, batch, build, loss_of, tokens
from tests.reference import assert_grads, copying, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003  # MiB: several buckets in the smallest model
SHARED, COPIED = True, False
PLACES = pytest.mark.parametrize("share", [SHARED, COPIED], ids=["shared", "copied"])


def replicated(module: nn.Module, share: bool = SHARED, devices: int = 2, **options: Any) -> BucketDDP:
    """A wrapper with several replicas on the CPU."""
    with pytest.warns(UserWarning, match=f"device_ids has {devices} entries"):
        net = BucketDDP(module, device_ids=["cpu"] * devices, **options)
    assert net._replicated is not None
    if not share:
        net._replicated = copying(net._replicated)
    return net


def counting_forwards(module: nn.Module) -> list[int]:
    """The batch sizes that the module and its replicas see."""
    sizes: list[int] = []
    module.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    return sizes


class Conv(nn.Module):
    """Channels-last convolutions: strides to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3)
        self.second = nn.Conv2d(6, 4, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 2, 2).repeat(1, 1, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.second(torch.relu(self.first(x))).mean((2, 3))


def model_named(name: str) -> nn.Module:
    torch.manual_seed(7)
    return Conv() if name == "conv_channels_last" else build(name)


# -- gradients and weights ---------------------------------------------------------------------------

MODELS = [
    "mlp",
    "shared_weights",
    "nested_outputs",
    "conv_channels_last",
    "checkpoint_reentrant",
    "checkpoint_non_reentrant",
    "mixed_dtypes",
]


def trained(name: str, share: bool | None) -> list[Tensor]:
    """The weights after a few steps; four samples for each of two processes, two for each of four.

    Compares with one process at every step.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module, alone = model_named(name), model_named(name)
    sizes = counting_forwards(module)
    net = BucketDDP(module, bucket_cap_mb=TINY) if share is None else replicated(module, share, bucket_cap_mb=TINY)
    optimizers = [torch.optim.SGD(it.parameters(), lr=0.1, momentum=0.9) for it in (module, alone)]
    # bf16 is added up in another order
    tolerance = {"rtol": 3e-2, "atol": 1e-3} if name == "mixed_dtypes" else {"rtol": 1e-5, "atol": 1e-6}
    for step in range(5):
        batches = [batch(step, number) for number in range(2)]
        if ranks == 4:
            inputs, target = (it.chunk(2)[rank % 2] for it in batches[rank // 2])
        else:
            inputs, target = batches[rank]
        net.zero_grad()
        alone.zero_grad()
        loss_of(net(inputs), target).backward()
        loss_of(alone(torch.cat([it for it, _ in batches])), torch.cat([it for _, it in batches])).backward()
        views = views_of(net)
        for (key, param), other in zip(module.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, **tolerance, msg=lambda m, n=key: f"{n}: {m}")
            assert param.grad is views[key]
            assert param.grad.stride() == param.stride()
        for optimizer in optimizers:
            optimizer.step()
        assert largest_difference_between_ranks(module) == 0
    assert sizes == ([2] * (10 if share is not None else 5)), "replicas did not divide the batch"
    assert net.early_launches > 0 or "reentrant" in name
    net.close()
    return [param.detach() for param in module.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_with_two_devices_each_are_four_processes_and_one(run_ranks: RunRanks, name: str) -> None:
    four = run_ranks(4, trained, name, None)[0]
    tolerance = {"rtol": 3e-2, "atol": 1e-3} if name == "mixed_dtypes" else {"rtol": 1e-5, "atol": 1e-6}
    for share in (SHARED, COPIED):
        two = run_ranks(2, trained, name, share)[0]
        torch.testing.assert_close(two, four, **tolerance)


def in_a_world_of_one(share: bool) -> None:
    module = Mlp()
    plain = copy.deepcopy(module)
    sizes = counting_forwards(module)
    net = replicated(module, share, devices=3)
    for step in range(2):
        inputs, target = batch(step, 0, 6)
        plain.zero_grad()
        net.zero_grad()
        loss_of(net(inputs), target).backward()
        loss_of(plain(inputs), target).backward()
        assert_grads(module, {name: param.grad for name, param in plain.named_parameters()})
    assert sizes == [2] * 6
    net.close()


@PLACES
def test_a_world_of_one(run_ranks: RunRanks, share: bool) -> None:
    run_ranks(1, in_a_world_of_one, share)


def compared_with_plain(
    net: BucketDDP,
    plain: nn.Module,
    step: int,
    size: int = 4,
    local: bool = False,
    clear: bool = True,
    guarded: bool = False,
    **kwargs: Any,
) -> None:
    """One pass of both, and the mean over the ranks of the plain module's gradients."""
    inputs, target = batch(step, dist.get_rank(), size)
    if clear:
        net.zero_grad()
        plain.zero_grad()
    with net.no_sync() if local else nullcontext():
        output = net(inputs, **kwargs)
        expected = plain(inputs, **kwargs)
        torch.testing.assert_close(output, expected)
        if output.requires_grad:
            loss = loss_of(output, target)
            with net.backward_pass(loss) if guarded else nullcontext():
                loss.backward()
    if expected.requires_grad:
        loss_of(expected, target).backward()
    if not local:
        assert_grads(net.module, mean_over_ranks(plain))


def uneven_parts(share: bool) -> list[int]:
    module = Mlp()
    plain = copy.deepcopy(module)
    sizes = counting_forwards(module)
    net = replicated(module, share, devices=3, bucket_cap_mb=TINY)
    for step, size in enumerate([4, 5, 1, 2, 3, 1, 7]):
        compared_with_plain(net, plain, step, size + dist.get_rank())
    net.close()
    return sizes


@PLACES
def test_batches_that_cannot_be_divided_evenly_or_are_too_small(run_ranks: RunRanks, share: bool) -> None:
    sizes, _ = run_ranks(2, uneven_parts, share)
    assert sorted(sizes[:2]) == [2, 2]  # as torch.chunk has it
    assert sorted(sizes[2:5]) == [1, 2, 2]
    assert sizes[5] == 1
    assert sizes[6:8] == [1, 1]


def accumulating(share: bool) -> None:
    module = Mlp()
    plain = copy.deepcopy(module)
    net = replicated(module, share, bucket_cap_mb=TINY)
    for step, local in enumerate([False, True, True, False, True, False]):
        compared_with_plain(net, plain, step, local=local, clear=step in (0, 1, 4))
        assert net.passes == [1, 1, 1, 2, 2, 3][step]
    # gradients that nobody clears: the mean of what was there and is new, as with one device
    single = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    net.zero_grad()
    for step in range(3):
        inputs, target = batch(step, dist.get_rank())
        for it in (net, single):
            loss_of(it(inputs), target).backward()
    assert_grads(module, {name: param.grad for name, param in single.module.named_parameters()})
    net.close()
    single.close()


@PLACES
def test_accumulation_and_gradients_that_are_not_cleared(run_ranks: RunRanks, share: bool) -> None:
    run_ranks(2, accumulating, share)


def parts_of_the_module(share: bool, find_unused: bool) -> None:
    torch.manual_seed(0)
    module = Branches()
    plain = copy.deepcopy(module)
    net = replicated(module, share, bucket_cap_mb=TINY, find_unused_parameters=find_unused)
    ways = [("left", "right"), ("left", "left"), ("none", "both"), ("both", "both"), ("right", "none")]
    for step, takes in enumerate(ways):
        compared_with_plain(net, plain, step, guarded=find_unused, take=takes[dist.get_rank()])
        assert module.idle.grad is None
    for step, frozen in enumerate([True, True, False, False]):
        for it in (module, plain):
            it.stem.requires_grad_(not frozen)
            it.left.weight.requires_grad_(frozen)
        compared_with_plain(net, plain, step)
        assert (module.stem.weight.grad is None) == frozen
    net.close()


@PLACES
@pytest.mark.parametrize("find_unused", [False, True])
def test_unused_and_frozen_parameters(run_ranks: RunRanks, share: bool, find_unused: bool) -> None:
    run_ranks(2, parts_of_the_module, share, find_unused)


def unfrozen_later(share: bool) -> None:
    module = Mlp()
    module.layers[0].requires_grad_(False)
    plain = copy.deepcopy(module)
    net = replicated(module, share, bucket_cap_mb=TINY)
    for step, frozen in enumerate([True, True, False, False, False, True]):
        for it in (module, plain):
            it.layers[0].requires_grad_(not frozen)
        compared_with_plain(net, plain, step)
        assert (module.layers[0].weight.grad is None) == frozen
    net.close()


@PLACES
def test_parameters_unfrozen_after_wrapping(run_ranks: RunRanks, share: bool) -> None:
    run_ranks(2, unfrozen_later, share)


def order_of_events(share: bool, **options: Any) -> tuple[list[str], int]:
    """What happened in a late pass: buckets on their way, and backward come to the first layer's output."""
    module = Mlp(depth=4)
    net = replicated(module, share, bucket_cap_mb=TINY, **options)
    events: list[str] = []

    def hook(state: Any, bucket: Any) -> Any:
        events.append("bucket")
        return allreduce_hook(None, bucket)

    def watch(_: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: events.append("first layer"))

    module.layers[0].register_forward_hook(watch)
    net.register_comm_hook(None, hook)
    for step in range(4):
        events.clear()
        inputs, target = batch(step, dist.get_rank())
        loss_of(net(inputs), target).backward()
    found = list(events), net.early_launches
    net.close()
    return found


@PLACES
def test_buckets_are_on_their_way_while_replicas_are_still_in_backward(run_ranks: RunRanks, share: bool) -> None:
    for events, early in run_ranks(2, order_of_events, share):
        assert early > 0
        assert events.count("first layer") == 2
        assert events.count("bucket") > 3
        assert "first layer" in events[events.index("bucket") :]


def learned_order(share: bool) -> tuple[list[list[str]], list[list[str]]]:
    """The parameters of each bucket after the first pass: with replicas, and on one device."""
    found = []
    for net in (replicated(OutOfOrder(), share, bucket_cap_mb=TINY), BucketDDP(OutOfOrder(), bucket_cap_mb=TINY)):
        for step in range(2):
            inputs, target = batch(step, dist.get_rank())
            loss_of(net(inputs), target).backward()
        layout = net.layout
        found.append([[layout.slots[slot].spec.name for slot in bucket.slots] for bucket in layout.buckets])
        net.close()
    return found[0], found[1]


@PLACES
def test_the_order_of_readiness_is_learned_as_on_one_device(run_ranks: RunRanks, share: bool) -> None:
    ours, one_device = run_ranks(2, learned_order, share)[0]
    assert ours == one_device
    assert len(ours) > 2
    assert "last.weight" in ours[0] + ours[1]


def edges_to_the_module(output: Tensor) -> int:
    """In how many pieces the gradients of copies come to the module's parameters."""
    seen, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [it for it, _ in node.next_functions]
    return sum(node.name() == "CloneBackward0" for node in seen)


def pieces_of_gradients() -> tuple[int, int]:
    """In how many pieces gradients come from a copy, and of how many parameters."""
    net = replicated(Mlp(depth=4), COPIED)
    plain = copy.deepcopy(net.module)
    for step in range(3):
        compared_with_plain(net, plain, step)
    found = edges_to_the_module(net(batch(0, 0)[0])), len(list(net.parameters()))
    net.close()
    return found


def test_each_gradient_comes_home_by_itself(run_ranks: RunRanks) -> None:
    # In one piece with others, autograd would not tell whether a gradient that is there got anything new.
    for pieces, params in run_ranks(2, pieces_of_gradients):
        assert pieces == params > 1


def two_threads_of_the_engine(share: bool) -> None:
    """Backward has come to an output on one device while parameters on another get gradients."""
    net = replicated(Mlp(), share, output_device="cpu")
    passes = passes_of(net)
    inside, may_leave = threading.Event(), threading.Event()

    def look() -> None:
        inside.set()
        assert may_leave.wait(30)

    passes._queue_end = lambda: None  # type: ignore[method-assign]
    passes.upkeep.look_before_gradients = look  # type: ignore[method-assign]
    thread = threading.Thread(target=passes.on_root, args=(True,))
    thread.start()
    assert inside.wait(30)
    try:
        assert not passes.setting.lock.acquire(blocking=False), (
            "a gradient's thread would open the pass at the same time"
        )
    finally:
        may_leave.set()
        thread.join()
    net.close()


@PLACES
def test_threads_of_outputs_and_of_gradients_exclude_each_other(run_ranks: RunRanks, share: bool) -> None:
    run_ranks(1, two_threads_of_the_engine, share)


# -- state -------------------------------------------------------------------------------------------


def statistics(share: bool) -> None:
    torch.manual_seed(0)
    module = ConvBatchNorm()
    halves = [copy.deepcopy(module) for _ in range(2)]
    net = replicated(module, share)
    rank = dist.get_rank()
    for step in range(3):
        inputs, target = batch(step, rank, 8)
        for number, (half, part) in enumerate(zip(halves, inputs.chunk(2), strict=True)):
            half.zero_grad()
            dist.broadcast(half.norm.running_mean, 0)  # as the wrapper does at the beginning of a forward
            dist.broadcast(half.norm.running_var, 0)
            if number:
                half.load_state_dict({**half.state_dict(), **dict(halves[0].named_buffers())})
            half.output = half(part)
        loss_of(torch.cat([half.output for half in halves]), target).backward()
        net.zero_grad()
        net.train()
        loss_of(net(inputs), target).backward()
        for name, param in module.named_parameters():
            total = sum(dict(half.named_parameters())[name].grad for half in halves)
            dist.all_reduce(total)
            torch.testing.assert_close(param.grad, total / 2, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(dict(module.named_buffers()), dict(halves[0].named_buffers()))
        assert int(module.norm.num_batches_tracked) == step + 1
        net.eval()
        before = copy.deepcopy(dict(module.named_buffers()))
        with torch.no_grad():
            torch.testing.assert_close(net(inputs), copy.deepcopy(module)(inputs))
        torch.testing.assert_close(dict(module.named_buffers()), before, rtol=0, atol=0)
    net.close()


@PLACES
def test_module_buffers_are_the_first_replicas_and_evaluation_uses_them(run_ranks: RunRanks, share: bool) -> None:
    run_ranks(2, statistics, share)


class Remembers(nn.Module):
    """Sets attributes and a module buffer in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.calls = 0
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.average = self.average * 0.5 + 1
        return self.layer(x)


def attributes_of_forward() -> tuple[int, float]:
    module = Remembers()
    net = replicated(module)
    for samples in (4, 4, 1):
        net(torch.ones(samples, 8)).sum().backward()
    net.close()
    return module.calls, float(module.average)


def test_what_forward_sets_on_the_module_stays(run_ranks: RunRanks) -> None:
    assert run_ranks(1, attributes_of_forward) == [(3, 1.75)]


def looked_at_between_steps() -> list[int]:
    """How many replicas there have been after each step."""
    net = replicated(Mlp(), COPIED)
    made: list[int] = []
    build = Replicas.__init__
    found = []
    try:
        Replicas.__init__ = lambda self, *args, **kwargs: (made.append(1), build(self, *args, **kwargs))[1]  # type: ignore[method-assign]
        for _ in range(4):
            net.zero_grad()
            net(torch.ones(4, 8)).sum().backward()
            with torch.no_grad():
                net(torch.ones(4, 8))
            found.append(len(made))
    finally:
        Replicas.__init__ = build  # type: ignore[method-assign]
    net.close()
    return found


def test_a_forward_without_gradients_leaves_the_replicas_as_they_are(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(1, looked_at_between_steps)
    assert found[-1] <= 2, "once to learn the order, once for its buckets"


def copies_of_the_wrapper(pickled: bool) -> None:
    torch.manual_seed(1)
    module = Mlp()
    keys = list(module.state_dict())
    net = replicated(module, COPIED, bucket_cap_mb=TINY)
    compared_with_plain(net, copy.deepcopy(module), 0)
    compared_with_plain(net, copy.deepcopy(module), 1)
    assert list(net.state_dict()) == keys
    assert len(list(net.modules())) == 1 + len(list(module.modules()))
    assert len(list(net.parameters())) == len(keys)
    memory = io.BytesIO()
    if pickled:
        torch.save(net, memory)
        assert memory.tell() < 40_000, "replicas were saved"
        memory.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # who copies has been told before
        other = torch.load(memory, weights_only=False) if pickled else copy.deepcopy(net)
        sizes = counting_forwards(other.module)
        inputs, _ = batch(3, 0)
        other.eval()
        with torch.no_grad():
            torch.testing.assert_close(other(inputs), module(inputs))
        assert sizes == [2, 2]
        other.train()
        compared_with_plain(other, copy.deepcopy(other.module), 2)
        assert other.passes == 1
        compared_with_plain(net, copy.deepcopy(module), 3)
        other.close()
        net.close()
        sizes.clear()
        other(inputs).sum().backward()  # forwards only, and still in parts
    assert sizes == [2, 2]


@pytest.mark.parametrize("pickled", [False, True], ids=["deepcopy", "pickle"])
def test_replicas_are_no_part_of_the_module_and_its_copies(run_ranks: RunRanks, pickled: bool) -> None:
    run_ranks(2, copies_of_the_wrapper, pickled)


# -- options that gradients pass by ------------------------------------------------------------------


def sharded(share: bool) -> None:
    torch.manual_seed(0)
    module = Mlp()
    alone = copy.deepcopy(module)
    sizes = counting_forwards(module)
    net = replicated(module, share, shard_optimizer=True, bucket_cap_mb=TINY)
    late: list[bool] = []
    module.register_forward_pre_hook(lambda it, _: late.extend(isinstance(p, GatheredLater) for p in it.parameters()))
    optimizers = [torch.optim.Adam(it.parameters(), lr=0.01) for it in (module, alone)]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs, target = batch(step, dist.get_rank())
        assert net._runtime.optimizers.parts.gathering == (step > 0)
        loss_of(net(inputs), target).backward()
        for rank in range(2):
            inputs, target = batch(step, rank)
            (loss_of(alone(inputs), target) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert len(sizes) == 12
    assert not any(late), "threads would wait for the same parameter at the same time"
    torch.testing.assert_close(module.state_dict(), alone.state_dict())
    net.close()


@PLACES
def test_a_sharded_optimizer(run_ranks: RunRanks, share: bool) -> None:
    run_ranks(2, sharded, share)


def in_fp32(share: bool) -> None:
    torch.manual_seed(0)
    module = Mlp().to(torch.bfloat16)
    plain = copy.deepcopy(module)
    net = replicated(module, share, grad_dtype=torch.float32, master_params=False, bucket_cap_mb=TINY)
    totals = [torch.zeros_like(param, dtype=torch.float32) for param in plain.parameters()]
    for step in range(2):
        inputs, target = (it.bfloat16() for it in batch(step, dist.get_rank()))
        with net.no_sync() if step == 0 else nullcontext():
            loss_of(net(inputs), target).backward()
        for part, goal in zip(inputs.chunk(2), target.chunk(2), strict=True):
            plain.zero_grad()
            (loss_of(plain(part), goal) / 2).backward()
            for total, param in zip(totals, plain.parameters(), strict=True):
                total += param.grad
    low = 0.0
    for total, (name, param) in zip(totals, module.named_parameters(), strict=True):
        dist.all_reduce(total)
        assert param.grad.dtype is torch.float32
        # what a sum in bf16 misses by half of its last bit
        torch.testing.assert_close(param.grad, total / 2, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
        low = max(low, float((param.grad - param.grad.bfloat16()).abs().max()))
    assert low > 1e-5, "a sum in bf16 would do"
    net.close()


@PLACES
def test_gradients_of_replicas_are_added_up_in_their_own_dtype(run_ranks: RunRanks, share: bool) -> None:
    run_ranks(2, in_fp32, share)


def sparse(share: bool) -> None:
    torch.manual_seed(5)
    module = Lookup()
    plain = copy.deepcopy(module)
    net = replicated(module, share)
    for step in range(3):
        words, bag = tokens(step, dist.get_rank())
        net.zero_grad()
        plain.zero_grad()
        net(words, bag).square().mean().backward()
        plain(words, bag).square().mean().backward()
        for param in plain.parameters():
            param.grad = param.grad.to_dense()
        expected = mean_over_ranks(plain)
        for name, param in module.named_parameters():
            assert param.grad.is_sparse == (name in ("words.weight", "bag.weight"))
            torch.testing.assert_close(param.grad.to_dense(), expected[name], msg=lambda m, n=name: f"{n}: {m}")
    net.close()


@PLACES
def test_sparse_gradients(run_ranks: RunRanks, share: bool) -> None:
    run_ranks(2, sparse, share)


def by_tokens(share: bool) -> None:
    torch.manual_seed(0)
    module = Mlp()
    plain = copy.deepcopy(module)
    net = replicated(module, share, gradient_divide_by="tokens")
    rank = dist.get_rank()
    for step in range(2):
        net.zero_grad()
        plain.zero_grad()
        inputs, target = batch(step, rank, 3 + rank)
        net.count_tokens(len(inputs))
        (net(inputs) - target).square().sum().backward()
        (plain(inputs) - target).square().sum().backward()
        expected = {name: mean * 2 / 7 for name, mean in mean_over_ranks(plain).items()}
        assert_grads(module, expected)
    net.close()


@PLACES
def test_gradients_divided_by_tokens(run_ranks: RunRanks, share: bool) -> None:
    run_ranks(2, by_tokens, share)


def many_ways(share: bool) -> None:
    ways: list[dict[str, Any]] = [
        {"use_contiguous_buffers": False},
        {"overlap": False},
        {"bucket_cap_mb": TINY, "wire_dtype": torch.bfloat16},
        {"bucket_cap_mb": TINY, "comm_hook": "bf16"},
        {"bucket_cap_mb": TINY, "comm_hook": "powersgd"},
        {"bucket_cap_mb": TINY, "max_abs_grad": 1e3},
        {"pad_buckets_to": 64, "module_buffers": "mean"},
    ]
    for options in ways:
        nets = [replicated(model_named("mlp"), share, **options), BucketDDP(model_named("mlp"), **options)]
        for step in range(3):
            inputs, target = batch(step, dist.get_rank())
            for net in nets:
                net.zero_grad()
                loss_of(net(inputs), target).backward()
            for ours, other in zip(*(net.parameters() for net in nets), strict=True):
                torch.testing.assert_close(
                    ours.grad, other.grad, rtol=1e-2, atol=1e-3, msg=lambda m, o=options: f"{o} {m}"
                )
        assert nets[0].passes == 3
        for net in nets:
            net.close()


@PLACES
def test_other_ways_to_reduce(run_ranks: RunRanks, share: bool) -> None:
    run_ranks(2, many_ways, share)


def changed_after_wrapping(share: bool) -> None:
    module = Branches()
    net = replicated(module, share, bucket_cap_mb=TINY)
    inputs, target = batch(0, 0)
    for takes in ("both", "left", "left"):  # the second pass has another layout, without what was taken away
        loss_of(net(inputs, take=takes), target).backward()
        if hasattr(module, "right"):
            del module.right
    module.left = nn.Linear(8, 4)
    alone = copy.deepcopy(module)
    for model in (alone, net):
        model.zero_grad()
        for _ in range(2):
            loss_of(model(inputs, take="left"), target).backward()
    assert_grads(module, {name: param.grad for name, param in alone.named_parameters()})
    net.close()


@PLACES
def test_parameters_taken_away_and_replaced_after_wrapping(run_ranks: RunRanks, share: bool) -> None:
    run_ranks(1, changed_after_wrapping, share, fresh=True)


def running_out_of_data() -> None:
    torch.manual_seed(0)
    nets = [replicated(Mlp()), BucketDDP(Mlp())]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with net.join():
            for step in range(2 + 2 * dist.get_rank()):
                inputs, target = batch(step, dist.get_rank())
                optimizer.zero_grad()
                loss_of(net(inputs), target).backward()
                optimizer.step()
        net.close()
    torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict())


def test_ranks_that_run_out_of_data(run_ranks: RunRanks) -> None:
    run_ranks(2, running_out_of_data)


# -- arguments ---------------------------------------------------------------------------------------


class Columns(nn.Module):
    """Takes its batch along dimension 1, by keyword, and returns it there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, *, columns: Tensor, scale: float) -> dict[str, Tensor]:
        self.seen.append(tuple(columns.shape))
        return {"out": self.linear(columns.T).T * scale, "loss": columns.mean()}


def along_another_dimension(share: bool) -> None:
    module = Columns()
    plain = copy.deepcopy(module)
    net = replicated(module, share, dim=1, output_device="cpu")
    inputs, target = batch(0, dist.get_rank())
    found = net(columns=inputs.T, scale=2.0)
    expected = plain(columns=inputs.T, scale=2.0)
    torch.testing.assert_close(found["out"], expected["out"])
    assert module.seen == [(8, 2), (8, 2)]
    assert found["loss"].shape == (2,)
    for output in (found, expected):
        loss_of(output["out"].T, target).backward()
    assert_grads(module, mean_over_ranks(plain))
    net.close()


@PLACES
def test_keywords_and_another_dimension(run_ranks: RunRanks, share: bool) -> None:
    run_ranks(2, along_another_dimension, share)


class WithoutInputs(nn.Module):
    """Makes its own data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.forwards: list[str] = []

    def forward(self, label: str = "none") -> Tensor:
        self.forwards.append(label)
        return self.weight * torch.arange(3.0)


def nothing_to_divide() -> None:
    module = WithoutInputs()
    net = replicated(module)
    net().sum().backward()
    assert torch.equal(module.weight.grad, torch.arange(3.0))
    net("one").sum().backward()
    assert module.forwards == ["none", "one"]
    net.close()


def test_a_forward_without_tensors_runs_once(run_ranks: RunRanks) -> None:
    run_ranks(1, nothing_to_divide)


class RefusesSome(nn.Module):
    """Raises at rows that begin with a large number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] > 99).any()):
            raise ArithmeticError("a row that I do not like")
        return self.net(x)


def raises_in_one_replica() -> tuple[str, list[str], list[str], int]:
    net = replicated(RefusesSome())
    inputs, target = batch(0, dist.get_rank())
    loss_of(net(inputs), target).backward()
    before = threading.active_count()
    if dist.get_rank() == 1:
        inputs[-1, 0] = 100.0

    def step() -> None:
        try:
            loss_of(net(inputs), target).backward()
        except ArithmeticError as problem:
            net.publish_failure(problem)  # as a Trainer does
            raise

    with pytest.raises((ArithmeticError, PeerFailureError)) as error:
        step()
    frames = [entry.name for entry in error.traceback]
    return str(error.value), getattr(error.value, "__notes__", []), frames, threading.active_count() - before


def test_an_exception_in_one_replica_reaches_the_caller_and_the_other_ranks(run_ranks: RunRanks) -> None:
    (theirs, *_), (own, notes, frames, threads) = run_ranks(2, raises_in_one_replica, fresh=True)
    assert own == "a row that I do not like"
    assert any("replica 1" in note for note in notes)
    assert "forward" in frames[-1]
    assert threads == 0
    assert "rank 1 raised ArithmeticError: a row that I do not like" in theirs


def what_is_said() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        BucketDDP(Mlp()).close()
        assert not caught
        net = BucketDDP(Mlp(), device_ids=["cpu", torch.device("cpu")])
        for step in range(2):
            loss_of(net(batch(step, 0)[0]), batch(step, 0)[1]).backward()
        net.close()
    (warning,) = caught
    assert warning.category is UserWarning
    assert warning.filename == __file__
    assert "one process per device is faster" in str(warning.message)


def test_one_warning_says_when_several_devices_are_of_use(run_ranks: RunRanks) -> None:
    run_ranks(1, what_is_said)
    with pytest.warns(UserWarning, match="device_ids has 5 entries"):
        warn_of_replicas(5)


def refused() -> None:
    class OnMeta(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("elsewhere", torch.empty(2, device="meta"))

    compiled = Mlp()
    compiled.compile()
    for module, arguments, kind, words in [
        (Mlp(), {"device_ids": ["cpu", "meta"]}, ValueError, "device_ids to name devices that compute, found 'meta'"),
        (Mlp(), {"device_ids": ["cpu", "moon:1"]}, ValueError, "expected device_ids to name devices, found 'moon:1'"),
        (Mlp(), {"device_ids": ["cpu", "cuda:99"]}, ValueError, "device_ids to name .*cuda:99"),
        (Mlp(), {"device_ids": ["cpu", "xpu"]}, ValueError, "device_ids to name .*xpu"),
        (Mlp(), {"device_ids": ["cpu", 99]}, ValueError, "device_ids to name devices, found 99: "),
        (Mlp(), {"device_ids": [-1, "cpu"]}, ValueError, "device_ids to name devices, found -1: "),
        (Mlp(), {"device_ids": ["cpu", True]}, TypeError, "device_ids to name devices, found True"),
        (Mlp(), {"device_ids": ["cpu", None]}, TypeError, "device_ids to name devices, found None"),
        (Mlp(), {"device_ids": ["cpu"] * 2, "output_device": 1.5}, TypeError, "output_device to name devices"),
        (Mlp(), {"device_ids": ["cpu"] * 2, "output_device": "meta"}, ValueError, "output_device to name"),
        (Mlp(), {"device_ids": ["cpu"] * 2, "dim": "0"}, TypeError, "dim to be the number of a dimension, found '0'"),
        (Mlp(), {"device_ids": ["cpu"]}, ValueError, "no device_ids and no output_device"),
        (compiled, {"device_ids": ["cpu"] * 2}, TypeError, "modules that are not compiled"),
        (OnMeta(), {"device_ids": ["cpu"] * 2, "init_sync": False}, ValueError, "module buffer 'elsewhere' on meta"),
        (
            convert_sync_batchnorm(ConvBatchNorm()),
            {"device_ids": ["cpu"] * 2},
            ValueError,
            "collectives of their own.* SyncBatchNorm 'norm'",
        ),
    ]:
        with pytest.raises(kind, match=words):
            BucketDDP(module, **arguments)


def test_arguments_that_make_no_sense_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(1, refused)
