"""The arguments of torch's ``DistributedDataParallel`` are accepted, and mean the same; module buffers."""

import copy
import inspect
import pickle
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP
from tests.models import ConvBatchNorm, Mlp, batch, loss_of
from tests.pool import RunRanks, on_ranks
from tests.reference import TINY, assert_grads, backward, both, everyones, grads, inputs_of, mean_grads

VALUES = [None, None, 0, True, True, None, 0, True, True, False, True]


@on_ranks(2)
def test_every_argument_by_name_and_by_position() -> None:
    names = list(inspect.signature(DistributedDataParallel.__init__).parameters)[2 : 2 + len(VALUES)]
    assert (names[0], names[6], names[-1]) == ("device_ids", "bucket_cap_mb", "static_graph"), "torch's order"
    module = Mlp()
    plain = copy.deepcopy(module)
    BucketDDP(Mlp(), **dict(zip(names, VALUES, strict=True))).close()
    ours = BucketDDP(module, *VALUES)
    ours._set_static_graph()
    both((plain, ours), inputs_of(0))
    assert len(ours.layout.buckets) == len(list(ours.parameters())), "a cap of 0 is one bucket per parameter"
    assert_grads(module, mean_grads(plain))
    assert (ours.find_unused_parameters, ours.static_graph) == (True, True)
    BucketDDP(Mlp(), device_ids=[])  # torch takes it for None


def said(model: Any) -> list[Any]:
    names = ("require_forward_param_sync", "parameters_to_ignore", "bucket_bytes_cap")
    return [*(getattr(model, name) for name in names), model.will_sync_module_buffers()]


