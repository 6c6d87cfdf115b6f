"""Collectives: the only callers of ``torch.distributed``'s collectives, shard groups, communication hooks."""
