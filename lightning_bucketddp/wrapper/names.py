"""Names without a prefix: a wrapper's parameters and state are called what they are called in its module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def members_of(module: nn.Module) -> set[str]:
    """The names of what a module holds itself, as they begin in its state dict."""
    return {*module._modules, *module._parameters, *module._buffers}


def without_prefix(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """A state dict for a module, whose names may all begin with ``module.``, as in one of torch DDP's."""
    prefix = "module."
    if state_dict and all(key.startswith(prefix) for key in state_dict) and not hasattr(module, "module"):
        return {key.removeprefix(prefix): value for key, value in state_dict.items()}
    return state_dict


def add_own_name(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Before a module that contains a wrapper loads: the wrapper's keys have no name of its own, as it saves them."""
    own = f"{prefix}module."
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if not key.startswith(own) or hasattr(wrapper.module, "module"):
            state_dict[own + key.removeprefix(prefix)] = state_dict.pop(key)
