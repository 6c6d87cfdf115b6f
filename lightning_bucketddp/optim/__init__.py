"""Optimizer steps: masters, shards, the lazy all-gather, whole state, sharded checkpoints."""
