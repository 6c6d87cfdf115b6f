"""Runs torch's DDP tests, written for one GPU per rank, on CPU ranks.

To be imported by a worker that runs nothing else: parts of torch are replaced for good.
"""

import contextlib
import functools
import importlib
import inspect
import io
import os
import re
import sys
import tempfile
import types
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_bucketddp import BucketDDP

TORCH_DDP = nn.parallel.DistributedDataParallel
USE_OF_DDP = re.compile(r"\b(DistributedDataParallel|DDP)[.(]")
FACTORIES = ("arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
SKIPS_WITH_ARGUMENTS = ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend")
SKIPS_WITHOUT_ARGUMENTS = ("skip_if_no_gpu", "skip_if_rocm_multiprocess", "skip_if_odd_worldsize")

SMALLER = {"test_ddp_uneven_inputs": {1000: 20}}
"""Constants, by test, to be replaced: images of that size take minutes on a CPU."""


class Nothing:
    """A stream or an event, where there are none: every method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class Asides:
    """Torch-private names that some tests use beside their subject, with the answers that the tests expect."""

    _set_params_and_buffers_to_ignore_for_model = staticmethod(TORCH_DDP._set_params_and_buffers_to_ignore_for_model)

    @property
    def _authoritative_rank(self) -> int:
        return dist.get_world_size() - 1

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {"join_uneven_inputs": True, "has_rebuilt_buckets": self.static_graph}  # type: ignore[attr-defined]

    def _remove_autograd_hooks(self) -> None:
        self.close()  # type: ignore[attr-defined]

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Does nothing: there is no such clone."""


def _on_cpu(device: Any) -> Any:
    """The CPU if ``device`` is a GPU, else what was given, a dtype or a tensor for example."""
    is_gpu = type(device) is int or (isinstance(device, str | torch.device) and str(device).startswith("cuda"))
    return "cpu" if is_gpu else device


def _made_on_cpu(function: Callable[..., Any], moves: bool = False) -> Callable[..., Any]:
    """The function with the CPU for a GPU named by keyword; or, if it ``moves`` things, by position too."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return function(*(map(_on_cpu, args) if moves else args), **kwargs)

    return call


def _replace_devices() -> None:
    for name in FACTORIES:
        setattr(torch, name, _made_on_cpu(getattr(torch, name)))
    owners: tuple[Any, ...] = (torch.Tensor, nn.Module)
    for owner in owners:
        owner.to = _made_on_cpu(owner.to, moves=True)
        owner.cuda = lambda self, *args, **kwargs: self
    cuda: Any = torch.cuda
    cuda.set_device = lambda device: None  # torch.compile wants different functions under different names
    cuda.synchronize = lambda device=None: None
    cuda.current_device = lambda: dist.get_rank()
    torch.accelerator.current_stream = torch.Event = Nothing


def _replace_skips() -> None:
    module = importlib.import_module("torch.testing._internal.common_distributed")
    for name in SKIPS_WITH_ARGUMENTS:
        setattr(module, name, lambda *_: lambda test: test)
    for name in SKIPS_WITHOUT_ARGUMENTS:
        setattr(module, name, lambda test: test)
    module.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}


@functools.cache
def torch_tests() -> Any:
    """Imports torch's module of tests, changed for CPU ranks. Needs the process group."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(dist.get_world_size()))
    try:
        importlib.import_module("expecttest")
    except ImportError:  # torch's test classes derive from its TestCase; these tests use nothing else of it
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    _replace_skips()
    module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    _replace_devices()
    return module


def names_of_tests() -> list[str]:
    """The tests that use ``DistributedDataParallel``, directly or in a method that they call; torch's order."""
    source = {
        name: inspect.getsource(inspect.unwrap(function))
        for name, function in vars(torch_tests().DistributedTest._DistTestBase).items()
        if inspect.isfunction(function)
    }

    def uses_ddp(name: str, seen: set[str]) -> bool:
        if name in seen or name not in source:
            return False
        seen.add(name)
        called = re.findall(r"self\.(\w+)\(", source[name])
        return bool(USE_OF_DDP.search(source[name])) or any(uses_ddp(other, seen) for other in called)

    return [name for name in source if name.startswith("test_") and uses_ddp(name, set())]


def _without_gpus(wrapper: type[nn.Module], *bases: type) -> type[nn.Module]:
    """A subclass of ``wrapper`` that leaves out the GPUs that a test names."""

    class DistributedDataParallel(*bases, wrapper):  # type: ignore[misc, valid-type]
        def __init__(
            self, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            super().__init__(module, None, None, *args, **kwargs)

    for name in ("__module__", "__qualname__"):  # so that instances can be pickled, under torch's name
        setattr(DistributedDataParallel, name, getattr(TORCH_DDP, name))
    return DistributedDataParallel


def run_test(name: str, with_bucketddp: bool) -> None:
    """Runs one of torch's tests on this rank, with ``BucketDDP`` in place of torch's DDP or without."""
    module = torch_tests()
    wrapper = _without_gpus(BucketDDP, Asides) if with_bucketddp else _without_gpus(TORCH_DDP)
    for owner in (nn.parallel, nn.parallel.distributed, module):
        owner.DistributedDataParallel = wrapper
    function: Any = inspect.unwrap(getattr(module.DistributedTest._DistTestBase, name))
    smaller = SMALLER.get(name, {})
    constants = (smaller.get(c, c) if type(c) is int else c for c in function.__code__.co_consts)
    function.__code__ = function.__code__.replace(co_consts=tuple(constants))

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    (Path(folder[0]) / "barrier").mkdir(exist_ok=True)
    os.environ["TEMP_DIR"] = folder[0]
    module.Barrier.barrier_id = 0

    class Test(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        pass

    test = Test(name)
    test.rank = dist.get_rank()
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            getattr(test, name)()
    finally:  # torch's tests of its debug levels leave the last one
        dist.set_debug_level(dist.DebugLevel.OFF)
