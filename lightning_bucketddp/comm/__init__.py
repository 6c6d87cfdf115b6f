"""The only callers of ``torch.distributed``'s collectives.

``work``: a collective under way, as a sequence of stages. ``collectives``: those of one process group. ``wire``: the
arithmetic around an all-to-all. ``shard_groups``: shards within some of the ranks. ``hooks``: torch's communication
hooks. ``broadcast``: many tensors at once. ``groups``: process groups. ``queue``: several wrappers on one group.
"""
