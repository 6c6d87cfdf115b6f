"""What a pass does, in plain PyTorch, against means worked out one parameter at a time."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm import collectives
from lightning_bucketddp.peers.control import HEADER
from tests.inside import passes_of, views_of
from tests.models import Branches, Checkpointed, ConvBatchNorm, Mlp, OutOfOrder, batch
from tests.reference import assert_grads, grads, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003  # MiB; makes several buckets of the small test models


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def take_both(rank: int) -> str:
    return "both"


def take_by_rank(rank: int) -> str:
    return "left" if rank == 0 else "right"


def take_left_on_rank_0(rank: int) -> str:
    return "left" if rank == 0 else "none"


def branches(take: Callable[[int], str]) -> None:
    rank = dist.get_rank()
    plain = seeded(Branches)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    for step in range(4):
        inputs, _ = batch(step, rank)
        plain.zero_grad()
        plain(inputs, take(rank)).square().mean().backward()
        ours.zero_grad()
        ours(inputs, take(rank)).square().mean().backward()
        assert_grads(ours.module, mean_over_ranks(plain))
        assert ours.module.idle.grad is None
    assert ours.passes == 4
    ours.close()


@pytest.mark.parametrize("take", [take_both, take_by_rank, take_left_on_rank_0])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_branch_taken_on_some_ranks_only(run_ranks: RunRanks, world_size: int, take: Callable[[int], str]) -> None:
    run_ranks(world_size, branches, take)


def pattern_changes_every_step() -> None:
    rank = dist.get_rank()
    plain = seeded(Branches)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    patterns = ["both", "left", "none", "right", "left", "both", "none"]
    for step in range(len(patterns)):
        take = patterns[(step + 2 * rank) % len(patterns)]
        inputs, _ = batch(step, rank)
        plain.zero_grad()
        plain(inputs, take).square().mean().backward()
        ours.zero_grad()
        ours(inputs, take).square().mean().backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_stale_buffer_content_never_reaches_the_wire(run_ranks: RunRanks) -> None:
    run_ranks(2, pattern_changes_every_step)


def unused_keeps_its_gradient() -> None:
    ours = BucketDDP(seeded(Branches), bucket_cap_mb=TINY)
    inputs, _ = batch(0, dist.get_rank())
    own = torch.randn(5) * 1e-3  # as a user may have put it there, another on each rank
    ours.module.idle.grad = own
    before = own.clone()
    ours(inputs).square().mean().backward()
    assert ours.module.idle.grad is own
    assert torch.equal(own, before)

    # A published view that no rank adds to in the next pass keeps every bit too.
    ours.module.left.weight.grad.copy_(torch.full((4, 8), 0.1) + dist.get_rank())
    before = grads(ours.module)["left.weight"]
    ours.module.right.weight.grad = None
    ours(inputs, "none").square().mean().backward()
    assert torch.equal(ours.module.left.weight.grad, before)
    assert ours.module.right.weight.grad is None
    ours.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_that_no_rank_touched_is_bitwise_untouched(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, unused_keeps_its_gradient)


def local_only() -> None:
    rank = dist.get_rank()
    plain = seeded(Branches)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    for step in range(3):
        (first, _), (second, _) = batch(2 * step, rank), batch(2 * step + 1, rank)
        take = "left" if rank == 0 else "none"  # `left` is used in rank 0's local micro-batch alone
        plain.zero_grad()
        plain(first, take).square().mean().backward()
        plain(second, "none").square().mean().backward()
        ours.zero_grad()
        with ours.no_sync():
            ours(first, take).square().mean().backward()
        assert ours.passes == step
        ours(second, "none").square().mean().backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_what_local_passes_accumulated_is_not_lost(run_ranks: RunRanks) -> None:
    run_ranks(2, local_only)


def zeroed_between() -> None:
    ours = BucketDDP(seeded(Branches), bucket_cap_mb=TINY)
    inputs, _ = batch(0, dist.get_rank())
    with ours.no_sync():
        ours(inputs, "left").square().mean().backward()
    ours.zero_grad()
    ours(inputs, "right").square().mean().backward()
    assert ours.module.left.weight.grad is None
    assert ours.module.right.weight.grad is not None
    ours.close()


def test_gradients_dropped_by_zero_grad_do_not_come_back(run_ranks: RunRanks) -> None:
    run_ranks(2, zeroed_between)


def two_passes() -> None:
    rank = dist.get_rank()
    plain = seeded(Branches)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    (first, _), (second, _) = batch(0, rank), batch(1, rank)
    for inputs, take in [(first, "both"), (second, "left" if rank else "none")]:
        plain(inputs, take).square().mean().backward()
        ours(inputs, take).square().mean().backward()
    assert_grads(ours.module, mean_over_ranks(plain))
    assert ours.passes == 2
    ours.close()


def test_two_synchronised_passes_without_zero_grad_add_up(run_ranks: RunRanks) -> None:
    run_ranks(2, two_passes)
    run_ranks(3, two_passes)


def constant_loss(use_leaf: bool) -> None:
    """Rank 1's output needs a gradient but comes from no parameter."""

    class Maybe(Mlp):
        def forward(self, x: Tensor, constant: bool) -> Tensor:
            if not constant:
                return super().forward(x)
            return torch.ones(4, 4, requires_grad=True) if use_leaf else torch.ones(4, 4, requires_grad=True) * 2

    rank = dist.get_rank()
    plain = seeded(Maybe)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY, find_unused_parameters=True)
    for step in range(3):
        inputs, _ = batch(step, rank)
        plain.zero_grad()
        plain(inputs, rank == 1).square().mean().backward()
        ours.zero_grad()
        ours(inputs, rank == 1).square().mean().backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


