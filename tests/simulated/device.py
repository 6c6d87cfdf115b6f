"""The device as torch sees it: importing this registers ``sim``, and its communicator ``simccl``, in this process.

torch has one such device per process, and programs then find that there is an accelerator. So tests on it have
processes of their own, where ``import torch`` imports this (:func:`tests.simulated.build.environment`).
"""

import atexit
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated import accelerator, build, sync_batch_norm
from tests.simulated.order import Started, order_conflicts


def _load() -> Any:
    path = str(build.library())
    loader = importlib.machinery.ExtensionFileLoader(build.NAME, path)
    spec = importlib.util.spec_from_file_location(build.NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


library = _load()


class _Module(types.ModuleType):
    """What torch and Lightning look for in ``torch.sim``, besides ``torch.accelerator``."""

    Stream, Event = torch.Stream, torch.Event
    device_count = staticmethod(library.device_count)
    current_device = staticmethod(library.current_device)
    synchronize = staticmethod(torch.accelerator.synchronize)
    current_stream = staticmethod(torch.accelerator.current_stream)
    # The CPU's generator is the device's too
    manual_seed = manual_seed_all = staticmethod(lambda seed: None)
    init = _lazy_init = empty_cache = staticmethod(lambda: None)
    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)

    @staticmethod
    def device(device: Any) -> Any:
        return torch.accelerator.device_index(device if isinstance(device, int) else torch.device(device).index)

    @staticmethod
    def set_device(device: Any) -> None:
        library.set_device(device if isinstance(device, int) else torch.device(device).index or 0)

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _make_communicator(options: Any, backend_options: Any = None) -> Any:
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, size, timeout)
    label = f"group {options.group_id} of ranks {list(options.global_ranks_in_group) or 'all'}"
    return library.make_communicator(gloo, rank, size, label)


torch.utils.rename_privateuse1_backend("sim")
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True, for_module=True)
torch._register_device_module("sim", _Module("torch.sim"))
sys.modules["torch.sim"] = torch.get_device_module("sim")
dist.Backend.register_backend("simccl", _make_communicator, extended_api=True, devices=["sim"])
dist.Backend.default_device_backend_map["sim"] = "simccl"
_operators = sync_batch_norm.operators()


# ---- what the checker has seen -------------------------------------------------------------------------


def unordered_accesses() -> list[str]:
    """Pairs of accesses to the same memory that nothing orders, each as a text with both Python stacks."""
    return library.unordered_accesses()


def host_waits(first: int = 0) -> list[str]:
    """Where the host has waited for the device, from this wait on, as texts with Python stacks."""
    return library.host_waits(first)


def clear() -> None:
    """Forget reports, host waits and the collectives that were started."""
    library.clear_reports()
    library.clear_started_collectives()


def started_collectives() -> list[Started]:
    """The collectives that this rank has started, of all its communicators, in its order."""
    return library.started_collectives()


def check_ranks(group: dist.ProcessGroup | None = None) -> None:
    """Require, on all ranks of a group, that nothing was unordered, and collectives had one order.

    Raises:
        AssertionError: If not.
    """
    torch.accelerator.synchronize()
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (unordered_accesses(), started_collectives()), group=group)
    for rank, (unordered, _) in enumerate(found):
        _require_none(unordered, rank)
    conflicts = order_conflicts([started for _, started in found])
    assert not conflicts, "ranks start collectives in different orders:\n" + "\n".join(conflicts)


def check_this_rank() -> None:
    """Require that nothing was unordered on this rank.

    Raises:
        AssertionError: If not.
    """
    _require_none(unordered_accesses(), dist.get_rank() if dist.is_initialized() else 0)


def _require_none(unordered: list[str], rank: int) -> None:
    text = "\n".join(unordered[:3])
    assert not unordered, f"nothing orders {len(unordered)} pair(s) of accesses on rank {rank}:\n\n{text}"


@contextmanager
def host_waits_raise() -> Iterator[None]:
    """Make operations raise that wait for a result of the device, as ``torch.cuda.set_sync_debug_mode("error")``."""
    library.set_waits_raise(True)
    try:
        yield
    finally:
        library.set_waits_raise(False)


def _at_exit() -> None:
    library.finish_all(2.0)
    if os.environ.get("SIM_REPORT") == "1":
        found = unordered_accesses()
        lines = [f"simulated accelerator: {len(found)} pair(s) of accesses that nothing orders", *found]
        print("\n".join(lines), file=sys.stderr, flush=True)


atexit.register(_at_exit)
accelerator.register_with_lightning()
