"""The optimizers that may be sharded.

Element-wise ones update each element by itself: their shards are cut anywhere. Others update each parameter by itself,
as Muon does: their shards are cut between parameters.
"""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

from lightning_bucketddp.layout.require import require

_OF_TORCH: frozenset[type] = frozenset({
    optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.SGD, optim.ASGD, optim.Adagrad,
    optim.Adadelta, optim.RMSprop, optim.Rprop,
})  # fmt: skip
"""torch's element-wise optimizers."""

_WHOLE_OF_TORCH: frozenset[type] = frozenset({optim.Muon} if hasattr(optim, "Muon") else ())
"""torch's optimizers that update each parameter by itself, but not each element."""

_DECLARED: set[type] = set()
_DECLARED_WHOLE: set[type] = set()

_KNOWN = frozenset({
    "lion_pytorch.foreach.Lion", "lion_pytorch.lion_pytorch.Lion", "timm.optim.adamw.AdamWLegacy",
    "timm.optim.adopt.Adopt", "timm.optim.lion.Lion", "timm.optim.nadamw.NAdamW", "timm.optim.sgdw.SGDW",
    "torch_optimizer.adabelief.AdaBelief", "torch_optimizer.adabound.AdaBound", "torch_optimizer.adamod.AdaMod",
    "torch_optimizer.diffgrad.DiffGrad", "torch_optimizer.qhadam.QHAdam", "torch_optimizer.sgdw.SGDW",
    "torch_optimizer.yogi.Yogi",
})  # fmt: skip
"""Element-wise optimizers of other packages, which need not be installed."""

_ONE_DTYPE: frozenset[type] = frozenset({optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax})
"""torch's optimizers that refuse a gradient of another dtype than the parameter's. Fused ones do too."""

_NOT_ELEMENT_WISE: dict[str, str] = {
    "LBFGS": "its directions are products of the whole gradient with earlier ones",
    "Adafactor": "it keeps sums over rows and columns of each parameter",
    "Muon": "it orthogonalises each parameter's matrix",
    "NovoGrad": "it divides by the norm of each parameter's gradient",
    "SparseAdam": "it is for sparse gradients, which are not sharded",
    **dict.fromkeys(("Shampoo", "SOAP"), "it multiplies by matrices of each parameter's rows and columns"),
    **dict.fromkeys(("LAMB", "LARS"), "it scales by the norm of each parameter"),
    **dict.fromkeys(("Prodigy", "DAdaptAdam"), "it estimates a step size from products over all parameters"),
}


def needs_one_dtype(optimizer: Optimizer) -> bool:
    """Whether an optimizer of torch refuses a gradient of another dtype than the parameter's. False if in doubt."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return type(optimizer) in _ONE_DTYPE or (type(optimizer) in _OF_TORCH and fused)


def declare_element_wise(kind: type[Optimizer]) -> type[Optimizer]:
    """Declare that an optimizer class may be sharded; usable as a decorator.

    It may if the update of an element depends only on that element, its gradient and its state. ``step`` must create
    the state. Each entry of the state must have the parameter's shape or one element. No other method may touch
    parameters together with their state.

    Args:
        kind: The class itself; subclasses are not included.

    Raises:
        TypeError: If it is no class of optimizers.
    """
    require("kind", kind, "a class of torch.optim.Optimizer", type(Optimizer))
    _DECLARED.add(kind)
    return kind


def declare_whole_parameter(kind: type[Optimizer]) -> type[Optimizer]:
    """Declare that an optimizer class may be sharded if no parameter is divided; usable as a decorator.

    It may if the update of a parameter depends only on that parameter, its gradient and its state. ``step`` must create
    the state. Each entry of the state must have the parameter's shape or one element. ``torch.optim.Muon`` is known.

    Args:
        kind: The class itself; subclasses are not included.

    Raises:
        TypeError: If it is no class of optimizers.
    """
    require("kind", kind, "a class of torch.optim.Optimizer", type(Optimizer))
    _DECLARED_WHOLE.add(kind)
    return kind


def needs_whole_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer steps on shards that divide no parameter."""
    return type(optimizer) in _WHOLE_OF_TORCH | _DECLARED_WHOLE


def require_optimizer(optimizer: object) -> None:
    """Require a torch optimizer, not a wrapper around one, which has no hooks and no state.

    Raises:
        TypeError: If it is something else.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}; pass the optimizer that it wraps"
        )


def require_shardable(optimizer: Optimizer) -> None:
    """Require that an optimizer can step on shards.

    Raises:
        TypeError: If it is a wrapper around an optimizer.
        ValueError: If it is not known to be element-wise or to update each parameter by itself, or changes parameters
            outside of ``step``.
    """
    require_optimizer(optimizer)
    if needs_whole_parameters(optimizer):
        return
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    known = kind in _OF_TORCH or kind in _DECLARED or name in _KNOWN
    problem = next(
        (f"{kind.__name__}: {why}" for base in kind.__mro__ if (why := _NOT_ELEMENT_WISE.get(base.__name__))), ""
    )
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        problem = f"{kind.__name__}: its train() and eval() change whole parameters, as in schedule-free optimizers"
    elif any(group.get("caution") for group in optimizer.param_groups):  # timm's
        problem = f"{name} with caution=True: it takes a mean over each parameter"
    elif known:
        return
    if problem:
        raise ValueError(
            "expected an element-wise optimizer that changes parameters in step() alone with shard_optimizer=True, "
            f"found {problem}. Each rank would have only a part of each parameter. Use shard_optimizer=False with it. "
            "If it updates each parameter by itself, in step() alone: declare_whole_parameter(its class)"
        )
    raise ValueError(
        f"expected an optimizer known to be element-wise with shard_optimizer=True, found {name}. If its update of an "
        "element depends on that element, its gradient and its state alone, declare it: "
        "lightning_bucketddp.declare_element_wise(its class). If its update of a parameter depends on that parameter, "
        "its gradient and its state alone: declare_whole_parameter(its class)"
    )
