"""Sparse gradients against torch DDP, one process, and means worked out densely, one parameter at a time."""

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

from lightning_bucketddp import BucketDDP, GradientError, PeerFailureError, RankMismatchError
from lightning_bucketddp.comm import collectives
from tests.inside import upkeep_of
from tests.models import ROWS, Lookup, RaiseInBackward, tokens
from tests.reference import largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003  # MiB
EMBEDDINGS = ("words.weight", "bag.weight")


def lookup(**options: Any) -> Lookup:
    torch.manual_seed(5)
    return Lookup(**options)


def densify(module: nn.Module) -> None:
    for param in module.parameters():
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.to_dense()


def dense_means(plain: nn.Module) -> dict[str, Tensor | None]:
    """The means of the gradients of ``plain``, whose own become dense."""
    densify(plain)
    return mean_over_ranks(plain)


def assert_means(module: nn.Module, expected: dict[str, Tensor | None], dense: tuple[str, ...] = ()) -> None:
    """Asserts values, that gradients of embeddings are coalesced sparse ones, and that all ranks have the same bits."""
    for name, param in module.named_parameters():
        mean, grad = expected[name], param.grad
        if mean is None:
            assert grad is None, f"{name} has a gradient that no rank produced"
            continue
        assert grad is not None, f"{name} has no gradient"
        if name in EMBEDDINGS and name not in dense:
            assert grad.is_sparse, f"{name} has a dense gradient"
            assert grad.is_coalesced()
            assert grad.indices().shape[1] < ROWS, "all rows travelled"
        else:
            assert not grad.is_sparse
        torch.testing.assert_close(grad.to_dense() if grad.is_sparse else grad, mean, msg=lambda m, n=name: f"{n}: {m}")
        assert_same_bits_on_all_ranks(name, grad)


def assert_same_bits_on_all_ranks(name: str, grad: Tensor) -> None:
    parts = (grad.indices(), grad.values()) if grad.is_sparse else (grad,)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    for other in everyone:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(parts, other, strict=True)), name


# -- against torch DDP -------------------------------------------------------------------------------


def sgd(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.1)]


def sparse_adam(module: nn.Module) -> list[torch.optim.Optimizer]:
    named = dict(module.named_parameters())
    rest = [param for name, param in named.items() if name not in EMBEDDINGS]
    return [
        torch.optim.SparseAdam([named[name] for name in EMBEDDINGS], lr=0.05),
        torch.optim.AdamW(rest, lr=0.01),
    ]


OPTIMIZERS = {"sgd": sgd, "sparse_adam": sparse_adam}


def train(wrapped: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, accumulate: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    for micro in range(accumulate):
        with nullcontext() if micro == accumulate - 1 else wrapped.no_sync():
            wrapped(*tokens(10 * step + micro, dist.get_rank())).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def compare_with_torch_ddp(optimizer: str, mode: str, accumulate: int) -> None:
    module = lookup(mode=mode)
    reference = DistributedDataParallel(copy.deepcopy(module))
    ours = BucketDDP(module, bucket_cap_mb=TINY)
    mine, theirs = OPTIMIZERS[optimizer](module), OPTIMIZERS[optimizer](reference.module)
    for step in range(4):
        train(ours, mine, step, accumulate)
        train(reference, theirs, step, accumulate)
        for (name, param), other in zip(module.named_parameters(), reference.module.parameters(), strict=True):
            assert param.grad.is_sparse == other.grad.is_sparse == (name in EMBEDDINGS)
            torch.testing.assert_close(param.grad.to_dense(), other.grad.to_dense(), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-6)
            assert_same_bits_on_all_ranks(name, param.grad)
            assert_same_bits_on_all_ranks(name, param.detach())
    assert ours.passes == 4
    assert len(ours.layout.slots) == 2, "only the dense layer has slots"
    ours.close()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_same_gradients_and_weights_as_torch_ddp(
    run_ranks: RunRanks, world_size: int, optimizer: str, mode: str, accumulate: int
) -> None:
    run_ranks(world_size, compare_with_torch_ddp, optimizer, mode, accumulate)


def against_one_process() -> None:
    """Rank 1's share has no token for the bag, so that it has no gradient for it."""
    module = lookup()
    alone = copy.deepcopy(module)
    ours = BucketDDP(module)
    mine, theirs = sparse_adam(module), sparse_adam(alone)
    for step in range(5):
        rank = dist.get_rank()
        for optimizer in mine:
            optimizer.zero_grad()
        ours(*tokens(step, rank), use_bag=rank == 0).square().mean().backward()
        for optimizer in mine:
            optimizer.step()
        for optimizer in theirs:
            optimizer.zero_grad()
        outputs = [alone(*tokens(step, r), use_bag=r == 0) for r in range(dist.get_world_size())]
        torch.cat(outputs).square().mean().backward()
        for optimizer in theirs:
            optimizer.step()
    for param, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-6)
    ours.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_one_process_also_where_only_some_ranks_had_a_gradient(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, against_one_process)


