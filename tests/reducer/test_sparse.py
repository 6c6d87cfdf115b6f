"""Sparse gradients against torch DDP, and against means that are worked out densely."""

import copy
import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, GradientError, PeerFailureError, RankMismatchError
from tests.inside import wrapped_of
from tests.models import ROWS, Lookup, RaiseInBackward, tokens
from tests.pool import case, on_ranks
from tests.reference import (
    TINY,
    WHERE,
    both,
    everyones,
    local_if,
    mean_grads,
    pair,
    run_backward,
)

EMBEDDINGS = ("words.weight", "bag.weight")


def step_of(models: tuple[nn.Module, ...], step: int, **options: bool) -> None:
    both(models, *tokens(step, dist.get_rank()), **options)


def assert_means(module: nn.Module, expected: dict[str, Tensor | None], dense: str = "", **tolerance: float) -> None:
    """Asserts values, that gradients of embeddings are coalesced sparse ones, and that all ranks have the same bits."""
    for name, param in module.named_parameters():
        mean, grad = expected[name], param.grad
        with case(name):
            assert (grad is None) == (mean is None)
            if grad is None or mean is None:
                continue
            assert grad.is_sparse == (name in EMBEDDINGS and name != dense)
            if grad.is_sparse:
                assert grad.is_coalesced()
                assert grad.indices().shape[1] < ROWS, "all rows travelled"
            torch.testing.assert_close(grad.to_dense(), mean, **tolerance)
            parts = (grad.indices(), grad.values()) if grad.is_sparse else (grad,)
            for other in everyones(parts):
                assert all(torch.equal(mine, theirs) for mine, theirs in zip(parts, other, strict=True))


