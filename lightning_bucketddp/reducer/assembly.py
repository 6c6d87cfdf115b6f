"""Puts a reducer together for the parameters that there are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.comm.queue import WrapperQueue
from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.grads.bucket import Buckets
from lightning_bucketddp.grads.coalesced import Coalesced
from lightning_bucketddp.grads.contiguous import Contiguous
from lightning_bucketddp.grads.hooks import GradientHooks
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.sharded import Sharded
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.peers.control import MAX_RANKS_IN_FP32, ControlChecks
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.reducer.changes import ParamChanges
from lightning_bucketddp.reducer.divisor import GradientDivisor
from lightning_bucketddp.reducer.limits import GradientLimits
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.pass_control import PassControl
from lightning_bucketddp.reducer.ready_order import OrderLearner
from lightning_bucketddp.reducer.record import PassRecorder
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.reductions import AllReduce, HookReduce, ReduceScatter, Reduction
from lightning_bucketddp.reducer.sparse import SparseGrads
from lightning_bucketddp.reducer.trainable import TrainableHistory


@dataclass(frozen=True)
class Setting:
    """What stays when parameters change.

    Attributes:
        collectives: The group.
        options: What was asked for.
        one_machine: Whether the ranks share one machine; agreed between them.
        peers: The other ranks.
        changes: The module's parameters.
        divisor: What the sum over the ranks is divided by.
        recorder: Records passes.
        checks: What the ranks must have in common when they meet in a pass.
        queue: Which of several wrappers on one group may launch.
        lock: Each device has its autograd thread, and outputs may be on other devices than parameters.
        others: Further participants, from outside of this folder.
    """

    collectives: Collectives
    options: Options
    one_machine: bool
    peers: Peers
    changes: ParamChanges
    divisor: GradientDivisor
    recorder: PassRecorder
    checks: ControlChecks
    queue: WrapperQueue
    lock: threading.RLock
    others: tuple[Participant, ...]


@dataclass(frozen=True)
class Assembled:
    """A reducer, and what its owner needs beside it.

    Attributes:
        reducer: The reducer.
        planner: Plans layouts.
        trainable: Follows ``requires_grad``.
        learner: Learns the order of gradients.
        sparse: Reduces sparse gradients.
        hooks: The hooks on the parameters. They keep the reducer alive, so whoever drops it removes them.
        index_of: The index in the module of each parameter, by its id.
    """

    reducer: Reducer
    planner: LayoutPlanner
    trainable: TrainableHistory
    learner: OrderLearner
    sparse: SparseGrads
    hooks: GradientHooks
    index_of: dict[int, int]


def assemble(
    setting: Setting,
    hook: CommHook | None,
    open_by_gradient: Callable[[int, Tensor], tuple[Reducer, int] | None],
) -> Assembled:
    """Make everything that follows from which parameters there are.

    Args:
        setting: What stays when they change.
        hook: The communication hook, if there is one.
        open_by_gradient: As for :class:`Reducer`.
    """
    options, collectives, peers = setting.options, setting.collectives, setting.peers
    table = SlotTable(setting.changes.params.named, setting.changes.params.sparse)
    planner = LayoutPlanner(table, options, collectives.world_size, setting.one_machine)
    buckets = Buckets(table, planner)
    storage = _storage(setting, table, buckets, planner)
    trainable = TrainableHistory(table, peers)
    learner = OrderLearner(table, planner, collectives, peers)
    sparse = SparseGrads(table, collectives, peers, setting.divisor, options.max_abs_grad)
    members: list[Participant] = [setting.recorder, setting.divisor]
    if options.max_abs_grad is not None:
        members.append(GradientLimits(table, storage, options.max_abs_grad, collectives.rank))
    members += [sparse, learner, setting.changes, trainable, *setting.others]
    setting.recorder.follow(table, storage, buckets, sparse)
    reducer = Reducer(
        table,
        buckets,
        storage,
        reduction_of(setting, table, buckets, storage, hook),
        members,
        peers,
        PassControl(collectives, peers, setting.checks, table),
        setting.queue,
        setting.lock,
        open_by_gradient,
    )
    hooks = GradientHooks(table, buckets, reducer.on_gradient)
    index_of = {id(param): index for index, param in enumerate(table.all_params)}
    return Assembled(reducer, planner, trainable, learner, sparse, hooks, index_of)


def _storage(setting: Setting, table: SlotTable, buckets: Buckets, planner: LayoutPlanner) -> Storage:
    options, collectives = setting.options, setting.collectives
    layout = planner.plan()
    if options.shard_optimizer:
        groups = ShardGroups(collectives, options.shard_group_size)
        return Sharded(table, buckets, layout, groups, options.scatter_every_pass)
    if not options.use_contiguous_buffers:
        return Coalesced(table, buckets, layout)
    plain = options.comm_hook is None and options.wire_dtype is None
    return Contiguous(table, buckets, layout, carries_control=plain and 1 < collectives.world_size <= MAX_RANKS_IN_FP32)


def reduction_of(
    setting: Setting, table: SlotTable, buckets: Buckets, storage: Storage, hook: CommHook | None
) -> Reduction:
    """What reduces buckets: the hook if there is one, whose result for a bucket is then all of it."""
    wire_dtype = setting.options.wire_dtype
    assert not isinstance(wire_dtype, str)  # Options has made it a dtype
    if hook is not None:
        return HookReduce(hook, buckets, table, storage)
    if isinstance(storage, Sharded):
        return ReduceScatter(storage.groups, buckets, wire_dtype)
    return AllReduce(setting.collectives, buckets, wire_dtype, scales=setting.options.use_contiguous_buffers)
