"""What stays while parameters come and go."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from lightning_bucketddp.comm.lane import Streams, separate_stages
from lightning_bucketddp.comm.queue import WrapperQueue
from lightning_bucketddp.comm.shard_groups import ShardGroups
from lightning_bucketddp.layout.nodes import Nodes
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.peers.control import ControlChannel
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.reducer.changes import ParamChanges
from lightning_bucketddp.reducer.divisor import GradientDivisor
from lightning_bucketddp.reducer.joining import Joining
from lightning_bucketddp.reducer.params import Params
from lightning_bucketddp.reducer.ranks_check import RanksCheck
from lightning_bucketddp.reducer.record import PassRecorder
from lightning_bucketddp.reducer.skipping import StepSkips


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
        self.recorder = PassRecorder(ranks.peers)
        self.control = ControlChannel(ranks, self.device)
        every, on_difference = options.check_ranks_every, options.check_ranks
        self.ranks_check = None if every is None else RanksCheck(ranks, every, on_difference)
        self.queue = WrapperQueue(collectives.group)
        self.groups = ShardGroups(collectives, options.shard_group_size) if options.shard_optimizer else None
        self.skips: StepSkips | None = None
        if options.skips_steps:
            self.skips = StepSkips(options, ranks, self.groups, self.device)
        first = collectives if self.groups is None else self.groups.inside
        second = collectives if self.groups is None else self.groups.across
        separate_stages(collectives, first, second if options.wire_dtype else None, self.device, self.nodes.one)
