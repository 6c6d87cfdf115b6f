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

BAD: dict[str, list[Any]] = {
    "bucket_cap_mb": [-1, "large", math.nan, True, math.inf],
    "comm_hook": ["bf61", 3],
    "sparse_parameters": ["emb.weight", [1]],
    "timeout": [30, -5, timedelta(seconds=-5)],
    "shard_group_size": [0],
    "max_abs_grad": ["inf", -1.0],
    "pad_buckets_to": [0, True],
    "gradient_divide_by": [0, "batch"],
    "module_buffers": ["sum"],
    "grad_dtype": ["float31", torch.int32, 32],
    "wire_dtype": ["float31", "fp32", torch.float32],
}
OF_STRATEGIES = {**BAD, "start_method": ["threads"]}
OF_THE_TRAINER = {
    **OF_STRATEGIES,
    **{"uneven_inputs": ["sometimes"], "state_dict_type": ["parts"], "exact_evaluation": ["yes", 1]},
}


@pytest.fixture(scope="module", autouse=True)
def _group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapper(**options: Any) -> BucketDDP:
    return BucketDDP(Mlp(), **options)


def refused(option: str, value: object) -> Any:
    found = re.escape(repr(value))
    return pytest.raises((TypeError, ValueError), match=rf"(?s)^expected {option} .*found {found}")


MAKERS = [(wrapper, BAD), (BucketDDPFabricStrategy, OF_STRATEGIES), (BucketDDPStrategy, OF_THE_TRAINER)]


@pytest.mark.parametrize(("maker", "options"), MAKERS, ids=["wrapper", "fabric", "trainer"])
def test_bad_values_are_refused_where_they_are_given(maker: Callable[..., Any], options: dict[str, list[Any]]) -> None:
    for option, values in options.items():
        for value in values:
            with refused(option, value):
                maker(**{option: value})


def test_a_start_method_that_the_platform_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.multiprocessing.get_all_start_methods", lambda: ["spawn"])
    for strategy in (BucketDDPFabricStrategy, BucketDDPStrategy):
        strategy(start_method="spawn")
        with refused("start_method", "forkserver"):
            strategy(start_method="forkserver")


def test_modules_and_optimizer_classes_are_required() -> None:
    with refused("module", "x"):
        BucketDDP("x")  # type: ignore[arg-type]
    with refused("kind", "x"):
        declare_element_wise("x")  # type: ignore[arg-type]


def test_a_switch_takes_no_number_and_no_word() -> None:
    switches = [each.name for each in fields(Options) if isinstance(each.default, bool)]
    assert len(switches) == 10
    for option in [*switches, "broadcast_buffers", "forward_sync_buffers", "master_params"]:
        for value in (1, "true"):
            with refused(option, value):
                Options(**{option: value})


DTYPES = {
    **dict.fromkeys(["bf16", "bfloat16"], torch.bfloat16),
    **dict.fromkeys(["fp16", "float16"], torch.float16),
    **dict.fromkeys(["fp32", "float32"], torch.float32),
}


def test_dtypes_have_the_same_names_everywhere() -> None:
    for name, dtype in DTYPES.items():
        for option in ("grad_dtype", "wire_dtype") if dtype.itemsize == 2 else ("grad_dtype",):
            for strategy in (BucketDDPFabricStrategy, BucketDDPStrategy):
                strategy(**{option: dtype})
                strategy(**{option: name})
            assert dict(wrapper(**{option: name})._options.described())[option] == repr(dtype)
