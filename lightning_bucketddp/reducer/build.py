"""Builds the reducer for the present parameters."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning_bucketddp.comm.gloo import SHORT_BYTES
from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.comm.lane import lane_for
from lightning_bucketddp.grads.bucket import Buckets
from lightning_bucketddp.grads.coalesced import Coalesced
from lightning_bucketddp.grads.contiguous import Contiguous
from lightning_bucketddp.grads.planner import LayoutPlanner
from lightning_bucketddp.grads.sharded import Sharded
from lightning_bucketddp.grads.slots import SlotTable
from lightning_bucketddp.grads.storage import Storage
from lightning_bucketddp.peers.control import MAX_RANKS_IN_FP32
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.reducer.context import WrapperContext
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.reductions import AllReduce, HookReduce, ReduceScatter, Reduction


def build_reducer(context: WrapperContext, hook: CommHook | None, participants: Sequence[Participant]) -> Reducer:
    """Build a reducer, which the participants follow from now on.

    Args:
        context: The parts that stay.
        hook: The communication hook, if there is one.
        participants: The features that take part in passes.
    """
    params, collectives = context.params, context.ranks.collectives
    table = SlotTable(params.named, params.sparse)
    control_up_to = _control_up_to(context, hook)
    in_one, levels = context.nodes.one, context.level_count
    planner = LayoutPlanner(table, context.options, collectives.world_size, in_one, levels, control_up_to)
    buckets = Buckets(table, planner)
    storage = _storage(context, table, buckets, planner, hook)
    reduction = _reduction(context, storage, hook)
    starts_here = context.nodes.one or hook is not None  # hooks are called in the thread that trains
    devices = {param.device for param in table.all_params}
    lanes = {device: lane_for(collectives, device, reduction.collectives_each, starts_here) for device in devices}
    for participant in participants:
        participant.follow(table, storage, planner)
    return Reducer(table, planner, buckets, storage, reduction, lanes, participants, context)


def _storage(
    context: WrapperContext, table: SlotTable, buckets: Buckets, planner: LayoutPlanner, hook: CommHook | None
) -> Storage:
    options, streams, layout = context.options, context.streams, planner.plan()
    if context.groups is not None:
        inside = Ranks(context.groups.inside, context.ranks.peers)
        return Sharded(table, buckets, layout, streams, context.groups, inside, options.scatter_every_pass)
    if not options.use_contiguous_buffers:
        return Coalesced(table, buckets, layout)
    return Contiguous(table, buckets, layout, streams, all_main_grads=options.grad_dtype is not None)


def _control_up_to(context: WrapperContext, hook: CommHook | None) -> int:
    """Up to how many bytes a bucket has room for the control vector. With it, it is reduced in one level."""
    options, world_size = context.options, context.ranks.world_size
    plain = hook is None and context.groups is None and options.use_contiguous_buffers and options.wire_dtype is None
    if not plain or not 1 < world_size <= MAX_RANKS_IN_FP32:
        return 0
    return sys.maxsize if context.levels is None else SHORT_BYTES // world_size


def _reduction(context: WrapperContext, storage: Storage, hook: CommHook | None) -> Reduction:
    wire_dtype = context.options.wire_dtype
    assert not isinstance(wire_dtype, str)  # Options has made it a dtype
    if hook is not None:
        return HookReduce(hook, storage, hook.one_at_a_time(context.device))
    if context.groups is not None:
        return ReduceScatter(context.groups, wire_dtype)
    return AllReduce(context.ranks.collectives, wire_dtype, context.levels)
