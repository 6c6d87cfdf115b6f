"""C++ extensions, and custom autograd functions around them, read the parameters of the last step.

Torch tells no Python code of such reads. Gathers are put off until somebody waits: who does not wait sees old values.
"""

import copy
import importlib.util
import os
import pickle
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.utils.cpp_extension import include_paths

from lightning_bucketddp import BucketDDP
from lightning_bucketddp.optim.lazy_all_gather import AwaitedParameter
from tests.optim.common import average, stepped
from tests.optim.test_lazy_all_gather import gathers_put_off
from tests.pool import case, on_ranks
from tests.reference import both, drift, inputs_of, seeded

SOURCE = Path(__file__).with_name("fused_scale.cpp")


@pytest.fixture(scope="session")
def extension(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the extension, built once per session."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, found none")
    library = tmp_path_factory.mktemp("extension") / "fused_scale.so"
    folders = [*include_paths(), sysconfig.get_paths()["include"]]
    libraries = Path(torch.__file__).parent / "lib"
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC"]
    command += [str(SOURCE), "-o", str(library), *(f"-I{folder}" for folder in folders)]
    command += [f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if built.returncode:
        pytest.skip(f"the compiler cannot build an extension: {built.stderr[-500:]}")
    return str(library)


def load(path: str) -> Callable[[Tensor, Tensor], Tensor]:
    spec = importlib.util.spec_from_file_location("fused_scale", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.scale


class Scale(torch.autograd.Function):
    """The extension inside a custom autograd function."""

    @staticmethod
    def forward(ctx: Any, scale: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        return scale(weight, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, x = ctx.saved_tensors
        return None, (grad * x).sum(0), grad * weight


class Weight(nn.Module):
    """Is read, and never called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)


class Fused(nn.Module):
    """Multiplies by a weight of its own, by that of a module it calls, and by those of two that it does not call."""

    def __init__(self, scale: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.rand(8) + 0.5)
        self.first, self.listed = Weight(), nn.ModuleList([Weight()])
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale(self.first.weight, self.scale(self.weight, x))
        return self.linear(self.scale(self.listed[0].weight, x))


def in_python(weight: Tensor, x: Tensor) -> Tensor:
    return weight * x


def fused_model(scale: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Fused(scale), Fused(scale))


def scales_of(path: str) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    scale = load(path)
    return {"called directly": scale, "in an autograd function": lambda weight, x: Scale.apply(scale, weight, x)}


@pytest.mark.slow
@on_ranks(2)
def test_extensions_read_the_new_values(extension: str) -> None:
    for name, scale in scales_of(extension).items():
        plain, module = seeded(partial(fused_model, in_python)), seeded(partial(fused_model, scale))
        ours = BucketDDP(module, shard_optimizer=True, bucket_cap_mb=0.0001)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (plain, ours)]
        with gathers_put_off(), case(name):
            for step in range(4):
                both((plain, ours), inputs_of(step))
                average(plain)
                stepped(*optimizers)
                late = [isinstance(param, AwaitedParameter) for param in module.parameters()]
                assert all(late)
                with torch.no_grad():
                    found = (module if step == 1 else ours)(inputs_of(9))  # past the wrapper, too
                    torch.testing.assert_close(found, plain(inputs_of(9)))
            torch.testing.assert_close([*module.state_dict().values()], [*plain.state_dict().values()])
            assert drift(module) == 0


@pytest.mark.slow
@on_ranks(2)
def test_a_module_waits_for_what_it_reads_alone(extension: str) -> None:
    """From the second forward on, which knows what modules call."""
    module = seeded(lambda: fused_model(load(extension)))
    ours = BucketDDP(module, shard_optimizer=True, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    late: list[set[str]] = []

    def look(*_: object) -> None:
        late.append({name for name, param in module.named_parameters() if isinstance(param, AwaitedParameter)})

    module[1].register_forward_hook(look)
    for step in range(4):
        late.clear()
        both((ours,), inputs_of(step))
        stepped(optimizer)
        if step >= 2:
            assert {name for name in late[0] if name.startswith(("0.", "1."))} == set()
            assert {"2.weight", "2.first.weight", "2.linear.weight"} <= late[0]
    assert len(_global_forward_pre_hooks) == isinstance(module[2].weight, AwaitedParameter)
    ours.wait_for_parameters()
    assert not _global_forward_pre_hooks


@on_ranks(2)
def test_copies_that_are_made_on_the_way_wait_for_nothing() -> None:
    module = seeded(lambda: fused_model(in_python))
    ours = BucketDDP(module, shard_optimizer=True)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    both((ours,), inputs_of(0))
    stepped(optimizer)
    assert len(_global_forward_pre_hooks) == 1
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    expected = module(inputs_of(1))
    for copied in copies:
        torch.testing.assert_close(copied(inputs_of(1)), expected)
