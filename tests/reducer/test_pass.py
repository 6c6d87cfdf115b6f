"""A pass in plain PyTorch, against means worked out one parameter at a time."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.peers.control import HEADER
from tests.inside import passes_of, views_of
from tests.models import Branches, Checkpointed, ConvBatchNorm, Mlp, OutOfOrder, batch, loss_of
from tests.reference import TINY, Twins, assert_grads, grads, largest_difference_between_ranks

RunRanks = Callable[..., list[Any]]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def taking(step: int, take: str, scale: float = 1.0) -> Callable[[nn.Module], Tensor]:
    """The loss of ``Branches`` on this rank's batch."""
    inputs = batch(step, dist.get_rank())[0]
    return lambda net: net(inputs, take).square().mean() * scale


def mse(step: int, direct: bool = False) -> Callable[[nn.Module], Tensor]:
    """A mean squared error on this rank's batch; ``direct`` goes past the wrapper."""
    inputs, target = batch(step, dist.get_rank())
    return lambda net: loss_of(net.module(inputs) if direct and isinstance(net, BucketDDP) else net(inputs), target)


# -- unused parameters ---------------------------------------------------------------------------------


def branches_by_rank() -> None:
    rank = dist.get_rank()
    for takes in (["both"] * 3, ["left", "right", "none"], ["left", "none", "none"]):
        twins = Twins(seeded(Branches))
        for step in range(3):
            twins.step(taking(step, takes[rank]))
            assert twins.ours.module.idle.grad is None
        assert twins.ours.passes == 3
        twins.ours.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_take_different_branches(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, branches_by_rank)


def branches_change_every_step() -> None:
    twins = Twins(seeded(Branches))
    patterns = ["both", "left", "none", "right", "left", "both", "none"]
    for step in range(len(patterns)):
        twins.step(taking(step, patterns[(step + 2 * dist.get_rank()) % len(patterns)]))
    twins.ours.close()


def test_stale_buffer_content_never_reaches_the_wire(run_ranks: RunRanks) -> None:
    run_ranks(2, branches_change_every_step)


def unused_keeps_its_gradient() -> None:
    ours = BucketDDP(seeded(Branches), bucket_cap_mb=TINY)
    own = torch.randn(5) * 1e-3  # as a user may have put it there, another on each rank
    ours.module.idle.grad = own
    before = own.clone()
    taking(0, "both")(ours).backward()
    assert ours.module.idle.grad is own
    assert torch.equal(own, before)

    ours.module.left.weight.grad.copy_(torch.full((4, 8), 0.1) + dist.get_rank())
    published = grads(ours.module)["left.weight"]
    ours.module.right.weight.grad = None
    taking(0, "none")(ours).backward()
    assert torch.equal(ours.module.left.weight.grad, published)
    assert ours.module.right.weight.grad is None
    ours.close()


def test_a_gradient_that_no_rank_used_keeps_every_bit(run_ranks: RunRanks) -> None:
    run_ranks(3, unused_keeps_its_gradient)


def loss_without_parameters(use_leaf: bool) -> None:
    """Rank 1's output requires grad but comes from no parameter."""

    class Maybe(Mlp):
        def forward(self, x: Tensor, constant: bool) -> Tensor:
            if not constant:
                return super().forward(x)
            return torch.ones(4, 4, requires_grad=True) if use_leaf else torch.ones(4, 4, requires_grad=True) * 2

    rank = dist.get_rank()
    twins = Twins(seeded(Maybe), find_unused_parameters=True)
    for step in range(3):
        inputs = batch(step, rank)[0]
        twins.step(lambda net, x=inputs: net(x, rank == 1).square().mean())
    twins.ours.close()


@pytest.mark.parametrize("use_leaf", [True, False])
def test_find_unused_parameters_lets_an_untouched_rank_take_part(run_ranks: RunRanks, use_leaf: bool) -> None:
    run_ranks(2, loss_without_parameters, use_leaf)


