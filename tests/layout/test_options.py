"""Options that name dtypes and parameters."""

import pytest
import torch

from lightning_bucketddp import Options


def test_gradient_dtypes_may_depend_on_the_name() -> None:
    options = Options(grad_dtype={"*.low.*": "fp32", "*": torch.bfloat16})
    assert options.master_params
    assert options.grad_dtype_of("net.low.weight", torch.bfloat16) is torch.float32
    assert options.grad_dtype_of("net.high.weight", torch.bfloat16) is torch.bfloat16
    assert options.grad_dtype_of("net.low.index", torch.int64) is torch.int64
    assert Options(grad_dtype="fp32").grad_dtype_of("weight", torch.float64) is torch.float64
    with pytest.raises(ValueError, match=r"'high', which is torch.float32; found torch.bfloat16 for the pattern '\*'"):
        options.grad_dtype_of("high", torch.float32)
    options.require_patterns_match(["net.low.weight"])
    with pytest.raises(ValueError, match=r"found '\*\.low\.\*': no match"):
        options.require_patterns_match(["net.high.weight"])


def test_spellings_agree_or_are_refused() -> None:
    assert Options(broadcast_buffers=False).module_buffers == "off"
    assert Options(forward_sync_buffers=False, module_buffers="off").init_sync_module_buffers
    assert not Options(broadcast_buffers=False).init_sync_module_buffers
    assert Options(accumulate_allreduce_grads_in_fp32=True) == Options(grad_dtype=torch.float32)
    assert Options(broadcast_buffers=True, wire_dtype="bf16") == Options(wire_dtype=torch.bfloat16)
    for options, words in [
        ({"broadcast_buffers": False, "module_buffers": "mean"}, "module_buffers='mean' and broadcast_buffers=False"),
        ({"accumulate_allreduce_grads_in_fp32": True, "grad_dtype": "fp64"}, "=True and grad_dtype=torch.float64"),
        ({"use_contiguous_buffers": False, "grad_dtype": "fp32"}, "cannot be combined with use_contiguous_buffers"),
        ({"master_params": True}, "give grad_dtype=torch.float32"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            Options(**options)
