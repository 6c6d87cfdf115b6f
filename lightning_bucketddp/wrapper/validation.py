"""What a module must be to be wrapped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lightning_bucketddp.grads.hooks import is_reducers_own
from lightning_bucketddp.peers.agreement import WrapError
from lightning_bucketddp.wrapper.sync_batchnorm import SyncBatchNorm


def names_to_ignore(module: nn.Module) -> frozenset[str]:
    """Names of parameters and module buffers that the module asks data-parallel wrappers to leave alone.

    The attribute is torch's: ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` sets it.
    """
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Each parameter once, under the first of its names that is not to be ignored, in registration order."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    ignored = names_to_ignore(module)
    for name, param in module.named_parameters(remove_duplicate=False):
        if name not in ignored:
            found.setdefault(id(param), (name, param))
    return list(found.values())


def require_valid_parameters(module: nn.Module, may_be_frozen: bool = False) -> None:
    """Requires that the module can be wrapped.

    Args:
        module: The module.
        may_be_frozen: Whether all of them may be frozen.

    Raises:
        WrapError: If not; names the parameter or module.
    """
    params = named_parameters(module)
    if not any(param.requires_grad or may_be_frozen for _, param in params):
        raise WrapError(
            "expected at least one parameter that requires grad, found none; there is nothing to average. Use the "
            "module as it is"
        )
    for name, param in params:
        if nn.parameter.is_lazy(param):
            raise WrapError(f"parameter {name!r} is uninitialised; run a forward pass before wrapping a lazy module")
        if hasattr(param, "placements"):  # a DTensor: its gradient is one too
            raise WrapError(
                f"parameter {name!r} is a DTensor, sharded or replicated over a mesh of its own; only plain "
                "tensors are supported"
            )
        # Private, like everything that tells of such hooks; without it they go unnoticed. A test notices.
        hooks = (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
        if not all(is_reducers_own(hook) for hook in hooks):  # of a wrapper in which it is frozen too
            raise WrapError(
                f"parameter {name!r} has a post-accumulate-grad hook: it would run before the gradient is averaged, "
                "and an optimizer that steps there lets the ranks drift apart. Remove it; step and look at averaged "
                "gradients after backward(), in a LightningModule in on_after_backward"
            )
        # Private too: torch.distributed.optim._apply_optimizer_in_backward leaves it behind. A test notices.
        if getattr(param, "_in_backward_optimizers", None):
            raise WrapError(
                f"parameter {name!r} has an optimizer that steps during backward "
                "(torch.distributed.optim._apply_optimizer_in_backward): it steps before the gradient is averaged, "
                "and lets the ranks drift apart. Use an ordinary optimizer, and step after backward()"
            )
    types = sorted({param.device.type for _, param in params})
    if len(types) > 1 or types == ["meta"]:
        raise WrapError(f"expected parameters on one type of device that holds values, found {types}")
    for name, owner in module.named_modules():
        if isinstance(owner, nn.SyncBatchNorm) and not isinstance(owner, SyncBatchNorm) and types == ["cpu"]:
            raise WrapError(
                f"module {name!r} is torch's SyncBatchNorm, which works on accelerators only (torch "
                f"{torch.__version__}), and the parameters are on the CPU; convert it with lightning_bucketddp's "
                "convert_sync_batchnorm(), whose layers work there too"
            )


def input_device(
    module: nn.Module, device_ids: Sequence[int | str | torch.device] | None, output_device: object
) -> torch.device | None:
    """The device to which a forward moves its arguments, as torch DDP's ``device_ids=[i]`` asks for.

    Returns:
        None if no device was named.

    Raises:
        ValueError: If the choice does not fit the parameters.
    """
    if not device_ids and output_device is None:
        return None
    params = named_parameters(module)
    devices = sorted({str(param.device) for _, param in params})
    if devices == ["cpu"] or len(devices) > 1:
        raise ValueError(
            f"expected no device_ids and no output_device for a module on the CPU or on several devices, found "
            f"device_ids={device_ids}, output_device={output_device} and parameters on {devices}"
        )
    if device_ids is None or len(device_ids) != 1:
        raise ValueError(
            f"expected device_ids to be None or to name the one device that holds the parameters, found {device_ids}"
        )
    own = params[0][1].device
    device = torch.device(own.type, device_ids[0]) if isinstance(device_ids[0], int) else torch.device(device_ids[0])
    if device != own:
        raise ValueError(f"expected device_ids to name the device of the parameters, {own}, found {device}")
    return device