def guarded_on_every_rank() -> None:
    rank = dist.get_rank()
    twins = Twins(seeded(Branches))
    for step in range(3):
        twins.zero_grad()
        if rank == 0:
            twins.backward(taking(step, "both"), guarded=True)
        else:
            loss = torch.zeros((), requires_grad=True)
            with twins.ours.backward_pass(loss):
                if step < 2:  # at last rank 1 does not even call it
                    loss.backward()
        twins.check()
    assert twins.ours.passes == 3
    twins.ours.close()


def test_in_a_backward_pass_every_rank_takes_part(run_ranks: RunRanks) -> None:
    run_ranks(2, guarded_on_every_rank)


def find_unused(reentrant: bool) -> int:
    """Rank 1's first loss shows nothing of the graph; re-entrant checkpoints hide what is inside."""
    rank = dist.get_rank()
    plain = seeded(lambda: Checkpointed(use_reentrant=reentrant))
    plain.spare = nn.Linear(8, 8)
    twins = Twins(plain, bucket_cap_mb=0.0001, find_unused_parameters=True)

    def loss(net: nn.Module, step: int) -> Tensor:
        value = mse(step)(net) if step or rank == 0 else torch.zeros((), requires_grad=True)
        module = net.module if isinstance(net, BucketDDP) else net
        # In step 0 only: `spare` is then not among the parameters never seen.
        return value if step else value + module.spare(batch(step, rank)[0]).sum()

    for step in range(4):
        twins.step(lambda net, step=step: loss(net, step), guarded=True)
    layout = twins.ours.layout
    assert layout.slots[layout.buckets[0].slots[0]].spec.name.startswith("spare")
    early = twins.ours.early_launches
    twins.ours.close()
    return early


def test_find_unused_parameters_keeps_the_overlap(run_ranks: RunRanks) -> None:
    assert min(run_ranks(2, find_unused, False)) == 7, "not held up by the first bucket, which is unused"
    assert run_ranks(2, find_unused, True) == [0, 0], "a re-entrant checkpoint may hide it"


# -- accumulation ----------------------------------------------------------------------------------------


def local_passes() -> None:
    rank = dist.get_rank()
    twins = Twins(seeded(Branches))
    for step in range(3):
        twins.zero_grad()
        twins.backward(taking(2 * step, "left" if rank == 0 else "none"), local=True)
        assert twins.ours.passes == step
        twins.backward(taking(2 * step + 1, "none"))
        twins.check()
    twins.zero_grad()
    twins.backward(taking(6, "left"), local=True)
    twins.step(taking(7, "right"))  # begins with zero_grad: what the local pass left does not come back
    assert twins.ours.module.left.weight.grad is None
    twins.ours.close()


def test_gradients_of_local_passes_count_until_zero_grad(run_ranks: RunRanks) -> None:
    run_ranks(2, local_passes)


def passes_add_up() -> None:
    rank = dist.get_rank()
    twins = Twins(seeded(Branches))
    twins.backward(taking(0, "both"))
    twins.backward(taking(1, "left" if rank else "none"))
    twins.check()
    assert twins.ours.passes == 2
    twins.ours.close()


def test_two_synchronised_passes_without_zero_grad_add_up(run_ranks: RunRanks) -> None:
    run_ranks(2, passes_add_up)
    run_ranks(3, passes_add_up)


def nested_no_sync() -> None:
    ours = BucketDDP(seeded(Mlp))

    def passes(direct: bool = False) -> int:
        before = ours.passes
        mse(0, direct)(ours).backward()
        return ours.passes - before

    with ours.no_sync():
        with ours.no_sync():
            assert passes() == 0
        assert passes() == 0
    assert passes() == 1
    with pytest.raises(KeyError), ours.no_sync():
        raise KeyError
    assert passes() == 1
    with ours.no_sync():  # without a root, no_sync around backward decides
        assert passes(direct=True) == 0
    assert passes(direct=True) == 1
    ours.close()


def test_no_sync_nests_and_restores_after_an_exception(run_ranks: RunRanks) -> None:
    run_ranks(2, nested_no_sync)


def bucket_that_never_fills() -> None:
    ours = BucketDDP(seeded(Branches), bucket_cap_mb=1)  # one bucket, and `idle` never gets a gradient
    with ours.no_sync():
        taking(0, "left")(ours).backward()
    assert ours.module.left.weight.grad is views_of(ours)["left.weight"]
    assert ours.module.right.weight.grad is None
    ours.close()


