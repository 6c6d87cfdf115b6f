"""Puts a reducer together for the present parameters."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.comm.queue import WrapperQueue
from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.comm.stage_thread import StageThread
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
from lightning_bucketddp.reducer.joining import Joining
from lightning_bucketddp.reducer.limits import GradientLimits
from lightning_bucketddp.reducer.params import Params
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.pass_control import PassControl
from lightning_bucketddp.reducer.ready_order import OrderLearner
from lightning_bucketddp.reducer.record import PassRecorder
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.reductions import AllReduce, CastReduce, HookReduce, ReduceScatter, Reduction
from lightning_bucketddp.reducer.sparse import SparseGrads
from lightning_bucketddp.reducer.trainable import TrainableHistory


class Setting:
    """The parts of a wrapper that stay when parameters change.

    Args:
        params: The module's parameters; the same on every rank.
        collectives: The group.
        peers: The other ranks.
        options: The user's options.
        one_machine: Whether the ranks share one machine; agreed between them.
        others: Further participants, from outside of this folder.

    Attributes:
        changes: Has the ranks take in changed parameters.
        joining: Whether ranks may run out of data, and whether this one has.
        divisor: What the sum over the ranks is divided by.
        recorder: Records passes.
        checks: Compares the ranks when they meet in a pass.
        queue: Which of several wrappers on one group may launch.
        lock: Guards hooks: each device has its autograd thread.
    """

    def __init__(
        self,
        params: Params,
        collectives: Collectives,
        peers: Peers,
        options: Options,
        one_machine: bool,
        others: Sequence[Participant],
    ) -> None:
        self.collectives, self.peers, self.options = collectives, peers, options
        self.one_machine, self.others = one_machine, others
        self.changes = ParamChanges(params, collectives, peers, options.init_sync)
        self.joining = Joining(peers)
        self.divisor = GradientDivisor(options.gradient_divide_by, collectives, self.joining)
        self.recorder = PassRecorder(collectives)
        on_cpu = all(param.device.type == "cpu" for _, param in params.named)
        self.checks = ControlChecks(peers, on_cpu)
        self.queue = WrapperQueue(collectives.group)
        if on_cpu and collectives.world_size > 1:
            if options.wire_dtype and not options.shard_optimizer:
                collectives.second = collectives.again()
            if not one_machine:  # a thread launches buckets, and others of their collectives come between
                collectives.apart = collectives.again()
                collectives.apart.second = collectives.second
            weakref.finalize(self, collectives.end).atexit = False
        self.lock = threading.RLock()


class Assembly:
    """A reducer, and the parts that its owner needs; made anew when parameters change.

    Args:
        setting: The parts that stay.
        hook: The communication hook, if there is one.
        open_by_gradient: As for :class:`Reducer`.

    Attributes:
        planner: Plans layouts.
        trainable: Follows ``requires_grad``.
        learner: Learns the order of gradients.
        sparse: Reduces sparse gradients.
        reducer: The reducer.
        hooks: The hooks on the parameters. They keep the reducer alive, so its owner removes them.
    """

    def __init__(
        self,
        setting: Setting,
        hook: CommHook | None,
        open_by_gradient: Callable[[Tensor], Reducer | None],
    ) -> None:
        options, collectives, peers = setting.options, setting.collectives, setting.peers
        table = SlotTable(setting.changes.params.named, setting.changes.params.sparse)
        self.planner = LayoutPlanner(table, options, collectives.world_size, setting.one_machine)
        buckets = Buckets(table, self.planner)
        storage = _storage(setting, table, buckets, self.planner)
        self.trainable = TrainableHistory(table, peers)
        self.learner = OrderLearner(table, self.planner, collectives, peers)
        self.sparse = SparseGrads(table, collectives, peers, setting.divisor, options.max_abs_grad)
        members: list[Participant] = [setting.recorder, setting.divisor]
        if options.max_abs_grad is not None:
            members.append(GradientLimits(table, storage, options.max_abs_grad, collectives.rank))
        members += [self.sparse, self.learner, setting.changes, self.trainable, *setting.others]
        setting.recorder.follow(table, storage, buckets, self.sparse)
        self.reducer = Reducer(
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
        self.hooks = GradientHooks(table, buckets, self.reducer.on_gradient)


def _storage(setting: Setting, table: SlotTable, buckets: Buckets, planner: LayoutPlanner) -> Storage:
    options, collectives = setting.options, setting.collectives
    layout = planner.plan()
    plain = options.comm_hook is None and options.wire_dtype is None
    carries_control = plain and 1 < collectives.world_size <= MAX_RANKS_IN_FP32
    if options.shard_optimizer:
        groups = ShardGroups(collectives, options.shard_group_size, options.wire_dtype is not None)
        return Sharded(table, buckets, layout, groups, options.scatter_every_pass, carries_control)
    if not options.use_contiguous_buffers:
        return Coalesced(table, buckets, layout)
    return Contiguous(
        table,
        buckets,
        layout,
        all_main_grads=options.grad_dtype is not None,
        largest_carrier=math.inf if carries_control else 0,
    )


def reduction_of(
    setting: Setting, table: SlotTable, buckets: Buckets, storage: Storage, hook: CommHook | None
) -> Reduction:
    """The reduction for these options: the communication hook if there is one."""
    wire_dtype = setting.options.wire_dtype
    assert not isinstance(wire_dtype, str)  # Options has made it a dtype
    contiguous = setting.options.use_contiguous_buffers
    if hook is not None:
        dtype = hook.casts_to(setting.collectives.group)
        if dtype is not None and all(param.device.type == "cpu" for param in table.all_params):
            found: Reduction = CastReduce(setting.collectives, buckets, dtype, packs=contiguous)
        else:
            return HookReduce(hook, buckets, table, storage)
    elif isinstance(storage, Sharded):
        found = ReduceScatter(storage.groups, buckets, wire_dtype)
    else:
        found = AllReduce(setting.collectives, buckets, wire_dtype, scales=contiguous)
    if setting.collectives.apart is not None:
        found.launcher = StageThread()
    elif hook is None:
        found.packs_early = wire_dtype is None and setting.options.max_abs_grad is None
    return found
