"""Where a sharded checkpoint lies while it is saved. A save that is killed leaves the old or the new one.

For ``last.ckpt``, which replaces an older one::

    being written      last.ckpt           last.ckpt.partial
    set aside          last.replaced.ckpt  last.ckpt.partial    both are complete
    in place           last.replaced.ckpt  last.ckpt
    being removed      last.ckpt.partial   last.ckpt

A name that looks like a checkpoint's belongs to a complete one, as Lightning's ``ckpt_path="last"`` goes by names.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

COMPLETE = ".metadata"
"""torch.distributed.checkpoint writes this file last."""


def is_complete(path: Path) -> bool:
    """Whether ranks have written all their parts there."""
    return (path / COMPLETE).is_file()


def partial_of(path: Path) -> Path:
    """The name of a checkpoint that is being written, or removed."""
    return path.with_name(f"{path.name}.partial")


def _replaced_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.replaced{path.suffix}")


def found(path: Path) -> Path:
    """The checkpoint to load: ``path``, or what a save has left that was killed while it replaced it."""
    if not os.path.lexists(path):
        for left in (partial_of(path), _replaced_of(path)):
            if is_complete(left):
                return left
    return path


def make_room(path: Path) -> None:
    """Finish a save of that name that was killed, and remove what else it has left."""
    left = found(path)
    if left != path:
        left.rename(path)
    _remove(partial_of(path), path)
    if os.path.lexists(path):
        _remove(_replaced_of(path), path)


def put_in_place(path: Path) -> None:
    """Give the checkpoint that was written its name. One of that name is removed then."""
    replaced = _replaced_of(path)
    if os.path.lexists(path):
        path.rename(replaced)
    partial_of(path).rename(path)
    _remove(replaced, path)


def _remove(old: Path, path: Path) -> None:
    """Remove a checkpoint, or a file, if it is there; first take away what makes it look complete."""
    partial = partial_of(path)
    if not os.path.lexists(old):
        return
    if old != partial:
        old.rename(partial)
    if partial.is_dir() and not partial.is_symlink():
        (partial / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(partial)
    else:
        partial.unlink()