@pytest.mark.parametrize("use_leaf", [True, False])
def test_a_rank_whose_loss_touches_no_parameter_takes_part(run_ranks: RunRanks, use_leaf: bool) -> None:
    run_ranks(2, constant_loss, use_leaf)


def nested_no_sync() -> None:
    ours = BucketDDP(seeded(Mlp))
    inputs, target = batch(0, dist.get_rank())

    def backward() -> int:
        before = ours.passes
        nn.functional.mse_loss(ours(inputs), target).backward()
        return ours.passes - before

    with ours.no_sync():
        with ours.no_sync():
            assert backward() == 0
        assert backward() == 0
    assert backward() == 1
    with pytest.raises(KeyError), ours.no_sync():
        raise KeyError
    assert backward() == 1
    ours.close()


def test_no_sync_nests_and_restores_after_an_exception(run_ranks: RunRanks) -> None:
    run_ranks(2, nested_no_sync)


def overlap() -> tuple[int, int, list[str]]:
    ours = BucketDDP(seeded(lambda: Mlp(depth=6)), bucket_cap_mb=TINY)
    inputs, target = batch(0, dist.get_rank())
    events: list[str] = []
    collectives = ours._runtime.collectives
    start = collectives.all_reduce_mean
    collectives.all_reduce_mean = lambda *args, **options: (
        events.append("launch"),
        start(*args, **options),
    )[1]
    # In backward the first layer's gradient is the last to come.
    ours.module.layers[0].weight.register_hook(lambda grad: events.append("last gradient"))
    counts = []
    for _ in range(2):
        events.clear()
        ours.zero_grad()
        nn.functional.mse_loss(ours(inputs), target).backward()
        counts.append(ours.early_launches)
    ours.close()
    return counts[0], counts[1], events


def test_buckets_launch_before_backward_has_finished(run_ranks: RunRanks) -> None:
    for first_pass, second_pass, events in run_ranks(2, overlap):
        assert first_pass == 0, "the first pass learns the order and launches nothing early"
        early = events.index("last gradient")
        assert early >= 3
        assert second_pass >= early
        assert len(events) > early + 1


