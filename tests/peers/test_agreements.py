"""What ranks agree on when a module is wrapped, and the errors of ranks that do not agree."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from lightning_bucketddp import BucketDDP, PeerFailureError, RankMismatchError
from lightning_bucketddp.layout.nodes import Nodes
from lightning_bucketddp.layout.plan import MIB
from lightning_bucketddp.peers.machines import Node, node_name
from tests.models import ConvBatchNorm, Mlp
from tests.pool import case, on_ranks
from tests.reference import both, inputs_of, nodes_of_size, raises_soon, without_where

WEIGHT = "parameter 'layers.0.weight'"
DIFFERENCES = {
    "shape": f"{WEIGHT}: rank 0 has shape (16, 8), torch.float32, strides (8, 1), rank 2 has",
    "order": f"rank 0 has {WEIGHT} (shape (16, 8), torch.float32, strides (8, 1)) where rank 2",
    "dtype": "'head.bias': rank 0 has shape (4,), torch.float32, strides (1,), rank 2 has shape (4,), torch.float64",
    "strides": "parameter 'conv2.weight': rank 0 has shape (4, 6, 2, 2), torch.float32, strides (24, 1, 12, 6), rank 2",
    "missing": "only rank 0 has parameter 'head.bias' (shape (4,), torch.float32, strides (1,))",
    "buffer": "only rank 2 has module buffer 'norm.extra' (shape (3,), torch.float32)",
    "option": "option bucket_cap_mb: rank 0 has None, rank 2 has 3.0",
}


def built_differently(kind: str, last: bool) -> nn.Module:
    module: Any = ConvBatchNorm() if kind in ("strides", "buffer") else Mlp(17 if last and kind == "shape" else 16)
    if last and kind == "order":
        return nn.ModuleDict({"head": module.head, "layers": module.layers})
    if last and kind == "dtype":
        module.head.bias = nn.Parameter(module.head.bias.detach().double())
    elif last and kind == "strides":
        module.conv2.to(memory_format=torch.contiguous_format)
    elif last and kind == "missing":
        module.head = nn.Linear(16, 4, bias=False)
    elif last and kind == "buffer":
        module.norm.register_buffer("extra", torch.zeros(3))
    return module


@on_ranks(3)
def test_ranks_built_differently_are_told_the_first_difference() -> None:
    rank = dist.get_rank()
    for kind, words in DIFFERENCES.items():
        module = built_differently(kind, rank == 2)
        with raises_soon(RankMismatchError) as error:
            BucketDDP(module, bucket_cap_mb=3.0 if kind == "option" and rank == 2 else None)
        assert str(error.value).startswith(f"rank {rank}: ranks disagree on parameters, module buffers and options: ")
        assert words in str(error.value)


@on_ranks(2)
def test_an_error_in_wrapping_reaches_the_other_ranks() -> None:
    mine = dist.get_rank() == 1
    for module, options, message in [
        (Mlp(), {"timeout": -5}, "expected timeout to be None or a positive timedelta, found -5"),
        (
            Mlp(),
            {"overlaps": True},
            "BucketDDP() got an unexpected keyword argument 'overlaps'; did you mean 'overlap'?",
        ),
        (Mlp(), {"device_ids": [0]}, "expected no device_ids"),
        ("x", {}, "expected module to be an nn.Module, found 'x'"),
        (Mlp().requires_grad_(False), {}, "expected at least one parameter that requires grad"),
    ]:
        with raises_soon(*([TypeError, ValueError] if mine else [PeerFailureError])) as error:
            BucketDDP(module if mine else Mlp(), **(options if mine else {}))
        assert message in str(error.value)
        who = "rank 0: rank 1 cannot go on with parameters, module buffers and options: "
        assert without_where(str(error.value)).startswith("" if mine else who)
    both([BucketDDP(Mlp())], inputs_of(0))  # the failed attempts leave nothing that the next could stumble over


@on_ranks(3, fresh=True)
def test_a_rank_that_never_wraps_is_named() -> None:
    if dist.get_rank() != 1:
        with pytest.raises(RuntimeError, match=r"waited 5 s.*nothing came from rank 1, not at this point"):
            BucketDDP(Mlp(), timeout=timedelta(seconds=5))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@on_ranks(1)
def test_modules_that_cannot_be_wrapped_are_refused() -> None:
    with pytest.raises(ValueError, match="'weight' is uninitialised"):
        BucketDDP(nn.LazyLinear(2))
    module = Mlp()
    module.head.bias.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match=r"'head\.bias' has a post-accumulate-grad hook.*on_after_backward") as error:
        BucketDDP(module)
    assert "registered after" not in str(error.value), "`.grad` may be None there"
    module = Mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, [module.head.bias], {"lr": 0.1})
    with pytest.raises(ValueError, match=r"'head\.bias' has an optimizer that steps during backward .* after backward"):
        BucketDDP(module)
    module = Mlp()
    module.register_buffer("last", module.head.weight.data[1:])
    with pytest.raises(ValueError, match=r"share no memory, .* found 'head\.weight' and 'last' in one place"):
        BucketDDP(module, shard_optimizer=True)


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        BucketDDP(Mlp())


def nodes_by(processes: int, of_rank: Callable[[int], dict[str, str]]) -> Nodes:
    """The nodes of ranks on machines with one host name, by their environment variables."""
    with patch.object(socket, "gethostname", lambda: "host"):
        return Nodes(tuple(node_name(rank, processes, of_rank(rank)) for rank in range(processes)))


def test_the_node_of_a_rank_follows_from_the_trainer_then_the_launcher_then_the_host() -> None:
    known = [node_name(rank, 4, {"LOCAL_WORLD_SIZE": "4"}, Node(rank // 2, 2)) for rank in range(4)]
    assert Nodes(tuple(known)).ranks_each == 2
    assert nodes_by(4, lambda rank: {}).one
    assert nodes_by(4, lambda rank: {"LOCAL_WORLD_SIZE": "4"}).one
    assert nodes_by(4, lambda rank: {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": str(rank)}).ranks_each == 1
    for variables in ({}, {"LOCAL_RANK": "x"}):
        nodes = nodes_by(8, lambda rank, given=variables: {"LOCAL_WORLD_SIZE": "4", **given})
        assert (nodes.count, nodes.ranks_each) == (2, 4)


def test_unequal_nodes_and_ranks_dealt_out_in_turn_are_noticed() -> None:
    unequal = nodes_by(6, lambda rank: {"LOCAL_WORLD_SIZE": "24"[rank > 1], "LOCAL_RANK": "010123"[rank]})
    assert (unequal.count, unequal.ranks_each) == (2, None)
    dealt = Nodes(("a", "b", "a", "b"))
    assert (dealt.count, dealt.ranks_each) == (2, None)
    assert dealt.described == "ranks 0, 2 on one node; ranks 1, 3 on one node"
    assert Nodes(("a", "b")).ranks_each == 1
    assert Nodes(("a", "a")).ranks_each == 2


@on_ranks(4)
def test_ranks_agree_on_the_nodes() -> None:
    with nodes_of_size(2):
        ours = BucketDDP(Mlp())
    assert ours._passes.wrapped.context.nodes.ranks_each == 2
    assert len(set(ours._passes.wrapped.context.nodes.names)) == 2


@on_ranks(2)
def test_default_buckets_follow_from_all_ranks_sharing_one_machine() -> None:
    """The launcher says it to each rank; else host names do. Sizes are in MiB."""
    for started_here, hosts, expected in [
        (["", ""], "ab", [4, 4, 4]),
        (["2", "2"], "aa", [12]),
        (["1", "1"], "aa", [4, 4, 4]),
        (["", "1"], "aa", [4, 4, 4]),
    ]:
        started, host = started_here[dist.get_rank()], hosts[dist.get_rank()]
        module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
        with patch.dict(os.environ), patch.object(socket, "gethostname", lambda host=host: host):
            os.environ["LOCAL_WORLD_SIZE"] = started
            ours = BucketDDP(module)
            for _ in range(2):
                ours(torch.ones(1, 1024)).sum().backward()
        with case(started_here, hosts):
            assert [ours.layout.bucket_nbytes(bucket) // MIB for bucket in ours.layout.buckets] == expected
        ours.close()
