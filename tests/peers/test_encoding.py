"""What ranks write into the store is data: anything else is ignored, with a warning, and runs nothing."""

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.peers.abort_listener import listen
from lightning_bucketddp.peers.agreement import Entry
from lightning_bucketddp.peers.diagnose import Failure
from lightning_bucketddp.peers.encoding import decode, encode
from lightning_bucketddp.peers.roll_call import News, RollCall
from lightning_bucketddp.peers.status import Phase, Position, Status
from tests.models import Mlp
from tests.pool import on_ranks
from tests.reference import inputs_of, logged

STATUS = Status(
    1, Position(pass_number=6, updates=(3, 7)), Phase.PASS, "'a'", trainable=(True, False), stack=(("a.py", 1, "f"),)
)
RECORDS: list[tuple[Any, Any]] = [
    (tuple[int, Sequence[Status]], (4, (STATUS, Status(1)))),
    (Failure, Failure("rank 1 raised KeyError: 'é'", mismatch=True)),
    (News, News(3, 1, Failure("rank 0 raised OSError", run=3), end=True)),
    (Sequence[tuple[str, str]], (Entry("parameter 'a'", "shape (3,)"),)),
]


@pytest.mark.parametrize(("kind", "value"), RECORDS)
def test_a_record_is_read_as_it_was_written(kind: Any, value: Any) -> None:
    assert decode(encode(value), kind, None) == value


class Runs:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


WRONG = [
    "",
    "7",
    "[]",
    "{}",
    "[[[[",
    '{"__class__": "os.system"}',
    "[1, [7]]",
    '["no", []]',
    "[" * 100_000,
    b"\xff\x80",
]


@pytest.mark.parametrize(("kind", "value"), RECORDS)
def test_anything_else_is_ignored_with_a_warning(kind: Any, value: Any, tmp_path: Path) -> None:
    wrong = [
        *WRONG,
        pickle.dumps(Runs(tmp_path / "ran")),
        encode(value).replace("1", '"1"'),
        encode(value)[:-1] + ", 7]",
    ]
    for text in wrong:
        with logged("lightning_bucketddp.peers") as said:
            found = decode(text, kind, "nothing")
        assert found == "nothing" or encode(found) == text, "an empty list or object may be a record"
        assert len(said) == (found == "nothing"), text[:50]
    assert not (tmp_path / "ran").exists()


def test_a_rank_whose_record_cannot_be_read_has_not_answered() -> None:
    store = HashStore()
    for text in (pickle.dumps((9, [Status(1)])).decode("latin-1"), "[9, []]", "nonsense"):
        store.set("status/1", text)
        store.set("news", "nonsense")
        found = RollCall(store, 0, 2, 60)._read_records(0, 10)
        assert [status.rank for status in found if not status.heard] == [1]


@on_ranks(2)
def test_training_goes_on_whatever_is_written_into_the_store(tmp_path: Path) -> None:
    model, listener = BucketDDP(Mlp()), listen(Collectives(None))
    dist.barrier()
    if dist.get_rank() == 1:
        bad = pickle.dumps(Runs(tmp_path / "ran"))
        for key in ("news", "status/0", "status/1"):
            listener.store.set(key, bad)
        listener.store.set("wake/0", "")
    dist.barrier()
    with logged("lightning_bucketddp.peers"):
        listener.roll_call.look(listener.store)
        assert [status.heard for status in listener.roll_call.ask(1)] == [True, True], "the next news replace it"
        model(inputs_of(0)).sum().backward()
    assert listener._thread.is_alive()
    assert listener.failure is None
    assert model.passes == 1
    assert not (tmp_path / "ran").exists()