def nothing_accumulates_on_the_wire() -> None:
    ours = BucketDDP(seeded(lambda: Mlp(depth=6)), bucket_cap_mb=TINY)
    inputs, target = batch(0, dist.get_rank())
    nn.functional.mse_loss(ours(inputs), target).backward()  # not zeroed: gradients are there before the next pass
    on_the_wire: list[bool] = []
    ours.module.layers[0].weight.register_hook(lambda _: on_the_wire.append(ours.module.head.weight.grad is None))
    nn.functional.mse_loss(ours(inputs), target).backward()
    assert ours.early_launches >= 1
    assert on_the_wire == [True]
    assert ours.module.head.weight.grad is views_of(ours)["head.weight"]
    ours.close()


def test_grad_is_none_between_launch_and_finish(run_ranks: RunRanks) -> None:
    run_ranks(2, nothing_accumulates_on_the_wire)


def incomplete_bucket_in_a_local_pass() -> None:
    ours = BucketDDP(seeded(Branches), bucket_cap_mb=1)  # one bucket, of which the unused parameter never comes
    inputs, _ = batch(0, dist.get_rank())
    with ours.no_sync():
        ours(inputs, "left").square().mean().backward()
    assert ours.module.left.weight.grad is views_of(ours)["left.weight"]
    assert ours.module.right.weight.grad is None
    ours.close()


def test_local_passes_accumulate_in_the_buffers(run_ranks: RunRanks) -> None:
    run_ranks(2, incomplete_bucket_in_a_local_pass)


def no_sync_without_a_root() -> None:
    ours = BucketDDP(seeded(Mlp))
    inputs, target = batch(0, dist.get_rank())
    nn.functional.mse_loss(ours(inputs), target).backward()
    with ours.no_sync():
        nn.functional.mse_loss(ours.module(inputs), target).backward()
    assert ours.passes == 1
    nn.functional.mse_loss(ours.module(inputs), target).backward()
    assert ours.passes == 2
    ours.close()


def test_without_a_root_no_sync_around_backward_decides(run_ranks: RunRanks) -> None:
    run_ranks(2, no_sync_without_a_root)


def learned_order() -> list[tuple[str, ...]]:
    ours = BucketDDP(seeded(OutOfOrder), bucket_cap_mb=0.0001)
    inputs, target = batch(0, dist.get_rank())
    for _ in range(2):
        ours.zero_grad()
        nn.functional.mse_loss(ours(inputs), target).backward()
    layout = ours.layout
    names = [tuple(layout.slots[slot].spec.name for slot in bucket.slots) for bucket in layout.buckets]
    assert ours.early_launches == len(names) - 1, "the last one waits for the control vector"
    ours.close()
    return names


def test_the_first_pass_teaches_the_order(run_ranks: RunRanks) -> None:
    rank0, rank1 = run_ranks(2, learned_order)
    assert rank0 == rank1
    modules = [names[0].split(".")[0] for names in rank0]
    assert list(dict.fromkeys(modules)) == ["last", "middle", "first"]


def never_seen_last() -> list[str]:
    ours = BucketDDP(seeded(Branches), bucket_cap_mb=1)
    inputs, _ = batch(0, dist.get_rank())
    for _ in range(2):
        ours.zero_grad()
        ours(inputs).square().mean().backward()
    assert ours.early_launches == len(ours.layout.buckets) - 1, "the never-seen parameter holds up its own bucket only"
    names = [ours.layout.slots[slot].spec.name for slot in ours.layout.buckets[-1].slots]
    ours.close()
    return names


def test_a_parameter_never_seen_holds_nobody_up(run_ranks: RunRanks) -> None:
    assert run_ranks(2, never_seen_last) == [["idle"], ["idle"]]


def storage_bytes() -> tuple[int, int, int]:
    module = seeded(lambda: Mlp(width=64, depth=4))
    ours = BucketDDP(module)
    inputs, target = batch(0, dist.get_rank())
    for _ in range(3):
        ours.zero_grad()
        with ours.no_sync():
            nn.functional.mse_loss(ours(inputs), target).backward()
        storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in module.parameters()}
        local = sum(storages.values())
        nn.functional.mse_loss(ours(inputs), target).backward()
    storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in module.parameters()}
    parameters = sum(p.numel() * 4 for p in module.parameters())
    assert sum(storages.values()) == ours.layout.nbytes + 4 * (HEADER + len(ours.layout.slots)), (
        "the control vector's place"
    )
    ours.close()
    return sum(storages.values()), local, parameters