@on_ranks(2, 3, cases=[(torch.optim.SGD, "mean", 3), (torch.optim.SparseAdam, "sum", 1)])
def test_gradients_and_weights_are_those_of_torch_ddp(kind: Any, mode: str, accumulate: int) -> None:
    _, ours = pair(lambda: Lookup(mode=mode), TINY)
    reference = DistributedDataParallel(copy.deepcopy(ours.module))
    for step in range(3):
        for model in (ours, reference):
            model.zero_grad()
            for micro in range(accumulate):
                with local_if(model, micro < accumulate - 1):
                    step_of((model,), 10 * step + micro, zero=False)
            kind([model.module.get_parameter(name) for name in EMBEDDINGS], lr=0.1).step()
        with case(step):
            grads = {name: param.grad.to_dense() for name, param in reference.module.named_parameters()}
            assert_means(ours.module, grads, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(ours.state_dict(), reference.module.state_dict(), rtol=1e-4, atol=1e-6)
    assert ours.passes == 3
    assert len(ours.layout.slots) == 2, "only the dense layer has slots"


@on_ranks(2, 3)
def test_ranks_may_use_different_embeddings() -> None:
    rank = dist.get_rank()
    plain, ours = pair(Lookup, TINY)
    patterns = [(True, True), (True, False), (False, False), (False, True)]
    for step in range(5):
        words, bag = patterns[(step + rank) % 4 if step < 4 else 2]  # at last no rank uses either
        step_of((plain, ours), step, use_words=words, use_bag=bag)
        with case(step):
            assert_means(ours.module, mean_grads(plain))
    with ours.no_sync():
        step_of((ours,), 0)
    step_of((ours,), 1, use_words=False)
    assert ours.module.words.weight.grad is None, "zero_grad dropped it"


@on_ranks(2)
def test_a_gradient_that_no_rank_made_keeps_every_bit() -> None:
    plain, ours = pair(Lookup, TINY)
    weight = ours.module.words.weight
    step_of((ours,), 0)
    own, before = weight.grad, weight.grad.to_dense()
    step_of((ours,), 1, zero=False, use_words=False)
    assert weight.grad is own
    assert torch.equal(own.to_dense(), before)
    step_of((plain, ours), 2, zero=False, use_words=dist.get_rank() == 1)  # it takes part if any rank adds to it
    torch.testing.assert_close(weight.grad.to_dense(), mean_grads(plain)["words.weight"] + before)
    assert weight.grad.is_coalesced()


@on_ranks(2)
def test_a_frozen_embedding_sends_nothing() -> None:
    plain, ours = pair(Lookup, TINY)
    layouts = []
    for step, (words, bag) in enumerate([(False, True), (False, True), (True, True), (True, False), (False, False)]):
        for model in (plain, ours.module):
            model.words.requires_grad_(words)
            model.bag.requires_grad_(bag)
        step_of((plain, ours), step)
        with case(step):
            assert_means(ours.module, mean_grads(plain))
            rows = [max(len(tokens(step, rank)[kind].unique()) for rank in range(2)) for kind in range(2)]
            received = ours.last_pass().sparse_nbytes  # from two ranks, an index and four values for each row
            assert received == 2 * (8 + 16) * (words * rows[0] + bag * rows[1])
        layouts.append(ours.layout)
    assert all(layout == layouts[1] for layout in layouts[1:]), "embeddings are no part of buffers"


@on_ranks(2, 3)
def test_one_dense_gradient_makes_all_ranks_dense() -> None:
    """Rank 1 alone uses the embedding as an output layer, in every other step; at last ranks use no rows."""
    plain, ours = pair(Lookup, TINY)
    rank = dist.get_rank()
    for step in range(4):
        tied = step % 2 == 1
        step_of((plain, ours), step, tied=tied and rank == 1)
        assert_means(ours.module, mean_grads(plain), dense="words.weight" if tied else "")
    for everywhere in (True, False):
        words, bag = tokens(0, rank)
        both((plain, ours), words[:, :0] if rank == 0 or everywhere else words, bag)
        assert_means(ours.module, mean_grads(plain))
        assert (ours.module.words.weight.grad.indices().shape[1] == 0) == everywhere


@on_ranks(2, cases=(torch.float64, torch.bfloat16, torch.float16))
def test_other_dtypes_are_averaged_in_themselves(dtype: torch.dtype) -> None:
    ours = BucketDDP(nn.Embedding(8, 4, sparse=True, dtype=dtype))
    scale = 40000.0 if dtype is torch.float16 else 1.0  # in fp16 the sum of two would overflow
    words, factors = torch.tensor([2, 2 + dist.get_rank()]), torch.tensor([[1.0], [0.5]], dtype=dtype)
    (ours(words) * scale * factors).sum().backward()
    expected = torch.zeros(8, 4, dtype=dtype)
    expected[2], expected[3] = 1.25 * scale, 0.25 * scale
    torch.testing.assert_close(ours.module.weight.grad.to_dense(), expected)


class Functional(nn.Module):
    """A table that no module scan can tell to be sparse, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.other_name = nn.Parameter(torch.ones(ROWS, 4))
        self.head = nn.Linear(4, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(nn.functional.embedding(words, self.table, sparse=True))


@on_ranks(2)
def test_a_parameter_may_be_declared_sparse() -> None:
    for name in ("table", "other_name"):
        ours = BucketDDP(Functional(), sparse_parameters=[name])
        assert [slot.spec.name for slot in ours.layout.slots] == ["head.bias", "head.weight"]
        both([ours], tokens(0, dist.get_rank())[0])
        assert ours.module.table.grad.is_sparse
        ours.close()
    with pytest.raises(ValueError, match=r"sparse_parameters to name parameters of the module, found \['tabel'\]"):
        BucketDDP(Functional(), sparse_parameters=["table", "tabel"])
    with pytest.raises(RankMismatchError, match=r"'weight': rank 0 has shape.*sparse gradient, rank 1 has"):
        BucketDDP(nn.Embedding(ROWS, 4, sparse=dist.get_rank() == 0))


def raising(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return RaiseInBackward.apply(output)


FAILURES: dict[str, list[Any]] = {  # guarded, errors by rank; rank 1 fails
    "raised": [False, "rank 0: pass 1 cannot be completed: rank 1", ArithmeticError, "no gradient today"],
    "odd": [True, "raised RuntimeError: the gradient of", RuntimeError, "'words.weight' cannot be reduced"],
    "interrupted": [True, f"rank 1{WHERE} raised KeyboardInterrupt in backward: enough", KeyboardInterrupt, "enough"],
    "unsound": [True, "rank 1: found ", GradientError, "gradient of parameter 'words.weight'"],
}


@on_ranks(2, cases={how: [how, *expected] for how, expected in FAILURES.items()}, fresh=True)
def test_a_failure_on_one_rank_is_one_on_all(how: str, guarded: bool, others: str, error: Any, mine: str) -> None:
    _, ours = pair(Lookup, TINY, max_abs_grad=1e3)
    rank, words = dist.get_rank(), ours.module.words
    run_backward(ours, ours(*tokens(0, rank)).square().mean(), guarded)
    ours.zero_grad()
    if rank == 1 and how == "raised":
        words.register_forward_hook(raising)
    elif rank == 1 and how == "interrupted":  # when the others have seen its control vector
        wrapped_of(ours).context.sparse.use_reports = Mock(side_effect=KeyboardInterrupt("enough"))
    elif rank == 1:  # sparse in both dimensions, or infinite
        words.weight.register_hook(lambda grad: grad.to_dense().to_sparse() if how == "odd" else grad * math.inf)
    loss = ours(*tokens(9, rank)).square().mean()
    with pytest.raises([PeerFailureError, error][rank], match=[others, mine][rank]):
        run_backward(ours, loss, guarded)
    with pytest.raises(PeerFailureError):
        ours(*tokens(0, rank))


@on_ranks(1, cases=(True, False))
def test_a_rank_without_others_goes_on_when_backward_raised(guarded: bool) -> None:
    plain, ours = pair(Lookup, TINY)
    for step in range(3):
        ours.zero_grad()
        if step in (0, 2):
            hook = ours.module.words.register_forward_hook(raising)
            with pytest.raises(ArithmeticError):
                run_backward(ours, ours(*tokens(step, dist.get_rank())).square().mean(), guarded)
            hook.remove()
            assert ours.module.bag.weight.grad is ours.module.head.weight.grad is None
        step_of((plain, ours), step)
        assert_means(ours.module, mean_grads(plain))


@on_ranks(2, cases=(3, "tokens", "samples"))
def test_sparse_gradients_are_divided_like_dense_ones(divide_by: Any) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, ours = pair(Lookup, gradient_divide_by=divide_by)
    for step in range(2):
        plain.zero_grad()
        ours.zero_grad()
        for micro in range(2):
            if divide_by == "tokens":
                ours.count_tokens(rank + 1)
            if divide_by == "samples":
                ours.count_samples(rank + 1)
            with local_if(ours, micro == 0):
                step_of((plain, ours), 2 * step + micro, zero=False)
        if divide_by == "samples":  # weights of 1/3 and 2/3 are 2/3 and 4/3 of the mean's
            for param in plain.parameters():
                param.grad = None if param.grad is None else param.grad * (2 * (rank + 1) / 3)
            assert_means(ours.module, mean_grads(plain))
            continue
        divisor = world * (world + 1) if divide_by == "tokens" else divide_by
        assert_means(ours.module, {name: mean * world / divisor for name, mean in mean_grads(plain).items()})
    if isinstance(divide_by, str):
        getattr(ours, f"count_{divide_by}")(1)
    with pytest.raises(RuntimeError, match="expected cleared gradients"):
        step_of((ours,), 9, zero=False)


@on_ranks(2)
def test_sparse_gradients_may_be_reduced_by_hand() -> None:
    plain, ours = pair(Lookup)
    with ours.no_sync():
        step_of((plain, ours), 0, use_bag=dist.get_rank() == 0)
    ours.allreduce_gradients()
    means = mean_grads(plain)
    assert_means(ours.module, means)
    ours.scale_gradients(0.5)
    for name, param in ours.module.named_parameters():
        torch.testing.assert_close(param.grad.to_dense(), means[name] / 2)
