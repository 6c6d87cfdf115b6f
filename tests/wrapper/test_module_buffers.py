"""Module buffers that forward replaces, that are views of a special kind, or that cannot be sent."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, PeerFailureError
from lightning_bucketddp.comm import broadcast
from lightning_bucketddp.peers.agreement import WrapError
from tests.pool import on_ranks
from tests.reference import WHERE, assert_grads, backward, drift, inputs_of, mean_grads, raises_soon, train
from tests.sampling import in_turn


class Replacing(nn.Module):
    """Keeps something of its last forward as a module buffer, which backward needs too."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.keep = nn.Linear(8, 8), nn.Linear(8, 4), keep
        self.register_buffer("kept", self.keep(torch.zeros(4, 8)).detach().clone())
        self.register_buffer("again", self.kept)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.kept = self.again = self.keep(hidden)
        return self.last(hidden * self.kept.detach())


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "an alias of an activation": lambda hidden: hidden.detach(),
    "a part of an activation": lambda hidden: hidden[0].detach(),
    "a new tensor": lambda hidden: hidden.detach() + 1,
    "an activation with its graph": lambda hidden: hidden,
    "an expanded tensor": lambda hidden: hidden.detach().mean().expand(4, 8),
}
REPLACED = {f"{name}, {mode}": [keep, mode] for name, keep in KEPT.items() for mode in ("broadcast", "mean")}


@on_ranks(2, cases=REPLACED, quick=map(", ".join, in_turn([*KEPT], ["broadcast", "mean"])))
def test_a_graph_keeps_what_a_module_buffer_was_replaced_by(keep: Callable[[Tensor], Tensor], mode: str) -> None:
    """Two forwards and one backward: the second forward synchronises what the first one's graph has saved."""
    plain = Replacing(keep)
    ours = BucketDDP(copy.deepcopy(plain), module_buffers=mode)
    for model in (plain, ours):
        sum((model(inputs_of(step)).square().mean() for step in range(2)), torch.zeros(())).backward()
    assert_grads(ours.module, mean_grads(plain))
    ours.synchronise_module_buffers()
    assert drift(ours.module) == 0
    assert ours.module.again is ours.module.kept, "names of one tensor go on sharing it"
    before = ours.module.kept
    ours.synchronise_module_buffers()
    assert ours.module.kept is before, "memory of its own is written to in place"


