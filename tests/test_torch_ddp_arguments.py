"""What users pass to torch's ``DistributedDataParallel`` is accepted, and means the same."""

import copy
import inspect
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from lightning_bucketddp.replicas.nested import move_to, tensors_in
from tests.models import ConvBatchNorm, Mlp, Outputs, batch, loss_of
from tests.reference import assert_grads, largest_difference_between_ranks, mean_over_ranks

RunRanks = Callable[..., list[Any]]


def step(model: nn.Module, number: int = 0) -> None:
    inputs, target = batch(number, dist.get_rank())
    loss_of(model(inputs), target).backward()


def every_argument() -> None:
    arguments: dict[str, Any] = {
        "device_ids": None,
        "output_device": None,
        "dim": 0,
        "broadcast_buffers": True,
        "init_sync": True,
        "process_group": None,
        "bucket_cap_mb": 25,
        "find_unused_parameters": True,
        "check_reduction": True,
        "gradient_as_bucket_view": False,
        "static_graph": True,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = Mlp()
        plain = copy.deepcopy(module)
        ours = BucketDDP(module, **arguments)
        for number in range(2):
            for model in (plain, ours):
                model.zero_grad()
                step(model, number)
        assert_grads(module, mean_over_ranks(plain))
        ours._set_static_graph()
        ours.close()
        BucketDDP(Mlp(), *arguments.values()).close()  # by position too
    theirs = list(inspect.signature(DistributedDataParallel.__init__).parameters)[2 : 2 + len(arguments)]
    assert theirs == list(arguments), "torch has changed the order of its arguments"


def test_every_argument_by_name_and_by_position(run_ranks: RunRanks) -> None:
    run_ranks(2, every_argument)


def module_buffers_after(arguments: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Rank 1's module buffer at first, and after a training forward."""
    module = ConvBatchNorm()
    rank = dist.get_rank()
    module.norm.running_mean.fill_(float(rank + 1))
    ours = BucketDDP(module, **arguments)
    first = module.norm.running_mean.clone()
    step(ours)
    module.norm.running_mean.fill_(float(rank + 1))
    module.norm.momentum = 0.0
    step(ours, 1)
    after = module.norm.running_mean.clone()
    ours.close()
    return [float(first[0])], [float(after[0])]


@pytest.mark.parametrize(
    ("arguments", "first", "after"),
    [
        ({}, 1.0, 1.0),
        ({"broadcast_buffers": True}, 1.0, 1.0),
        ({"broadcast_buffers": False}, 2.0, 2.0),
        ({"forward_sync_buffers": False}, 1.0, 2.0),
        ({"forward_sync_buffers": True}, 1.0, 1.0),
        ({"module_buffers": "off"}, 1.0, 2.0),
        ({"module_buffers": "mean"}, 1.0, 1.5),
        ({"init_sync": False}, 2.0, 1.0),
    ],
    ids=str,
)
def test_what_happens_to_module_buffers(
    run_ranks: RunRanks, arguments: dict[str, Any], first: float, after: float
) -> None:
    assert run_ranks(2, module_buffers_after, arguments)[1] == ([first], [after])


def wrong_in_torch_too() -> None:
    frozen = Mlp().requires_grad_(False)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    for module, arguments in [
        (frozen, {}),
        (nn.LazyLinear(3), {}),
        (Mlp(), {"process_group": dist.group.WORLD, "device_mesh": mesh["b"]}),
        (Mlp(), {"device_mesh": mesh}),
    ]:
        with pytest.raises((RuntimeError, ValueError)) as theirs:
            DistributedDataParallel(module, **arguments)
        with pytest.raises(theirs.type) as ours:
            BucketDDP(module, **arguments)
        assert isinstance(ours.value, ValueError), "as in versions before 0.2"
    assert issubclass(RankMismatchError, RuntimeError), "torch's for shapes that differ between ranks"


def test_errors_have_the_types_of_torchs(run_ranks: RunRanks) -> None:
    run_ranks(2, wrong_in_torch_too, fresh=True)


def one_bucket_per_parameter() -> None:
    for cap in (0, 1e-9):
        ours = BucketDDP(Mlp(), bucket_cap_mb=cap)
        for number in range(2):
            ours.zero_grad()
            step(ours, number)
            assert len(ours.layout.buckets) == len(list(ours.parameters()))
        assert largest_difference_between_ranks(ours.module) == 0
        ours.close()


def test_tiny_buckets_hold_one_parameter_each(run_ranks: RunRanks) -> None:
    run_ranks(2, one_bucket_per_parameter)


def refused_arguments() -> None:
    for arguments, words in [
        ({"broadcast_buffers": True, "module_buffers": "off"}, "one choice for module buffers"),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, "one choice for module buffers"),
        ({"device_ids": [0]}, r"no device_ids .* found device_ids=\[0\].* parameters on \['cpu'\]"),
        ({"output_device": 0}, "no device_ids and no output_device"),
    ]:
        with pytest.raises(ValueError, match=words):
            BucketDDP(Mlp(), **arguments)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="found both"):
        BucketDDP(Mlp(), process_group=dist.group.WORLD, device_mesh=mesh)
    plane = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    with pytest.raises(ValueError, match="one dimension"):
        BucketDDP(Mlp(), device_mesh=plane)
    with pytest.raises(ValueError, match="module 'norm' is torch's SyncBatchNorm, which works on accelerators only"):
        BucketDDP(nn.SyncBatchNorm.convert_sync_batchnorm(ConvBatchNorm()))
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises(ValueError, match=r"one type of device that holds values, found \['cpu', 'meta'\]"):
        BucketDDP(mixed)
    BucketDDP(Mlp(), device_ids=[]).close()  # what torch takes for none, too


