"""``torch.compile`` around a wrapper, inside of it, or of blocks: what is not traced, and where graphs are cut.

A compiled backward is one function to autograd: all its gradients arrive when it has ended, and no bucket can leave
before. For its own DDP torch cuts the graph wherever a bucket is full, and compiles the pieces one by one; it asks the
DDP module whose forward is running for the size of its buckets. This has it ask the wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch._dynamo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.plan import Layout, default_bucket_cap


@dataclass(frozen=True)
class GraphCuts:
    """What torch's compiler asks the running data-parallel module for.

    Attributes:
        bucket_bytes_cap: After how many bytes of parameters, counted from the end, a graph is cut.
    """

    bucket_bytes_cap: int


def graph_cuts(options: Options, layout: Layout, world_size: int, one_machine: bool) -> GraphCuts | None:
    """Cuts where buckets are full; None if every bucket waits for the end of backward.

    Args:
        options: What was asked for.
        layout: The buckets.
        world_size: How many ranks there are.
        one_machine: Whether the ranks share one machine.
    """
    if not options.overlap or not options.use_contiguous_buffers:
        return None
    cap = options.bucket_cap_bytes
    if cap is None:
        cap = default_bucket_cap(layout.nbytes, world_size, one_machine)
    # torch's last piece has 1 MiB, and the others may not have less.
    return GraphCuts(max(cap, getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 0)))


@contextmanager
def cutting_graphs(cuts: GraphCuts | None) -> Iterator[None]:
    """Inside, what is compiled is cut, unless ``torch._dynamo.config.optimize_ddp`` is False.

    Args:
        cuts: Where; None to leave graphs whole.
    """
    # Private, as what it does has no public name. If torch drops it graphs stay whole: right, but late. A test notices.
    outside = getattr(DistributedDataParallel, "_active_ddp_module", None)
    DistributedDataParallel._active_ddp_module = cuts  # type: ignore[assignment]
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = outside


def leave_untraced(package: str) -> None:
    """Has torch's compiler pass over a package's functions, as it does over those of torch's own DDP.

    What they call, the user's module above all, is compiled.

    Args:
        package: Its name; to be imported.
    """
    # Private as well. Without it a compiled wrapper, or a compiled step with a backward in it, traces hooks.
    add = getattr(getattr(torch._dynamo, "trace_rules", None), "add", None)
    if add is not None:
        add(package)


def frames_are_compiled() -> bool:
    """Whether torch's compiler takes over the functions that are called from here, as below a compiled wrapper."""
    # Private. Without it the answer is that it may, which costs time only.
    callback = getattr(getattr(torch._C._dynamo, "eval_frame", None), "get_eval_frame_callback", None)
    return callback is None or callable(callback())
