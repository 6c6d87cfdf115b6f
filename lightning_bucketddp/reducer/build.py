"""What stays while parameters come and go, and the reducer that is built of it for the present parameters."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.comm.lane import Streams, lane_for, separate_stages
from lightning_bucketddp.comm.queue import WrapperQueue
from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.grads.bucket import Buckets
from lightning_bucketddp.grads.coalesced import Coalesced
from lightning_bucketddp.grads.contiguous import Contiguous
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.sharded import Sharded
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.peers.control import MAX_RANKS_IN_FP32, ControlChannel
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.reducer.changes import ParamChanges
from lightning_bucketddp.reducer.divisor import GradientDivisor
from lightning_bucketddp.reducer.joining import Joining
from lightning_bucketddp.reducer.limits import GradientLimits
from lightning_bucketddp.reducer.params import Params
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.ranks_check import RanksCheck
from lightning_bucketddp.reducer.ready_order import OrderLearner
from lightning_bucketddp.reducer.record import PassRecorder
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.reductions import AllReduce, HookReduce, ReduceScatter, Reduction
from lightning_bucketddp.reducer.skipping import StepSkips
from lightning_bucketddp.reducer.sparse import SparseGrads
from lightning_bucketddp.reducer.trainable import TrainableHistory


@dataclass(eq=False)
class WrapperContext:
    """The parts of a wrapper that stay when parameters change.

    Args:
        params: The module's parameters; the same on every rank.
        collectives: The group.
        peers: The other ranks.
        options: The user's options.
        one_machine: Whether the ranks share one machine; agreed between them.

    Attributes:
        groups: The groups in which shards travel; None without shards.
        changes: Has the ranks take in changed parameters.
        joining: Whether ranks may run out of data, and whether this one has.
        divisor: What the sum over the ranks is divided by.
        recorder: Records passes.
        control: Sends and reads control vectors.
        ranks_check: Compares the ranks' parameters; None if that is off.
        skips: Has all ranks drop the gradients of a step; None if that is off.
        queue: Which of several wrappers on one group may launch.
        streams: The streams on which accelerators make gradients.
        lock: Guards hooks: each device has its autograd thread.
    """

    params: Params
    collectives: Collectives
    peers: Peers
    options: Options
    one_machine: bool
    streams: Streams = field(default_factory=Streams)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        options, collectives, peers = self.options, self.collectives, self.peers
        self.device = self.params.named[0][1].device
        self.changes = ParamChanges(self.params, collectives, peers, options.init_sync)
        self.joining = Joining(peers)
        self.divisor = GradientDivisor(options.gradient_divide_by, collectives, self.joining)
        self.recorder = PassRecorder(peers)
        self.control = ControlChannel(collectives, peers, self.device)
        every, on_difference = options.check_ranks_every, options.check_ranks
        self.ranks_check = None if every is None else RanksCheck(collectives, peers, every, on_difference)
        self.queue = WrapperQueue(collectives.group)
        self.groups = ShardGroups(collectives, options.shard_group_size) if options.shard_optimizer else None
        self.skips: StepSkips | None = None
        if options.skips_steps:
            self.skips = StepSkips(options, collectives, self.groups, peers, self.device)
        first = collectives if self.groups is None else self.groups.inside
        second = collectives if self.groups is None else self.groups.across
        separate_stages(first, second if options.wire_dtype else None, self.device, self.one_machine)


@dataclass(frozen=True, eq=False)
class Built:
    """A reducer for the present parameters, and the parts of it that its owner needs.

    Attributes:
        reducer: The reducer.
        planner: Plans layouts.
        trainable: Follows ``requires_grad``.
        learner: Learns the order of gradients.
        sparse: Reduces sparse gradients.
    """

    reducer: Reducer
    planner: LayoutPlanner
    trainable: TrainableHistory
    learner: OrderLearner
    sparse: SparseGrads


def build_reducer(context: WrapperContext, hook: CommHook | None, others: Sequence[Participant]) -> Built:
    """Build a reducer.

    Args:
        context: The parts that stay.
        hook: The communication hook, if there is one.
        others: Further participants, from outside of this folder.
    """
    options, collectives, peers, params = context.options, context.collectives, context.peers, context.params
    table = SlotTable(params.named, params.sparse)
    planner = LayoutPlanner(table, options, collectives.world_size, context.one_machine)
    buckets = Buckets(table, planner)
    storage = _storage(context, table, buckets, planner, hook)
    trainable = TrainableHistory(table, peers)
    learner = OrderLearner(table, planner, collectives, peers, sharded=context.groups is not None)
    sparse = SparseGrads(table, collectives, peers, context.divisor, options.max_abs_grad)
    members: list[Participant] = [context.recorder, context.divisor]
    if options.max_abs_grad is not None:
        members.append(GradientLimits(table, storage, options.max_abs_grad, collectives.rank))
    members.append(sparse)
    if context.skips is not None:
        context.skips.follow(table, storage)
        members.append(context.skips)
    members += [learner, context.changes, trainable]
    if context.ranks_check is not None:
        context.ranks_check.follow(table)
        members.append(context.ranks_check)
    members += others
    context.recorder.follow(table, storage, sparse)
    context.recorder.laid_out(storage.layout)
    reduction = _reduction(context, storage, hook)
    starts_here = context.one_machine or hook is not None  # hooks are called in the thread that trains
    lane = lane_for(collectives, context.device, reduction.collectives_each, starts_here)
    reducer = Reducer(
        table,
        buckets,
        storage,
        reduction,
        lane,
        planner.overlap,
        members,
        peers,
        context.control,
        context.queue,
        context.lock,
    )
    return Built(reducer, planner, trainable, learner, sparse)


def _storage(
    context: WrapperContext, table: SlotTable, buckets: Buckets, planner: LayoutPlanner, hook: CommHook | None
) -> Storage:
    options, streams, layout = context.options, context.streams, planner.plan()
    if context.groups is not None:
        return Sharded(table, buckets, layout, streams, context.groups, options.scatter_every_pass)
    if not options.use_contiguous_buffers:
        return Coalesced(table, buckets, layout)
    plain = hook is None and options.wire_dtype is None
    with_control = plain and 1 < context.collectives.world_size <= MAX_RANKS_IN_FP32
    all_main_grads = options.grad_dtype is not None
    return Contiguous(table, buckets, layout, streams, all_main_grads=all_main_grads, with_control=with_control)


def _reduction(context: WrapperContext, storage: Storage, hook: CommHook | None) -> Reduction:
    wire_dtype = context.options.wire_dtype
    assert not isinstance(wire_dtype, str)  # Options has made it a dtype
    if hook is not None:
        return HookReduce(hook, storage)
    if context.groups is not None:
        return ReduceScatter(context.groups, wire_dtype)
    return AllReduce(context.collectives, wire_dtype)