def test_local_passes_accumulate_in_the_buffers(run_ranks: RunRanks) -> None:
    run_ranks(2, bucket_that_never_fills)


def memory() -> tuple[int, int, int]:
    module = seeded(lambda: Mlp(width=64, depth=4))
    ours = BucketDDP(module)

    def held() -> int:
        storages = [p.grad.untyped_storage() for p in module.parameters()]
        return sum({it.data_ptr(): it.nbytes() for it in storages}.values())

    for _ in range(3):
        ours.zero_grad()
        with ours.no_sync():
            mse(0)(ours).backward()
        local = held()
        mse(0)(ours).backward()
    assert held() == ours.layout.nbytes + 4 * (HEADER + len(ours.layout.slots)), "the control vector's place"
    ours.close()
    return held(), local, sum(p.numel() * 4 for p in module.parameters())


def test_gradients_exist_once(run_ranks: RunRanks) -> None:
    for after_close, local, parameters in run_ranks(2, memory):
        assert local < parameters * 1.02, "alignment"
        assert after_close == parameters


# -- overlap and order -----------------------------------------------------------------------------------


def overlap() -> tuple[list[int], list[str], bool]:
    ours = BucketDDP(seeded(lambda: Mlp(depth=6)), bucket_cap_mb=TINY)
    events: list[str] = []
    collectives = ours._runtime.collectives
    start = collectives.all_reduce_mean

    def noted(*args: Any, **options: Any) -> Any:
        events.append("launch")
        return start(*args, **options)

    collectives.all_reduce_mean = noted
    hidden = []
    last = ours.module.layers[0].weight  # its gradient is the last to come
    last.register_hook(lambda grad: events.append("last gradient"))
    last.register_hook(lambda grad: hidden.append(ours.module.head.weight.grad is None))
    counts = []
    for _ in range(2):
        events.clear()
        mse(0)(ours).backward()
        counts.append(ours.early_launches)
    assert hidden[-1], "nothing may accumulate into a gradient that is on the wire"
    assert ours.module.head.weight.grad is views_of(ours)["head.weight"]
    ours.close()
    return counts, events, hidden[-1]


def test_buckets_launch_before_backward_has_finished(run_ranks: RunRanks) -> None:
    for (first_pass, second_pass), events, hidden in run_ranks(2, overlap):
        assert first_pass == 0, "the first pass learns the order and launches nothing early"
        early = events.index("last gradient")
        assert early >= 3
        assert second_pass >= early
        assert len(events) > early + 1
        assert hidden, "nothing may accumulate into a gradient that is on the wire"


def learned_order() -> tuple[list[str], list[str]]:
    names = []
    for build in (OutOfOrder, Branches):
        ours = BucketDDP(seeded(build), bucket_cap_mb=0.0001)
        for step in range(2):
            ours.zero_grad()
            (mse(step) if build is OutOfOrder else taking(step, "both"))(ours).backward()
        layout = ours.layout
        names.append([layout.slots[slot].spec.name for bucket in layout.buckets for slot in bucket.slots])
        assert ours.early_launches == len(layout.buckets) - 1, "the last waits for the control vector, or is never seen"
        ours.close()
    return names[0], names[1]


def test_the_first_pass_teaches_the_order(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, learned_order)
    assert first == second
    out_of_order, branches = first
    assert list(dict.fromkeys(name.split(".")[0] for name in out_of_order)) == ["last", "middle", "first"]
    assert branches[-1] == "idle", "a parameter never seen holds nobody up"


def repeated_gradients() -> None:
    twins = Twins(seeded(lambda: Checkpointed(use_reentrant=True, calls=3)), bucket_cap_mb=0.0001)
    for step in range(4):
        twins.step(mse(step))
    assert twins.ours.passes == 4
    assert 0 < twins.ours.early_launches < len(twins.ours.layout.buckets), "only the repeated layer waits"
    twins.ours.close()


