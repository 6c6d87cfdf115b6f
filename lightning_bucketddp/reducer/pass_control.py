"""The control vector of a pass: sends this rank's report, and reads the sum of all reports."""

from __future__ import annotations

from collections.abc import Collection
from zlib import crc32

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.grads.bucket import Bucket
from lightning_bucketddp.grads.slots import SlotTable, TrainableSet
from lightning_bucketddp.peers.control import Control, ControlChecks, ControlExchange, Report, fingerprint, write
from lightning_bucketddp.peers.end_signals import end_signals
from lightning_bucketddp.peers.peers import Peers


class PassControl:
    """Sends and reads the control vectors of the passes of one set of parameters.

    Args:
        collectives: The group.
        peers: The other ranks.
        checks: What the ranks must have in common when they meet in a pass.
        table: The parameters.

    Attributes:
        exchange: The control vector of this pass, once it is on its way.
    """

    def __init__(self, collectives: Collectives, peers: Peers, checks: ControlChecks, table: SlotTable) -> None:
        self._collectives, self._peers, self._checks, self._table = collectives, peers, checks, table
        self.exchange: ControlExchange | None = None

    def report(self, trainable: TrainableSet, failed: bool, joined: bool) -> Report:
        """This rank's report on a pass, before participants add to it."""
        at = self._peers.position
        seen = fingerprint(self._peers.number, at.pass_number, crc32(bytes(trainable)), self._peers.here.updated)
        return Report(seen, at.step, at.forward, failed=failed, joined=joined, to_end=end_signals.received > 0)

    def send(self, report: Report, used: Collection[int]) -> ControlExchange:
        """Send the control vector in a collective of its own."""
        device = self._table.all_params[0].device
        self.exchange = ControlExchange.start(self._collectives, device, report, len(self._table), used)
        return self.exchange

    def put_in(self, bucket: Bucket, report: Report, used: Collection[int]) -> None:
        """Write the control vector where it travels with a packed bucket."""
        assert bucket.with_tail is not None
        vector = bucket.with_tail[bucket.flat.numel() :]
        write(vector, report, used)
        self.exchange = ControlExchange(vector, self._collectives.world_size)

    def read(self, exchange: ControlExchange, needed: bool) -> Control | None:
        """Require that the pass went well on every rank, now if that is needed or costs nothing; else later.

        Raises:
            PeerFailureError: If backward raised on some rank.
            RankMismatchError: If ranks met from different places of the program.
        """
        self._checks.last.append(exchange)
        if needed or exchange.arrived():
            return self._checks.require_success(exchange.read())
        self._checks.read_later(exchange)
        return None
