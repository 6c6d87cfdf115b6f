"""Names without a prefix: the wrapper's parameters and state have the names that they have in the module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def members_of(module: nn.Module) -> set[str]:
    """The names of a module's own submodules, parameters and module buffers."""
    # keys(): what scripted modules have instead of dictionaries cannot be iterated over
    return {*module._modules.keys(), *module._parameters.keys(), *module._buffers.keys()}


def without_prefix(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Remove the prefix ``module.`` if all keys have it, as in one of torch DDP's, and none is the module's own."""
    prefix = "module."
    has_own = hasattr(module, "module") and state_dict.keys() & module.state_dict().keys()
    if all(key.startswith(prefix) for key in state_dict) and not has_own:
        return {key.removeprefix(prefix): value for key, value in state_dict.items()}
    return state_dict


def add_own_name(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Insert ``module.`` into a wrapper's keys; a hook that runs before a module around the wrapper loads them."""
    own = f"{prefix}module."
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if not key.startswith(own) or hasattr(wrapper.module, "module"):
            state_dict[own + key.removeprefix(prefix)] = state_dict.pop(key)
