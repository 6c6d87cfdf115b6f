"""What ranks say of themselves in the store: several ranks in one process, without collectives."""

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock, patch

import pytest
from torch.distributed import HashStore, PrefixStore

from lightning_bucketddp import PeerFailureError, RankMismatchError
from lightning_bucketddp.peers import peers as peers_file
from lightning_bucketddp.peers.abort_listener import AbortListener, listen
from lightning_bucketddp.peers.peers import Peers
from tests.reference import WHERE, without_where

MakeRanks = Callable[[int], list[Peers]]


class Collectives:
    def __init__(self, rank: int, world_size: int, store: HashStore) -> None:
        self.rank, self.world_size, self._store = rank, world_size, store
        self.name = str(uuid.uuid4())
        self.group = type("Group", (), {})()

    def store(self, prefix: str) -> PrefixStore:
        return PrefixStore("group", self._store)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRanks]:
    made: list[Any] = []
    monkeypatch.setattr(peers_file, "POLL_SECONDS", 0.05)

    def make(world_size: int) -> list[Peers]:
        if not made:
            store = HashStore()
            made.extend(Collectives(rank, world_size, store) for rank in range(world_size))
        return [Peers(collectives) for collectives in made]

    yield make
    for collectives in made:
        listen(collectives).close()


def test_ranks_exchange_answers_and_clear_up(ranks: MakeRanks) -> None:
    three = ranks(3)
    for topic in ("first", "second"):
        with ThreadPoolExecutor(3) as pool:
            said = [pool.submit(peer.exchange, topic, f"{topic} of {peer.rank}") for peer in three]
            assert [future.result(timeout=20) for future in said] == [[f"{topic} of {rank}" for rank in range(3)]] * 3
    assert not any(three[0]._listener.store.check([f"1/1/first/{key}"]) for key in (0, 1, 2, "said"))


def test_an_error_of_a_dataloader_is_not_one_of_another_rank(ranks: MakeRanks) -> None:
    (one,) = ranks(1)
    for text, kind in (("DataLoader worker (pid 7) is killed", RuntimeError), ("closed by peer", PeerFailureError)):
        with pytest.raises(RuntimeError, match=text[-6:]) as caught, one.waiting_for("the gradients"):
            raise RuntimeError(text)
        assert type(caught.value) is kind


def test_a_failure_ends_what_was_made_before_it_and_nothing_later(ranks: MakeRanks) -> None:
    first, second = ranks(2)
    second.fail("raised A")
    second.fail("raised B")
    first.look()
    first.fail("raised C")
    for peers in (first, second, first):
        with pytest.raises(PeerFailureError, match=rf"^rank \d: pass 0 cannot be completed: rank 1{WHERE} raised A\."):
            peers.require_usable()
    later = ranks(2)  # they wrap anew
    for peers in later:
        peers.look()
        peers.require_usable()
    later[1].failed_by(RankMismatchError("rank 1: ranks met in different passes"))
    with pytest.raises(RankMismatchError, match=r"^rank 1: ranks met in different passes$"):
        later[1].require_usable()
    assert first.failure is not None


@patch.object(AbortListener, "abort")
def test_a_process_that_ends_after_a_failure_ends_later_runs_too(abort: Mock, ranks: MakeRanks) -> None:
    first, second = ranks(2)
    second._listener.end_all_runs()
    first.look()
    assert first.failure is None, "it has not failed"
    abort.assert_not_called()
    second.fail("raised A")
    second._listener.end_all_runs()
    later, _ = ranks(2)
    later.look()
    assert later.failure is not None
    assert without_where(later.failure.text) == "rank 1 raised A"
