"""The states of all random-number generators of a process."""

import random
from typing import Any

import numpy as np
import torch

from lightning_bucketddp.comm.devices import is_accelerator


def random_state(device: torch.device, set_to: list[Any] | None = None) -> list[Any]:
    """The state of all generators, of types that ``torch.load(weights_only=True)`` loads; sets it if one is given.

    Args:
        device: The device that trains. A state of another kind of device leaves its generator as it is.
        set_to: What this function returned, in an earlier run or in this one.
    """
    module: Any = torch.get_device_module(device) if is_accelerator(device) else torch
    if set_to is not None:
        setters: list[Any] = [random.setstate, np.random.set_state, torch.set_rng_state]
        *states, of_device = set_to
        for setter, state in zip(setters, states, strict=True):
            setter(state)
        if device.type in of_device:
            module.set_rng_state(of_device[device.type])
    numpy: Any = np.random.get_state()
    of_device = {device.type: module.get_rng_state()}
    return [random.getstate(), (numpy[0], numpy[1].tolist(), *numpy[2:]), torch.get_rng_state(), of_device]


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, those of devices excepted."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
