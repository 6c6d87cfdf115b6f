"""Values that cannot be honoured are refused where they are given, all in one form; dtypes have one set of names."""

import math
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDP, BucketDDPFabricStrategy, BucketDDPStrategy, declare_element_wise
from tests.models import Mlp

Maker = Callable[..., Any]
LATER = pytest.mark.xfail(strict=True, reason='accepted, or refused in other words; mended in "The house"')


def wrapper(**options: Any) -> BucketDDP:
    return BucketDDP(Mlp(), **options)


TRAINER: dict[str, Maker] = {"trainer": BucketDDPStrategy}
STRATEGIES: dict[str, Maker] = {**TRAINER, "fabric": BucketDDPFabricStrategy}
ALL: dict[str, Maker] = {**STRATEGIES, "wrapper": wrapper}
NONE: dict[str, Maker] = {}

BAD: list[tuple[str, Any, dict[str, Maker], dict[str, Maker]]] = [
    ("bucket_cap_mb", -1, ALL, NONE),
    ("bucket_cap_mb", "large", ALL, NONE),
    ("bucket_cap_mb", math.nan, ALL, NONE),
    ("bucket_cap_mb", True, ALL, ALL),
    ("comm_hook", "bf61", ALL, STRATEGIES),
    ("comm_hook", 3, ALL, ALL),
    ("sparse_parameters", "emb.weight", ALL, STRATEGIES),
    ("timeout", 30, ALL, ALL),
    ("timeout", -5, ALL, ALL),
    ("timeout", timedelta(seconds=-5), ALL, ALL),
    ("shard_optimizer", "yes", ALL, ALL),
    ("shard_group_size", 0, ALL, NONE),
    ("find_unused_parameters", "false", ALL, ALL),
    ("overlap", "false", ALL, ALL),
    ("init_sync", "no", ALL, ALL),
    ("use_contiguous_buffers", "no", ALL, ALL),
    ("max_abs_grad", "inf", ALL, ALL),
    ("max_abs_grad", -1.0, ALL, NONE),
    ("pad_buckets_to", 0, ALL, NONE),
    ("pad_buckets_to", True, ALL, ALL),
    ("gradient_divide_by", 0, ALL, NONE),
    ("gradient_divide_by", "batch", ALL, NONE),
    ("module_buffers", "sum", ALL, NONE),
    ("grad_dtype", "float31", ALL, NONE),
    ("grad_dtype", torch.int32, ALL, NONE),
    ("grad_dtype", 32, ALL, NONE),
    ("wire_dtype", "float31", ALL, NONE),
    ("start_method", "threads", STRATEGIES, STRATEGIES),
    ("uneven_inputs", "sometimes", TRAINER, NONE),
    ("state_dict_type", "parts", TRAINER, NONE),
]
"""An option, a bad value, who takes the option, and who does not refuse the value as it should yet."""


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
        pytest.param(
            maker, option, value, id=f"{name}-{option}-{value!r}", marks=[LATER] if name in not_refused else []
        )
        for option, value, makers, not_refused in BAD
        for name, maker in makers.items()
    ],
)
def test_a_bad_value_is_refused_where_it_is_given(maker: Maker, option: str, value: Any) -> None:
    with refused(option, value):
        maker(**{option: value})


@LATER
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_start_method_that_the_platform_lacks_is_refused(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.multiprocessing.get_all_start_methods", lambda: ["spawn"])
    STRATEGIES[strategy](start_method="spawn")
    with refused("start_method", "forkserver"):
        STRATEGIES[strategy](start_method="forkserver")


@LATER
def test_what_is_no_module_is_not_wrapped() -> None:
    with refused("module", "x"):
        BucketDDP("x")  # type: ignore[arg-type]


@LATER
def test_what_is_no_optimizer_class_is_not_declared() -> None:
    with refused("kind", "x"):
        declare_element_wise("x")  # type: ignore[arg-type]


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
        pytest.param(option, name, marks=[LATER] if name in ("bf16", "fp16", "fp32") else [])
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