def test_gradients_exist_once(run_ranks: RunRanks) -> None:
    for after_pass, after_local_pass, parameters in run_ranks(2, storage_bytes):
        assert after_pass == after_local_pass
        assert after_pass < parameters * 1.02  # alignment


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
    nn.functional.mse_loss(ours(inputs), target).backward()
    assert ours.passes == 1
    ours.close()


def test_autograd_grad_and_unused_forwards_send_nothing(run_ranks: RunRanks) -> None:
    run_ranks(2, engine_uses_without_a_pass)


def two_forwards(module: nn.Module) -> None:
    rank = dist.get_rank()
    plain, ours = copy.deepcopy(module), BucketDDP(module, bucket_cap_mb=TINY)
    for step in range(3):
        (first, _), (second, _) = batch(2 * step, rank), batch(2 * step + 1, rank)
        plain.zero_grad()
        (plain(first).square().mean() + plain(second).square().mean()).backward()
        ours.zero_grad()
        (ours(first).square().mean() + ours(second).square().mean()).backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    assert ours.passes == 3
    ours.close()


def two_forwards_with_batchnorm() -> None:
    two_forwards(seeded(ConvBatchNorm))


def two_forwards_mlp() -> None:
    two_forwards(seeded(Mlp))


@pytest.mark.parametrize("job", [two_forwards_mlp, two_forwards_with_batchnorm])
def test_two_forwards_before_one_backward(run_ranks: RunRanks, job: Callable[[], None]) -> None:
    run_ranks(2, job)


def checkpoint_called_twice() -> None:
    rank = dist.get_rank()
    plain = seeded(lambda: Checkpointed(use_reentrant=True, calls=3))
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=0.0001)
    for step in range(4):
        inputs, target = batch(step, rank)
        plain.zero_grad()
        nn.functional.mse_loss(plain(inputs), target).backward()
        ours.zero_grad()
        nn.functional.mse_loss(ours(inputs), target).backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    assert ours.passes == 4
    assert 0 < ours.early_launches < len(ours.layout.buckets), "the repeated layer alone waits for the finish"
    ours.close()


def test_a_layer_checkpointed_several_times_is_reduced_once(run_ranks: RunRanks) -> None:
    run_ranks(2, checkpoint_called_twice)


def plain_backward_with_a_checkpoint_and_no_root() -> None:
    """The loss is made of parameters alone and never passes by an output: the first inner backward ends a pass."""
    rank = dist.get_rank()
    plain = seeded(lambda: Checkpointed(use_reentrant=True))
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    for step in range(3):
        inputs, target = batch(step, rank)
        plain.zero_grad()
        nn.functional.mse_loss(plain(inputs), target).backward()
        ours.zero_grad()
        nn.functional.mse_loss(ours.module(inputs), target).backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_a_backward_that_did_not_come_by_forward_is_right_too(run_ranks: RunRanks) -> None:
    run_ranks(2, plain_backward_with_a_checkpoint_and_no_root)


def backward_pass_context() -> None:
    rank = dist.get_rank()
    plain = seeded(Branches)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    for step in range(3):
        inputs, _ = batch(step, rank)
        plain.zero_grad()
        ours.zero_grad()
        if rank == 0:
            plain(inputs).square().mean().backward()
        loss = ours(inputs).square().mean() if rank == 0 else torch.zeros((), requires_grad=True)
        with ours.backward_pass(loss):
            if step < 2 or rank == 0:  # at last rank 1 does not even call it
                loss.backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    assert ours.passes == 3
    ours.close()


def test_in_a_backward_pass_every_rank_takes_part_without_a_flag(run_ranks: RunRanks) -> None:
    run_ranks(2, backward_pass_context)