# -- what is pending, and what is not ----------------------------------------------------------------


def used_by_rank() -> None:
    rank = dist.get_rank()
    plain = lookup()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    patterns = [(True, True), (True, False), (False, False), (False, True)]
    for step in range(6):
        words, bag = patterns[(step + rank) % 4 if step < 4 else 2]  # at last no rank uses either
        for module in (plain, ours):
            module.zero_grad()
            module(*tokens(step, rank), use_words=words, use_bag=bag).square().mean().backward()
        assert_means(ours.module, dense_means(plain))
    assert ours.module.words.weight.grad is None
    ours.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_used_on_some_ranks_only(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, used_by_rank)


def only_in_a_local_pass() -> None:
    rank = dist.get_rank()
    plain = lookup()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    for step in range(3):
        for module in (plain, ours):
            module.zero_grad()
            with ours.no_sync():
                module(*tokens(2 * step, rank), use_words=rank == 0).square().mean().backward()
            module(*tokens(2 * step + 1, rank), use_words=False).square().mean().backward()
        assert_means(ours.module, dense_means(plain))
    ours.close()


def test_what_local_passes_accumulated_is_not_lost(run_ranks: RunRanks) -> None:
    run_ranks(2, only_in_a_local_pass)


def without_zero_grad(to_zeros: bool) -> None:
    rank = dist.get_rank()
    plain = lookup()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    expected: dict[str, Tensor] = {}
    for step in range(4):
        plain.zero_grad()
        use_words = step == 0 or rank == 1
        for module in (plain, ours):
            module(*tokens(step, rank), use_words=use_words).square().mean().backward()
        for name, mean in dense_means(plain).items():
            expected[name] = expected.get(name, 0) + mean
        for name, param in ours.module.named_parameters():
            torch.testing.assert_close(param.grad.to_dense(), expected[name])
            assert_same_bits_on_all_ranks(name, param.grad)
        if to_zeros:
            ours.zero_grad(set_to_none=False)
            expected.clear()
    assert ours.module.words.weight.grad.is_sparse
    ours.close()


@pytest.mark.parametrize("to_zeros", [True, False])
def test_passes_without_zero_grad_add_up(run_ranks: RunRanks, to_zeros: bool) -> None:
    run_ranks(2, without_zero_grad, to_zeros)


def untouched() -> None:
    rank = dist.get_rank()
    ours = BucketDDP(lookup(), bucket_cap_mb=TINY)
    own = torch.sparse_coo_tensor([[3, rank, 3]], torch.randn(3, 4), (ROWS, 4), check_invariants=True)
    ours.module.words.weight.grad = own
    before = own.clone()
    ours(*tokens(0, rank), use_words=False).square().mean().backward()
    assert ours.module.words.weight.grad is own
    assert not own.is_coalesced()
    assert torch.equal(own._values(), before._values())
    assert torch.equal(own._indices(), before._indices())

    # What was there takes part as soon as some rank adds to it, in whatever layout it is.
    mean = own.to_dense()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    plain = copy.deepcopy(ours.module)
    plain.zero_grad()
    for module in (plain, ours):
        module(*tokens(1, rank), use_words=rank == 1).square().mean().backward()
    expected = dense_means(plain)["words.weight"] + mean
    torch.testing.assert_close(ours.module.words.weight.grad.to_dense(), expected)
    assert ours.module.words.weight.grad.is_coalesced()

    published = ours.module.words.weight.grad
    ours(*tokens(2, rank), use_words=False).square().mean().backward()
    assert ours.module.words.weight.grad is published
    ours.close()


