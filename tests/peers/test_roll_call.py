"""What a rank says of itself."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed import HashStore

from lightning_bucketddp.peers.roll_call import RollCall


def test_records_show_the_thread_that_trains() -> None:
    """In Ray that is not the main thread."""
    store: Any = HashStore()
    waits = threading.Event()

    def trains() -> None:
        waits.wait(20)

    with ThreadPoolExecutor(1) as pool:
        roll_call = pool.submit(RollCall, store, 0, 1).result()
        pool.submit(trains)
        deadline = time.monotonic() + 20
        while "trains" not in (functions := [function for _, _, function in roll_call.records()[0].stack]):
            assert time.monotonic() < deadline, functions
        waits.set()
