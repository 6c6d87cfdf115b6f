"""Values that cannot be honoured are refused where they are given, all in one form; dtypes have one set of names."""

import math
import re
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from lightning_bucketddp import BucketDDP, BucketDDPFabricStrategy, BucketDDPStrategy, Options, declare_element_wise
from lightning_bucketddp.trainer.preemption import PreemptionCheckpoint
from tests.models import Mlp
from tests.pool import on_ranks

BAD: dict[str, list[Any]] = {
    "bucket_cap_mb": [-1, "large", math.nan, True, math.inf],
    "bucket_cap_mb_list": [[], [True], [1, -1], ["large"], "large", 3],
    "comm_hook": ["bf61", 3],
    "sparse_parameters": ["emb.weight", [1]],
    "timeout": [30, -5, timedelta(seconds=-5)],
    "shard_group_size": [0],
    "max_abs_grad": ["inf", -1.0],
    "pad_buckets_to": [0, True],
    "gradient_divide_by": [0, "batch"],
    "module_buffers": ["sum"],
    "grad_dtype": ["float31", torch.int32, "int8", 32],
    "wire_dtype": ["float31", "fp32", torch.float32, torch.uint8],
}
STRATEGIES = {**BAD, "start_method": ["threads"]}
TRAINER = STRATEGIES | {
    "uneven_inputs": ["sometimes"],
    "state_dict_type": ["parts"],
    "async_save": ["yes", 1],
    "exact_evaluation": ["yes", 1],
    "logged_keys": ["all", None],
}
MAKERS: list[tuple[Callable[..., object], dict[str, list[Any]]]] = [
    (lambda **options: BucketDDP(Mlp(), **options), BAD),
    (BucketDDPFabricStrategy, STRATEGIES),
    (BucketDDPStrategy, TRAINER),
    (partial(PreemptionCheckpoint, "here"), {"patience": [0, "long"]}),
]


def refused(option: str, value: object) -> Any:
    return pytest.raises((TypeError, ValueError), match=rf"(?s)^expected {option} .*found {re.escape(repr(value))}")


@on_ranks(1, cases=MAKERS)
def test_bad_values_are_refused_where_they_are_given(maker: Callable[..., Any], options: dict[str, list[Any]]) -> None:
    for option, values in options.items():
        for value in values:
            with refused(option, value):
                maker(**{option: value})


@on_ranks(1)
def test_modules_and_optimizer_classes_are_required() -> None:
    with refused("module", "x"):
        BucketDDP("x")  # type: ignore[arg-type]
    with refused("kind", "x"):
        declare_element_wise("x")  # type: ignore[arg-type]


def test_a_switch_takes_no_number_and_no_word() -> None:
    switches = [each.name for each in fields(Options) if isinstance(each.default, bool)]
    assert len(switches) == 14
    for option in [*switches, "broadcast_buffers", "forward_sync_buffers", "master_params"]:
        for value in (1, "true"):
            with refused(option, value):
                Options(**{option: value})
