"""Batches are split as torch.chunk splits them, in whatever they are nested, and put together again."""

import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bucketddp.replicas.nested import move_to
from lightning_bucketddp.replicas.replicas import Replicas, gather, scatter
from lightning_bucketddp.replicas.scatter_gather import as_device


class Pair(NamedTuple):
    first: Tensor
    second: Any


Plain = namedtuple("Plain", "only")


@dataclass(frozen=True)
class Frozen:
    image: Tensor
    label: str


def flattened(value: Any) -> list[Any]:
    """Leaves in order, tensors as lists, with the containers' types."""
    if isinstance(value, Tensor):
        return [value.tolist()]
    if isinstance(value, dict):
        return [type(value), *(leaf for key, item in value.items() for leaf in [key, *flattened(item)])]
    if isinstance(value, list | tuple):
        return [type(value), *(leaf for item in value for leaf in flattened(item))]
    if isinstance(value, Frozen):
        return [Frozen, *flattened(value.image), value.label]
    return [value]


@pytest.mark.parametrize("samples", [0, 1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_tensor_is_split_as_chunk_splits_it_and_comes_back(samples: int, dim: int) -> None:
    shape = [2, 3]
    shape[dim] = samples
    whole = torch.arange(2 * 3 * samples, dtype=torch.float64)[: shape[0] * shape[1]].view(shape)
    parts = scatter(whole, ["cpu"] * 3, dim)
    expected = whole.chunk(3, dim)
    assert len(parts) == len(expected)
    for part, chunk in zip(parts, expected, strict=True):
        torch.testing.assert_close(part, chunk)
    torch.testing.assert_close(gather(parts, "cpu", dim), whole)


def test_containers_are_rebuilt_around_the_chunks() -> None:
    x = torch.arange(4.0)
    nested = (
        x,
        [x + 10, {"a": x + 20, "n": 3}],
        OrderedDict(b=(x + 30,)),
        Pair(x + 40, None),
        Plain("text"),
        Frozen(x + 50, "label"),
        (),
        {},
    )
    first, second = scatter(nested, ["cpu", "cpu"])
    assert flattened(first) == flattened(
        (
            x[:2],
            [x[:2] + 10, {"a": x[:2] + 20, "n": 3}],
            OrderedDict(b=(x[:2] + 30,)),
            Pair(x[:2] + 40, None),
            Plain("text"),
            Frozen(x[:2] + 50, "label"),
            (),
            {},
        )
    )
    assert flattened(second)[1] == [2.0, 3.0]
    assert flattened(gather([first, second], "cpu")) == flattened(nested)


def test_what_cannot_be_split_goes_to_every_device() -> None:
    marker = object()
    scale = torch.tensor(2.0, requires_grad=True)
    parts = scatter((torch.ones(5, 2), scale, marker, "text"), ["cpu"] * 4)
    assert [len(x) for x, *_ in parts] == [2, 2, 1], "5 samples on 4 devices"
    assert all(part[2] is marker for part in parts)
    sum((x * s).sum() for x, s, *_ in parts).backward()
    assert scale.grad is not None
    assert scale.grad.item() == 10.0
    assert scatter("text", ["cpu"] * 2) == ["text", "text"]


def test_tensors_without_samples_make_as_many_chunks_as_the_rest() -> None:
    parts = scatter({"x": torch.ones(3, 2), "boxes": torch.ones(0, 4)}, ["cpu"] * 4)
    assert [tuple(part["x"].shape) for part in parts] == [(1, 2)] * 3
    assert [tuple(part["boxes"].shape) for part in parts] == [(0, 4)] * 3


def test_samples_that_would_be_dropped_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2\) and \(4, 3\), which make 1 and 2 chunks for 2 devices"):
        scatter((torch.ones(4, 3), torch.ones(1, 2)), ["cpu"] * 2)
    with pytest.raises(ValueError, match=r"dimension 1, found one of shape \(4,\)"):
        scatter(torch.ones(4), ["cpu"] * 2, dim=1)
    with pytest.raises(ValueError, match="PackedSequence"):
        scatter(nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]), ["cpu"] * 2)
    with pytest.raises(ValueError, match="at least one device"):
        scatter(torch.ones(4), [])


def test_gradients_flow_through_scatter_and_gather_twice() -> None:
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: Tensor) -> Tensor:
        parts = scatter(x, ["cpu"] * 3)
        return gather([part.sin() * (index + 1) for index, part in enumerate(parts)], "cpu")

    assert torch.autograd.gradcheck(there_and_back, (x,))
    assert torch.autograd.gradgradcheck(there_and_back, (x,))