def test_a_layer_checkpointed_several_times_is_reduced_once(run_ranks: RunRanks) -> None:
    run_ranks(2, repeated_gradients)


def first_used_later() -> None:
    """The first passes do not use the block. The stem is frozen: no gradient comes after those of the block."""
    plain = seeded(lambda: Checkpointed(use_reentrant=True, calls=0))
    plain.stem.requires_grad_(False)
    twins = Twins(plain, bucket_cap_mb=0.0001)
    for step in range(4):
        for module in twins.modules:
            module.calls = 3 if step >= 2 else 0
        inputs, target = batch(step, dist.get_rank())
        twins.step(lambda net, x=inputs, y=target: loss_of(net(x.requires_grad_()), y))
    twins.ours.close()


def test_a_branch_used_later_may_be_checkpointed_repeatedly(run_ranks: RunRanks) -> None:
    run_ranks(2, first_used_later)


# -- how backwards begin -----------------------------------------------------------------------------------


def engine_uses_without_a_pass() -> None:
    ours = BucketDDP(seeded(Mlp), bucket_cap_mb=TINY)
    inputs, target = batch(0, dist.get_rank())
    inputs.requires_grad_()
    if dist.get_rank() == 0:  # on one rank only: nothing may be sent
        torch.autograd.grad(ours(inputs).sum(), inputs)
        ours(inputs)
        with torch.no_grad():
            ours(inputs)
    assert ours.passes == 0
    loss_of(ours(inputs), target).backward()
    assert ours.passes == 1
    ours.close()


def test_autograd_grad_and_unused_forwards_send_nothing(run_ranks: RunRanks) -> None:
    run_ranks(2, engine_uses_without_a_pass)


def other_roots() -> None:
    for build in (ConvBatchNorm, Mlp):
        twins = Twins(seeded(build))
        for step in range(3):
            first, second = (batch(2 * step + at, dist.get_rank())[0] for at in range(2))
            twins.step(lambda net, a=first, b=second: net(a).square().mean() + net(b).square().mean())
        assert twins.ours.passes == 3, "two forwards, one backward"
        twins.ours.close()
    twins = Twins(seeded(lambda: Checkpointed(use_reentrant=True)))
    for step in range(3):
        twins.step(mse(step, direct=True))  # past the wrapper: the first inner backward ends a pass
    twins.ours.close()


def test_backward_of_two_forwards_or_past_the_wrapper(run_ranks: RunRanks) -> None:
    run_ranks(2, other_roots)


def two_wrappers() -> None:
    first, second = BucketDDP(seeded(Mlp)), BucketDDP(seeded(Branches))
    for step in range(2):
        inputs, target = batch(step, dist.get_rank())
        nn.functional.mse_loss(second(first(inputs) @ torch.ones(4, 8)), target).backward()
    assert (first.passes, second.passes) == (2, 2)
    for wrapper in (first, second):
        torch.optim.SGD(wrapper.parameters(), lr=0.1).step()
        assert largest_difference_between_ranks(wrapper.module) == 0
        wrapper.close()


def test_two_wrappers_in_one_graph(run_ranks: RunRanks) -> None:
    run_ranks(2, two_wrappers)


def context_without_backward() -> int:
    first, second = BucketDDP(seeded(Mlp)), BucketDDP(seeded(lambda: Mlp(depth=6)), bucket_cap_mb=TINY)
    mse(0)(second).backward()
    with first.backward_pass(torch.zeros((), requires_grad=True)):
        pass
    mse(1)(second).backward()
    early = second.early_launches
    first.close()
    second.close()
    return early


def test_a_context_without_backward_holds_no_other_wrapper_up(run_ranks: RunRanks) -> None:
    assert min(run_ranks(2, context_without_backward)) > 0


# -- values --------------------------------------------------------------------------------------------------


def large_values() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        module = nn.Linear(4, 1, bias=False).to(dtype)
        nn.init.zeros_(module.weight)
        ours = BucketDDP(module)
        ours(torch.full((1, 4), 40000.0, dtype=dtype)).sum().backward()
        torch.testing.assert_close(module.weight.grad, torch.full((1, 4), 40000.0, dtype=dtype), rtol=2e-3, atol=0)
        ours.close()


