"""Lets ``import torch`` find the simulated accelerator where this folder is on ``PYTHONPATH`` (``torch.backends``)."""


def load() -> None:
    import tests.simulated.device  # noqa: F401
