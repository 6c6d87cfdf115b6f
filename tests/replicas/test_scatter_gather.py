"""Batches are split as torch.chunk splits them, in whatever they are nested, and put together again."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bucketddp.replicas.nested import move_to, tensors_in
from lightning_bucketddp.replicas.replicas import Replicas, gather, scatter

PACKED = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
ONE, TWO = torch.ones(1), ["cpu"] * 2


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    image: Any
    label: str


def nested(leaf: Callable[[int], Any]) -> Any:
    inner = [leaf(10), {"a": leaf(20), "n": 3}]
    return leaf(0), inner, OrderedDict(b=(leaf(30),)), Pair(leaf(40), None), Frozen(leaf(50), "label"), (), {}


def test_tensors_are_split_as_chunk_splits_them_and_come_back() -> None:
    for dim, samples in [(0, 0), (1, 1), (-1, 2), (0, 3), (1, 5), (-1, 6), (0, 7)]:
        whole = torch.randn((samples, 3) if dim == 0 else (2, samples))
        parts = scatter(whole, ["cpu"] * 3, dim)
        torch.testing.assert_close(parts, list(whole.chunk(3, dim)))
        torch.testing.assert_close(gather(parts, "cpu", dim), whole)


def test_containers_are_rebuilt_around_the_chunks() -> None:
    x = torch.arange(4.0)
    parts = scatter(nested(lambda number: x + number), ["cpu", "cpu"])
    for found, expected in zip((*parts, gather(parts, "cpu")), (x[:2], x[2:], x), strict=True):
        assert str(found) == str(nested(lambda number, tensor=expected: tensor + number))
        assert [type(value) for value in found] == [Tensor, list, OrderedDict, Pair, Frozen, tuple, dict]


def test_what_cannot_be_split_goes_to_every_device() -> None:
    marker, scale = object(), torch.tensor(2.0, requires_grad=True)
    parts = scatter((torch.ones(5, 2), scale, marker, torch.ones(0, 4)), ["cpu"] * 4)
    assert [len(x) for x, *_ in parts] == [2, 2, 1], "5 samples on 4 devices"
    assert all(part[2] is marker and part[3].shape == (0, 4) for part in parts)
    sum((x * s).sum() for x, s, *_ in parts).backward()
    assert scale.grad == 10.0
    assert scatter("text", ["cpu"] * 2) == ["text", "text"]


def test_gradients_flow_through_scatter_and_gather_twice() -> None:
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: Tensor) -> Tensor:
        return gather([part.sin() * (index + 1) for index, part in enumerate(scatter(x, ["cpu"] * 3))], "cpu")

    assert torch.autograd.gradgradcheck(there_and_back, (x,))
    losses = [torch.tensor(float(value), requires_grad=True) for value in (1, 2, 3)]
    gather(losses, "cpu").mean().backward()  # a vector, without torch's warning
    assert [float(loss.grad) for loss in losses] == [pytest.approx(1 / 3)] * 3


def test_replicas_may_change_their_parts_in_place() -> None:
    parts = scatter((torch.ones(6, 8), torch.tensor(1.0)), ["cpu", "cpu"])
    output = nn.Linear(8, 4)(parts[0][0])  # saves it for backward
    for tensor in parts[1]:
        tensor.sub_(1.0)
    output.sum().backward()  # raises if the parts counted changes together
    assert [(float(x.sum()), float(scalar)) for x, scalar in parts] == [(24.0, 1.0), (0.0, 0.0)]


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        (scatter, [(torch.ones(4, 3), ONE), TWO], r"\(1,\) and \(4, 3\), which make 1 and 2 chunks for 2 devices"),
        (scatter, [torch.ones(4), TWO, 1], r"dimension 1, found one of shape \(4,\)"),
        (scatter, [([PACKED],), TWO], "found a PackedSequence, whose samples lie interleaved"),
        (scatter, [torch.ones(4), []], "at least one device, found none; pass some"),
        (scatter, [torch.ones(4), ["moon"]], "expected devices to name devices, found 'moon': "),
        (gather, [[{"a": ONE}, {"b": ONE}], "cpu"], r"output: expected the same set of keys .*'a'.*'b'"),
        (gather, [[[ONE], [ONE] * 2], "cpu"], "same length from every replica, found 1 in replica 0 and 2 in rep"),
        (gather, [[{"a": (1,)}, {"a": (2,)}], "cpu"], r"output\['a'\]\[0\]: expected the same value .*found 1 in repl"),
        (gather, [[ONE, None], "cpu"], "same type"),
        (gather, [[PACKED, PACKED.to("meta")], "cpu"], "same value"),
        (gather, [[ONE, ONE.double()], "cpu"], r"dtype .*torch.float32 in replica 0 and torch.float64 in replica 1"),
        (gather, [[torch.ones(2, 3), torch.ones(2, 4)], "cpu"], r"but for dimension 0 .*\(-1, 3\) .*0 and \(-1, 4\)"),
        (gather, [[], "cpu"], "at least one output"),
    ],
)
def test_batches_and_outputs_that_do_not_fit_are_an_error(call: Any, given: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*given)


class Transfers(TorchDispatchMode):
    """Notes where copies between devices go, and whether the host waits for them. Meta tensors stand for a device's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        copies = func is torch.ops.aten.copy_.default
        source, target = (args[1], args[0].device) if copies else (args[0], kwargs.get("device"))
        if not (copies or func is torch.ops.aten._to_copy.default) or target in (None, source.device):
            return func(*args, **kwargs)
        goes_on = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        self.found.add((target.type, "goes on" if goes_on else "waits"))
        if target.type == "meta":
            return func(*args, **kwargs)
        return args[0] if copies else torch.zeros_like(source, **kwargs)


def backward_on(device: torch.device, home: torch.device) -> None:
    (replica,) = Replicas(nn.Linear(2, 2, device=home), [device]).refresh()
    replica(torch.ones(2, 2, device=device)).sum().backward()


MOVES: dict[str, Callable[[torch.device, torch.device], Any]] = {
    "move_to": lambda there, here: move_to({"x": [torch.ones(4, device=here)]}, there),
    "scatter": lambda there, here: scatter(torch.ones(4, device=here), [there] * 2),
    "scatter with gradients": lambda there, here: scatter(torch.ones(4, device=here, requires_grad=True), [there] * 2),
    "gather": lambda there, here: gather([torch.ones(4, device=here)] * 2, there),
    "replicas": lambda there, here: Replicas(nn.BatchNorm1d(2, device=here), [there] * 2).refresh(),
    "gradients": backward_on,
}


@pytest.mark.parametrize("move", MOVES)
def test_the_host_waits_for_copies_to_the_cpu_alone(move: str) -> None:
    cpu, device = torch.device("cpu"), torch.device("meta")
    for there, here, way in ((device, cpu, ("meta", "goes on")), (cpu, device, ("cpu", "waits"))):
        with Transfers() as transfers:
            MOVES[move](there, here)
        assert way in transfers.found
        assert move == "gradients" or transfers.found == {way}
        assert ("cpu", "goes on") not in transfers.found


def test_packed_sequences_move_and_show_their_tensor() -> None:
    (moved,) = move_to((PACKED,), torch.device("meta"))
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
    assert list(tensors_in([moved])) == [moved.data]
