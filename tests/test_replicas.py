"""Replicas inside one process give one device's gradients on the full batch."""

import pytest
import torch
from torch import nn

from lightning_bucketddp.replicas import Replicas, gather, parallel_apply, scatter
from tests.models import MODELS, batch, build, loss_of

CPUS = ["cpu"] * 3
SAMPLE_WISE = sorted(set(MODELS) - {"conv_batchnorm_channels_last", "mixed_dtypes"})


def assert_same_grads(module: nn.Module, reference: nn.Module) -> None:
    for (name, param), expected in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(param.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", SAMPLE_WISE)
def test_gradients_are_those_of_one_device_on_the_full_batch(name: str, share: bool) -> None:
    module, reference = build(name).double(), build(name).double()
    replicas = Replicas(module, CPUS, share=share)
    for step in range(3):
        x, y = (tensor.double() for tensor in batch(step, 0, 7))
        parts = scatter(x, CPUS)
        outputs = parallel_apply(replicas.refresh(len(parts)), parts)
        assert len(outputs) == 3
        for model, output in ((module, gather(outputs, "cpu")), (reference, reference(x))):
            model.zero_grad()
            loss_of(output, y).backward()
        assert_same_grads(module, reference)
        with torch.no_grad():
            for param, expected in zip(module.parameters(), reference.parameters(), strict=True):
                param -= 0.1 * param.grad
                expected -= 0.1 * expected.grad
