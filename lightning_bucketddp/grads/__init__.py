"""Gradient memory: slots, buffers and views, buckets, sparse gradients, hooks on autograd and its engine."""
