"""The strategy's arguments: all reach the wrapper, and what cannot be honoured is refused before ranks start."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp import BucketDDP, BucketDDPStrategy, Options
from tests.inside import comm_hook_of

_EXPERIMENTAL = {
    "mixed_precision",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "bucket_cap_mb_list",
}
_LIGHTNINGS_OWN = {"module", "device_ids", "output_device", "dim"}
"""What Lightning passes itself, or fixes by having one device per process."""


def names(function: Any) -> set[str]:
    """Names of a function's arguments; those of ``**options`` too."""
    found = set(inspect.signature(function).parameters) - {"self", "kwargs"}
    return found - {"options"} | {each.name for each in fields(Options)} if "options" in found else found


def test_everything_that_ddp_accepts_is_an_argument() -> None:
    ours = names(BucketDDPStrategy.__init__)
    assert names(DDPStrategy.__init__) <= ours
    assert names(DistributedDataParallel.__init__) - _LIGHTNINGS_OWN - _EXPERIMENTAL <= ours
    assert (
        list(inspect.signature(BucketDDPStrategy).parameters)[:12]
        == list(inspect.signature(DDPStrategy).parameters)[:12]
    )


def test_every_argument_of_the_wrapper_is_an_option_with_its_default() -> None:
    defaults = {each.name: each.default for each in fields(Options)}
    here = dict(inspect.signature(BucketDDP).parameters)
    assert here.keys() - _LIGHTNINGS_OWN - {"options", "torch_options"} <= defaults.keys()
    for name in here.keys() & defaults.keys():
        assert here[name].default == defaults[name], name


def test_options_made_from_options_are_the_same() -> None:
    for given in [
        {"broadcast_buffers": False},
        {"forward_sync_buffers": False},
        {"module_buffers": "mean", "broadcast_buffers": True},
        {"accumulate_allreduce_grads_in_fp32": True},
        {"grad_dtype": {"a.*": "bf16"}, "master_params": False, "wire_dtype": "fp16", "sparse_parameters": ["a"]},
    ]:
        once = Options(**given)
        assert vars(Options(**vars(once))) == vars(once)
        assert vars(once) != vars(Options())


def wrapped(**options: Any) -> BucketDDP:
    strategy = BucketDDPStrategy(parallel_devices=[torch.device("cpu")], **options)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16()
    return strategy._setup_model(model)


def all_options_arrive() -> dict[str, str]:
    wrapper = wrapped(
        bucket_cap_mb=3,
        broadcast_buffers=True,
        init_sync=False,
        find_unused_parameters=True,
        grad_dtype={"0.*": "float32"},
        master_params=False,
        overlap=False,
        gradient_divide_by=3,
        max_abs_grad=2.0,
        pad_buckets_to=64,
        wire_dtype="bfloat16",
        shard_optimizer=True,
    )
    values = dict(wrapper._options.described())
    hooked = wrapped(comm_hook="bf16")
    assert comm_hook_of(hooked).name.endswith("bf16_compress_hook")
    hooked = wrapped(ddp_comm_hook=default_hooks.allreduce_hook, ddp_comm_wrapper=default_hooks.fp16_compress_wrapper)
    assert "fp16_compress_wrapper" in comm_hook_of(hooked).name
    return values


def test_options_arrive_in_the_wrapper(run_ranks: Any) -> None:
    values = run_ranks(1, all_options_arrive)[0]
    assert values["bucket_cap_mb"] == "3"
    assert values["grad_dtype"] == "{'0.*': torch.float32}"
    assert values["wire_dtype"] == "torch.bfloat16"
    assert values["gradient_divide_by"] == "3"
    assert values["shard_optimizer"] == "True"
    assert (values["overlap"], values["init_sync"], values["master_params"]) == ("False", "False", "False")
    assert (values["max_abs_grad"], values["pad_buckets_to"], values["find_unused_parameters"]) == ("2.0", "64", "True")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_cap_mb": -1}, "expected bucket_cap_mb to be None or a number of MiB from 0, found -1"),
        ({"bucket_cap_mb": "auto"}, "expected bucket_cap_mb to be None or a number of MiB from 0, found 'auto'"),
        ({"broadcast_buffers": True, "module_buffers": "off"}, "expected one choice for module buffers"),
        ({"grad_dtype": "float31"}, "expected grad_dtype to be None, one of bf16.*found 'float31'"),
        ({"grad_dtype": {"*": "int"}}, r"expected grad_dtype\['\*'\] to be .* bf16.*found 'int'"),
        ({"wire_dtype": "float32"}, "expected wire_dtype to be None or one of"),
        (
            {"comm_hook": "bf16", "ddp_comm_hook": default_hooks.allreduce_hook},
            "comm_hook or ddp_comm_hook, found both",
        ),
        ({"comm_hook": "bf16", "wire_dtype": "bfloat16"}, "expected either comm_hook or wire_dtype"),
        ({"ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}, "found None; to wrap a plain all-reduce"),
        ({"ddp_comm_state": 3}, "expected a communication hook for the given state"),
        ({"model_averaging_period": 4}, "together with a PostLocalSGDState"),
        ({"shard_optimizer": True, "use_contiguous_buffers": False}, "shard_optimizer=True divides contiguous buffers"),
        ({"uneven_inputs": "sometimes"}, "expected uneven_inputs to be None"),
        ({"uneven_inputs": "active_ranks", "gradient_divide_by": "tokens"}, "each says what gradients are divided by"),
    ],
)
def test_a_choice_that_cannot_be_honoured_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        BucketDDPStrategy(**options)


def averaging(**options: Any) -> BucketDDPStrategy:
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=2)
    return BucketDDPStrategy(ddp_comm_hook=post_localSGD_hook, ddp_comm_state=state, **options)


def test_model_averaging_needs_a_period_and_excludes_masters() -> None:
    averaging(model_averaging_period=2)
    with pytest.raises(ValueError, match="expected model_averaging_period together with"):
        averaging()
    with pytest.raises(ValueError, match="expected model averaging or shard_optimizer=True, found both"):
        averaging(model_averaging_period=2, shard_optimizer=True)
    with pytest.raises(ValueError, match="expected model averaging or master_params=True, found both"):
        averaging(model_averaging_period=2, grad_dtype="float32")


def test_arguments_that_nobody_knows_are_refused() -> None:
    with pytest.raises(TypeError, match="mixed_precision"):
        BucketDDPStrategy(mixed_precision=True)  # type: ignore[call-arg]