def test_a_gradient_that_no_rank_touched_is_bitwise_untouched(run_ranks: RunRanks) -> None:
    run_ranks(2, untouched)


def zeroed_between() -> None:
    rank = dist.get_rank()
    ours = BucketDDP(lookup(), bucket_cap_mb=TINY)
    with ours.no_sync():
        ours(*tokens(0, rank)).square().mean().backward()
    ours.zero_grad()
    ours(*tokens(1, rank), use_words=False).square().mean().backward()
    assert ours.module.words.weight.grad is None
    ours.close()


def test_zero_grad_drops_what_local_passes_accumulated(run_ranks: RunRanks) -> None:
    run_ranks(2, zeroed_between)


def frozen_and_unfrozen() -> None:
    rank = dist.get_rank()
    plain = lookup()
    plain.words.requires_grad_(False)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    gathered = []
    gather = getattr(dist, collectives._ALL_GATHER)

    def counting(out: Tensor, *args: Any, **options: Any) -> Any:
        gathered.append(out.shape)
        return gather(out, *args, **options)

    setattr(dist, collectives._ALL_GATHER, counting)
    try:
        for step in range(8):
            for module in (plain, ours.module):
                module.words.requires_grad_(2 <= step < 6)
                module.bag.requires_grad_(step < 4)
            if step == 1:
                layout = ours.layout
            gathered.clear()
            for module in (plain, ours):
                module.zero_grad()
                module(*tokens(step, rank)).square().mean().backward()
            # The numbers of rows once, then indices and values of each parameter that is trainable.
            assert len(gathered) == {0: 3, 1: 3, 2: 5, 3: 5, 4: 3, 5: 3, 6: 0, 7: 0}[step]
            assert_means(ours.module, dense_means(plain))
        assert ours.layout == layout, "an embedding moved what lies in buffers"
    finally:
        setattr(dist, collectives._ALL_GATHER, gather)
    ours.close()


def test_a_frozen_embedding_costs_nothing_and_an_unfrozen_one_is_reduced(run_ranks: RunRanks) -> None:
    run_ranks(2, frozen_and_unfrozen)


# -- what gradients look like ------------------------------------------------------------------------


def tied_to_a_dense_use() -> None:
    """Rank 1 alone uses the embedding as an output layer, in every other step."""
    rank = dist.get_rank()
    plain = lookup()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    for step in range(4):
        tied = step % 2 == 1
        for module in (plain, ours):
            module.zero_grad()
            module(*tokens(step, rank), tied=tied and rank == 1).square().mean().backward()
        assert_means(ours.module, dense_means(plain), dense=("words.weight",) if tied else ())
    ours.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_dense_gradient_makes_all_ranks_dense(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, tied_to_a_dense_use)


def no_rows(everywhere: bool) -> None:
    rank = dist.get_rank()
    plain = lookup()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    for step in range(3):
        words, bag = tokens(step, rank)
        if rank == 0 or everywhere:
            words = torch.zeros_like(words)[:, :0]
        for module in (plain, ours):
            module.zero_grad()
            module(words, bag).square().mean().backward()
        assert plain.words.weight.grad.is_sparse
        assert_means(ours.module, dense_means(plain))
        assert ours.module.words.weight.grad.is_sparse
        assert (ours.module.words.weight.grad.indices().shape[1] == 0) == everywhere
    ours.close()


@pytest.mark.parametrize("everywhere", [True, False])
def test_gradients_without_rows(run_ranks: RunRanks, everywhere: bool) -> None:
    run_ranks(2, no_rows, everywhere)


