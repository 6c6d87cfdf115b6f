"""The simulated device by itself. Each check fails where something is missing, and passes where it is not."""

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import DEVICE, host_waits_raise, on_stream, simulated, sleep
from tests.models import ConvBatchNorm, Mlp, batch, loss_of
from tests.pool import ROOT, on_ranks
from tests.simulated import build


def reports() -> list[str]:
    """What the checker has found since the last call."""
    found = simulated().unordered_accesses()
    simulated().clear()
    return found


def waits(function: Callable[[], Any]) -> list[str]:
    """What the host waits for in a call, without stacks."""
    before = simulated().library.host_wait_count()
    function()
    return [text.partition("\n")[0] for text in simulated().host_waits(before)]


def fresh(value: float = 1.0) -> Tensor:
    """A tensor that all streams may use."""
    made = torch.full((1000,), value, device=DEVICE)
    torch.accelerator.synchronize()
    return made


@on_ranks(1)
def test_the_host_runs_ahead() -> None:
    x = fresh()
    began = time.perf_counter()
    sleep(1.5)
    y = x + 1
    event = torch.Event(DEVICE)
    event.record()
    assert time.perf_counter() - began < 1
    assert not event.query()
    event.synchronize()
    assert time.perf_counter() - began >= 1.5
    assert event.query()
    assert y.cpu().tolist() == [2.0] * 1000


@on_ranks(1, cases=((Mlp, 0), (ConvBatchNorm, 1e-6)))  # channels-last results come in another layout here
def test_a_model_trains_to_the_bits_of_the_cpu(make: Callable[[], nn.Module], tolerance: float) -> None:
    nets = [make()]
    nets.append(copy.deepcopy(nets[0]).to(DEVICE))
    outputs: list[Tensor] = []
    for net, device in zip(nets, ("cpu", DEVICE), strict=True):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(4):
            x, target = (tensor.to(device) for tensor in batch(step, 0))
            loss_of(net(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            outputs.append(net.eval()(batch(9, 0)[0].to(device)).cpu())
    torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)
    for expected, found in zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
    assert not simulated().library.operators_not_queued()


def wait_for_stream(side: torch.Stream) -> None:
    side.wait_stream(torch.accelerator.current_stream())


def wait_for_event(side: torch.Stream) -> None:
    event = torch.Event(DEVICE)
    event.record()
    side.wait_event(event)


def wait_on_the_host(side: torch.Stream) -> None:
    torch.accelerator.current_stream().synchronize()


def see_that_it_is_over(side: torch.Stream) -> None:
    event = torch.Event(DEVICE)
    event.record()
    while not event.query():
        time.sleep(0.001)


ORDERED = {f.__name__: f for f in (wait_for_stream, wait_for_event, wait_on_the_host, see_that_it_is_over)}


@pytest.mark.parametrize("lag", ["random", "none"])
@pytest.mark.parametrize("order", ["", *ORDERED])
@on_ranks(1)
def test_a_missing_wait_is_reported(order: str, lag: str) -> None:
    """Whether the accesses come in the right order by luck does not matter."""
    simulated().library.set_lag(lag, 2000)
    for reads_first in (False, True):
        side, x = torch.Stream(DEVICE), fresh()
        simulated().clear()
        first, second = (x.add, x.mul_) if reads_first else (x.mul_, x.add)
        kept = first(3)
        if order:
            ORDERED[order](side)
        with on_stream(side):
            kept = kept, second(1)
        found = reports()
        assert len(found) == (0 if order else 1), found
        if found:
            one, other = found[0].split("is not ordered after")
            assert one.startswith("a write" if reads_first else "a read")
            assert "test_device.py" in one
            assert "test_device.py" in other
            assert "on side stream" in one
        torch.accelerator.synchronize()
        del kept
    simulated().library.set_lag("random", 2000)


@on_ranks(1)
def test_waits_are_transitive_and_ranges_matter() -> None:
    first, second = torch.Stream(DEVICE), torch.Stream(DEVICE)
    x = fresh()
    x.mul_(2)
    first.wait_stream(torch.accelerator.current_stream())
    second.wait_stream(first)
    with on_stream(second):
        x.add_(1)
    assert reports() == []
    with on_stream(first):  # another half than the one below
        x[:500].mul_(2)
    assert len(reports()) == 1, "the second stream has written all of it"
    torch.accelerator.synchronize()
    with on_stream(first):
        x[:500].mul_(2)
    with on_stream(second):
        x[500:].mul_(2)
    assert reports() == []
    torch.accelerator.synchronize()


@on_ranks(1, cases={"kept": [True, False], "missing": [False, False], "lenient": [False, True]})
def test_memory_that_another_stream_reads_late_is_lost_without_record_stream(recorded: bool, lenient: bool) -> None:
    """With ``lenient`` memory is overwritten only where it is given out again."""
    side = torch.Stream(DEVICE)
    simulated().library.set_reuse_at_once(not lenient)
    try:
        x = fresh()
        simulated().clear()
        side.wait_stream(torch.accelerator.current_stream())
        with on_stream(side):
            sleep(0.1)
            y = x + 1
        if recorded:
            x.record_stream(side)
        del x
        if lenient:
            assert reports() == []
            torch.empty(1000, device=DEVICE)
        torch.accelerator.synchronize()
        assert torch.equal(y.cpu(), torch.full((1000,), 2.0)) == recorded
        found = reports()
    finally:
        simulated().library.set_reuse_at_once(True)
    assert len(found) == (0 if recorded else 1)
    assert recorded or "reuse of freed memory" in found[0]


@on_ranks(1)
def test_memory_is_reused_in_its_streams_order_and_fresh_memory_is_nan() -> None:
    assert torch.empty(8, device=DEVICE).isnan().all().item()
    x = torch.ones(1000, device=DEVICE)
    address = x.data_ptr()
    del x
    y = torch.full((1000,), 5.0, device=DEVICE)
    assert y.data_ptr() == address
    assert y.cpu().tolist() == [5.0] * 1000
    before = torch.accelerator.memory_allocated()
    z = torch.empty(1000, device=DEVICE)
    assert torch.accelerator.memory_allocated() == before + 4000
    del z
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() >= before + 4000


@on_ranks(1)
def test_copies_to_pinned_memory_come_later() -> None:
    pinned, pageable, x = torch.empty(1000, pin_memory=True), torch.empty(1000), fresh(5.0)
    assert pinned.is_pinned()
    sleep(0.1)
    assert waits(partial(pinned.copy_, x, non_blocking=True)) == []
    assert pinned.isnan().all()
    address = pinned.data_ptr()
    del pinned  # the copy still writes
    assert torch.empty(1000, pin_memory=True).data_ptr() != address
    assert waits(lambda: pageable.copy_(x, non_blocking=True)) == ["copy to the host"]
    assert pageable.eq(5).all()


@on_ranks(1)
def test_host_waits_are_counted_and_can_be_forbidden() -> None:
    x, pinned = fresh(), torch.ones(1000, pin_memory=True)
    event = torch.Event(DEVICE)

    def wait_for_event() -> None:
        event.record()
        event.synchronize()

    waiting: dict[str, Callable[[], Any]] = {
        "item": lambda: x[0].item(),
        "copy to the host": x.cpu,
        "copy from the host": lambda: torch.ones(3).to(DEVICE),
        "aten::nonzero": x.nonzero,
        "synchronize an event": wait_for_event,
        "synchronize a stream": lambda: torch.accelerator.current_stream().synchronize(),
        "synchronize the device": torch.accelerator.synchronize,
    }
    for what, function in waiting.items():
        assert waits(function) == [what]
        with host_waits_raise(), nullcontext() if "synchronize" in what else pytest.raises(RuntimeError, match=what):
            function()
    for function in (
        lambda: pinned.to(DEVICE, non_blocking=True),
        lambda: nn.functional.dropout(x),
        lambda: torch.randn(3, device=DEVICE),
        lambda: x.copy_(x + 1),
        event.synchronize,  # the host knows that it is over
    ):
        assert waits(function) == []
        with host_waits_raise():
            function()
    x.add_(1)
    event.record()
    while not event.query():
        time.sleep(0.001)
    assert waits(event.synchronize) == []
    assert "test_device.py" in simulated().host_waits()[-1]


@on_ranks(1)
def test_what_an_operation_raises_comes_where_the_host_waits() -> None:
    x = torch.arange(3.0, device=DEVICE)
    y = x[torch.tensor([99], device=DEVICE)]
    with pytest.raises(RuntimeError, match=r"an operation failed.*99 is out of bounds"):
        torch.accelerator.synchronize()
    del y
    assert (x + 1).tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="sim:0 and cpu"):
        _ = x + torch.ones(3)


