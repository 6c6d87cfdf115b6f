"""Which optimizers are sharded, which are refused and why."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_bucketddp import declare_element_wise, declare_whole_parameter
from lightning_bucketddp.optim.element_wise import _KNOWN, needs_whole_parameters, require_shardable


class OfAnotherPackage(Optimizer):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.01, **options})


def called(name: str) -> type[Optimizer]:
    module, kind = name.rsplit(".", 1)
    return type(kind, (OfAnotherPackage,), {"__module__": module, "__qualname__": kind})


class ScheduleFree(SGD):
    def eval(self) -> None: ...

    def train(self) -> None: ...


class OwnSgd(SGD):
    """Not known to be element-wise."""


def one(kind: Any, **options: Any) -> Optimizer:
    return kind([nn.Parameter(torch.ones(2, 2))], **options)


def test_what_is_element_wise_is_taken() -> None:
    assert {"lion_pytorch.lion_pytorch.Lion", "timm.optim.adopt.Adopt"} <= _KNOWN
    declared = declare_element_wise(type("Declared", (OwnSgd,), {}))
    for kind in [*map(called, _KNOWN), torch.optim.AdamW, torch.optim.Adagrad, declared]:
        require_shardable(one(kind))
        assert not needs_whole_parameters(one(kind))


def test_what_updates_each_parameter_by_itself_gets_whole_ones() -> None:
    declared = declare_whole_parameter(type("LAMB", (OfAnotherPackage,), {}))
    for kind in (torch.optim.Muon, declared):
        require_shardable(one(kind))
        assert needs_whole_parameters(one(kind))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (torch.optim.LBFGS, {}, r"step\(\) alone .*found LBFGS: its directions.*would have only a part"),
        (torch.optim.Adafactor, {}, "Adafactor: it keeps sums over rows and columns"),
        (type("Muon", (OfAnotherPackage,), {}), {}, "Muon: it orthogonalises.*declare_whole_parameter"),
        (torch.optim.SparseAdam, {}, "SparseAdam: it is for sparse"),
        (type("LAMB", (OfAnotherPackage,), {}), {}, "LAMB: it scales by the norm"),
        (OwnSgd, {}, r"found tests.optim.test_element_wise.OwnSgd\. If .*declare_element_wise"),
        (called("lion_pytorch.lion_pytorch.Unknown"), {}, r"found lion_pytorch.lion_pytorch.Unknown\. If"),
        (called("timm.optim.lion.Lion"), {"caution": True}, r"timm\.optim\.lion\.Lion with caution=True: it takes a"),
        (declare_element_wise(ScheduleFree), {}, r"ScheduleFree: its train\(\) and eval\(\).*shard_optimizer=False"),
    ],
)
def test_optimizers_that_cannot_be_sharded_say_why(kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        require_shardable(one(kind, **options))
