"""What training code does around a data-parallel module: as torch DDP does it, or one process where DDP fails."""

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
from tests.models import Branches, ConvBatchNorm, Mlp, batch, loss_of
from tests.reference import assert_grads, grads, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]
TINY = 0.0003  # MiB; makes several buckets of the small test models


def pair(build: Callable[[], nn.Module], **ddp_options: Any) -> tuple[BucketDDP, DistributedDataParallel]:
    """The same module twice: ours and torch's."""
    torch.manual_seed(3)
    module = build()
    ddp = DistributedDataParallel(copy.deepcopy(module), **ddp_options)
    return BucketDDP(module, bucket_cap_mb=TINY), ddp


# -- what forward returns ----------------------------------------------------------------------------

Named = namedtuple("Named", ["out", "other"])


@dataclass
class Result:
    out: Any
    other: Any


PACK: dict[str, Callable[[Tensor, Any], Any]] = {
    "tuple": lambda out, other: (out, other),
    "list": lambda out, other: [out, other],
    "namedtuple": Named,
    "dict": lambda out, other: {"out": out, "other": other},
    "ordered_dict": lambda out, other: OrderedDict(out=out, other=other),
    "dataclass": Result,
    "nested": lambda out, other: {"a": [(Named(out, 1.5), "text")], "b": Result(other, {"deep": (other,)})},
}
UNPACK: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "tuple": lambda packed: (packed[0], packed[1]),
    "list": lambda packed: (packed[0], packed[1]),
    "namedtuple": lambda packed: (packed.out, packed.other),
    "dict": lambda packed: (packed["out"], packed["other"]),
    "ordered_dict": lambda packed: (packed["out"], packed["other"]),
    "dataclass": lambda packed: (packed.out, packed.other),
    "nested": lambda packed: (packed["a"][0][0].out, packed["b"].other["deep"][0]),
}


class TwoOutputs(nn.Module):
    """Returns two things in a container: the second with a graph, without one, or None."""

    def __init__(self, container: str, second: str) -> None:
        super().__init__()
        self.container = container
        self.second = second
        self.stem = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)
        self.other = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.stem(x))
        other: Tensor | None = self.other(hidden)
        if self.second == "detached":
            other = other.detach()
        elif self.second == "none":
            other = None
        return PACK[self.container](self.out(hidden), other)


DDP_LOOKS_INSIDE = ("tuple", "list", "namedtuple", "dict", "ordered_dict")


def outputs_in_containers(second: str, uses: str) -> None:
    rank = dist.get_rank()
    for container, unpack in UNPACK.items():
        ours, ddp = pair(lambda c=container: TwoOutputs(c, second), find_unused_parameters=True)
        plain = copy.deepcopy(ours.module)
        for step in range(3):
            inputs, _ = batch(step, rank)
            models = (ours, ddp, plain) if container in DDP_LOOKS_INSIDE else (ours, plain)
            for model in models:
                model.zero_grad()
                packed = model(inputs)
                assert type(packed) is type(plain(inputs))
                out, other = unpack(packed)
                assert (other is None) == (second == "none")
                loss = out.square().mean() if uses in ("first", "both") else torch.zeros(())
                if uses in ("second", "both"):
                    loss = loss + other.square().mean()
                loss.backward()
            assert_grads(ours.module, mean_over_ranks(plain))
            if container in DDP_LOOKS_INSIDE:
                assert_grads(ours.module, grads(ddp.module))
        assert ours.passes == 3
        assert ours.module.stem.weight.grad is not None
        assert (ours.module.other.weight.grad is not None) == (second == "graph" and uses != "first")
        ours.close()


@pytest.mark.parametrize(
    ("second", "uses"),
    [("graph", "both"), ("graph", "first"), ("graph", "second"), ("detached", "both"), ("none", "first")],
)
def test_outputs_in_containers(run_ranks: RunRanks, second: str, uses: str) -> None:
    run_ranks(2, outputs_in_containers, second, uses)