def in_dtype(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    module = nn.Embedding(8, 4, sparse=True, dtype=dtype)
    ours = BucketDDP(module)
    scale = 40000.0 if dtype is torch.float16 else 1.0  # in fp16 the sum of two would overflow
    for _ in range(2):
        ours.zero_grad()
        (ours(torch.tensor([2, 2 + rank])) * scale * torch.tensor([[1.0], [0.5]], dtype=dtype)).sum().backward()
        assert module.weight.grad.dtype is dtype
        expected = torch.zeros(8, 4, dtype=dtype)
        expected[2] = (1.5 + 1) * scale / 2 if dtype is not torch.float16 else 50000.0
        expected[3] = 0.5 * scale / 2
        torch.testing.assert_close(module.weight.grad.to_dense(), expected)
        assert module.weight.grad.is_coalesced()
    ours.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(run_ranks: RunRanks, dtype: torch.dtype) -> None:
    run_ranks(2, in_dtype, dtype)


def nothing_but_sparse() -> None:
    rank = dist.get_rank()
    for find_unused in (False, True):
        plain = nn.Embedding(ROWS, 4, sparse=True)
        ours = BucketDDP(plain, find_unused_parameters=find_unused)
        assert ours.layout.buckets == ()
        plain = copy.deepcopy(plain)
        for step in range(3):
            words, _ = tokens(step, rank)
            plain.zero_grad()
            ours.zero_grad()
            plain(words).square().mean().backward()
            loss = ours(words).square().mean()
            with ours.backward_pass(loss):
                loss.backward()
            mean = dense_means(plain)["weight"]
            torch.testing.assert_close(ours.module.weight.grad.to_dense(), mean)
            assert ours.module.weight.grad.is_coalesced()
        assert ours.passes == 3
        ours.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_with_nothing_but_sparse_gradients(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, nothing_but_sparse)


# -- declaring ---------------------------------------------------------------------------------------


class Functional(nn.Module):
    """A table that no module scan can tell to be sparse, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(ROWS, 4))
        self.other_name = self.table
        self.head = nn.Linear(4, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(nn.functional.embedding(words, self.table, sparse=True))


def declared(name: str) -> None:
    ours = BucketDDP(Functional(), sparse_parameters=[name])
    assert [slot.spec.name for slot in ours.layout.slots] == ["head.bias", "head.weight"]
    ours(tokens(0, dist.get_rank())[0]).square().mean().backward()
    assert ours.module.table.grad.is_sparse
    ours.close()


@pytest.mark.parametrize("name", ["table", "other_name"])
def test_a_declared_parameter_may_have_a_sparse_gradient(run_ranks: RunRanks, name: str) -> None:
    run_ranks(2, declared, name)


def undeclared() -> str:
    ours = BucketDDP(Functional())
    with pytest.raises(RuntimeError) as error:
        ours(tokens(0, dist.get_rank())[0]).square().mean().backward()
    return str(error.value)


def test_a_sparse_gradient_that_was_not_declared_is_refused_with_the_remedy(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, undeclared, fresh=True):
        assert "'table'" in message
        assert "pass sparse_parameters=['table'] to BucketDDP" in message


def bad_names() -> None:
    with pytest.raises(ValueError, match=r"sparse_parameters to name parameters of the module, found \['tabel'\]"):
        BucketDDP(Functional(), sparse_parameters=["table", "tabel"])
    with pytest.raises(TypeError, match="to be a list of names, found 'table'"):
        BucketDDP(Functional(), sparse_parameters="table")


def test_unknown_names_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(1, bad_names)


def declared_on_rank_0() -> str:
    with pytest.raises(RankMismatchError) as error:
        BucketDDP(nn.Embedding(ROWS, 4, sparse=dist.get_rank() == 0))
    return str(error.value)


def test_ranks_that_differ_in_what_is_sparse_are_told_at_wrap(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, declared_on_rank_0):
        assert "parameter 'weight': rank 0 has shape" in message
        assert "sparse gradient, rank 1 has" in message


class TwoSparseDims(torch.autograd.Function):
    """The identity on a table; its gradient is sparse in both dimensions."""

    @staticmethod
    def forward(ctx: object, table: Tensor) -> Tensor:
        return table.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.to_sparse()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3, 4))

    def forward(self, odd: bool) -> Tensor:
        return (TwoSparseDims.apply(self.table) if odd else self.table).sum()


def refused_on_rank_1() -> str:
    ours = BucketDDP(Odd(), sparse_parameters=["table"])
    ours(odd=False).backward()
    ours.zero_grad()
    loss = ours(odd=dist.get_rank() == 1)
    with pytest.raises(RuntimeError) as error, ours.backward_pass(loss):
        loss.backward()
    return str(error.value)


def test_a_gradient_of_the_wrong_kind_is_an_error_on_every_rank(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, refused_on_rank_1, fresh=True)
    assert "the gradient of parameter 'table' cannot be reduced" in second
    assert "rank 1 raised RuntimeError in backward: the gradient of parameter 'table' cannot be reduced" in first


# -- failures ----------------------------------------------------------------------------------------


class FragileLookup(nn.Module):
    """Its backward raises on demand, when one of two embeddings has its gradient already."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Embedding(ROWS, 4, sparse=True)
        self.late = nn.Embedding(ROWS, 4, sparse=True)
        self.head = nn.Linear(4, 4)

    def forward(self, words: Tensor, fail: bool = False) -> Tensor:
        x = self.late(words)
        x = RaiseInBackward.apply(x) if fail else x
        return self.head(x * self.early(words))


def one_rank_raises(guarded: bool, step_of_failure: int) -> str:
    ours = BucketDDP(FragileLookup(), bucket_cap_mb=TINY)
    rank = dist.get_rank()
    for step in range(step_of_failure):
        ours.zero_grad()
        ours(tokens(step, rank)[0]).square().mean().backward()
    loss = ours(tokens(9, rank)[0], fail=rank == 1).square().mean()
    with pytest.raises((ArithmeticError, PeerFailureError)) as error:
        with ours.backward_pass(loss) if guarded else nullcontext():
            loss.backward()
    with pytest.raises(PeerFailureError):
        ours(tokens(0, rank)[0])
    return str(error.value)


@pytest.mark.parametrize("step_of_failure", [0, 2])
@pytest.mark.parametrize("guarded", [True, False], ids=["backward_pass", "plain"])
def test_one_rank_raising_in_backward_is_an_error_on_every_rank(
    run_ranks: RunRanks, guarded: bool, step_of_failure: int
) -> None:
    first, second = run_ranks(2, one_rank_raises, guarded, step_of_failure, fresh=True)
    assert second == "no gradient today"
    assert f"rank 0: pass {step_of_failure} cannot be completed: rank 1" in first


def all_ranks_raise(guarded: bool) -> None:
    torch.manual_seed(5)
    plain = FragileLookup()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    rank = dist.get_rank()
    for step in range(4):
        words, _ = tokens(step, rank)
        plain.zero_grad()
        ours.zero_grad()
        if step in (0, 2):
            loss = ours(words, fail=True).square().mean()
            with pytest.raises(ArithmeticError), ours.backward_pass(loss) if guarded else nullcontext():
                loss.backward()
            ours(words)  # in plain PyTorch the next use finds out that all ranks failed
            assert ours.module.early.weight.grad is None
            assert ours.module.head.weight.grad is None
        for module in (plain, ours):
            module(words).square().mean().backward()
        for name, mean in dense_means(plain).items():
            torch.testing.assert_close(dict(ours.module.named_parameters())[name].grad.to_dense(), mean)
    ours.close()


@pytest.mark.parametrize("guarded", [True, False], ids=["backward_pass", "plain"])
def test_training_goes_on_when_backward_raised_on_every_rank(run_ranks: RunRanks, guarded: bool) -> None:
    run_ranks(2, all_ranks_raise, guarded)


def gone_before_the_rows_travel() -> str:
    """Rank 1 is through with the control vector and then raises: nobody may wait for its rows."""
    ours = BucketDDP(lookup(), bucket_cap_mb=TINY)
    rank = dist.get_rank()
    loss = ours(*tokens(0, rank)).square().mean()
    if rank == 1:
        upkeep_of(ours)._parts.sparse.settle = interrupt
    with pytest.raises((KeyboardInterrupt, PeerFailureError)) as error, ours.backward_pass(loss):
        loss.backward()
    return str(error.value)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt("enough")


def test_a_rank_interrupted_before_its_rows_travel_is_an_error_on_the_others(run_ranks: RunRanks) -> None:
    first, _ = run_ranks(2, gone_before_the_rows_travel, fresh=True)
    assert "rank 0: pass 0 cannot be completed: rank 1 raised KeyboardInterrupt in backward: enough" in first


# -- with the other options --------------------------------------------------------------------------


def dense_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.to_dense() if p.grad.is_sparse else p.grad for name, p in module.named_parameters()}