def low_precision(dtype: torch.dtype) -> list[float]:
    module = nn.Linear(4, 1, bias=False).to(dtype)
    nn.init.zeros_(module.weight)
    ours = BucketDDP(module)
    ours(torch.full((1, 4), 40000.0, dtype=dtype)).sum().backward()
    found = module.weight.grad.flatten().tolist()
    ours.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_averaging_does_not_overflow(run_ranks: RunRanks, dtype: torch.dtype) -> None:
    expected = [torch.tensor(40000.0).to(dtype).item()] * 4
    for found in run_ranks(3, low_precision, dtype):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)


def create_graph(contiguous: bool) -> str:
    ours = BucketDDP(seeded(Mlp), use_contiguous_buffers=contiguous)
    inputs, target = batch(0, dist.get_rank())
    with pytest.raises(RuntimeError, match="create_graph=True") as error:
        nn.functional.mse_loss(ours(inputs), target).backward(create_graph=True)
    return str(error.value)


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "coalesced"])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_is_refused_by_name(run_ranks: RunRanks, contiguous: bool) -> None:
    for message in run_ranks(2, create_graph, contiguous, fresh=True):
        assert "head.bias" in message or "head.weight" in message


def closing() -> None:
    module = seeded(Mlp)
    ours = BucketDDP(module)
    inputs, target = batch(0, dist.get_rank())
    nn.functional.mse_loss(ours(inputs), target).backward()
    before = grads(module)
    ours.close()
    for name, param in module.named_parameters():
        assert torch.equal(param.grad, before[name])
        assert param.grad.untyped_storage().nbytes() == param.numel() * 4, "a plain tensor, not a view"
        assert not param._post_accumulate_grad_hooks
    nn.functional.mse_loss(ours(inputs), target).backward()  # forwards still, reduces nothing
    assert ours.passes == 1
    again = BucketDDP(module)
    again.zero_grad()
    nn.functional.mse_loss(again(inputs), target).backward()
    assert_grads(module, before)
    again.close()


def test_close_gives_the_module_back(run_ranks: RunRanks) -> None:
    run_ranks(2, closing)


def state_dicts() -> None:
    module = seeded(ConvBatchNorm)
    ours = BucketDDP(module)
    assert list(ours.state_dict()) == list(module.state_dict())
    other = BucketDDP(ConvBatchNorm())
    assert str(other.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"
    for name, value in other.module.state_dict().items():
        assert torch.equal(value, module.state_dict()[name])
    ours.close()
    other.close()


def test_state_dicts_have_the_modules_keys(run_ranks: RunRanks) -> None:
    run_ranks(2, state_dicts)


def moved_elsewhere(change: str) -> None:
    """`.data` keeps the gradient's tensor object and puts it into other memory."""
    rank = dist.get_rank()
    plain = seeded(ConvBatchNorm)
    ours = BucketDDP(copy.deepcopy(plain).to(memory_format=torch.contiguous_format), bucket_cap_mb=TINY)
    for step in range(3):
        inputs, _ = batch(step, rank)
        for model in (plain, ours):
            model(inputs).square().mean().backward()
        assert_grads(ours.module, expected := mean_over_ranks(plain))
        for name, param in plain.named_parameters():
            param.grad = expected[name]
        if change == "data":
            for model in (plain, ours):
                for param in model.parameters():
                    param.grad.data = param.grad * 0.5
        else:
            ours.module.to(memory_format=torch.channels_last)
    if change == "data":  # and of no use to the next pass, of no rank
        before = grads(ours.module)
        ours(inputs)[:0].sum().backward()
        assert_grads(ours.module, before)
    ours.close()


@pytest.mark.parametrize("change", ["data", "memory format"])
def test_a_gradient_that_was_moved_out_of_the_buffer_counts(run_ranks: RunRanks, change: str) -> None:
    run_ranks(2, moved_elsewhere, change)


def dropped_without_close() -> tuple[int, int]:
    module = seeded(Mlp)
    alive = []
    for _ in range(3):
        ours = BucketDDP(module)
        inputs, target = batch(0, dist.get_rank())
        nn.functional.mse_loss(ours(inputs), target).backward()
        alive.append(weakref.ref(passes_of(ours)))
        del ours
        gc.collect()
    hooks = sum(len(param._post_accumulate_grad_hooks or ()) for param in module.parameters())
    return sum(ref() is not None for ref in alive), hooks


def test_a_wrapper_dropped_without_close_leaves_nothing_behind(run_ranks: RunRanks) -> None:
    assert run_ranks(2, dropped_without_close) == [(0, 0), (0, 0)]


def refused_capture_binds_nothing() -> None:
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
def test_a_refused_gradient_leaves_the_others_as_they_are(run_ranks: RunRanks) -> None:
    run_ranks(2, refused_capture_binds_nothing)


def find_unused(reentrant: bool) -> int:
    """Rank 1's first loss shows nothing of the graph; later ones hide what is inside a re-entrant checkpoint."""
    rank = dist.get_rank()
    plain = seeded(lambda: Checkpointed(use_reentrant=reentrant))
    plain.spare = nn.Linear(8, 8)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=0.0001, find_unused_parameters=True)
    for step in range(4):
        inputs, target = batch(step, rank)
        plain.zero_grad()
        ours.zero_grad()
        if step == 0:  # so that it is not among the parameters never seen
            plain.spare(inputs).sum().backward()
        if step or rank == 0:
            nn.functional.mse_loss(plain(inputs), target).backward()
        loss = torch.zeros((), requires_grad=True)
        if step or rank == 0:
            loss = nn.functional.mse_loss(ours(inputs), target)
        if step == 0:
            loss = loss + ours.module.spare(inputs).sum()
        with ours.backward_pass(loss):
            loss.backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    assert ours.layout.slots[ours.layout.buckets[0].slots[0]].spec.name.startswith("spare")
    early = ours.early_launches
    ours.close()
    return early