def test_averaging_does_not_overflow(run_ranks: RunRanks) -> None:
    run_ranks(3, large_values)


def averaging_ops() -> dict[torch.dtype, list[str]]:
    found: dict[torch.dtype, list[str]] = {}
    start = dist.all_reduce

    def noted(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        found[dtype].append(str(op).split(".")[-1])
        return start(tensor, op=op, **options)

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        found[dtype] = []
        ours = BucketDDP(seeded(Mlp).to(dtype), bucket_cap_mb=1)
        inputs, target = (tensor.to(dtype) for tensor in batch(0, dist.get_rank()))
        dist.all_reduce = noted
        try:
            loss_of(ours(inputs), target).backward()
        finally:
            dist.all_reduce = start
        ours.close()
    return found


def test_packing_or_the_backend_divides(run_ranks: RunRanks) -> None:
    """The bucket, the control vector where it does not travel in the bucket, and the order of gradients."""
    once, apart = ["SUM", "SUM"], ["AVG", "SUM", "SUM"]
    for found in run_ranks(2, averaging_ops):
        assert found == {torch.float32: once, torch.float64: once, torch.bfloat16: apart}


def divided_once(take: str) -> None:
    """Large and small gradients: fresh, in the buffer already, published, and missing ones."""
    torch.manual_seed(0)
    twins = Twins(nn.ModuleList([nn.Linear(200, 200), nn.Linear(3, 200), nn.Linear(200, 2)]), bucket_cap_mb=None)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))

    def loss(net: nn.Module, middle: bool) -> Tensor:
        layers = net.module if isinstance(net, BucketDDP) else net
        hidden = layers[1](x)
        return layers[2](layers[0](hidden) if middle else hidden).square().mean()

    for step in range(4):
        if take != "added up":
            twins.zero_grad()
        if take == "accumulated":
            twins.backward(lambda net, step=step: loss(net, step % 2 == 0) * 3, local=True)
        before = grads(twins.ours.module)
        twins.backward(lambda net, step=step: loss(net, step != 2), guarded=True)
        if take == "added up":
            twins.check()
            if step == 2:
                assert torch.equal(twins.ours.module[0].weight.grad, before["0.weight"]), "untouched"
            for plain, ours in zip(*(it.parameters() for it in twins.modules), strict=True):
                plain.grad = None if ours.grad is None else ours.grad.clone()
        else:
            twins.check()
    twins.ours.close()


@pytest.mark.parametrize("take", ["cleared", "accumulated", "added up"])
def test_every_gradient_is_divided_once(run_ranks: RunRanks, take: str) -> None:
    run_ranks(3, divided_once, take)


def kept_on_one_rank() -> None:
    """Rank 0 and 2 have nothing to add to a published gradient, in a bucket where all else is fresh."""
    ours = BucketDDP(Mlp())
    head = ours.module.head.weight

    def backward(parts: list[nn.Parameter]) -> None:
        value = sum(param.sum() for param in parts)
        with ours.backward_pass(value):
            value.backward()

    backward(list(ours.module.parameters()))
    for param in ours.module.parameters():
        if param is not head:
            param.grad = None
    backward([p for p in ours.module.parameters() if p is not head or dist.get_rank() == 1])
    torch.testing.assert_close(head.grad, torch.full_like(head, 4 / 3), msg="1, 2 and 1")
    ours.close()


def test_a_kept_gradient_is_divided_once(run_ranks: RunRanks) -> None:
    run_ranks(3, kept_on_one_rank)


def moved_elsewhere(change: str) -> None:
    """``.data`` keeps the gradient's tensor object and puts it into other memory."""
    twins = Twins(seeded(ConvBatchNorm))
    for step in range(3):
        inputs = batch(step, dist.get_rank())[0]
        twins.backward(lambda net, x=inputs: net(x).square().mean())
        twins.check()
        for plain, ours in zip(*(it.parameters() for it in twins.modules), strict=True):
            plain.grad = ours.grad.clone()
            if change == "data":
                for param in (plain, ours):
                    param.grad.data = param.grad * 0.5
        if change == "memory format":
            twins.ours.module.to(memory_format=torch.contiguous_format if step % 2 else torch.channels_last)
    if change == "data":  # of no use to the next pass of any rank
        before = grads(twins.ours.module)
        twins.ours(inputs)[:0].sum().backward()
        assert_grads(twins.ours.module, before)
    twins.ours.close()


