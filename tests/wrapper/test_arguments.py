"""The arguments of torch's ``DistributedDataParallel`` are accepted, and mean the same."""

import copy
import inspect
import io
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, PeerFailureError
from tests.models import ConvBatchNorm, Mlp, batch, loss_of
from tests.pool import RunRanks, on_ranks
from tests.reference import TINY, assert_grads, backward, everyones, mean_over_ranks

ARGUMENTS: dict[str, Any] = {
    "device_ids": None,
    "output_device": None,
    "dim": 0,
    "broadcast_buffers": True,
    "init_sync": True,
    "process_group": None,
    "bucket_cap_mb": 0,
    "find_unused_parameters": True,
    "check_reduction": True,
    "gradient_as_bucket_view": False,
    "static_graph": True,
}


@on_ranks(2)
def test_every_argument_by_name_and_by_position() -> None:
    theirs = list(inspect.signature(DistributedDataParallel.__init__).parameters)[2 : 2 + len(ARGUMENTS)]
    assert theirs == list(ARGUMENTS), "torch has changed the order of its arguments"
    module = Mlp()
    plain = copy.deepcopy(module)
    BucketDDP(Mlp(), **ARGUMENTS).close()
    ours = BucketDDP(module, *ARGUMENTS.values())
    ours._set_static_graph()
    for model in (plain, ours):
        backward(model)
    assert len(ours.layout.buckets) == len(list(ours.parameters())), "a cap of 0 is one bucket per parameter"
    assert_grads(module, mean_over_ranks(plain))
    assert (ours.find_unused_parameters, ours.static_graph) == (True, True)
    BucketDDP(Mlp(), device_ids=[])  # torch takes it for None


MODULE_BUFFERS: dict[str, list[Any]] = {  # arguments, rank 1's buffer at first, and in a later forward
    "default": [{}, 1.0, 1.0],
    "off in torch's words": [{"broadcast_buffers": False}, 2.0, 2.0],
    "off in forward, in torch's newer words": [{"forward_sync_buffers": False}, 1.0, 2.0],
    "on, in torch's newer words": [{"forward_sync_buffers": True}, 1.0, 1.0],
    "off": [{"module_buffers": "off"}, 1.0, 2.0],
    "mean": [{"module_buffers": "mean"}, 1.0, 1.5],
    "not at first": [{"init_sync": False}, 2.0, 1.0],
}


@on_ranks(2, cases=MODULE_BUFFERS)
def test_each_choice_for_module_buffers(arguments: dict[str, Any], first: float, later: float) -> None:
    module = ConvBatchNorm()
    module.norm.momentum = 0.0
    rank = dist.get_rank()
    module.norm.running_mean.fill_(float(rank + 1))
    ours = BucketDDP(module, **arguments)
    assert rank == 0 or module.norm.running_mean.eq(first).all()
    backward(ours)
    module.norm.running_mean.fill_(float(rank + 1))
    backward(ours)
    assert rank == 0 or module.norm.running_mean.eq(later).all()


@on_ranks(2, fresh=True)
def test_arguments_that_cannot_be_honoured_are_refused() -> None:
    plane = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    both = {"process_group": dist.group.WORLD, "device_mesh": plane["inner"]}
    sharded = nn.Linear(4, 4)
    sharded.weight = nn.Parameter(distribute_tensor(sharded.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)]))
    for module, arguments, words in [
        (Mlp(), {"broadcast_buffers": True, "module_buffers": "off"}, "one choice for module buffers"),
        (Mlp(), {"broadcast_buffers": False, "forward_sync_buffers": True}, "one choice for module buffers"),
        (Mlp(), {"device_ids": [0]}, r"no device_ids .* found device_ids=\[0\].* parameters on \['cpu'\]"),
        (Mlp(), {"output_device": 0}, "no device_ids and no output_device"),
        (Mlp(), both, "found both"),
        (Mlp(), {"device_mesh": plane}, "one dimension"),
        (nn.SyncBatchNorm.convert_sync_batchnorm(ConvBatchNorm()), {}, "torch's on the CPU, found 'norm'"),
        (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")]), {}, r"found \['cpu', 'meta'\]"),
        (sharded, {}, "parameter 'weight' is a DTensor"),
        (Mlp().requires_grad_(False), {}, "at least one parameter that requires grad"),
    ]:
        with pytest.raises(ValueError, match=words) as error:
            BucketDDP(module, **arguments)
        if words in ("found both", "one dimension", "at least one parameter that requires grad"):
            with pytest.raises((RuntimeError, ValueError)) as theirs:
                DistributedDataParallel(module, **arguments)
            assert isinstance(error.value, theirs.type), "code that catches torch's error catches ours"


@on_ranks(2)
def test_a_bad_argument_on_one_rank_raises_on_all() -> None:
    bad = dist.get_rank() == 1
    words = "expected no device_ids" if bad else "rank 1 cannot go on"
    with pytest.raises(ValueError if bad else PeerFailureError, match=words):
        BucketDDP(Mlp(), device_ids=[0] if bad else None)


@on_ranks(4)
def test_one_dimension_of_a_device_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "dp"))
    torch.manual_seed(dist.get_rank())
    module = Mlp()
    ours = BucketDDP(module, device_mesh=mesh["dp"])
    assert ours.process_group is mesh["dp"].get_group()
    backward(ours)
    ours.close()
    sums = everyones(float(module.head.weight.grad.sum()))
    assert sums[0] == sums[1] != sums[2] == sums[3], "equal in a row, different between the rows"