def ddp_with_an_ignored_output(container: str) -> bool:
    """Whether ``ddp`` leaves this rank's own gradient, as if there were no other rank."""
    _, ddp = pair(lambda: TwoOutputs(container, "graph"), find_unused_parameters=True)
    plain = copy.deepcopy(ddp.module)
    inputs, _ = batch(0, dist.get_rank())
    for model in (ddp, plain):
        UNPACK[container](model(inputs))[0].square().mean().backward()
    return torch.equal(ddp.module.stem.weight.grad, plain.stem.weight.grad)


def test_ddp_leaves_gradients_as_they_are_when_part_of_a_dataclass_is_ignored(run_ranks: RunRanks) -> None:
    assert run_ranks(2, ddp_with_an_ignored_output, "dict") == [False, False]
    assert run_ranks(2, ddp_with_an_ignored_output, "dataclass", fresh=True) == [True, True]


# -- forwards and backwards in unusual numbers -------------------------------------------------------


def retained(first_is_local: bool) -> None:
    """Two backwards of one graph. Synchronised, each adds the mean; a local one waits for the next."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    plain = Mlp()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    for step in range(3):
        inputs, target = batch(step, rank)
        plain.zero_grad()
        ours.zero_grad()
        (2 * loss_of(plain(inputs), target)).backward()
        loss = loss_of(ours(inputs), target)
        if first_is_local:
            with ours.no_sync(), ours.backward_pass(loss):
                loss.backward(retain_graph=True)
            assert ours.passes == step
            with ours.backward_pass(loss):
                loss.backward()
        else:
            loss.backward(retain_graph=True)
            loss.backward()
        assert_grads(ours.module, mean_over_ranks(plain))
    assert ours.passes == (3 if first_is_local else 6)
    ours.close()


@pytest.mark.parametrize("first_is_local", [False, True], ids=["synchronised", "local"])
def test_two_backwards_of_one_graph(run_ranks: RunRanks, first_is_local: bool) -> None:
    run_ranks(2, retained, first_is_local)


def ddp_backward_of_one_graph_twice() -> bool:
    """Whether DDP's gradients are the mean after a second backward."""
    _, ddp = pair(Mlp)
    plain = copy.deepcopy(ddp.module)
    inputs, target = batch(0, dist.get_rank())
    (2 * loss_of(plain(inputs), target)).backward()
    loss = loss_of(ddp(inputs), target)
    try:
        loss.backward(retain_graph=True)
        loss.backward()
        assert_grads(ddp.module, mean_over_ranks(plain))
    except (RuntimeError, AssertionError):
        return False
    return True


def test_ddp_does_not_reduce_a_second_backward_of_one_graph(run_ranks: RunRanks) -> None:
    assert run_ranks(2, ddp_backward_of_one_graph_twice, fresh=True) == [False, False]


def forwards_in_between(kind: str) -> None:
    rank = dist.get_rank()
    ours, ddp = pair(ConvBatchNorm)
    optimizers = [torch.optim.AdamW(wrapper.parameters(), lr=1e-2) for wrapper in (ours, ddp)]
    for step in range(5):
        (inputs, target), (more, _) = batch(2 * step, rank), batch(2 * step + 1, rank)
        outputs = []
        for wrapper, optimizer in zip((ours, ddp), optimizers, strict=True):
            optimizer.zero_grad()
            if kind == "dropped":
                wrapper(more)
            elif kind != "between forward and backward":
                wrapper.train(kind == "no_grad in train mode")
                with torch.no_grad():
                    outputs.append(wrapper(more))
                wrapper.train()
            loss = loss_of(wrapper(inputs), target)
            if kind == "between forward and backward":
                wrapper.eval()  # train mode would move the statistics that BatchNorm's backward needs
                with torch.no_grad():
                    outputs.append(wrapper(more))
                wrapper.train()
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
    assert ours.passes == 5
    ours.close()


@pytest.mark.parametrize(
    "kind", ["no_grad in train mode", "no_grad in eval mode", "between forward and backward", "dropped"]
)
def test_forwards_that_are_not_trained_on(run_ranks: RunRanks, kind: str) -> None:
    run_ranks(2, forwards_in_between, kind)


