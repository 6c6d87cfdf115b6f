"""What ranks say of themselves in the store: several ranks in one process, without collectives."""

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from lightning_bucketddp import PeerFailureError
from lightning_bucketddp.peers import peers as peers_file
from lightning_bucketddp.peers.abort_listener import listen
from lightning_bucketddp.peers.peers import Peers

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


def test_a_failure_is_known_until_the_next_pass_or_for_good(ranks: MakeRanks) -> None:
    first, second = ranks(2)
    second.publish_failure("raised A", for_good=False)
    second.publish_failure("raised B", for_good=False)
    assert first.failure() == "rank 1 raised A", "the first cause stays"
    first.here.end_pass()
    assert first.failure() == "", "training goes on where all ranks raised"
    first.raise_if_failed()
    second.here.end_pass()
    second.publish_failure("raised A", for_good=False)
    second.publish_failure("gave up")
    first.publish_failure("raised C", for_good=False)
    for _ in range(2):
        assert first.failure() == "rank 1 raised A"
        with pytest.raises(PeerFailureError, match=r"rank 0: pass \d cannot be completed: rank 1 raised A"):
            first.raise_if_failed()
        first.here.end_pass()
