"""A simulated accelerator, ``torch.device("sim")``, and tests on it; see ``docs/simulated-accelerator.md``."""