def named_inputs() -> None:
    """``backward(inputs=...)``: gradients for these alone, and what others had stays as it was, bit for bit."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    plain = Branches()
    ours = BucketDDP(copy.deepcopy(plain), bucket_cap_mb=TINY)
    for step in range(4):
        inputs, _ = batch(step, rank)
        before = grads(ours.module)
        plain.left.zero_grad()
        ours.module.left.zero_grad()
        plain(inputs).square().mean().backward(inputs=[plain.left.weight, plain.left.bias])
        loss = ours(inputs).square().mean()
        loss.backward(inputs=[ours.module.left.weight, ours.module.left.bias])
        expected = mean_over_ranks(plain)
        for name, param in ours.module.named_parameters():
            if name.startswith("left"):
                torch.testing.assert_close(param.grad, expected[name])
            elif before[name] is None:
                assert param.grad is None
            else:
                assert torch.equal(param.grad, before[name])
        if step == 1:  # from here on the others have gradients too
            ours(inputs).square().mean().backward()
    assert ours.passes == 5
    ours.close()


def test_backward_with_named_inputs(run_ranks: RunRanks) -> None:
    run_ranks(2, named_inputs)


def modes() -> None:
    ours, ddp = pair(ConvBatchNorm)
    inputs, target = batch(0, dist.get_rank())
    for wrapper in (ours, ddp):
        assert wrapper.training
        assert all(m.training for m in wrapper.modules())
        wrapper.eval()
        assert not any(m.training for m in wrapper.modules())
        loss_of(wrapper(inputs), target).backward()  # in eval mode too: the gradients of frozen statistics
    assert ours.passes == 1
    assert_grads(ours.module, grads(ddp.module))
    for wrapper in (ours, ddp):
        wrapper.train()
        assert all(m.training for m in wrapper.modules())
        wrapper.zero_grad()
        loss_of(wrapper(inputs), target).backward()
    assert_grads(ours.module, grads(ddp.module))
    ours.close()


def test_train_and_eval_reach_the_module(run_ranks: RunRanks) -> None:
    run_ranks(2, modes)


# -- what is done with gradients ---------------------------------------------------------------------


def clipped() -> None:
    rank = dist.get_rank()
    ours, ddp = pair(Mlp)
    optimizers = [torch.optim.AdamW(wrapper.parameters(), lr=1e-2) for wrapper in (ours, ddp)]
    for step in range(4):
        inputs, target = batch(step, rank)
        norms = []
        for wrapper, optimizer in zip((ours, ddp), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(wrapper(inputs), target).backward()
            norms.append(nn.utils.clip_grad_norm_(wrapper.parameters(), 0.1))
            if step == 3:
                nn.utils.clip_grad_value_(wrapper.parameters(), 0.01)
            optimizer.step()
        assert norms[0] > 0.1, "nothing was clipped"
        torch.testing.assert_close(*norms)
        assert_grads(ours.module, grads(ddp.module))
    torch.testing.assert_close(dict(ours.module.named_parameters()), dict(ddp.module.named_parameters()))
    assert largest_difference_between_ranks(ours) == 0
    ours.close()


def test_clipping(run_ranks: RunRanks) -> None:
    run_ranks(2, clipped)


def scaled() -> list[float]:
    rank = dist.get_rank()
    ours, ddp = pair(Mlp)
    wrappers = (ours, ddp)
    optimizers = [torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9) for wrapper in wrappers]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in wrappers]
    scales = []
    for step in range(6):
        inputs, target = batch(step, rank)
        if step == 3 and rank == 1:
            inputs = inputs * float("inf")  # on one rank: no rank may step
        before = {name: param.detach().clone() for name, param in ours.module.named_parameters()}
        for wrapper, optimizer, scaler in zip(wrappers, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(wrapper(inputs), target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(wrapper.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        stepped = not torch.equal(ours.module.head.bias, before["head.bias"])
        assert stepped == (step != 3)
        torch.testing.assert_close(dict(ours.module.named_parameters()), dict(ddp.module.named_parameters()))
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[0].get_scale())
    assert largest_difference_between_ranks(ours) == 0
    ours.close()
    return scales


def test_grad_scaler(run_ranks: RunRanks) -> None:
    assert run_ranks(2, scaled) == [[1024, 2048, 2048, 1024, 1024, 2048]] * 2


# -- process groups ----------------------------------------------------------------------------------


def mean_over(plain: nn.Module, group: dist.ProcessGroup) -> dict[str, Tensor | None]:
    means: dict[str, Tensor | None] = {}
    for name, param in plain.named_parameters():
        assert param.grad is not None
        mean = param.grad.clone()
        dist.all_reduce(mean, group=group)
        means[name] = mean / dist.get_world_size(group)
    return means


def two_groups() -> list[float]:
    """Ranks 0 and 2 train one model, 1 and 3 another, at different speeds."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    torch.manual_seed(rank)  # values come from the group's first rank
    module = Mlp()
    ours = BucketDDP(module, process_group=group, bucket_cap_mb=TINY)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2 + 3 * (rank % 2)):
        inputs, target = batch(step, rank)
        plain = copy.deepcopy(module)
        plain.zero_grad()
        loss_of(plain(inputs), target).backward()
        optimizer.zero_grad()
        loss_of(ours(inputs), target).backward()
        assert_grads(module, mean_over(plain, group))
        optimizer.step()
    assert ours.passes == 2 + 3 * (rank % 2)
    ours.close()
    return [param.sum().item() for param in module.parameters()]