@on_ranks(4)
def test_wrappers_over_different_groups_in_one_graph() -> None:
    """A trunk that all ranks share and a head per pair of ranks."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    with pytest.raises(ValueError, match=f"process {rank} is not a member"):
        BucketDDP(Mlp(), process_group=groups[1 - rank // 2])
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
        for param in plain[1].parameters():
            dist.all_reduce(param.grad, group=group)
        assert_grads(head, {name: param.grad / 2 for name, param in plain[1].named_parameters()})
    for wrapper in ours:
        assert wrapper.passes == 3


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


def pickled(ours: BucketDDP) -> BucketDDP:
    memory = io.BytesIO()
    torch.save(ours, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


@on_ranks(2, cases={"deepcopy": [copy.deepcopy], "pickle": [pickled]})
def test_copies_and_pickles_train(copied: Any) -> None:
    module = Mlp()
    ours = BucketDDP(module, bucket_cap_mb=TINY, grad_dtype=torch.float64)
    backward(ours)
    other, plain = copied(ours), copy.deepcopy(module)
    before = module.head.weight.grad.clone()
    if dist.get_rank() == 0:  # a copy that does not train asks nothing of other ranks
        with torch.no_grad():
            torch.testing.assert_close(other(batch(3, 0)[0]), module(batch(3, 0)[0]))
    other.zero_grad()
    for model in (plain, other):
        backward(model, 1)
    assert_grads(other.module, {name: mean.double() for name, mean in mean_over_ranks(plain).items()})
    assert torch.equal(module.head.weight.grad, before), "the copy has touched the original"
    assert len(other.layout.buckets) == len(ours.layout.buckets) > 1
    backward(ours, 2)
    for wrapper in (ours, other):
        wrapper.close()
    again = copied(ours)
    backward(again)  # closed: forwards only
    assert again.module.head.weight.grad is not None
    ours = BucketDDP(Mlp(), process_group=dist.new_group([0, 1]))
    with pytest.raises(RuntimeError, match="the default process group where a BucketDDP is copied or pickled"):
        copied(ours)
    backward(ours)
    assert ours.passes == 1


@on_ranks(2)
def test_no_sync_nests_and_its_attribute_may_be_set() -> None:
    ours = BucketDDP(Mlp())
    for step in range(2):
        ours.require_backward_grad_sync = step == 1
        backward(ours, step)
        assert ours.passes == step
    with ours.no_sync():
        with ours.no_sync():
            pass
        assert not ours.require_backward_grad_sync
    assert ours.require_backward_grad_sync


@on_ranks(2)
def test_a_rank_that_skips_a_backward_is_noticed_once() -> None:
    """Rank 1 runs a forward without its backward, in a loop that says nothing of steps."""
    ours = BucketDDP(Mlp())
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            with torch.no_grad():
                for _ in range(rank):
                    ours(batch(step, rank)[0])
            if step == 1 and rank == 1:
                ours(batch(step, rank)[0])
            backward(ours, step)
    ours.close()
    (message,) = (str(warning.message) for warning in caught)
    assert "ranks met in pass 1 after different numbers of training forwards" in message
    assert f"{[2, 3][rank]} on this rank" in message
