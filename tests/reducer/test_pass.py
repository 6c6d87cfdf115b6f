"""A pass in plain PyTorch, against means worked out one parameter at a time."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp import BucketDDP
from tests.inside import passes_of, views_of
from tests.models import Branches, Checkpointed, ConvBatchNorm, Mlp, OutOfOrder, batch, loss_of
from tests.pool import case, on_ranks
from tests.reference import TINY, Twins, assert_grads, grads, inner, mse, run_backward, seeded, taking

REENTRANT = partial(Checkpointed, use_reentrant=True)


@on_ranks(3)
def test_a_gradient_that_no_rank_used_keeps_every_bit() -> None:
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


@on_ranks(2)
def test_in_a_backward_pass_every_rank_takes_part() -> None:
    twins = Twins(seeded(Branches))
    for step in range(3):
        twins.zero_grad()
        if dist.get_rank() == 0:
            twins.backward(taking(step, "both"), guarded=True)
        else:
            loss = torch.zeros((), requires_grad=True)
            with twins.ours.backward_pass(loss):
                if step < 2:  # at last rank 1 does not even call it
                    loss.backward()
        twins.check()
    assert twins.ours.passes == 3


@on_ranks(2)
def test_find_unused_parameters_keeps_the_overlap() -> None:
    """Rank 1's first loss shows nothing of the graph; re-entrant checkpoints hide what is inside."""
    rank = dist.get_rank()

    def loss(net: nn.Module, step: int) -> Tensor:
        if step:
            return mse(step)(net)
        # `spare` is then not among the parameters never seen.
        value = torch.zeros((), requires_grad=True) if rank else mse(step)(net)
        return value + inner(net).spare(batch(step, rank)[0]).sum()

    for reentrant in (False, True):
        plain = seeded(partial(Checkpointed, use_reentrant=reentrant))
        plain.spare = nn.Linear(8, 8)
        twins = Twins(plain, bucket_cap_mb=0.0001, find_unused_parameters=True)
        for step in range(4):
            twins.step(partial(loss, step=step), guarded=True)
        layout = twins.ours.layout
        assert layout.slots[layout.buckets[0].slots[0]].spec.name.startswith("spare"), "the first bucket is unused"
        assert twins.ours.last_pass().early_launches == (0 if reentrant else 7)
        twins.ours.close()


@on_ranks(1, 2, 3)
def test_gradients_add_up_until_zero_grad() -> None:
    rank = dist.get_rank()
    twins = Twins(seeded(Branches), bucket_cap_mb=1)  # one bucket, and `idle` never gets a gradient
    module = twins.ours.module
    for step in range(3):
        twins.zero_grad()
        twins.backward(taking(4 * step, "none" if rank else "left"), local=True)
        assert module.stem.weight.grad is views_of(twins.ours)["stem.weight"]
        assert (module.left.weight.grad is None) == (rank > 0)
        for at, take in enumerate(("none", "left" if rank else "none", ["right", "none", "both"][rank])):
            twins.backward(taking(4 * step + at, take))
            twins.check()
            assert module.idle.grad is None
    assert twins.ours.passes == 9
    twins.zero_grad()
    twins.backward(taking(10, "left"), local=True)
    twins.step(taking(11, "right"))  # begins with zero_grad: what the local pass left does not come back
    assert module.left.weight.grad is None


@on_ranks(2)
def test_no_sync_nests_and_restores_after_an_exception() -> None:
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


@on_ranks(2)
def test_buckets_launch_before_backward_has_finished() -> None:
    ours = BucketDDP(seeded(partial(Mlp, depth=6)), bucket_cap_mb=TINY)
    params = list(ours.module.parameters())
    hidden: list[int] = []  # how many gradients are on the wire when the last one comes
    params[0].register_hook(lambda _: hidden.append(sum(param.grad is None for param in params)))
    mse(0)(ours).backward()
    assert ours.last_pass().early_launches == 0, "the first pass learns the order and launches nothing early"
    mse(0)(ours).backward()
    assert len(ours.layout.buckets) > ours.last_pass().early_launches >= 3
    assert hidden[1] >= 6, "nothing may accumulate into a gradient that is on the wire"
    assert all(ours.module.get_parameter(name).grad is view for name, view in views_of(ours).items())


@on_ranks(2)
def test_the_first_pass_teaches_the_order() -> None:
    names = []
    for build, loss in ((OutOfOrder, mse), (Branches, partial(taking, take="both"))):
        ours = BucketDDP(seeded(build), bucket_cap_mb=0.0001)
        for step in range(2):
            ours.zero_grad()
            loss(step)(ours).backward()
        layout = ours.layout
        names.append([layout.slots[slot].spec.name for bucket in layout.buckets for slot in bucket.slots])
        assert ours.last_pass().early_launches == len(layout.buckets) - 1, (
            "the last waits for the control vector, or is never seen"
        )
        ours.close()
    assert [name.split(".")[0] for name in names[0][::2]] == ["last", "middle", "first"]
    assert names[1][-1] == "idle", "a parameter never seen holds nobody up"