@on_ranks(2, cases=[{}, {"broadcast_buffers": False}, {"bucket_cap_mb": 2.5}, {"bucket_cap_mb_list": [1, 3, 2]}])
def test_programs_read_the_attributes_of_torchs_wrapper(options: dict[str, Any]) -> None:
    plain = ConvBatchNorm()
    plain._ddp_params_and_buffers_to_ignore = ["norm.num_batches_tracked", "conv2.bias"]
    theirs, ours = (kind(copy.deepcopy(plain), **options) for kind in (DistributedDataParallel, BucketDDP))
    before = said(ours)
    assert before == said(theirs)
    for model in (theirs, ours):
        with model.no_sync():
            loss_of(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    assert said(ours) == said(theirs) != before
    for model in (theirs, ours):
        model.require_forward_param_sync = True
    assert said(ours) == said(theirs) == before
    assert not BucketDDP(Mlp()).will_sync_module_buffers(), "it has none"


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
        (Mlp(), {"require_manual_backward_finalization": True}, r"averaged before backward\(\) returns"),
        (Mlp(), {"process_group": 3}, "process_group to be None or a process group, found 3"),
        (nn.SyncBatchNorm.convert_sync_batchnorm(ConvBatchNorm()), {}, "torch's on the CPU, found 'norm'"),
        (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")]), {}, r"found \['cpu', 'meta'\]"),
        (nn.Linear(2, 2, device="meta"), {}, r"one type of device that holds values, found \['meta'\]"),
        (sharded, {}, "parameter 'weight' is a DTensor"),
        (Mlp().requires_grad_(False), {}, "at least one parameter that requires grad"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words) as error:
            BucketDDP(module, **arguments)
        if words in ("found both", "one dimension", "at least one parameter that requires grad"):
            with pytest.raises((RuntimeError, ValueError)) as theirs:
                DistributedDataParallel(module, **arguments)
            assert isinstance(error.value, theirs.type), "code that catches torch's error catches ours"


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
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    with pytest.raises(ValueError, match=f"process {rank} is not a member"):
        BucketDDP(Mlp(), process_group=groups[1 - rank // 2])
    trunk, head = Mlp(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    ours = BucketDDP(trunk, bucket_cap_mb=TINY), BucketDDP(head, process_group=group, bucket_cap_mb=TINY)
    plain = copy.deepcopy(trunk), copy.deepcopy(head)
    for first, second in (plain, ours):
        inputs, target = batch(0, rank)
        loss_of(second(first(inputs)), target).backward()
    assert_grads(trunk, mean_grads(plain[0]))
    for param in plain[1].parameters():
        dist.all_reduce(param.grad, dist.ReduceOp.AVG, group)
    assert_grads(head, grads(plain[1]))


def name_of_group(ranks: list[int]) -> str:
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        backward(BucketDDP(Mlp(), process_group=group, timeout=timedelta(seconds=10)), rank=0)
    return group.group_name if dist.get_rank() in ranks else ""


def test_groups_may_be_made_anew_with_other_members(run_ranks: RunRanks) -> None:
    first = run_ranks(3, name_of_group, [0, 2])
    second = run_ranks(3, name_of_group, [0, 1])  # in the same processes, after destroy_process_group()
    assert first[0] == second[0] == second[1], "torch gives the groups other names now: nothing is tested here"


@on_ranks(2, cases={"deepcopy": [copy.deepcopy], "pickle": [lambda ours: pickle.loads(pickle.dumps(ours))]})
def test_copies_and_pickles_train(copied: Any) -> None:
    module = Mlp()
    ours = BucketDDP(module, bucket_cap_mb=TINY, grad_dtype=torch.float64)
    backward(ours)
    other, plain, before = copied(ours), copy.deepcopy(module), grads(module)
    if dist.get_rank() == 0:  # a copy that does not train asks nothing of other ranks
        with torch.no_grad():
            torch.testing.assert_close(other(batch(3, 0)[0]), module(batch(3, 0)[0]))
    both((plain, other), inputs_of(1))
    assert_grads(other.module, {name: mean.double() for name, mean in mean_grads(plain).items()})
    assert_grads(module, before)
    assert len(other.layout.buckets) == len(ours.layout.buckets) > 1
    ours.close()
    teacher = copied(BucketDDP(Mlp())).requires_grad_(False)
    assert not teacher(batch(3, 0)[0]).requires_grad
    again = copied(ours)
    backward(again)  # closed: forwards only
    assert again.module.head.weight.grad is not None
    ours = BucketDDP(Mlp())
    ours.register_comm_hook(dist.group.WORLD, noop_hook)
    other, plain = copied(ours), copy.deepcopy(ours.module)
    both((plain, other), inputs_of(0))
    assert_grads(other.module, grads(plain))  # this rank's own
    ours = BucketDDP(Mlp(), process_group=dist.new_group([0, 1]))
    with pytest.raises(RuntimeError, match="the default process group where a BucketDDP is copied or pickled"):
        copied(ours)
    backward(ours)
    assert ours.passes == 1


@on_ranks(2)
def test_a_rank_that_skips_a_backward_is_noticed_once() -> None:
    """Rank 1 runs a forward without its backward, in a loop that says nothing of steps."""
    ours = BucketDDP(Mlp())
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(3):
            for at in range(2 * rank):
                with torch.set_grad_enabled(at == step == 1):
                    ours(batch(step, rank)[0])
            backward(ours, step)
    (message,) = (str(warning.message) for warning in caught)
    assert "ranks met in pass 1 after different numbers of training forwards" in message
    assert f"{[2, 3][rank]} on this rank" in message
    assert "A backward averages gradients on all ranks: put one that only some ranks run" in message


@on_ranks(2, cases=(False, True))
def test_a_backward_inside_no_sync_may_run_on_one_rank_alone(shard: bool) -> None:
    plain = Mlp()
    ours = BucketDDP(copy.deepcopy(plain), shard_optimizer=shard)
    for step in range(3):
        if dist.get_rank() == 0:
            with ours.no_sync():
                ours.module(torch.ones(2, 8)).sum().backward()
        for model in (plain, ours):
            model.zero_grad()
            backward(model, step)
        for (name, param), expected in zip(ours.named_parameters(), mean_grads(plain).values(), strict=True):
            torch.testing.assert_close(ours.full_grad(param), expected, msg=lambda m, n=name: f"{n}: {m}")
        ours.zero_grad()


CHOICES: dict[str, list[Any]] = {  # arguments, of 10 times the rank: at first, and in a later forward
    "torch": [None, 0, 0],
    "default": [{}, 0, 0],
    "off in torch's words": [{"broadcast_buffers": False}, 10, 10],
    "off in forward, in torch's newer words": [{"forward_sync_buffers": False}, 0, 10],
    "off": [{"module_buffers": "off"}, 0, 10],
    "mean": [{"module_buffers": "mean"}, 0, 5],
    "not at first": [{"init_sync": False}, 10, 0],
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("scale", torch.tensor(10.0 * dist.get_rank()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = float(self.scale)
        self.scale = self.scale + 1
        return self.layer(x) * self.scale  # saves the buffer for backward


@on_ranks(2, cases=CHOICES)
def test_forward_synchronises_module_buffers_as_torch_does(arguments: Any, first: float, later: float) -> None:
    """Forwards of many kinds see a module buffer that is 10 times the rank. Without arguments: in torch DDP."""
    rank, seen = dist.get_rank(), []
    module = Scaled()
    wrapper = nn.parallel.DistributedDataParallel(module) if arguments is None else BucketDDP(module, **arguments)
    assert rank == 0 or module.scale == first

    def look(times: int = 2, backward: bool = True) -> None:
        for _ in range(times):
            module.scale = torch.tensor(10.0 * rank)
            output = wrapper(batch(0, rank)[0])
            if backward:
                output.sum().backward()
            seen.append(module.seen)

    look()
    look(backward=False)  # nothing reduced in between
    wrapper.eval()  # Lightning leaves a wrapper like this behind validation
    look(1)
    wrapper.train()
    with wrapper.no_sync():
        look()
    look()
    own = 10.0
    assert rank == 0 or seen == [*[later] * 6, own, own, later]


@on_ranks(2)
def test_module_buffers_may_be_replaced_and_used_by_a_graph() -> None:
    ours = BucketDDP(ConvBatchNorm())
    norm, inputs = ours.module.norm, batch(0, dist.get_rank())[0]
    backward(ours)
    kept = ours.module.eval()(inputs).sum()  # saves its statistics for backward
    own = norm.running_mean.clone()
    if dist.get_rank() == 1:  # a rank may evaluate alone
        with torch.no_grad():
            ours.eval()(inputs)
        assert torch.equal(norm.running_mean, own)
    ours.train()(inputs)  # broadcasts
    kept.backward()  # and autograd has not seen it
    norm.running_mean = torch.full((6,), float(dist.get_rank()))  # replaced, not written to
    ours.synchronise_module_buffers()
    assert norm.running_mean.eq(0).all()