def test_arguments_that_cannot_be_honoured_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(2, refused_arguments)


def over_a_mesh() -> bool:
    module = Mlp()
    plain = copy.deepcopy(module)
    mesh = init_device_mesh("cpu", (2,))
    ours = BucketDDP(module, device_mesh=mesh)
    for model in (plain, ours):
        step(model)
    assert_grads(module, mean_over_ranks(plain))
    ours.close()
    return ours.process_group is mesh.get_group()


def test_a_device_mesh_of_one_dimension(run_ranks: RunRanks) -> None:
    assert all(run_ranks(2, over_a_mesh))


def over_a_slice_of_a_mesh() -> float:
    """Two rows of a mesh train apart: equal inside a row, different between the rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "dp"))
    torch.manual_seed(dist.get_rank())
    module = Mlp()
    ours = BucketDDP(module, device_mesh=mesh["dp"])
    step(ours)
    grad = module.head.weight.grad.clone()
    other = grad.clone()
    dist.broadcast(other, group=mesh["dp"].get_group(), group_src=0)
    assert torch.equal(grad, other)
    ours.close()
    return float(grad.sum())


def test_one_dimension_of_a_larger_mesh(run_ranks: RunRanks) -> None:
    sums = run_ranks(4, over_a_slice_of_a_mesh)
    assert sums[0] == sums[1] != sums[2] == sums[3]


def some_left_alone() -> None:
    rank = dist.get_rank()
    module = ConvBatchNorm()
    ignored = ["conv2.weight", "norm.running_mean"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    with torch.no_grad():
        module.conv2.weight.fill_(rank + 1.0)
        module.conv1.weight.fill_(rank + 1.0)
    module.norm.running_mean.fill_(rank + 1.0)
    plain = copy.deepcopy(module)
    ours = BucketDDP(module)
    assert module.conv2.weight.eq(rank + 1.0).all()
    assert module.norm.running_mean.eq(rank + 1.0).all()
    assert module.conv1.weight.eq(1.0).all()
    with torch.no_grad():
        plain.conv1.weight.fill_(1.0)
    for model in (plain, ours):
        step(model)
    torch.testing.assert_close(module.conv2.weight.grad, plain.conv2.weight.grad)  # this rank's alone
    expected = mean_over_ranks(plain)
    torch.testing.assert_close(module.conv2.bias.grad, expected["conv2.bias"])
    assert "conv2.weight" not in [slot.spec.name for slot in ours.layout.slots]
    ours.synchronise_module_buffers()
    assert largest_difference_between_ranks(nn.ModuleList([module.conv1])) == 0
    means = [torch.empty_like(module.norm.running_mean) for _ in range(2)]
    dist.all_gather(means, module.norm.running_mean)
    assert not torch.equal(*means)
    with torch.no_grad():
        module.conv2.weight.fill_(rank + 1.0)
    ours.broadcast_params()
    assert module.conv2.weight.eq(rank + 1.0).all()
    ours.close()


def test_parameters_and_module_buffers_to_ignore(run_ranks: RunRanks) -> None:
    run_ranks(2, some_left_alone)


def torch_knows_the_attribute() -> None:
    module = Mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["head.bias"])
    assert module._ddp_params_and_buffers_to_ignore == ["head.bias"]


def test_torch_still_marks_what_to_ignore_in_this_attribute() -> None:
    torch_knows_the_attribute()


def a_copy(pickled: bool) -> None:
    torch.manual_seed(1)
    module = Mlp()
    ours = BucketDDP(module, bucket_cap_mb=0.0003, grad_dtype=torch.float64)
    step(ours)
    if pickled:
        memory = io.BytesIO()
        torch.save(ours, memory)
        memory.seek(0)
        other = torch.load(memory, weights_only=False)
    else:
        other = copy.deepcopy(ours)
    plain = copy.deepcopy(module)
    plain.zero_grad()
    before = module.head.weight.grad.clone()
    if dist.get_rank() == 0:  # asks for nothing that other ranks would have to know of
        inputs, _ = batch(3, 0)
        with torch.no_grad():
            torch.testing.assert_close(other(inputs), module(inputs))
    other.zero_grad()
    for model in (plain, other):
        step(model, 1)
    found = dict(other.module.named_parameters())
    for name, expected in mean_over_ranks(plain).items():
        assert found[name].grad.dtype is torch.float64
        torch.testing.assert_close(found[name].grad.float(), expected)
    assert torch.equal(module.head.weight.grad, before), "the copy has touched the original"
    assert len(other.layout.buckets) == len(ours.layout.buckets) > 1
    step(ours, 2)
    for wrapper in (ours, other):
        wrapper.close()
    again = copy.deepcopy(ours)
    step(again)  # closed: forwards only
    assert again.module.head.weight.grad is not None


@pytest.mark.parametrize("pickled", [False, True], ids=["deepcopy", "pickle"])
def test_copies_and_pickles_work_again(run_ranks: RunRanks, pickled: bool) -> None:
    run_ranks(2, a_copy, pickled)


def copy_with_a_group() -> None:
    ours = BucketDDP(Mlp(), process_group=dist.new_group([0, 1]))
    with pytest.raises(RuntimeError, match="expected the default process group where a BucketDDP is copied or pickled"):
        copy.deepcopy(ours)
    with pytest.raises(RuntimeError, match="copy or pickle its module"):
        torch.save(ours, io.BytesIO())
    step(ours)
    assert ours.passes == 1
    ours.close()


def test_a_wrapper_with_a_group_of_its_own_cannot_be_copied(run_ranks: RunRanks) -> None:
    run_ranks(2, copy_with_a_group)


def by_attribute() -> None:
    module = Mlp()
    plain = copy.deepcopy(module)
    ours = BucketDDP(module)
    for number in range(2):
        ours.require_backward_grad_sync = number == 1
        step(ours, number)
        step(plain, number)
        assert ours.passes == number
    assert_grads(module, mean_over_ranks(plain))
    with ours.no_sync():
        assert not ours.require_backward_grad_sync
    ours.close()


def test_the_attribute_that_no_sync_sets_may_be_set_directly(run_ranks: RunRanks) -> None:
    run_ranks(2, by_attribute)


def skipped_backward() -> list[str]:
    """Rank 1 runs a forward without its backward, in a loop that says nothing of steps."""
    ours = BucketDDP(Mlp())
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            inputs, target = batch(number, rank)
            with torch.no_grad():
                for _ in range(rank):
                    ours(inputs)
            output = ours(inputs)
            if number == 1 and rank == 1:
                output = ours(inputs)
            loss_of(output, target).backward()
    ours.close()
    return [str(warning.message) for warning in caught]


def test_a_rank_that_skips_a_backward_is_noticed_once(run_ranks: RunRanks) -> None:
    for rank, messages in enumerate(run_ranks(2, skipped_backward)):
        assert len(messages) == 1
        assert "ranks met in pass 1 after different numbers of training forwards" in messages[0]
        assert f"{[2, 3][rank]} on this rank" in messages[0]


def one_rank_asks_for_devices() -> str:
    try:
        BucketDDP(Mlp(), device_ids=[0] if dist.get_rank() == 1 else None)
    except (ValueError, PeerFailureError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_bad_argument_on_one_rank_is_an_error_on_all(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, one_rank_asks_for_devices)
    assert second.startswith("ValueError: expected no device_ids")
    assert first.startswith("PeerFailureError")
    assert "rank 1 cannot go on" in first


class Pair(tuple):
    """A tuple of one's own."""


