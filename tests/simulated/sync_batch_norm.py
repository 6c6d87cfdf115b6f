"""The operators of torch's SyncBatchNorm, which only accelerators have, made of other operators."""

import torch
from torch import Tensor


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x.float(), _dims(x), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    count = counts.view(-1, 1).to(mean.dtype)
    total = count.sum()
    mean_of_all = (mean * count).sum(0) / total
    var = ((invstd.pow(-2) - eps + (mean - mean_of_all).square()) * count).sum(0) / total
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(mean_of_all * momentum)
        running_var.mul_(1 - momentum).add_(var * (total / (total - 1)) * momentum)
    return mean_of_all, (var + eps).rsqrt()


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    y = (x - _per_channel(mean, x)) * _per_channel(invstd, x)
    if weight is not None and bias is not None:
        y = y * _per_channel(weight, x) + _per_channel(bias, x)
    return y.to(x.dtype)


def batch_norm_backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    _input: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    sum_dy = grad.sum(_dims(x))
    sum_dy_xmu = (grad * (x - _per_channel(mean, x))).sum(_dims(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd if of_weight else None, sum_dy.clone() if of_bias else None


def batch_norm_backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum().to(mean.dtype)
    factor = invstd if weight is None else invstd * weight
    by_var = _per_channel(invstd.square() * sum_dy_xmu / total, x)
    centred = grad - _per_channel(sum_dy / total, x) - (x - _per_channel(mean, x)) * by_var
    return centred * _per_channel(factor, x)


def operators() -> torch.library.Library:
    """Register them for the device. They stay as long as what is returned."""
    library = torch.library.Library("aten", "IMPL")
    for function in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        library.impl(function.__name__, function, "PrivateUse1")
    return library
