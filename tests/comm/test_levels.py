"""Two levels, on four ranks as two nodes of two: which groups they have, what they send, and that weights are right."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.layout.ledger import leaving, sent
from lightning_bucketddp.layout.nodes import Nodes
from tests.models import Mlp
from tests.pool import case, on_ranks
from tests.reference import TINY, everyones, local_if, loss_at, nodes_of_size, noted, seeded

BF16 = torch.bfloat16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"hierarchical": True},
    "wire": {"wire_dtype": BF16},
    "wire, 8 bits": {"wire_dtype": torch.int8},
    "sharded": {"shard_optimizer": True, "hierarchical": True},
    "sharded, wire": {"shard_optimizer": True, "wire_dtype": BF16},
    "sharded, wire, 8 bits": {"shard_optimizer": True, "wire_dtype": torch.int8},
    "shards inside nodes, wire": {"shard_optimizer": True, "shard_group_size": 2, "wire_dtype": BF16},
    "shards inside nodes, wire, 8 bits": {"shard_optimizer": True, "shard_group_size": 2, "wire_dtype": torch.int8},
    "scatter every pass": {"shard_optimizer": True, "scatter_every_pass": True, "hierarchical": True},
    "coalesced": {"use_contiguous_buffers": False, "hierarchical": True},
    "no overlap": {"overlap": False, "hierarchical": True},
    "skipping": {"skip_step_on": ["nonfinite"], "skip_norm_above": 100.0, "hierarchical": True},
}


def levels_of(ours: BucketDDP) -> Any:
    context = ours._passes.wrapped.context
    return context.levels if context.groups is None else context.groups.levels


def trained(ours: BucketDDP, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.5)
    ours.prepare_optimizer(optimizer)
    for step in range(5):
        with local_if(ours, step % 4 == 2):
            loss_at(ours, step).backward()
        if step % 4 != 2:
            optimizer.step()
            optimizer.zero_grad()
    state = ours.optimizer_state_dict(optimizer)
    ours.close()
    if dist.get_rank() == 0:
        assert len(state["state"]) == len(list(ours.parameters()))
    return [param.detach().clone() for param in ours.parameters()]


@on_ranks(
    4,
    cases={name: name for name in OPTIONS},
    quick=["plain", "wire, 8 bits", "sharded, wire", "shards inside nodes, wire"],
)
def test_weights_are_those_of_one_level_and_the_same_on_all_ranks(name: str) -> None:
    alone = {option: value for option, value in OPTIONS[name].items() if option not in ("wire_dtype", "hierarchical")}
    expected = trained(BucketDDP(seeded(Mlp), bucket_cap_mb=TINY, **alone))
    with nodes_of_size(2):
        ours = BucketDDP(seeded(Mlp), bucket_cap_mb=TINY, **OPTIONS[name])
    assert (levels_of(ours) is not None) == ("inside" not in name)
    weights = trained(ours)
    tolerance = 2e-2 if "8 bits" in name else 5e-3 if "wire" in name else 1e-6
    torch.testing.assert_close(weights, expected, rtol=0, atol=tolerance)
    assert "wire" not in name or any(not torch.equal(*pair) for pair in zip(weights, expected, strict=True))
    for others in everyones(weights):
        assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))


@on_ranks(4)
def test_whole_state_is_that_of_one_process() -> None:
    states = []
    for ranks in (4, 2):
        with nodes_of_size(ranks):
            ours = BucketDDP(seeded(Mlp), bucket_cap_mb=TINY, shard_optimizer=True, hierarchical=True)
        optimizer = torch.optim.Adam(ours.parameters())
        ours.prepare_optimizer(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss_at(ours, step).backward()
            optimizer.step()
        states.append(copy.deepcopy(ours.optimizer_state_dict(optimizer)))
        ours.close()
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=1e-6)


@on_ranks(4)
def test_narrow_gradients_are_summed_in_fp32_inside_nodes() -> None:
    """1 + 2 ** -8 is no bf16 number: a sum in bf16 inside a node would lose the small part of both of its ranks."""
    small = [1.0, 2.0**-8, 0.0, 2.0**-8][dist.get_rank()]
    with nodes_of_size(2):
        ours = BucketDDP(nn.Linear(64, 64, bias=False).to(BF16), wire_dtype=BF16, init_sync=False)
    ours.module.weight.register_hook(lambda grad: torch.full_like(grad, 512 * small))
    ours(torch.ones(1, 64, dtype=BF16)).sum().backward()
    expected = torch.tensor([512.0 + 2, 2.0]).mul(0.5).to(BF16).float().mean().to(BF16)  # each node's mean in bf16 once
    assert ours.module.weight.grad is not None
    assert torch.equal(ours.module.weight.grad, torch.full_like(ours.module.weight.grad, expected.item()))


def started(name: str, group: dist.ProcessGroup) -> tuple[str, str, tuple[int, ...]]:
    return name, threading.current_thread().name, tuple(dist.get_process_group_ranks(group))


@on_ranks(4)
def test_stages_have_groups_of_their_own_and_threads_start_them() -> None:
    with nodes_of_size(2):
        ours = BucketDDP(nn.Sequential(*(nn.Linear(128, 128) for _ in range(3))), bucket_cap_mb=0.06, hierarchical=True)
    levels, rank = levels_of(ours), dist.get_rank()
    groups = [levels.near.group, levels.far.group, levels.near_last.group]
    assert len(set(groups)) == 3
    assert levels.near.made_of == levels.near_last.made_of == [range(2), range(2, 4)]
    assert [list(part) for part in levels.far.made_of] == [[0, 2], [1, 3]]
    ours(torch.ones(1, 128)).sum().backward()  # learns the order
    with noted("allreduce", "all_to_all_single", "_allgather_base", "all_gather_single", look=started) as calls:
        ours(torch.ones(1, 128)).sum().backward()
    near, far = (tuple(dist.get_process_group_ranks(part.group)) for part in (levels.near, levels.far))
    in_far = [call for call in calls if call[2] == far]
    assert in_far == [("allreduce", "bucketddp-lane", far)] * len(in_far), calls
    assert len(in_far) >= 2
    assert len([call for call in calls if call[2] == near]) == 2 * len(in_far)
    assert [thread for _, thread, ranks in calls if len(ranks) == 4] == ["MainThread"], "what holds the control vector"
    assert near == ((0, 1), (2, 3))[rank // 2]


@on_ranks(4)
def test_two_levels_are_chosen_on_the_cpu_unless_the_option_says_otherwise() -> None:
    for ranks, options, two in (
        (2, {}, True),
        (2, {"hierarchical": False}, False),
        (2, {"shard_optimizer": True}, True),
        (2, {"wire_dtype": BF16}, True),
        (2, {"hierarchical": False, "wire_dtype": BF16}, False),
        (2, {"comm_hook": "fp16"}, False),
        (1, {"hierarchical": True}, False),
        (4, {"hierarchical": True}, False),
        (4, {"wire_dtype": BF16}, False),
        (2, {"hierarchical": True}, True),
    ):
        with nodes_of_size(ranks), case(ranks, options):
            ours = BucketDDP(Mlp(), **options)
            assert (levels_of(ours) is not None) == two
            ours.close()
    with pytest.raises(ValueError, match="either comm_hook or hierarchical, found both"):
        BucketDDP(Mlp(), comm_hook="fp16", hierarchical=True)


@on_ranks(3)
def test_unequal_nodes_have_one_level_and_rank_0_warns() -> None:
    for options in ({"hierarchical": True}, {"wire_dtype": BF16}, {"shard_optimizer": True, "hierarchical": True}):
        with nodes_of_size(2):
            if dist.get_rank() == 0:
                with pytest.warns(UserWarning, match=r"found ranks 0, 1 on one node; ranks 2 on one node.*one level"):
                    ours = BucketDDP(seeded(Mlp), **options)
            else:
                ours = BucketDDP(seeded(Mlp), **options)
        assert levels_of(ours) is None
        loss_at(ours).backward()
        ours.close()
    with nodes_of_size(2):
        assert levels_of(BucketDDP(seeded(Mlp))) is None, "nobody asked for two: no warning"


@contextmanager
def bytes_leaving(nodes: Nodes) -> Iterator[list[float]]:
    """This rank's share of the bytes that leave its node, by collective."""
    found: list[float] = []

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, name)

        def run(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            where = [nodes.names[rank] for rank in dist.get_process_group_ranks(group)]
            kind = {"allreduce": "all_reduce", "all_to_all_single": "all_to_all"}.get(name, "all_gather")
            nbytes = sum(tensor.nbytes for tensor in tree_leaves(args[0]))
            if kind == "all_to_all" and args[2]:  # without this rank's own part
                found.append(nbytes if len(set(where)) > 1 else 0.0)
            else:
                found.append(sent(kind, nbytes, where).between * len(set(where)) / len(where))  # type: ignore[arg-type]
            return original(group, *args, **options)

        return run

    names = ("allreduce", "all_to_all_single", "all_gather_single", "_allgather_base", "allgather")
    known = [name for name in names if hasattr(dist.ProcessGroup, name)]
    with patch.multiple(dist.ProcessGroup, **{name: noting(name) for name in known}):
        yield found


LEAVING = {"plain": 1.0, "wire": 0.5, "wire, 8 bits": 33 / 128, "sharded": 1.0, "sharded, wire": 0.75}


@on_ranks(4, cases=LEAVING.items())
def test_what_leaves_a_node_is_what_the_ledger_says(name: str, expected: float) -> None:
    """In units of the gradients, between two nodes of two ranks."""
    with nodes_of_size(2):
        ours = BucketDDP(
            nn.Sequential(*(nn.Linear(256, 256, bias="8" not in name) for _ in range(4))),
            bucket_cap_mb=0.3,
            **OPTIONS[name],
        )
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours.prepare_optimizer(optimizer)
    for _ in range(3):  # the first pass learns the order
        with bytes_leaving(ours._passes.wrapped.context.nodes) as found:
            optimizer.zero_grad()
            ours(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            ours.wait_for_parameters()
    nbytes = sum(param.nbytes for param in ours.parameters())
    assert 2 * sum(found) / nbytes == pytest.approx(expected, rel=0.03)


def test_the_table_of_the_page_is_the_ledgers() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "machines.md").read_text().splitlines()
    lines = lines[next(at for at, line in enumerate(lines) if line.startswith("| nodes x ranks")) :]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in takewhile(lambda line: line.startswith("|"), lines)
    ]
    shapes = [tuple(map(int, cell.split("x"))) for cell in rows[0][1:]]
    for at, (nodes, ranks) in enumerate(shapes, 1):
        for name, share in leaving([rank // ranks for rank in range(nodes * ranks)]).items():
            (row,) = [row for row in rows if row[0].startswith(name)]
            with case(name, nodes, ranks):
                assert float(row[at]) == pytest.approx(share, abs=0.0051)


def test_the_ledger_says_what_leaves_a_node() -> None:
    for nodes, ranks in ((2, 1), (2, 4), (4, 8), (64, 8)):
        where = [rank // ranks for rank in range(nodes * ranks)]
        world = len(where)
        assert sent("all_reduce", 1.0, where).between == pytest.approx(2 * (world - 1) / world)
        assert sent("all_to_all", 1.0, where).between == pytest.approx(ranks * (nodes - 1) / nodes)
        assert sent("all_reduce", 1.0, where, "tree").between == pytest.approx(2 * (nodes - 1) / nodes)
        far = ranks * sent("all_reduce", 1 / ranks, range(nodes)).between
        assert far == pytest.approx(2 * (nodes - 1) / nodes)
    assert sent("all_reduce", 1.0, "aaaa") == (0, 6)
    assert sent("all_to_all", 4.0, "aabb") == (4, 2)