def test_losses_become_a_vector_without_a_warning() -> None:
    losses = [torch.tensor(float(value), requires_grad=True) for value in (1, 2, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vector = gather(losses, "cpu")
    torch.testing.assert_close(vector, torch.tensor([1.0, 2.0, 3.0]), check_stride=False)
    vector.mean().backward()
    assert [loss.grad.item() for loss in losses if loss.grad is not None] == [pytest.approx(1 / 3)] * 3


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], r"output: expected the same set of keys .*'a'.*'b'"),
        ([[torch.ones(1)], [torch.ones(1)] * 2], "same length from every replica, found 1 in replica 0 and 2 in rep"),
        ([{"a": (1,)}, {"a": (2,)}], r"output\['a'\]\[0\]: expected the same value .*found 1 in replica 0 and 2"),
        ([torch.ones(1), None], "same type"),
        ([torch.ones(2), torch.ones(2).double()], r"dtype .*torch.float32 in replica 0 and torch.float64 in replica 1"),
        ([torch.ones(2, 3), torch.ones(2, 4)], r"shape but for dimension 0 .*\(-1, 3\) in replica 0 and \(-1, 4\)"),
        ([], "at least one output"),
    ],
)
def test_outputs_that_do_not_fit_together_are_an_error_with_both_values(outputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather(outputs, "cpu")


def test_parameters_and_other_tensors_are_gathered_as_tensors() -> None:
    weight = nn.Parameter(torch.ones(2))
    gathered = gather([weight, weight * 2], "cpu")
    gathered.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


def test_devices_compare_equal_to_those_of_tensors() -> None:
    assert as_device("cpu:0") == torch.ones(1).device
    assert as_device(torch.device("cpu")) == torch.ones(1).device
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        assert as_device(accelerator.type) == as_device(0) == torch.ones(1, device=accelerator).device
    else:
        with pytest.raises(ValueError, match="found 0: Cannot access accelerator"):
            as_device(0)


def test_packed_sequences_move_with_their_sizes_left_on_the_cpu() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    (moved,) = move_to((packed,), torch.device("meta"))
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"


class Transfers(TorchDispatchMode):
    """Notes where copies between devices go, and whether the host waits for them. Meta tensors stand for a device's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            source, target = args[1], args[0].device
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        elif func is torch.ops.aten._to_copy.default:
            source, target = args[0], kwargs.get("device", args[0].device)
            non_blocking = kwargs.get("non_blocking", False)
        else:
            return func(*args, **kwargs)
        if source.device == target:
            return func(*args, **kwargs)
        self.found.add((target.type, "goes on" if non_blocking else "waits"))
        if target.type == "meta":
            return func(*args, **kwargs)
        return args[0] if func is torch.ops.aten.copy_.default else torch.zeros_like(source, **kwargs)


def backward_on(device: torch.device, home: torch.device) -> None:
    (replica,) = Replicas(nn.Linear(2, 2, device=home), [device]).refresh()
    replica(torch.ones(2, 2, device=device)).sum().backward()


@pytest.mark.parametrize(
    "move",
    [
        lambda there, here: move_to({"x": [torch.ones(4, device=here)]}, there),
        lambda there, here: scatter(torch.ones(4, device=here), [there] * 2),
        lambda there, here: scatter(torch.ones(4, device=here, requires_grad=True), [there] * 2),
        lambda there, here: gather([torch.ones(4, device=here)] * 2, there),
        lambda there, here: Replicas(nn.BatchNorm1d(2, device=here), [there] * 2).refresh(),
        backward_on,
    ],
    ids=["move_to", "scatter", "scatter with gradients", "gather", "replicas", "replicas' gradients"],
)
def test_the_host_waits_for_copies_to_the_cpu_alone(move: Callable[[torch.device, torch.device], Any]) -> None:
    """Values on the CPU that have not come yet would be read as they are; a device's own work waits for them."""
    cpu, device = torch.device("cpu"), torch.device("meta")
    both_ways = move is backward_on
    for there, here, way in ((device, cpu, ("meta", "goes on")), (cpu, device, ("cpu", "waits"))):
        with Transfers() as transfers:
            move(there, here)
        assert way in transfers.found
        assert both_ways or transfers.found == {way}
        assert ("cpu", "goes on") not in transfers.found
