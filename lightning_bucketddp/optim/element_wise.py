"""Which optimizers may be sharded: those that update each element by itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import optim
from torch.optim import Optimizer

from lightning_bucketddp.layout.require import require

_ADAMS: frozenset[type] = frozenset({optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax})
_TORCHS: frozenset[type] = _ADAMS | {optim.SGD, optim.ASGD, optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop}
"""Element-wise, and steps are counted by parameter."""

_ELEMENT_WISE: set[type] = set(_TORCHS)
_KNOWN = frozenset(
    f"{package}.{kind}"
    for package, kinds in {
        "lion_pytorch": "foreach.Lion lion_pytorch.Lion",
        "timm.optim": "adamw.AdamWLegacy adopt.Adopt lion.Lion nadamw.NAdamW sgdw.SGDW",
        "torch_optimizer": "adabelief.AdaBelief adabound.AdaBound adamod.AdaMod diffgrad.DiffGrad qhadam.QHAdam "
        "sgdw.SGDW yogi.Yogi",
    }.items()
    for kind in kinds.split()
)
"""Element-wise optimizers of other packages, which need not be installed."""

_NOT_ELEMENT_WISE: dict[str, str] = {
    "LBFGS": "its directions are products of the whole gradient with earlier ones",
    "Adafactor": "it keeps sums over rows and columns of each parameter",
    "Muon": "it orthogonalises each parameter's matrix",
    "Shampoo": "it multiplies by matrices of each parameter's rows and columns",
    "SOAP": "it multiplies by matrices of each parameter's rows and columns",
    "LAMB": "it scales by the norm of each parameter",
    "LARS": "it scales by the norm of each parameter",
    "NovoGrad": "it divides by the norm of each parameter's gradient",
    "SparseAdam": "it is for sparse gradients, which are not sharded",
    "Prodigy": "it estimates a step size from products over all parameters",
    "DAdaptAdam": "it estimates a step size from products over all parameters",
}


def plain_step(optimizer: Optimizer) -> Callable[[Optimizer], object] | None:
    """The optimizer's ``step`` without hooks; None if a step on some parameters, and then on others, may not be one."""
    hooked = type(optimizer).step
    step: Callable[[Optimizer], object] | None = getattr(hooked, "__wrapped__", None)  # functools' name for it
    return step if type(optimizer) in _TORCHS and getattr(hooked, "hooked", False) else None


def declare_element_wise(kind: type[Optimizer]) -> type[Optimizer]:
    """Say that an optimizer class may be sharded; usable as a decorator.

    That is so if what happens to an element of a parameter depends on that element, its gradient and its state alone,
    and state is made in ``step``, of the parameter's shape or of one element. No other method may touch parameters
    together with their state.

    Args:
        kind: The class itself; subclasses are not included.

    Raises:
        TypeError: If it is no class of optimizers.
    """
    require("kind", kind, "a class of torch.optim.Optimizer", type(Optimizer))
    _ELEMENT_WISE.add(kind)
    return kind


def require_optimizer(optimizer: object) -> None:
    """Require that something is an optimizer itself: a wrapper around one has no hooks and state of its own.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}; pass the optimizer that it wraps"
        )


def require_element_wise(optimizer: Optimizer) -> None:
    """Require that an optimizer can work on parts of parameters.

    Raises:
        TypeError: If it is no torch optimizer, but a wrapper around one.
        ValueError: If it looks at more than one element at a time, if it is not known whether it does, or if it changes
            parameters outside of ``step``.
    """
    require_optimizer(optimizer)
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    problem = _why_not(optimizer, name)
    if problem is not None:
        raise ValueError(
            "expected an element-wise optimizer that changes parameters in step() alone with shard_optimizer=True, "
            f"found {problem}: each rank would see a part only. Use shard_optimizer=False with it"
        )
    if kind not in _ELEMENT_WISE and name not in _KNOWN:
        raise ValueError(
            f"expected an optimizer known to be element-wise with shard_optimizer=True, found {name}. If what it does "
            "to an element depends on that element, its gradient and its state alone, say so: "
            "lightning_bucketddp.declare_element_wise(its class)"
        )


def _why_not(optimizer: Optimizer, name: str) -> str | None:
    """Why an optimizer cannot be sharded, as far as is known."""
    kind = type(optimizer)
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        return f"{kind.__name__} with train() and eval(), as schedule-free ones have, which work on whole parameters"
    if any(group.get("caution") for group in optimizer.param_groups):  # timm's
        return f"{name} with caution=True: it takes a mean over each parameter"
    if kind in _ELEMENT_WISE or name in _KNOWN:
        return None
    found = next((base.__name__ for base in kind.__mro__ if base.__name__ in _NOT_ELEMENT_WISE), None)
    return None if found is None else f"{kind.__name__}: {_NOT_ELEMENT_WISE[found]}"