def test_arguments_are_moved_and_found_inside_containers() -> None:
    here, there = torch.ones(2), torch.device("meta")
    value = {"a": [here, (here, None)], "b": Outputs(here, {"x": [here]}), "c": "text", "d": Pair([here])}
    moved = move_to(value, there)
    assert [t.device.type for t in tensors_in(moved)] == ["meta"] * 5
    assert [t.device.type for t in tensors_in(value)] == ["cpu"] * 5
    assert isinstance(moved["b"], Outputs)
    assert isinstance(moved["d"], Pair)
    assert moved["c"] == "text"
    assert isinstance(moved["a"][1], tuple)
    assert moved["a"][1][1] is None
    output = torch.max(torch.ones(2, 2), dim=0)
    assert move_to(output, there).values.device.type == "meta"


def forward_to_the_device() -> None:
    """The CPU refuses ``device_ids``; what they lead to is the same for every device."""
    module = Mlp()
    ours = BucketDDP(module)
    seen: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ours._input_device = torch.device("cpu")
    inputs, _ = batch(0, 0)
    ours(inputs)
    assert seen[0] is inputs
    ours.close()


def test_inputs_that_are_in_place_are_not_copied(run_ranks: RunRanks) -> None:
    run_ranks(2, forward_to_the_device)


def sharded_by_somebody_else() -> None:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="parameter 'weight' is a DTensor"):
        BucketDDP(module)


def test_parameters_sharded_by_somebody_else_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(2, sharded_by_somebody_else)
