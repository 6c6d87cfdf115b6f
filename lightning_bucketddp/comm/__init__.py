"""The only callers of ``torch.distributed``'s collectives.

``collectives``: those of one process group, as any backend has them. ``gloo``: better ways on gloo. ``work``: a
collective under way, and the stages of a reduction. ``lane``: who runs stages, on which stream or thread. ``wire``: how
what travels is packed. ``shard_groups``: shards within some of the ranks. ``hooks``: torch's communication hooks.
``broadcast``: many tensors at once. ``groups``: process groups. ``queue``: several wrappers on one group.
"""