class SpecialViews(nn.Module):
    """Parameters and module buffers that torch keeps as conjugate or negative views of their memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        conjugate, negative = (torch.randn(4, dtype=torch.cfloat).conj() for _ in range(2))
        self.layer, self.turn, self.scale = nn.Linear(8, 4), nn.Parameter(conjugate), nn.Parameter(negative.imag)
        self.register_buffer("phase", torch.randn(4, dtype=torch.cfloat).conj())
        self.register_buffer("shift", torch.randn(4, dtype=torch.cfloat).conj().imag)
        assert self.turn.is_conj()
        assert self.scale.is_neg()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.shift.add_(x.mean())
        return (self.layer(x) * self.turn * self.phase).real * self.scale


VIEWS: dict[str, Any] = {
    "default": {},
    "coalesced": {"use_contiguous_buffers": False},
    "hook": {"comm_hook": "bf16"},
    "mean": {"module_buffers": "mean"},
    "sharded": {"shard_optimizer": True},
    "fp64 gradients": {"grad_dtype": {"layer.*": torch.float64}},
}


@on_ranks(2, cases={name: [options] for name, options in VIEWS.items()})
def test_conjugate_and_negative_views_train_as_with_torchs_ddp(options: dict[str, Any]) -> None:
    theirs, ours = DistributedDataParallel(SpecialViews()), BucketDDP(SpecialViews(), **options)
    for model in (theirs, ours):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3))
        model(inputs_of(3))
    found, expected = ours.module.state_dict(), theirs.module.state_dict()
    if options.get("module_buffers") == "mean":
        del found["shift"], expected["shift"]
    rounding = {"rtol": 1e-2, "atol": 1e-2} if "comm_hook" in options else {}
    torch.testing.assert_close(found, expected, **rounding)
    ours.synchronise_module_buffers()
    assert drift(ours.module.layer) == 0
    assert drift(nn.ParameterList([ours.module.scale, ours.module.shift])) == 0


def quantised() -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch finds them old-fashioned
        return torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)


def compressed() -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch calls them a beta feature
        return torch.eye(4).to_sparse_csr()


NOT_SENT: dict[str, list[Any]] = {
    "sparse": [lambda: torch.eye(4).to_sparse(), r"'kept' sparse \(torch.sparse_coo\)"],
    "compressed": [compressed, r"'kept' sparse \(torch.sparse_csr\)"],
    "quantised": [quantised, r"'kept' quantised \(torch.qint8\)"],
    "nested": [lambda: torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]), "'kept' nested"],
    "meta": [lambda: torch.ones(4, 4, device="meta"), "'kept' on meta memory"],
    "expanded": [lambda: torch.ones(1).expand(4, 4), r"'kept' expanded to shape \(4, 4\); register its clone"],
}


WHERES = ("all", 0, 1)
SOME = [f"{kind} on {where}" for kind, where in in_turn([*NOT_SENT], WHERES)]


@on_ranks(
    2, cases={f"{kind} on {where}": [*args, where] for kind, args in NOT_SENT.items() for where in WHERES}, quick=SOME
)
def test_what_cannot_be_sent_is_named_on_all_ranks(make: Callable[[], Tensor], words: str, where: int | str) -> None:
    rank, module = dist.get_rank(), nn.Sequential(nn.Linear(8, 4))
    here = where in ("all", rank)
    module.register_buffer("kept", make() if here else torch.eye(4))
    words = f"module buffer {words}" if here else f"rank {where}{WHERE} cannot go on with .*module buffer {words}"
    with pytest.raises(WrapError if here else PeerFailureError, match=words):
        BucketDDP(module)
    module._ddp_params_and_buffers_to_ignore = ["kept"]
    ours = BucketDDP(module)
    assert backward(ours).isfinite()
    del module._ddp_params_and_buffers_to_ignore
    if where == "all" and not module.kept.is_nested:  # ranks compare shapes
        ours = BucketDDP(module, module_buffers="off", init_sync=False)
        assert backward(ours).isfinite()


@on_ranks(2, cases={"all": [{0, 1}], "source": [{0}], "other": [{1}]}, fresh=True)
def test_what_a_module_buffer_was_replaced_by_is_named_where_it_is(ranks: set[int]) -> None:
    rank, module = dist.get_rank(), nn.Sequential(nn.Linear(8, 4))
    module.register_buffer("kept", torch.eye(4))
    ours = BucketDDP(module)
    backward(ours)
    words = r"module buffer 'kept', replaced since it was sent, sparse \(torch.sparse_coo\)"
    if rank in ranks:
        module.kept = torch.eye(4).to_sparse()
    else:
        words = rf"rank {min(ranks)}{WHERE} raised WrapError: .*{words}"
    with raises_soon(WrapError if rank in ranks else PeerFailureError, match=words):
        backward(ours, 1)
    module.kept = torch.eye(4)
    with pytest.raises(PeerFailureError, match="WrapError"):
        backward(ours, 2)
    if len(ranks) == 2:  # nothing was left under way
        assert backward(BucketDDP(module), 2).isfinite()


@on_ranks(2, fresh=True)
def test_an_error_while_rank_0_sends_is_named_on_all_ranks() -> None:
    rank = dist.get_rank()
    failing = patch.object(broadcast, "stage", side_effect=RuntimeError("no memory left"))
    with raises_soon(RuntimeError, match="no memory left"), failing if rank == 0 else nullcontext():
        BucketDDP(nn.Linear(8, 4))
