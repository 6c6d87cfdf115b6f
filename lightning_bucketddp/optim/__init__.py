"""What an optimizer steps on: masters, shards, the lazy all-gather, whole state, sharded checkpoints."""
