"""Module buffers that forward replaces, that are views of a special kind, or that cannot be sent."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from tests.pool import on_ranks
from tests.reference import assert_grads, drift, inputs_of, mean_grads, train


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


@on_ranks(2, cases=REPLACED)
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
