"""Values that cannot be honoured are refused where they are given, all in one form; dtypes have one set of names."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDP, BucketDDPFabricStrategy, BucketDDPStrategy, Options, declare_element_wise
from tests.models import Mlp

Maker = Callable[..., Any]


def wrapper(**options: Any) -> BucketDDP:
    return BucketDDP(Mlp(), **options)


TRAINER: dict[str, Maker] = {"trainer": BucketDDPStrategy}
STRATEGIES: dict[str, Maker] = {**TRAINER, "fabric": BucketDDPFabricStrategy}
ALL: dict[str, Maker] = {**STRATEGIES, "wrapper": wrapper}

BAD: list[tuple[str, Any, dict[str, Maker]]] = [
    ("bucket_cap_mb", -1, ALL),
    ("bucket_cap_mb", "large", ALL),
    ("bucket_cap_mb", math.nan, ALL),
    ("bucket_cap_mb", True, ALL),
    ("bucket_cap_mb", math.inf, ALL),
    ("comm_hook", "bf61", ALL),
    ("comm_hook", 3, ALL),
    ("sparse_parameters", "emb.weight", ALL),
    ("sparse_parameters", [1], ALL),
    ("timeout", 30, ALL),
    ("timeout", -5, ALL),
    ("timeout", timedelta(seconds=-5), ALL),
    ("shard_optimizer", "yes", ALL),
    ("shard_group_size", 0, ALL),
    ("find_unused_parameters", "false", ALL),
    ("overlap", "false", ALL),
    ("init_sync", "no", ALL),
    ("use_contiguous_buffers", "no", ALL),
    ("max_abs_grad", "inf", ALL),
    ("max_abs_grad", -1.0, ALL),
    ("pad_buckets_to", 0, ALL),
    ("pad_buckets_to", True, ALL),
    ("gradient_divide_by", 0, ALL),
    ("gradient_divide_by", "batch", ALL),
    ("module_buffers", "sum", ALL),
    ("grad_dtype", "float31", ALL),
    ("grad_dtype", torch.int32, ALL),
    ("grad_dtype", 32, ALL),
    ("wire_dtype", "float31", ALL),
    ("wire_dtype", "fp32", ALL),
    ("wire_dtype", torch.float32, ALL),
    ("start_method", "threads", STRATEGIES),
    ("uneven_inputs", "sometimes", TRAINER),
    ("state_dict_type", "parts", TRAINER),
]
"""An option, a bad value, and who takes the option."""


@pytest.fixture(scope="module", autouse=True)
def _group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refused(option: str, value: object) -> Any:
    found = re.escape(repr(value))
    return pytest.raises((TypeError, ValueError), match=rf"(?s)^expected {option} .*found {found}")


@pytest.mark.parametrize(
    ("maker", "option", "value"),
    [
        pytest.param(maker, option, value, id=f"{name}-{option}-{value!r}")
        for option, value, makers in BAD
        for name, maker in makers.items()
    ],
)
def test_a_bad_value_is_refused_where_it_is_given(maker: Maker, option: str, value: Any) -> None:
    with refused(option, value):
        maker(**{option: value})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_start_method_that_the_platform_lacks_is_refused(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.multiprocessing.get_all_start_methods", lambda: ["spawn"])
    STRATEGIES[strategy](start_method="spawn")
    with refused("start_method", "forkserver"):
        STRATEGIES[strategy](start_method="forkserver")


def test_what_is_no_module_is_not_wrapped() -> None:
    with refused("module", "x"):
        BucketDDP("x")  # type: ignore[arg-type]


def test_what_is_no_optimizer_class_is_not_declared() -> None:
    with refused("kind", "x"):
        declare_element_wise("x")  # type: ignore[arg-type]


SWITCHES = [each.name for each in fields(Options) if isinstance(each.default, bool)]
SPELLED_ELSEWHERE = ["broadcast_buffers", "forward_sync_buffers", "master_params"]
"""Where None leaves the choice to another option."""


@pytest.mark.parametrize("option", [*SWITCHES, *SPELLED_ELSEWHERE])
def test_a_switch_takes_no_number_and_no_word(option: str) -> None:
    for value in (1, "true"):
        with refused(option, value):
            Options(**{option: value})
    assert len(SWITCHES) == 10


# -- dtypes ------------------------------------------------------------------------------------------

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
"""``wire_dtype`` takes those of two bytes."""


@pytest.mark.parametrize("maker", ALL.values(), ids=ALL)
@pytest.mark.parametrize(
    ("option", "name"),
    [
        (option, name)
        for option in ("grad_dtype", "wire_dtype")
        for name, dtype in DTYPES.items()
        if option == "grad_dtype" or dtype.itemsize == 2
    ],
)
def test_dtypes_have_the_same_names_everywhere(maker: Maker, option: str, name: str) -> None:
    maker(**{option: DTYPES[name]})
    made = maker(**{option: name})
    if isinstance(made, BucketDDP):
        assert dict(made._options.described())[option] == repr(DTYPES[name])
