"""Builds the reducer for the present parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_bucketddp.comm.gloo import SHORT_BYTES
from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.comm.lane import lane_for
from lightning_bucketddp.grads.bucket import Buckets
from lightning_bucketddp.grads.coalesced import Coalesced
from lightning_bucketddp.grads.contiguous import Contiguous
from lightning_bucketddp.grads.hooks import GradientHooks
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.sharded import Sharded
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.peers.control import MAX_RANKS_IN_FP32
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.reducer.context import WrapperContext
from lightning_bucketddp.reducer.limits import GradientLimits
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.ready_order import OrderLearner
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.reductions import AllReduce, HookReduce, ReduceScatter, Reduction
from lightning_bucketddp.reducer.sparse import SparseGrads
from lightning_bucketddp.reducer.trainable import TrainableHistory


@dataclass(frozen=True, eq=False)
class Built:
    """A reducer for the present parameters, and the parts of it that its owner needs.

    Attributes:
        reducer: The reducer.
        planner: Plans layouts.
        trainable: Follows ``requires_grad``.
        learner: Learns the order of gradients.
        sparse: Reduces sparse gradients.
        hooks: Tell the reducer of gradients.
    """

    reducer: Reducer
    planner: LayoutPlanner
    trainable: TrainableHistory
    learner: OrderLearner
    sparse: SparseGrads
    hooks: GradientHooks


def build_reducer(
    context: WrapperContext, hook: CommHook | None, others: Sequence[Participant], open_pass: Callable[[Tensor], None]
) -> Built:
    """Build a reducer.

    Args:
        context: The parts that stay.
        hook: The communication hook, if there is one.
        others: Further participants, from outside of this folder.
        open_pass: Called with the first parameter that gets a gradient while no pass is open.
    """
    options, ranks, params = context.options, context.ranks, context.params
    collectives = ranks.collectives
    table = SlotTable(params.named, params.sparse)
    planner = LayoutPlanner(table, options, collectives.world_size, context.nodes.one)
    buckets = Buckets(table, planner)
    storage = _storage(context, table, buckets, planner, hook)
    trainable = TrainableHistory(table, ranks)
    learner = OrderLearner(table, planner, ranks, sharded=context.groups is not None)
    sparse = SparseGrads(table, ranks, context.divisor, options.max_abs_grad)
    members: list[Participant] = [context.recorder, context.divisor]
    if options.max_abs_grad is not None:
        members.append(GradientLimits(table, storage, options.max_abs_grad, collectives.rank))
    members.append(sparse)
    if context.skips is not None:
        context.skips.follow(table, storage)
        members.append(context.skips)
    members += [trainable, learner, context.changes]  # what is launched is proved before it is learned
    if context.ranks_check is not None:
        context.ranks_check.follow(table)
        members.append(context.ranks_check)
    members += others
    context.recorder.follow(table, storage, sparse)
    context.recorder.laid_out(storage.layout)
    reduction = _reduction(context, storage, hook)
    starts_here = context.nodes.one or hook is not None  # hooks are called in the thread that trains
    devices = {param.device for param in table.all_params}
    lanes = {device: lane_for(collectives, device, reduction.collectives_each, starts_here) for device in devices}
    reducer = Reducer(table, buckets, storage, reduction, lanes, members, context)
    hooks = GradientHooks(table, reducer, open_pass, context.streams)
    return Built(reducer, planner, trainable, learner, sparse, hooks)


def _storage(
    context: WrapperContext, table: SlotTable, buckets: Buckets, planner: LayoutPlanner, hook: CommHook | None
) -> Storage:
    options, streams, layout = context.options, context.streams, planner.plan()
    if context.groups is not None:
        inside = Ranks(context.groups.inside, context.ranks.peers)
        return Sharded(table, buckets, layout, streams, context.groups, inside, options.scatter_every_pass)
    if not options.use_contiguous_buffers:
        return Coalesced(table, buckets, layout)
    plain = hook is None and options.wire_dtype is None
    with_control = plain and 1 < (world_size := context.ranks.world_size) <= MAX_RANKS_IN_FP32
    # A bucket with the control vector is reduced in one level.
    control_up_to = (sys.maxsize if context.levels is None else SHORT_BYTES // world_size) if with_control else 0
    all_main_grads = options.grad_dtype is not None
    return Contiguous(
        table,
        buckets,
        layout,
        streams,
        all_main_grads=all_main_grads,
        control_up_to=control_up_to,
        multiple=planner.multiple,
    )


def _reduction(context: WrapperContext, storage: Storage, hook: CommHook | None) -> Reduction:
    wire_dtype = context.options.wire_dtype
    assert not isinstance(wire_dtype, str)  # Options has made it a dtype
    if hook is not None:
        return HookReduce(hook, storage, hook.one_at_a_time(context.device))
    if context.groups is not None:
        return ReduceScatter(context.groups)
    return AllReduce(context.ranks.collectives, wire_dtype, context.levels)