@on_ranks(1)
def test_random_numbers_are_those_of_the_cpu() -> None:
    drawn = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(3)
        x = torch.ones(50, device=device)
        drawn.append(
            [torch.rand(4, device=device).cpu(), nn.functional.dropout(x).cpu(), torch.randperm(9, device=device).cpu()]
        )
    for expected, found in zip(*drawn, strict=True):
        assert torch.equal(found, expected)


def test_without_a_compiler_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "needs a C++ compiler" in build.why_not()


def test_processes_that_come_at_once_build_the_library_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = []

    def slowly(folder: Path, target: Path) -> Path:
        built.append(target)
        time.sleep(0.2)
        target.touch()
        return target

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_build", slowly)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build.library())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(set(found)) == 1
    assert found[0].exists()


@pytest.mark.slow
def test_any_script_runs_on_it(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(1, nothing)  # the library is built
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "x = torch.ones(1000, device=torch.accelerator.current_accelerator())\n"
        "side = torch.Stream(x.device)\n"
        "with side: y = x + 1\n"
        "print(sys.argv[1:], x.device, y.numel())\n"
    )
    command = [sys.executable, "-m", "tests.simulated", str(script), "--option"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["['--option'] sim:0 1000"]
    assert "1 pair(s) of accesses that nothing orders" in ended.stderr
    assert f"{script}:4" in ended.stderr


def nothing() -> None: ...
