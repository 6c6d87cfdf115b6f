"""Builds the device's library, once for each state of its sources and each torch."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCES = Path(__file__).parent / "csrc"
AUTOLOAD = Path(__file__).parent / "autoload"
NAME = "_simulated_accelerator"
# torch's headers take most of the time: so files are compiled in two parts, one for each core.
PARTS = (
    ("streams", "events", "allocator", "pinned", "guard", "operators", "fallback"),
    ("checker", "communicator", "bindings"),
)


def environment() -> dict[str, str]:
    """Variables with which ``import torch`` finds the device, in a process and in those that it starts."""
    paths = [str(AUTOLOAD), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def why_not() -> str:
    """Why the device cannot be built here; empty if it can."""
    if sys.platform != "linux":
        return f"the simulated accelerator is built on Linux only, found {sys.platform}"
    return "" if compiler() else "the simulated accelerator needs a C++ compiler, found none (apt install g++)"


def library() -> Path:
    """The library, built if it is not there yet. Processes that come at once build it once.

    Raises:
        RuntimeError: If it cannot be built.
    """
    target = _cache() / f"{NAME}.{_hash()}.so"
    if target.exists():
        return target
    if why_not():
        raise RuntimeError(why_not())
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory() as folder:
                os.replace(_build(Path(folder), target.with_suffix(f".{os.getpid()}")), target)
    return target


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for parent in (home, Path(tempfile.gettempdir())):
        folder = parent / "lightning-bucketddp-tests"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise RuntimeError("expected a cache or temporary directory that can be written to, found none")


def _hash() -> str:
    import torch  # not above: the variables are asked for where nothing is to be imported

    found = hashlib.sha256(f"{torch.__version__} {torch.__file__} {sys.version} {compiler()}".encode())
    for path in sorted([Path(__file__), *SOURCES.iterdir()]):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _build(folder: Path, target: Path) -> Path:
    import torch
    from torch.utils import cpp_extension

    command = compiler()
    assert command is not None
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"], str(SOURCES)]
    flags = [command, "-std=c++20", "-fPIC", "-O1", "-w", f"-DTORCH_EXTENSION_NAME={NAME}", "-DUSE_DISTRIBUTED"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *(f"-I{path}" for path in includes)]
    objects, running = [], []
    for index, names in enumerate(PARTS):
        source = folder / f"part{index}.cpp"
        source.write_text("".join(f'#include "{name}.cpp"\n' for name in names))
        objects.append(str(source.with_suffix(".o")))
        compile_one = [*flags, "-c", str(source), "-o", objects[-1]]
        running.append(subprocess.Popen(compile_one, stderr=subprocess.PIPE, text=True))
    for process in running:
        errors = process.communicate(timeout=500)[1]
        if process.returncode:
            raise RuntimeError(f"the simulated accelerator does not compile:\n{errors[-5000:]}")
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    subprocess.run([command, "-shared", *objects, "-o", str(target), *libraries], check=True, timeout=200)
    return target
