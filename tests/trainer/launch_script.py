"""A script as users write it; run by test_launchers.py with each start method.

launch_script.py <strategy> [<strategy> ...]
"""

import atexit
import os
import sys
import tempfile
import weakref

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDPStrategy
from tests.lightning_models import QUIET
from tests.trainer.cli_models import Data, Model

groups: list[weakref.ref[dist.ProcessGroup]] = []


class Noting(Model):
    def on_train_end(self) -> None:
        super().on_train_end()
        groups.append(weakref.ref(dist.group.WORLD))


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main() -> None:
    torch.set_num_threads(1)
    atexit.register(lambda: say(f"process group open at exit: {dist.is_initialized()}"))  # runs after later ones
    atexit.register(lambda: say(f"process groups alive at exit: {sum(ref() is not None for ref in groups)}"))
    for name in sys.argv[1:]:
        # The one way of starting processes without a name of its own.
        sharded = BucketDDPStrategy(start_method="forkserver", state_dict_type="sharded")
        options = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, **QUIET}
        fits = pl.Trainer(strategy=sharded if name == "forkserver" else name, **options)
        fits.fit(Noting(), Data())
        if name == "forkserver":
            with tempfile.TemporaryDirectory() as folder:
                fits.save_checkpoint(f"{folder}/after.ckpt")
                say(f"the main process saves a file: {os.path.isfile(f'{folder}/after.ckpt')}")


if __name__ == "__main__":
    main()
