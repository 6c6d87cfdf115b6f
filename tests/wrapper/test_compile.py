"""``torch.compile`` with the wrapper and with a Trainer: parity, no tracing of hooks, graphs cut at buckets."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from lightning_bucketddp import BucketDDP, convert_sync_batchnorm
from tests.lightning_models import Regression, close_to, data, ours, trainer
from tests.models import ConvBatchNorm, Mlp, batch, loss_of
from tests.pool import on_ranks
from tests.reference import TINY, assert_grads, both, drift, grads, inputs_of, local_if, mean_grads, noted

EAGER = "aot_eager"


@contextmanager
def fresh_compiler(**config: Any) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(**{"error_on_recompile": False, **config}):
        yield
    torch._dynamo.reset()


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class Blocks(Mlp):
    """Its layers are of a class of their own, which torch compiles one by one."""

    def __init__(self) -> None:
        super().__init__(width=8)
        self.layers = nn.ModuleList(Block(8, 8) for _ in range(3))


def train(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    loss_of(model(inputs), target).backward()


PLACES = {where: where for where in ("module", "module.compile()", "layers", "wrapper", "step")}


@on_ranks(2, cases=PLACES, quick=["wrapper"])
def test_gradients_are_the_same_wherever_it_is_compiled(where: str) -> None:
    plain = Blocks()
    original = copy.deepcopy(plain)
    with fresh_compiler():
        for module in {"module.compile()": [original], "layers": original.layers}.get(where, []):
            module.compile(backend=EAGER)
        inner = torch.compile(original, backend=EAGER) if where == "module" else original
        wrapper = BucketDDP(inner, bucket_cap_mb=TINY)
        model = torch.compile(wrapper, backend=EAGER) if where == "wrapper" else wrapper
        step = torch.compile(train, backend=EAGER) if where == "step" else train
        for number, local in enumerate((False, False, True, False)):  # the third batch is accumulated
            if number < 3:
                plain.zero_grad()
                model.zero_grad()
            train(plain, *batch(number, dist.get_rank()))
            with local_if(wrapper, local):
                step(model, *batch(number, dist.get_rank()))
            if not local:
                assert_grads(original, mean_grads(plain))
            if number == 1:
                torch._dynamo.config.error_on_recompile = True  # taken back with the patch
        graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"]
        assert len(breaks) == {"wrapper": 1, "step": 2}.get(where, 0), breaks  # our forward, and backward()
        assert graphs == {"layers": 2, "step": 2}.get(where, 1)  # the first layer's input needs no gradient; the loss
        wrapper.close()


@on_ranks(2)
def test_statistics_are_synchronised_in_compiled_modules() -> None:
    with fresh_compiler():
        eager = convert_sync_batchnorm(ConvBatchNorm())
        compiled = copy.deepcopy(eager)
        compiled.compile(backend=EAGER)
        for number in range(2):
            both((eager, compiled), inputs_of(number))
            assert_grads(compiled, grads(eager))
        close_to(compiled, eager)
        assert counters["stats"]["unique_graphs"] > 1, "one before and one after the layer"


def events_of_a_pass(**options: Any) -> list[str]:
    """In which order the compiled pieces of a backward run and reductions are started."""
    events: list[str] = []
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph),
        bw_compiler=lambda graph, _: make_boxed_func(lambda *args: (events.append("compute"), graph(*args))[1]),
    )
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))  # 1 MiB each: torch cuts no smaller pieces
    model = BucketDDP(torch.compile(module, backend=backend), bucket_cap_mb=1, **options)
    with noted("allreduce", look=lambda *_: events.append("reduce")):
        for _ in range(3):  # the first pass learns the order
            events.clear()
            model(torch.ones(1, 512)).sum().backward()
    assert nn.parallel.DistributedDataParallel._active_ddp_module is None
    return events


CUTS: dict[str, Any] = {
    "at each bucket": ({}, {}, 3),
    "not without overlap": ({}, {"overlap": False}, 1),
    "not where torch's option is off": ({"optimize_ddp": False}, {}, 1),
}


@on_ranks(2, cases=CUTS, quick=["at each bucket"])
def test_graphs_are_cut_where_buckets_are_full(config: dict[str, Any], options: dict[str, Any], pieces: int) -> None:
    with fresh_compiler(**config):
        events = events_of_a_pass(**options)
    assert events.count("compute") == pieces
    last = len(events) - 1 - events[::-1].index("compute")
    assert (events.index("reduce") < last) == (pieces > 1), events


@pytest.mark.slow
@on_ranks(2, fresh=True)  # an error in a compiled backward may leave torch's compiler on
def test_a_compiled_backward_is_refused() -> None:
    ours = BucketDDP(Mlp())
    with fresh_compiler(compiled_autograd=True), pytest.raises(RuntimeError, match="compiled_autograd=True, which"):
        torch.compile(lambda inputs: ours(inputs).sum().backward(), backend="eager")(inputs_of(0))


@pytest.mark.slow
@on_ranks(2)
def test_a_trainer_takes_a_compiled_module() -> None:
    eager, compiled = Regression("mlp"), Regression("mlp")
    trainer(ours(), accumulate_grad_batches=2).fit(eager, data())
    with fresh_compiler():
        runs = trainer(ours(), accumulate_grad_batches=2)
        runs.fit(torch.compile(compiled, backend=EAGER), data())
        assert counters["stats"]["unique_graphs"] > 0
    close_to(compiled, eager)
    assert runs.strategy.model is compiled, "unwrapped after fit"
    assert drift(compiled) == 0
