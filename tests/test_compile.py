"""``torch.compile`` with the wrapper and with a Trainer: parity, no tracing of hooks, graphs cut at buckets."""

import copy
from collections.abc import Callable, Iterator
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
from tests.lightning_models import Regression, close_to, data, ddp, ours, trainer
from tests.models import Blocks, Branches, ConvBatchNorm, batch, loss_of
from tests.reference import assert_grads, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
EAGER = "aot_eager"


@contextmanager
def fresh_compiler(**config: Any) -> Iterator[None]:
    """Nothing compiled before and nothing left behind, in processes that are kept."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(**{"error_on_recompile": False, **config}):
        yield
    torch._dynamo.reset()


# -- parity ------------------------------------------------------------------------------------------


def wrap(module: nn.Module, where: str) -> tuple[nn.Module, BucketDDP]:
    """The module wrapped and compiled; what to call, and the wrapper."""
    if where == "module":
        module = torch.compile(module, backend=EAGER)
    elif where == "module.compile()":
        module.compile(backend=EAGER)
    elif where == "blocks":
        for block in module.blocks:
            block.compile(backend=EAGER)
    wrapper = BucketDDP(module, bucket_cap_mb=0.0003)
    return (torch.compile(wrapper, backend=EAGER) if where == "wrapper" else wrapper), wrapper


def train(model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    loss_of(model(inputs), target).backward()


def same_gradients(where: str) -> tuple[int, float]:
    torch.manual_seed(2)
    plain = Blocks()
    with fresh_compiler():
        model, wrapper = wrap(copy.deepcopy(plain), where)
        step = torch.compile(train, backend=EAGER) if where == "step" else train
        for number in range(5):
            plain.zero_grad()
            model.zero_grad()
            if number == 2:  # an accumulated batch
                train(plain, *batch(10, dist.get_rank()))
                with wrapper.no_sync():
                    step(model, *batch(10, dist.get_rank()))
            train(plain, *batch(number, dist.get_rank()))
            step(model, *batch(number, dist.get_rank()))
            original = getattr(wrapper.module, "_orig_mod", wrapper.module)
            assert_grads(original, mean_over_ranks(plain))
            if number == 1:
                torch._dynamo.config.error_on_recompile = True  # taken back with the patch
        graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"]
        assert len(breaks) == {"wrapper": 1, "step": 2}.get(where, 0), breaks  # our forward, and backward()
        for param in original.parameters():
            param.data.add_(param.grad)
        difference = largest_difference_between_ranks(original)
        wrapper.close()
    return graphs, difference


@pytest.mark.parametrize("where", ["module", "module.compile()", "blocks", "wrapper", "step"])
def test_the_same_gradients_wherever_it_is_compiled(run_ranks: RunRanks, where: str) -> None:
    results = run_ranks(2, same_gradients, where)
    expected = {"blocks": 2, "step": 2}.get(where, 1)  # the first block's input needs no gradient; the loss
    assert results == [(expected, 0.0)] * 2


def unused_parameters_and_statistics() -> None:
    torch.manual_seed(2)
    plain = Branches()
    with fresh_compiler():
        model = BucketDDP(torch.compile(copy.deepcopy(plain), backend=EAGER), bucket_cap_mb=0.0003)
        for number, take in enumerate(["left", "right", "left"]):
            mine = take if dist.get_rank() == 0 else "both"
            plain.zero_grad()
            model.zero_grad()
            inputs, target = batch(number, dist.get_rank())
            loss_of(plain(inputs, mine), target).backward()
            loss_of(model(inputs, mine), target).backward()
            assert_grads(model.module._orig_mod, mean_over_ranks(plain))
        assert counters["stats"]["unique_graphs"] > 0
        model.close()
    with fresh_compiler():
        eager = convert_sync_batchnorm(ConvBatchNorm())
        compiled = copy.deepcopy(eager)
        compiled.compile(backend=EAGER)
        for number in range(2):
            inputs, target = batch(number, dist.get_rank())
            for module in (eager, compiled):
                module.zero_grad()
                loss_of(module(inputs), target).backward()
            for first, second in zip(compiled.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(first.grad, second.grad)
        close_to(compiled, eager)
        assert counters["stats"]["unique_graphs"] > 1, "one before and one after the layer"


def test_parameters_in_use_and_synchronised_statistics(run_ranks: RunRanks) -> None:
    run_ranks(2, unused_parameters_and_statistics)


# -- cuts --------------------------------------------------------------------------------------------


def events_of_a_pass(**options: Any) -> list[str]:
    """In which order the compiled pieces of a backward run and reductions are started."""
    events: list[str] = []

    def compile_backward(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            events.append("compute")
            return graph(*args)

        return make_boxed_func(run)

    def compile_forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph)

    reduce = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        events.append("reduce")
        return reduce(*args, **kwargs)

    backend = aot_autograd(fw_compiler=compile_forward, bw_compiler=compile_backward)
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))  # 1 MiB each: torch cuts no smaller pieces
    model = BucketDDP(torch.compile(module, backend=backend), **options)
    dist.all_reduce = all_reduce
    try:
        for _ in range(3):  # the first pass learns the order
            events.clear()
            model(torch.ones(1, 512)).sum().backward()
    finally:
        dist.all_reduce = reduce
    model.close()
    assert torch.nn.parallel.DistributedDataParallel._active_ddp_module is None
    return events


def cut_and_whole() -> dict[str, list[str]]:
    found = {}
    with fresh_compiler():
        found["cut"] = events_of_a_pass(bucket_cap_mb=1)
        found["overlap=False"] = events_of_a_pass(bucket_cap_mb=1, overlap=False)
    with fresh_compiler(optimize_ddp=False):
        found["optimize_ddp=False"] = events_of_a_pass(bucket_cap_mb=1)
    return found


def test_graphs_are_cut_where_buckets_are_full(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, cut_and_whole):
        assert found["cut"].count("compute") == 3
        last = len(found["cut"]) - found["cut"][::-1].index("compute")
        assert found["cut"][:last].count("reduce") >= 2, found["cut"]
        for case in ("overlap=False", "optimize_ddp=False"):
            assert found[case].count("compute") == 1
            assert found[case][0] == "compute"


# -- in a Trainer ------------------------------------------------------------------------------------


def fit_compiled() -> float:
    models = []
    for strategy in (ddp(), ours()):
        model = Regression("mlp")
        with fresh_compiler():
            runs = trainer(strategy, max_epochs=2, accumulate_grad_batches=2)
            runs.fit(torch.compile(model, backend=EAGER), data())
            assert counters["stats"]["unique_graphs"] > 0
        models.append(model)
    close_to(models[1], models[0])
    assert runs.strategy.model is models[1], "unwrapped after fit"
    return largest_difference_between_ranks(models[1])


def test_a_trainer_takes_a_compiled_module(run_ranks: RunRanks) -> None:
    assert run_ranks(2, fit_compiled) == [0.0, 0.0]