def test_find_unused_parameters_keeps_the_overlap_where_the_graph_shows_all(run_ranks: RunRanks) -> None:
    assert min(run_ranks(2, find_unused, False)) == 7, "not held up by the first bucket, which is unused"
    assert run_ranks(2, find_unused, True) == [0, 0], "a re-entrant checkpoint may hide it"


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
    inputs, _ = batch(0, dist.get_rank())
    (first(inputs) + second(inputs)).sum().backward()
    assert (first.passes, second.passes) == (1, 1)
    first.close()
    second.close()


def test_frozen_parameters_may_be_integers_and_shared(run_ranks: RunRanks) -> None:
    run_ranks(2, not_for_gradients)


def first_used_later() -> None:
    """A block under a re-entrant checkpoint, called three times, that the first passes do not use.

    The stem is frozen: no other gradient comes after the block's, for which its bucket might wait by chance.
    """
    rank = dist.get_rank()
    plain = seeded(lambda: Checkpointed(use_reentrant=True, calls=0))
    plain.stem.requires_grad_(False)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=0.0001)
    for step in range(4):
        plain.calls = ours.module.calls = 3 if step >= 2 else 0
        inputs, target = batch(step, rank)
        for model in (plain, ours):
            model.zero_grad()
            nn.functional.mse_loss(model(inputs.requires_grad_()), target).backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    ours.close()


def test_a_branch_first_used_later_may_be_checkpointed_several_times(run_ranks: RunRanks) -> None:
    run_ranks(2, first_used_later)


