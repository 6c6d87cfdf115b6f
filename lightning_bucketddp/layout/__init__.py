"""Where gradients lie: options, buckets, shards, checkpoint chunks. Arithmetic on frozen values."""
