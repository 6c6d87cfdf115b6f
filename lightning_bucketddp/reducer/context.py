"""What stays while parameters come and go."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.devices import is_accelerator
from lightning_bucketddp.comm.lane import Streams, separate_stages
from lightning_bucketddp.comm.levels import Levels
from lightning_bucketddp.comm.queue import WrapperQueue
from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.layout.nodes import Nodes
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.peers.control import ControlChannel
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.reducer.changes import ParamChanges
from lightning_bucketddp.reducer.divisor import GradientDivisor
from lightning_bucketddp.reducer.joining import Joining
from lightning_bucketddp.reducer.limits import GradientLimits
from lightning_bucketddp.reducer.params import Params
from lightning_bucketddp.reducer.participant import Participant
from lightning_bucketddp.reducer.ranks_check import RanksCheck
from lightning_bucketddp.reducer.ready_order import OrderLearner
from lightning_bucketddp.reducer.record import PassRecorder
from lightning_bucketddp.reducer.skipping import StepSkips
from lightning_bucketddp.reducer.sparse import SparseGrads
from lightning_bucketddp.reducer.trainable import TrainableHistory


@dataclass(eq=False)
class WrapperContext:
    """The parts of a wrapper that stay when parameters change.

    Args:
        params: The module's parameters; the same on every rank.
        ranks: The ranks.
        options: The user's options.
        nodes: The nodes of the ranks; agreed between them.

    Attributes:
        groups: The groups in which shards travel; None without shards.
        levels: The two levels in which buckets are all-reduced; None for one level, or with shards.
        changes: Has the ranks take in changed parameters.
        joining: Whether ranks may run out of data, and whether this one has.
        divisor: What the sum over the ranks is divided by.
        sparse: Reduces sparse gradients.
        recorder: Records passes.
        trainable: Follows ``requires_grad``.
        learner: Learns the order of gradients.
        control: Sends and reads control vectors.
        ranks_check: Compares the ranks' parameters; None if that is off.
        skips: Has all ranks drop the gradients of a step; None if that is off.
        queue: Which of several wrappers on one group may launch.
        streams: The streams on which accelerators make gradients.
        lock: Guards hooks: each device has its autograd thread.
    """

    params: Params
    ranks: Ranks
    options: Options
    nodes: Nodes
    streams: Streams = field(default_factory=Streams)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        options, ranks, collectives = self.options, self.ranks, self.ranks.collectives
        self.device = self.params.named[0][1].device
        self.changes = ParamChanges(self.params, ranks, options.init_sync)
        self.joining = Joining(ranks.peers)
        self.divisor = GradientDivisor(options.gradient_divide_by, collectives, self.joining)
        self.sparse = SparseGrads(ranks, self.divisor, options.max_abs_grad)
        self.recorder = PassRecorder(ranks.peers, self.sparse)
        self.trainable = TrainableHistory(ranks.peers)
        self.learner = OrderLearner(ranks, sharded=options.shard_optimizer)
        self.control = ControlChannel(ranks, self.device)
        every, on_difference = options.check_ranks_every, options.check_ranks
        self.ranks_check = None if every is None else RanksCheck(ranks, every, on_difference)
        self.queue = WrapperQueue(collectives.group)
        self.groups: ShardGroups | None = None
        self.levels: Levels | None = None
        ranks_each, wire_dtype = self._ranks_each(), options.wire_dtype
        assert not isinstance(wire_dtype, str)  # Options has made it a dtype
        if options.shard_optimizer:
            self.groups = ShardGroups(collectives, options.shard_group_size, ranks_each, wire_dtype is not None)
        elif ranks_each is not None:
            # Two nodes have one stage across.
            far_twice = wire_dtype is not None and self.nodes.count > 2 and not is_accelerator(self.device)
            self.levels = Levels(collectives, ranks_each, ranks.world_size, far_twice)
        self.skips: StepSkips | None = None
        if options.skips_steps:
            self.skips = StepSkips(options, ranks, self.groups, self.device)
        if self.levels is None:
            self._separate_stages()

    def _separate_stages(self) -> None:
        options, collectives = self.options, self.ranks.collectives
        first: Collectives | None = collectives
        second: Collectives | None = collectives
        if self.groups is not None:
            first, second = None if self.groups.levels else self.groups.inside, self.groups.across
        separate_stages(collectives, first, second if options.wire_dtype else None, self.device, self.nodes.one)

    @property
    def level_count(self) -> int:
        """In how many levels buckets are reduced."""
        levels = self.levels if self.groups is None else self.groups.levels
        return 1 if levels is None else 2

    def participants(self) -> list[Participant]:
        """The features that take part in passes; the same on every rank, in the order of their collectives."""
        limit = self.options.max_abs_grad
        limits = None if limit is None else GradientLimits(limit, self.ranks.rank)
        last = (self.trainable, self.learner, self.changes, self.ranks_check)
        members = (self.recorder, self.divisor, limits, self.sparse, self.skips, *last)
        return [member for member in members if member is not None]

    def _ranks_each(self) -> int | None:
        """How many ranks each node has, if gradients are reduced in two levels; else None."""
        options, nodes = self.options, self.nodes
        asked = options.wire_dtype is not None if options.hierarchical is None else options.hierarchical
        by_default = options.hierarchical is None and not is_accelerator(self.device)
        if not (asked or by_default) or options.comm_hook is not None or nodes.count in (1, len(nodes.names)):
            return None
        if nodes.ranks_each is not None and self.ranks.collectives.has_all_processes():
            return nodes.ranks_each
        if asked and self.ranks.rank == 0:
            warnings.warn(
                "rank 0: expected a process group of all processes, and nodes with as many ranks each that follow each "
                f"other, where gradients are reduced in two levels; found {nodes.described}, among "
                f"{self.ranks.collectives.among_all()[1]} processes. They are reduced in one level, which sends more "
                "between nodes; hierarchical=False does so without a warning",
                stacklevel=2,
            )
        return None
