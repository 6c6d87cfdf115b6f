"""Checks of the module that is to be wrapped, and of the device that it is on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from lightning_bucketddp.peers.agreement import WrapError
from lightning_bucketddp.reducer.gradient_hooks import is_reducers_own
from lightning_bucketddp.replicas.module_copies import first_sync_batchnorm
from lightning_bucketddp.wrapper.sync_batchnorm import SyncBatchNorm


def names_to_ignore(module: nn.Module) -> frozenset[str]:
    """Names of parameters and module buffers that data-parallel wrappers are to leave alone.

    The attribute is torch's: ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` sets it.
    """
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Each parameter once, under the first of its names that is not ignored, in registration order."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    ignored = names_to_ignore(module)
    for name, param in module.named_parameters(remove_duplicate=False):
        if name not in ignored:
            found.setdefault(id(param), (name, param))
    return list(found.values())


def require_valid_parameters(module: nn.Module, may_be_frozen: bool = True) -> None:
    """Require that the module can be wrapped.

    Args:
        module: The module.
        may_be_frozen: Whether all parameters may be frozen.

    Raises:
        WrapError: If it cannot; names the parameter or module.
    """
    params = named_parameters(module)
    if not any(param.requires_grad or may_be_frozen for _, param in params):
        raise WrapError(
            "expected at least one parameter that requires grad, found none; use the module without a wrapper"
        )
    for name, param in params:
        _require_plain(name, param)
    types = sorted({param.device.type for _, param in params})
    if len(types) > 1 or types == ["meta"]:
        hint = "; to_empty() gives those on meta memory" if "meta" in types else ""
        raise WrapError(f"expected parameters on one type of device that holds values, found {types}{hint}")
    for name, owner in module.named_modules():
        if isinstance(owner, nn.SyncBatchNorm) and not isinstance(owner, SyncBatchNorm) and types == ["cpu"]:
            raise WrapError(
                f"expected no SyncBatchNorm of torch's on the CPU, found {name!r}: it works on accelerators only. "
                "Convert it with lightning_bucketddp.convert_sync_batchnorm()"
            )


def _require_plain(name: str, param: nn.Parameter) -> None:
    """Require a parameter that holds a plain tensor, and that nobody steps on during backward."""
    if nn.parameter.is_lazy(param):
        raise WrapError(f"parameter {name!r} is uninitialised; run a forward pass before wrapping a lazy module")
    if hasattr(param, "placements"):  # a DTensor's; its gradient is one too
        raise WrapError(f"parameter {name!r} is a DTensor; only plain tensors are supported")
    # Both attributes are private, as torch has no public ones. Without them the mistakes go unnoticed.
    hooks = (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
    if not all(is_reducers_own(hook) for hook in hooks):  # another wrapper's, in which it is frozen
        raise WrapError(
            f"parameter {name!r} has a post-accumulate-grad hook, which would run before the gradient is averaged. "
            "Remove it; step and look at gradients after backward(), in a LightningModule in on_after_backward()"
        )
    if getattr(param, "_in_backward_optimizers", None):
        raise WrapError(
            f"parameter {name!r} has an optimizer that steps during backward (torch's _apply_optimizer_in_backward), "
            "before the gradient is averaged. Use an ordinary optimizer, and step after backward()"
        )


def require_may_be_sent(what: str, tensor: Tensor) -> None:
    """Require a tensor whose elements can be sent as bytes.

    Args:
        what: The tensor in words, with its name.
        tensor: A parameter or module buffer.

    Raises:
        WrapError: If it cannot be sent.
    """
    kinds = {
        f"sparse ({tensor.layout})": tensor.layout is not torch.strided,
        f"quantised ({tensor.dtype})": tensor.is_quantized,
        "nested": tensor.is_nested,
        "on meta memory": tensor.is_meta,
    }
    for kind, found in kinds.items():
        if found:
            raise WrapError(
                f"expected a dense tensor of numbers, which rank 0 can send, found {what} {kind}. Keep a dense one and "
                "convert it in forward, or name it in the module's attribute _ddp_params_and_buffers_to_ignore: then "
                "each rank has its own"
            )


def require_distinct_elements(what: str, tensor: Tensor) -> None:
    """Require that no two elements share memory, as they do in an expanded tensor.

    Raises:
        WrapError: If they do.
    """
    if is_expanded(tensor):
        raise WrapError(
            f"expected a tensor whose elements have memory of their own, into which rank 0's values are copied, found "
            f"{what} expanded to shape {tuple(tensor.shape)}; register its clone()"
        )


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements of a dense tensor share memory along some dimension."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def require_own_memory(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Require that no trainable parameter shares memory with another tensor: sharded parameters move elsewhere.

    Args:
        tensors: The parameters and module buffers, by name.

    Raises:
        WrapError: If two of them overlap.
    """
    plain = [
        entry for entry in tensors if type(entry[1]) in (Tensor, nn.Parameter) and entry[1].layout is torch.strided
    ]
    for (first, one), (second, other) in pairwise(sorted(plain, key=lambda entry: entry[1].data_ptr())):
        if one.data_ptr() + one.nbytes > other.data_ptr() and (one.requires_grad or other.requires_grad):
            raise WrapError(
                f"expected tensors that share no memory, as shard_optimizer moves parameters, found {first!r} and "
                f"{second!r} in one place; make them one Parameter, or compute the buffer in forward"
            )


def require_no_sync_batchnorm(module: nn.Module, found: str, absent: str) -> None:
    """Require that no layer has collectives of its own, which a rank may miss.

    Args:
        module: The module.
        found: What was asked for, such as ``"uneven_inputs"``.
        absent: What a rank did that misses them, such as ``"ran out of memory"``.

    Raises:
        ValueError: If a ``SyncBatchNorm`` has.
    """
    if (name := first_sync_batchnorm(module)) is not None:
        raise ValueError(
            f"expected no SyncBatchNorm with {found}, found {name!r}: in its collectives the other ranks would wait "
            f"for one that {absent}. Leave one of the two out"
        )


def input_device(
    module: nn.Module, device_ids: Sequence[int | str | torch.device] | None, output_device: object
) -> torch.device | None:
    """The device to which forward moves its arguments, as torch DDP's ``device_ids=[i]`` asks for; None for nowhere.

    Raises:
        ValueError: If the choice does not fit the parameters.
    """
    if not device_ids and output_device is None:
        return None
    devices = {param.device for _, param in named_parameters(module)}
    own = next(iter(devices))
    named = [torch.device(own.type, each) if isinstance(each, int) else torch.device(each) for each in device_ids or ()]
    if len(devices) > 1 or own.type == "cpu" or named != [own]:
        raise ValueError(
            "expected no device_ids and no output_device, or device_ids with the one accelerator that the parameters "
            f"are on, found device_ids={device_ids}, output_device={output_device} and parameters on "
            f"{sorted(map(str, devices))}; leave both out, or name a device for each replica in this process, as "
            'device_ids=["cpu", "cpu"]'
        )
    return own