def divided(divide_by: int | str) -> None:
    torch.manual_seed(1)
    module = Lookup()
    plain = copy.deepcopy(module)
    ours = BucketDDP(module, gradient_divide_by=divide_by)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        for model in (plain, ours):
            model.zero_grad()
        for micro in range(2):
            if divide_by == "tokens":
                ours.count_tokens(rank + 1)
            with ours.no_sync() if micro == 0 else nullcontext():
                ours(*tokens(2 * step + micro, rank)).square().sum().backward()
            plain(*tokens(2 * step + micro, rank)).square().sum().backward()
        divisor = world * (world + 1) if divide_by == "tokens" else divide_by
        for name, grad in dense_of(plain).items():
            dist.all_reduce(grad)
            torch.testing.assert_close(dense_of(module)[name], grad / divisor)
        assert module.words.weight.grad.is_sparse
    if divide_by == "tokens":
        ours.count_tokens(1)
    with pytest.raises(RuntimeError, match="expected cleared gradients"):
        ours(*tokens(9, rank)).square().sum().backward()
    ours.close()


@pytest.mark.parametrize("divide_by", [3, "tokens"])
def test_sparse_gradients_are_divided_as_dense_ones_are(run_ranks: RunRanks, divide_by: int | str) -> None:
    run_ranks(2, divided, divide_by)