def averaging_op(dtype: torch.dtype) -> list[str]:
    ours = BucketDDP(seeded(Mlp).to(dtype), bucket_cap_mb=1)
    inputs, target = (tensor.to(dtype) for tensor in batch(0, dist.get_rank()))
    ops = []
    start = dist.all_reduce

    def record(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        ops.append(str(op))
        return start(tensor, op=op, **options)

    collectives.dist.all_reduce = record
    try:
        nn.functional.mse_loss(ours(inputs), target).backward()
    finally:
        collectives.dist.all_reduce = start
    ours.close()
    return ops


@pytest.mark.parametrize(("dtype", "op"), [(torch.float32, "SUM"), (torch.float64, "SUM"), (torch.bfloat16, "AVG")])
def test_gradients_are_divided_on_their_way_or_by_the_backend(run_ranks: RunRanks, dtype: torch.dtype, op: str) -> None:
    """One bucket, the control vector where it is not in the bucket, and what the first pass learned."""
    expected = ["SUM", "SUM"] if op == "SUM" else [op, "SUM", "SUM"]
    for ops in run_ranks(2, averaging_op, dtype):
        assert [it.split(".")[-1] for it in ops] == expected


def divided_once(take: str) -> None:
    """Large and small gradients, fresh ones and ones that are in the buffer already, published ones, missing ones."""
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Linear(200, 200), nn.Linear(3, 200), nn.Linear(200, 2)])
    ours = BucketDDP(copy.deepcopy(plain))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))

    def loss(model: nn.ModuleList, middle: bool) -> Tensor:
        hidden = model[1](x)
        return model[2](model[0](hidden) if middle else hidden).square().mean()

    for step in range(4):
        for model in (plain, ours.module):
            if take != "added up":
                model.zero_grad()
        if take == "accumulated":
            with ours.no_sync():
                for model in (plain, ours.module):
                    (loss(model, step % 2 == 0) * 3).backward()
        before = {name: None if p.grad is None else p.grad.clone() for name, p in ours.module.named_parameters()}
        value = loss(ours.module, step != 2)
        with ours.backward_pass(value):
            value.backward()
        loss(plain, step != 2).backward()
        expected = mean_over_ranks(plain)
        for name, param in ours.module.named_parameters():
            if take == "added up" and name.startswith("0.") and step == 2:
                assert param.grad is not None
                assert torch.equal(param.grad, before[name])
            else:
                torch.testing.assert_close(param.grad, expected[name], msg=f"{name} in step {step}")
        if take == "added up":
            for (_, param), (_, mine) in zip(plain.named_parameters(), ours.module.named_parameters(), strict=True):
                param.grad = None if mine.grad is None else mine.grad.clone()
    ours.close()


def kept_on_one_rank() -> None:
    """A published gradient to which this rank has nothing to add, in a bucket where all else is fresh."""
    ours = BucketDDP(Mlp())
    for param in ours.module.parameters():
        param.grad = None
    value = sum(param.sum() for param in ours.module.parameters())
    with ours.backward_pass(value):
        value.backward()
    head = ours.module.head.weight
    for param in ours.module.parameters():
        if param is not head:
            param.grad = None
    parts = [p for p in ours.module.parameters() if p is not head or dist.get_rank() == 1]
    value = sum(param.sum() for param in parts)
    with ours.backward_pass(value):
        value.backward()
    torch.testing.assert_close(head.grad, torch.full_like(head, 4 / 3), msg="1, 2 and 1")
    ours.close()


def test_a_kept_gradient_is_divided_once(run_ranks: RunRanks) -> None:
    run_ranks(3, kept_on_one_rank)


@pytest.mark.parametrize("take", ["cleared", "accumulated", "added up"])
def test_every_gradient_is_divided_once(run_ranks: RunRanks, take: str) -> None:
    run_ranks(3, divided_once, take)


def one_rank() -> None:
    plain = seeded(Branches)
    ours = BucketDDP(copy.deepcopy(plain))
    inputs, _ = batch(0, 0)
    for take in ("both", "left"):
        plain.zero_grad()
        plain(inputs, take).square().mean().backward()
        ours.zero_grad()
        ours(inputs, take).square().mean().backward()
        assert_grads(ours.module, grads(plain))
    assert ours.passes == 2
    ours.close()


def test_a_world_of_one_is_an_unwrapped_module(run_ranks: RunRanks) -> None:
    run_ranks(1, one_rank)


def several_wrappers() -> None:
    first, second = BucketDDP(seeded(Mlp)), BucketDDP(seeded(Branches))
    rank = dist.get_rank()
    for step in range(2):
        inputs, target = batch(step, rank)
        nn.functional.mse_loss(second(first(inputs) @ torch.ones(4, 8)), target).backward()
    assert (first.passes, second.passes) == (2, 2)
    for wrapper in (first, second):
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        optimizer.step()
        assert largest_difference_between_ranks(wrapper.module) == 0
        wrapper.close()


def test_two_wrappers_in_one_graph(run_ranks: RunRanks) -> None:
    run_ranks(2, several_wrappers)