def outside_the_group() -> str:
    group = dist.new_group([0, 1])
    rank = dist.get_rank()
    if rank > 1:
        with pytest.raises(ValueError, match="not a member") as error:
            BucketDDP(Mlp(), process_group=group)
        return str(error.value)
    ours = BucketDDP(Mlp(), process_group=group)
    inputs, target = batch(0, rank)
    loss_of(ours(inputs), target).backward()
    assert ours.passes == 1
    ours.close()
    return ""


def groups_of(members: list[list[int]]) -> list[str]:
    names = []
    for ranks in members:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            names.append(group.group_name)
            ours = BucketDDP(Mlp(), process_group=group, timeout=timedelta(seconds=10))
            loss_of(ours(batch(0, 0)[0]), batch(0, 0)[1]).backward()
            assert ours.passes == 1
            ours.close()
    return names


def a_group_within_the_world() -> None:
    """A trunk that all ranks share and a head per pair of ranks, in one graph."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    world = dist.group.WORLD
    assert world is not None
    torch.manual_seed(5)
    trunk, head = Mlp(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    ours = BucketDDP(trunk, bucket_cap_mb=TINY), BucketDDP(head, process_group=group, bucket_cap_mb=TINY)
    for step in range(4):
        inputs, target = batch(step, rank)
        plain = copy.deepcopy(trunk), copy.deepcopy(head)
        for module in (*plain, *ours):
            module.zero_grad()
        loss_of(plain[1](plain[0](inputs)), target).backward()
        loss_of(ours[1](ours[0](inputs)), target).backward()
        assert_grads(trunk, mean_over(plain[0], world))
        assert_grads(head, mean_over(plain[1], group))
    for wrapper in ours:
        assert wrapper.passes == 4
        wrapper.close()


def test_two_groups_train_at_once(run_ranks: RunRanks) -> None:
    found = run_ranks(4, two_groups)
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0] != found[1]


def test_a_process_outside_the_group_is_told(run_ranks: RunRanks) -> None:
    found = run_ranks(4, outside_the_group)
    assert found[:2] == ["", ""]
    for rank in (2, 3):
        assert f"process {rank} is not a member" in found[rank]


def test_groups_may_be_made_anew_with_other_members(run_ranks: RunRanks) -> None:
    first = run_ranks(3, groups_of, [[0, 2]])
    second = run_ranks(3, groups_of, [[0, 1]])  # in the same processes, after destroy_process_group()
    assert first[0] == second[0] == second[1], "torch gives the groups other names now: nothing is tested here"


def test_wrappers_over_different_groups_in_one_graph(run_ranks: RunRanks) -> None:
    run_ranks(4, a_group_within_the_world)