@pytest.mark.parametrize("change", ["data", "memory format"])
def test_a_gradient_moved_out_of_the_buffer_counts(run_ranks: RunRanks, change: str) -> None:
    run_ranks(2, moved_elsewhere, change)


# -- refused, closed, dropped ------------------------------------------------------------------------------


def create_graph() -> None:
    for contiguous in (True, False):
        ours = BucketDDP(seeded(Mlp), use_contiguous_buffers=contiguous)
        with pytest.raises(RuntimeError, match=r"'head\.(bias|weight)'.*create_graph=True"):
            mse(0)(ours).backward(create_graph=True)
        ours.close()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_is_refused_by_name(run_ranks: RunRanks) -> None:
    run_ranks(2, create_graph, fresh=True)


def refused_in_a_local_pass() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.a.square() * x).sum() + (self.b * 2 * x).sum()

    ours = BucketDDP(Two())
    ours(torch.ones(3) * 7).backward()
    ours.zero_grad()
    with pytest.raises(RuntimeError, match="create_graph=True"), ours.no_sync():
        ours(torch.ones(3)).backward(create_graph=True)
    for param in ours.parameters():
        torch.testing.assert_close(param.grad.detach(), torch.full((3,), 2.0))
    ours.zero_grad()
    ours.close()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_refused_gradient_leaves_the_others_alone(run_ranks: RunRanks) -> None:
    run_ranks(2, refused_in_a_local_pass)


def not_for_gradients() -> None:
    """Frozen parameters that can have no gradient, and a frozen module that two wrappers share."""

    class Quantised(nn.Module):
        def __init__(self, encoder: nn.Module) -> None:
            super().__init__()
            self.encoder, self.head = encoder, nn.Linear(8, 4)
            self.codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x))

    encoder = nn.Linear(8, 8).requires_grad_(False)
    first, second = BucketDDP(Quantised(encoder)), BucketDDP(Quantised(encoder))
    inputs = batch(0, dist.get_rank())[0]
    (first(inputs) + second(inputs)).sum().backward()
    assert (first.passes, second.passes) == (1, 1)
    first.close()
    second.close()


def test_frozen_parameters_may_be_integers_and_shared(run_ranks: RunRanks) -> None:
    run_ranks(2, not_for_gradients)


def closing() -> None:
    module = seeded(ConvBatchNorm)
    ours = BucketDDP(module)
    assert list(ours.state_dict()) == list(module.state_dict())
    mse(0)(ours).backward()
    before = grads(module)
    ours.close()
    for name, param in module.named_parameters():
        assert torch.equal(param.grad, before[name])
        assert param.grad.untyped_storage().nbytes() == param.numel() * 4, "a plain tensor, not a view"
        assert not param._post_accumulate_grad_hooks
    mse(0)(ours).backward()  # forwards still, reduces nothing
    assert ours.passes == 1
    again = BucketDDP(module)
    again.zero_grad()
    mse(0)(again).backward()
    assert_grads(module, before, rtol=1e-4, atol=1e-5)
    again.close()


def test_close_gives_the_module_back(run_ranks: RunRanks) -> None:
    run_ranks(2, closing)


def dropped_without_close() -> tuple[int, int]:
    module = seeded(Mlp)
    alive = []
    for _ in range(3):
        ours = BucketDDP(module)
        mse(0)(ours).backward()
        alive.append(weakref.ref(passes_of(ours)))
        del ours
        gc.collect()
    hooks = sum(len(param._post_accumulate_grad_hooks or ()) for param in module.parameters())
    return sum(ref() is not None for ref in alive), hooks


def test_a_wrapper_dropped_without_close_leaves_nothing(run_ranks: RunRanks) -> None:
    assert run_ranks(2, dropped_without_close) == [(0, 0), (0, 0)]
