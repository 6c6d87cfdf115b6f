"""Count the store's requests while ranks wait for one rank that does not come: many threads, one TCPStore.

    python benchmarks/store_load.py [--ranks 512] [--seconds 20]

An earlier version read keys of every rank twice a second on each waiting rank. Its requests are calculated, as no store
can serve them. Now a rank's listener waits for one key, and roll calls come after 1, 2, 4, 8, ... seconds. These
requests are counted.
"""

from __future__ import annotations

import argparse
import resource
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from lightning_bucketddp.comm.work import POLL_SECONDS
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase

KEYS_PER_RANK = 3
"""Keys per rank that each poll read in the earlier version: answers on trainable sets, parameters and hooks."""

FIXED_KEYS = 6
"""Other keys that each poll read: two for failures, one each for ends, updates, exchanges and skips."""


class CountingStore:
    """The store, with a prefix before all keys. Counts requests."""

    def __init__(self, store: TCPStore, prefix: str, requests: Counter[str]) -> None:
        self.underlying_store = store
        self._prefix, self._requests = prefix, requests

    def clone(self) -> CountingStore:
        return CountingStore(self.underlying_store.clone(), self._prefix, self._requests)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.underlying_store, name)
        prefix, requests = self._prefix, self._requests

        def ask(keys: str | list[str], *arguments: Any) -> Any:
            # The client of torch's store waits for a key before it gets it: a second request.
            requests[name] += 2 if name in ("get", "multi_get") else 1
            return method(prefix + keys if isinstance(keys, str) else [prefix + key for key in keys], *arguments)

        return ask


class Group:
    """Stands for a process group."""


class Collectives:
    """Stands for the package's, on one simulated rank."""

    name = "simulated"

    def __init__(self, rank: int, world_size: int, store: TCPStore, requests: Counter[str]) -> None:
        self.rank, self.world_size = rank, world_size
        self.group = Group()
        self._made_of = store, requests

    def store(self, prefix: str) -> CountingStore:
        # Every rank counts the listeners that it has made; here all ranks are in one process.
        store, requests = self._made_of
        return CountingStore(store, f"{prefix.rpartition('/')[0]}/", requests)


def wait_in_vain(peers: Peers, begin: threading.Barrier, until: list[float], errors: list[BaseException]) -> None:
    try:
        begin.wait()
        with peers.waiting_for("the gradients", Phase.PASS):
            while time.monotonic() < until[0]:
                time.sleep(POLL_SECONDS)
                peers.poll()
    except BaseException as error:
        errors.append(error)


def measure(ranks: int, seconds: float) -> tuple[Counter[str], list[int]]:
    """Count requests by kind, and in each second."""
    master = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=300))
    requests: Counter[str] = Counter()
    everyone: list[Any] = [Collectives(rank, ranks, master, requests) for rank in range(ranks)]
    peers = [Peers(collectives) for collectives in everyone]
    begin, until, errors = threading.Barrier(ranks), [float("inf")], list[BaseException]()
    threads = [threading.Thread(target=wait_in_vain, args=(one, begin, until, errors)) for one in peers[1:]]
    for thread in threads:
        thread.start()
    time.sleep(1)
    requests.clear()
    until[0] = time.monotonic() + seconds
    begin.wait()
    per_second = []
    while time.monotonic() < until[0]:
        before = requests.total()
        time.sleep(1)
        per_second.append(requests.total() - before)
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    return requests, per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    per_poll = KEYS_PER_RANK * options.ranks + FIXED_KEYS
    requests, per_second = measure(options.ranks, options.seconds)
    print(f"{options.ranks} ranks, of which one does not come for {options.seconds:.0f} s\n")
    print("requests per second        all ranks   one rank")
    for name, number in (
        ("before, calculated", per_poll / POLL_SECONDS * (options.ranks - 1)),
        ("now, mean", requests.total() / options.seconds),
        ("now, busiest second", max(per_second)),
        ("now, median second", sorted(per_second)[len(per_second) // 2]),
    ):
        print(f"{name:<24} {number:>11,.0f} {number / (options.ranks - 1):>10,.1f}")
    print("\nnow, second by second:", *per_second)
    print("by kind:", ", ".join(f"{name} {count}" for name, count in requests.most_common()))


if __name__ == "__main__":
    main()
