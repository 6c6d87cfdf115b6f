"""A communication hook comes into use: the same one, on all ranks, at the same point."""

from __future__ import annotations

from collections.abc import Callable

from lightning_bucketddp.comm.hooks import CommHook
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.peers.agreement import Entry
from lightning_bucketddp.peers.peers import Peers


class HookRegistration:
    """Has the ranks agree on a communication hook.

    Args:
        peers: The other ranks; tells which pass is next.
        options: What was asked for.
    """

    def __init__(self, peers: Peers, options: Options) -> None:
        self._peers = peers
        self._options = options
        self._attempts = 0

    def agree(self, make_hook: Callable[[], CommHook], present: CommHook | None, between_passes: bool) -> CommHook:
        """The hook, if all ranks register the same one.

        Args:
            make_hook: Gives the hook, or raises.
            present: The one in use.
            between_passes: Whether no pass is under way.

        Raises:
            RuntimeError: If there is a hook already, or a pass is under way.
            ValueError: If gradients travel in a wire dtype.
            RankMismatchError: If ranks register different hooks, or if this is not called on all of them.
        """
        times = f", attempt {self._attempts + 1}" if self._attempts else ""
        topic = f"the communication hook from pass {self._peers.position.pass_number} on{times}"
        self._attempts += 1
        problem: Exception | None = None
        entries: list[Entry] = []
        try:
            hook = make_hook()
            self._require_acceptable(present, between_passes)
            entries = [Entry(f"option {name}", repr(value)) for name, value in hook.options().items()]
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error  # the others must hear of it before it is raised
        self._peers.require_same(topic, entries, problem)
        return hook

    def _require_acceptable(self, present: CommHook | None, between_passes: bool) -> None:
        self._options.require_hook_decides()
        if present is not None:
            raise RuntimeError(
                f"register_comm_hook can only be called once: expected no communication hook, found {present.name!r}"
            )
        if not between_passes:
            raise RuntimeError("expected register_comm_hook to be called between passes, found one under way")
