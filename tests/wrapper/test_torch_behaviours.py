"""Things that training code does around a data-parallel module, as with torch DDP or as in one process."""

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from tests.models import ConvBatchNorm, Mlp, batch, loss_of
from tests.reference import assert_grads, grads, largest_difference_between_ranks, mean_over_ranks
from tests.wrapper.cases import TINY, RunRanks, backward, check_each


def pair(build: Callable[[], nn.Module]) -> tuple[BucketDDP, DistributedDataParallel]:
    """The same module twice: ours and torch's."""
    torch.manual_seed(3)
    module = build()
    ddp = DistributedDataParallel(copy.deepcopy(module))
    return BucketDDP(module, bucket_cap_mb=TINY), ddp


# -- what forward returns ----------------------------------------------------------------------------

Named = namedtuple("Named", ["out", "other"])


@dataclass
class Result:
    out: Any
    other: Any


CONTAINERS: dict[str, tuple[Callable[[Tensor, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "named tuple": (Named, tuple),
    "dict": (lambda out, other: OrderedDict(out=out, other=other), lambda packed: tuple(packed.values())),
    "dataclass": (Result, lambda packed: (packed.out, packed.other)),
    "nested": (
        lambda out, other: {"a": [(Named(out, 1.5), "text")], "b": Result(other, {"deep": (other,)})},
        lambda packed: (packed["a"][0][0].out, packed["b"].other["deep"][0]),
    ),
}


class TwoOutputs(nn.Module):
    """Returns two things in a container: the second with a graph, without one, or None."""

    def __init__(self, container: str, second: str) -> None:
        super().__init__()
        self.pack, self.second = CONTAINERS[container][0], second
        self.stem, self.out, self.other = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.stem(x))
        other = self.other(hidden)
        return self.pack(self.out(hidden), {"graph": other, "detached": other.detach(), "none": None}[self.second])


def output_in_a_container(container: str, second: str, uses: str) -> None:
    torch.manual_seed(3)
    plain = TwoOutputs(container, second)
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY, find_unused_parameters=True)
    for step in range(2):
        inputs, _ = batch(step, dist.get_rank())
        for model in (ours, plain):
            model.zero_grad()
            packed = model(inputs)
            assert type(packed) is type(plain(inputs))
            used = zip(("first", "second"), CONTAINERS[container][1](packed), strict=True)
            torch.stack([value.square().mean() for name, value in used if uses in (name, "both")]).sum().backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    assert ours.passes == 2
    ours.close()


def outputs_in_containers() -> None:
    ways = [("graph", "both"), ("graph", "first"), ("graph", "second"), ("detached", "both"), ("none", "first")]
    cases = [(container, *way) for container in CONTAINERS for way in ways]
    check_each({str(case): case for case in cases}, output_in_a_container)


def test_outputs_in_containers(run_ranks: RunRanks) -> None:
    run_ranks(2, outputs_in_containers)


# -- forwards that are not trained on -------------------------------------------------------


def evaluate(wrapper: nn.Module, inputs: Tensor, train: bool = False) -> Tensor:
    wrapper.train(train)
    assert all(module.training == train for module in wrapper.modules())
    with torch.no_grad():
        output = wrapper(inputs)
    wrapper.train()
    return output


def forwards_in_between(kind: str) -> None:
    rank = dist.get_rank()
    ours, ddp = pair(ConvBatchNorm)
    optimizers = [torch.optim.AdamW(wrapper.parameters(), lr=1e-2) for wrapper in (ours, ddp)]
    for step in range(3):
        more, _ = batch(2 * step + 1, rank)
        outputs = []
        for wrapper, optimizer in zip((ours, ddp), optimizers, strict=True):
            optimizer.zero_grad()
            if kind == "dropped":
                wrapper(more)
            elif kind != "between forward and backward":
                outputs.append(evaluate(wrapper, more, train=kind == "no_grad in train mode"))
            inputs, target = batch(2 * step, rank)
            loss = loss_of(wrapper(inputs), target)
            if kind == "between forward and backward":
                outputs.append(evaluate(wrapper, more))  # train mode would move statistics that backward needs
            loss.backward()
        if outputs and (rank == 0 or "train" in kind):  # in eval mode only rank 0 has the statistics of DDP's rank 0
            torch.testing.assert_close(*outputs)
        assert_grads(ours.module, grads(ddp.module))
        for optimizer in optimizers:
            optimizer.step()
    if rank == 0:
        torch.testing.assert_close(dict(ours.module.named_buffers()), dict(ddp.module.named_buffers()))
    ours.synchronise_module_buffers()
    assert largest_difference_between_ranks(ours) == 0
    assert ours.passes == 3
    ours.close()


def forwards_without_training() -> None:
    kinds = ["no_grad in train mode", "no_grad in eval mode", "between forward and backward", "dropped"]
    check_each({kind: [kind] for kind in kinds}, forwards_in_between)


def test_forwards_that_are_not_trained_on(run_ranks: RunRanks) -> None:
    run_ranks(2, forwards_without_training)


# -- process groups ----------------------------------------------------------------------------------


def mean_over(plain: nn.Module, group: dist.ProcessGroup) -> dict[str, Tensor | None]:
    means: dict[str, Tensor | None] = {}
    for name, param in plain.named_parameters():
        mean = param.grad.clone()
        dist.all_reduce(mean, group=group)
        means[name] = mean / dist.get_world_size(group)
    return means


def outside_the_group() -> None:
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    if rank > 1:
        with pytest.raises(ValueError, match=f"process {rank} is not a member"):
            BucketDDP(Mlp(), process_group=group)
        return
    ours = BucketDDP(Mlp(), process_group=group)
    backward(ours)
    assert ours.passes == 1
    ours.close()


def a_group_within_the_world() -> None:
    """A trunk that all ranks share and a head per pair of ranks, in one graph."""
    rank = dist.get_rank()
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    torch.manual_seed(5)
    trunk, head = Mlp(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    ours = BucketDDP(trunk, bucket_cap_mb=TINY), BucketDDP(head, process_group=group, bucket_cap_mb=TINY)
    for step in range(3):
        plain = copy.deepcopy(trunk), copy.deepcopy(head)
        for module in ours:
            module.zero_grad()
        for first, second in (plain, ours):
            inputs, target = batch(step, rank)
            loss_of(second(first(inputs)), target).backward()
        assert_grads(trunk, mean_over_ranks(plain[0]))
        assert_grads(head, mean_over(plain[1], group))
    for wrapper in ours:
        assert wrapper.passes == 3
        wrapper.close()


def groups_within_the_world() -> None:
    outside_the_group()
    a_group_within_the_world()


def test_wrappers_over_different_groups_in_one_graph(run_ranks: RunRanks) -> None:
    run_ranks(4, groups_within_the_world)


def groups_of(members: list[list[int]]) -> list[str]:
    names = []
    for ranks in members:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            names.append(group.group_name)
            ours = BucketDDP(Mlp(), process_group=group, timeout=timedelta(seconds=10))
            backward(ours, rank=0)
            assert ours.passes == 1
            ours.close()
    return names


def test_groups_may_be_made_anew_with_other_members(run_ranks: RunRanks) -> None:
    first = run_ranks(3, groups_of, [[0, 2]])
    second = run_ranks(3, groups_of, [[0, 1]])  # in the same processes, after destroy_process_group()
    assert first[0] == second[0] == second[1], "torch gives the groups other names now: nothing is tested here"
