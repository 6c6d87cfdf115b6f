"""Where gradients lie: options, buckets, shards, checkpoint chunks, schedules. Arithmetic on frozen values."""
