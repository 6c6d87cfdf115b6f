"""Parameters that are added, replaced or re-typed after wrapping."""

from __future__ import annotations

from collections.abc import Callable, Container

from torch import nn

from lightning_bucketddp.peers.agreement import Entry, WrapError
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.reducer.params import Params
from lightning_bucketddp.reducer.participant import Participant, PassResult


class ParamChanges(Participant):
    """Has all ranks take in the same parameters, and gives new ones rank 0's values.

    Args:
        params: The module's parameters.
        ranks: The ranks.
        init_sync: Whether new parameters get rank 0's values, as wrapping gives them.

    Attributes:
        params: The module's parameters.
    """

    def __init__(self, params: Params, ranks: Ranks, init_sync: bool) -> None:
        self.params = params
        self._ranks, self._peers = ranks, ranks.peers
        self._init_sync = init_sync
        self._agreed_changes = params.changes
        self._new: list[nn.Parameter] = []  # no rank has sent their values yet

    def take_in(self, trained: Callable[[], Container[int]]) -> bool:
        """Look parameters up anew if the module has changed, and note new ones. Sends nothing.

        Called at the root of backward, where the parameters of `torch.func.functional_call` are gone again.

        Args:
            trained: Gives the ids of the parameters that are trained or were.

        Returns:
            Whether the module has changed.

        Raises:
            WrapError: If a new parameter cannot be wrapped, or an optimizer holds shards or masters of old ones.
        """
        if not self.params.changed():
            return False
        known = {id(param) for _, param in self.params.named}
        try:
            self.params.take_in(trained)
            self._require_devices_of_the_same_type()
        except RuntimeError as error:
            self._peers.failed_by(error)
            raise
        self._new += [param for _, param in self.params.named if id(param) not in known]
        return True

    def _require_devices_of_the_same_type(self) -> None:
        wrapped = self._ranks.collectives.device
        for name, param in self.params.named:
            if wrapped is not None and param.device.type != wrapped.type:
                raise WrapError(
                    f"expected parameters on {wrapped.type!r} devices, as the module was when it was wrapped, found "
                    f"{name!r} on {param.device}. Move a module to another device before it is wrapped"
                )

    def due(self) -> bool:
        """Whether the ranks have yet to agree on the present parameters."""
        return self._agreed_changes != self.params.changes

    def agree(self) -> None:
        """Have all ranks take in the same parameters.

        Raises:
            RankMismatchError: On every rank, naming the first parameter that differs.
            PeerFailureError: If another rank is in the pass with the parameters it had.
        """
        new = {id(param) for param in self._new}
        lines = [Entry(f"taken-in parameter {name!r}", "") for name, param in self.params.named if id(param) in new]
        with self._peers.failing():
            topic = f"the parameters of pass {self._peers.position.pass_number}"
            self._peers.require_same(topic, [*self.params.entries(), *lines])
        self._agreed_changes = self.params.changes

    def use_reports(self, result: PassResult) -> None:
        """Give new parameters rank 0's values, as wrapping does."""
        if self._new and self._init_sync:
            self._ranks.broadcast(self._new, "the values of new parameters", hidden=True)
        self._new = []