@on_ranks(2)
def test_a_branch_used_later_may_be_checkpointed_repeatedly() -> None:
    """The stem is frozen: no gradient comes after those of the block."""
    plain = seeded(partial(REENTRANT, calls=0))
    plain.stem.requires_grad_(False)
    twins = Twins(plain, bucket_cap_mb=0.0001)
    for step in range(5):
        for module in twins.modules:
            module.calls = 3 if step >= 2 else 0
        inputs, target = batch(step, dist.get_rank())
        twins.step(lambda net, x=inputs, y=target: loss_of(net(x.requires_grad_()), y))
    assert 0 < twins.ours.last_pass().early_launches < len(twins.ours.layout.buckets), "only the repeated layer waits"


@on_ranks(2)
def test_autograd_grad_and_unused_forwards_send_nothing() -> None:
    ours = BucketDDP(seeded(Mlp), bucket_cap_mb=TINY)
    inputs = batch(0, dist.get_rank())[0].requires_grad_()
    if dist.get_rank() == 0:  # on one rank only: nothing may be sent
        torch.autograd.grad(ours(inputs).sum(), inputs)
        ours(inputs)
        with torch.no_grad():
            ours(inputs)
    assert ours.passes == 0
    mse(0)(ours).backward()
    assert ours.passes == 1


@on_ranks(2)
def test_past_the_wrapper_the_first_inner_backward_ends_a_pass() -> None:
    twins = Twins(seeded(REENTRANT))
    for step in range(3):
        twins.step(mse(step, direct=True))
    assert twins.ours.passes == 3


@on_ranks(2)
def test_a_context_without_backward_holds_no_other_wrapper_up() -> None:
    first, second = BucketDDP(seeded(Mlp)), BucketDDP(seeded(partial(Mlp, depth=6)), bucket_cap_mb=TINY)
    mse(0)(second).backward()
    with first.backward_pass(torch.zeros((), requires_grad=True)):
        pass
    mse(1)(second).backward()
    assert second.last_pass().early_launches > 0


@on_ranks(3, cases=(torch.float16, torch.bfloat16, torch.float64))
def test_averaging_does_not_overflow(dtype: torch.dtype) -> None:
    module = nn.Linear(4, 1, bias=False).to(dtype)
    ours = BucketDDP(module)
    ours(torch.full((1, 4), 40000.0, dtype=dtype)).sum().backward()
    torch.testing.assert_close(module.weight.grad, torch.full((1, 4), 40000.0, dtype=dtype), rtol=2e-3, atol=0)


@on_ranks(3)
def test_a_kept_gradient_is_divided_once() -> None:
    """Rank 0 and 2 have nothing to add to a published gradient, in a bucket where all else is fresh."""
    ours = BucketDDP(Mlp())
    head, params = ours.module.head.weight, list(ours.module.parameters())
    run_backward(ours, sum(param.sum() for param in params), guarded=True)
    for param in params:
        if param is not head:
            param.grad = None
    parts = [param for param in params if param is not head or dist.get_rank() == 1]
    run_backward(ours, sum(param.sum() for param in parts), guarded=True)
    torch.testing.assert_close(head.grad, torch.full_like(head, 4 / 3), msg="1, 2 and 1")


@on_ranks(2, cases=("data", "memory format"))
def test_a_gradient_moved_out_of_the_buffer_counts(change: str) -> None:
    """``.data`` keeps the gradient's tensor object and puts it into other memory."""
    twins = Twins(seeded(ConvBatchNorm))
    for step in range(3):
        inputs = batch(step, dist.get_rank())[0]
        twins.backward(lambda net, x=inputs: net(x).square().mean())
        with case(change, step):
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


class TwoScales(nn.Module):
    """One gradient needs a graph with ``create_graph=True``, the other does not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.square() * x).sum() + (self.b * 2 * x).sum()


@pytest.mark.filterwarnings("ignore:Using backward")
@on_ranks(2, fresh=True)
def test_create_graph_is_refused_by_name() -> None:
    for contiguous in (True, False):
        ours = BucketDDP(TwoScales(), use_contiguous_buffers=contiguous)
        if contiguous:  # in a local pass: the other gradient is left alone
            with pytest.raises(RuntimeError, match=r"'a'.*create_graph=True"), ours.no_sync():
                ours(torch.ones(3)).backward(create_graph=True)
            for param in ours.parameters():
                torch.testing.assert_close(param.grad.detach(), torch.full((3,), 2.0))
            ours.zero_grad()
        with pytest.raises(RuntimeError, match=r"'a'.*create_graph=True"):
            ours(torch.ones(3)).backward(create_graph=True)
        ours.close()


@on_ranks(2)
def test_frozen_parameters_may_be_integers_and_shared() -> None:
    encoder = nn.Linear(8, 8).requires_grad_(False)
    encoder.codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    first, second = (BucketDDP(nn.Sequential(encoder, nn.Linear(8, 4))) for _ in range(2))
    inputs = batch(0, dist.get_rank())[0]
    (first(inputs) + second(inputs)).sum().backward()
    assert (first.passes, second.passes) == (1, 1)


@on_ranks(2)
def test_close_gives_the_module_back() -> None:
    module = seeded(ConvBatchNorm)
    ours = BucketDDP(module)
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


@on_ranks(2)
def test_a_wrapper_dropped_without_close_leaves_nothing() -> None:
    module = seeded(Mlp)
    for _ in range(3):
        ours = BucketDDP(module)
        mse(0)(ours).backward()
        passes = weakref.ref(passes_of(ours))
        del ours
        gc.collect()
        assert passes() is None
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())