def unsound() -> str:
    module = Lookup()
    ours = BucketDDP(module, max_abs_grad=1e3)
    rank = dist.get_rank()
    for step in range(2):
        ours.zero_grad()
        if step == 1 and rank == 1:
            module.words.weight.register_hook(lambda grad: grad * math.inf)
        loss = ours(*tokens(step, rank)).square().mean()
        try:
            with ours.backward_pass(loss):
                loss.backward()
        except (GradientError, PeerFailureError) as error:
            ours.close()
            return str(error)
    return "no error"


def test_unsound_sparse_gradients_are_named_on_every_rank(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, unsound, fresh=True):
        assert "rank 1: found " in message
        assert "in the gradient of parameter 'words.weight'" in message


def reduced_by_hand() -> None:
    torch.manual_seed(1)
    module = Lookup()
    plain = copy.deepcopy(module)
    ours = BucketDDP(module)
    rank = dist.get_rank()
    for model in (plain, ours):
        with ours.no_sync():
            model(*tokens(0, rank), use_bag=rank == 0).square().mean().backward()
    ours.allreduce_gradients()
    expected = {}
    for name, param in plain.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
        dist.all_reduce(grad)
        expected[name] = grad / dist.get_world_size()
    for name, grad in dense_of(module).items():
        torch.testing.assert_close(grad, expected[name])
    ours.scale_gradients(0.5)
    for name, grad in dense_of(module).items():
        torch.testing.assert_close(grad, expected[name] / 2)
    ours.zero_grad_buffer()
    assert module.words.weight.grad is None
    assert not module.head.weight.grad.any()
    ours.close()


def test_sparse_gradients_are_reduced_by_hand(run_ranks: RunRanks) -> None:
    run_ranks(2, reduced_by_hand)


def joined() -> float:
    """The rank without data contributes nothing, and ends with the same embeddings."""
    torch.manual_seed(1)
    module = Lookup()
    alone = copy.deepcopy(module)
    ours = BucketDDP(module)
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (module, alone)]
    with ours.join():
        for step in range(2 + rank):
            optimizers[0].zero_grad()
            ours(*tokens(step, rank)).square().mean().backward()
            optimizers[0].step()
    for step in range(2 + world - 1):
        optimizers[1].zero_grad()
        for r in range(world):
            if step < 2 + r:
                alone(*tokens(step, r)).square().mean().div(world).backward()
        optimizers[1].step()
    for (name, param), other in zip(module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param, other, msg=lambda m, n=name: f"{n}: {m}")
    difference = largest_difference_between_ranks(module)
    ours.close()
    return difference


def test_uneven_inputs_with_sparse_gradients(run_ranks: RunRanks) -> None:
    assert run_ranks(3, joined) == [0.0] * 3
