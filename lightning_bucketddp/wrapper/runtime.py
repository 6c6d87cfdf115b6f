"""What a wrapper has in one process: made when a module is wrapped, and anew where a copy of the wrapper trains."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.comm.broadcast import broadcast_tensors
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.hooks import CommHook, choose_hook
from lightning_bucketddp.comm.shard_groups import require_divides
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.optim.optimizers import Optimizers
from lightning_bucketddp.optim.swap import restart_masters
from lightning_bucketddp.peers.agreement import Entry, WrapError
from lightning_bucketddp.peers.machines import on_one_machine
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.reducer.passes import Passes
from lightning_bucketddp.replicas.nested import tensors_in
from lightning_bucketddp.wrapper.compiled import graph_cuts
from lightning_bucketddp.wrapper.join import UnevenInputs
from lightning_bucketddp.wrapper.module_buffers import ModuleBuffers
from lightning_bucketddp.wrapper.module_params import ModuleParams
from lightning_bucketddp.wrapper.sync_batchnorm import links_of
from lightning_bucketddp.wrapper.validation import named_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_AGREED = "parameters, module buffers and options"


class Runtime:
    """What belongs to this process and its group. All ranks make it at the same point of the program.

    Args:
        module: The module.
        options: What was asked for.
        may_be_frozen: Whether all parameters may be frozen at first.
        take_over: Given the ids of parameters, closes the open wrappers that average gradients of some of them.

    Attributes:
        collectives: The group.
        params: The module's parameters.
        passes: What opens and ends passes, and averages gradients.
        module_buffers: What synchronises module buffers.
        uneven: What ranks with and without data tell each other.
        optimizers: What optimizers step on.
        graph_cuts: Where compiled graphs are cut; None to leave them whole.
    """

    def __init__(
        self, module: nn.Module, options: Options, may_be_frozen: bool, take_over: Callable[[set[int]], None]
    ) -> None:
        self.collectives = collectives = Collectives(group_of(options.process_group, options.device_mesh))
        peers = Peers(collectives, options.timeout)
        self.params = ModuleParams(module, may_be_frozen)
        hook = _agree(self.params, options, collectives, peers, take_over)
        collectives.probe(self.params.named[0][1].device)
        if options.init_sync:
            buffers = [buffer for name, buffer in module.named_buffers() if name not in self.params.ignored]
            params = [param for _, param in self.params.named]
            broadcast_tensors(params + (buffers if options.init_sync_module_buffers else []), collectives)
        one_machine = options.bucket_cap_mb is None and on_one_machine(peers)
        links = links_of(module)
        self.passes = Passes(self.params, collectives, peers, options, hook, one_machine, links)
        for link in links:
            link.join(peers, self.passes.joining.counts)
        self.module_buffers = ModuleBuffers(self.params, collectives, peers, options)
        self.uneven = UnevenInputs(module, self.passes, self.module_buffers, collectives, options)
        self.optimizers = Optimizers(module, self.params.optimizers, self.passes, collectives, options)
        self.graph_cuts = graph_cuts(options, self.passes.reducer.storage.layout, collectives.world_size, one_machine)
        self._leaf_hooks: list[RemovableHandle] = []
        release = ExitStack()  # the last one comes first
        release.callback(_remove_hooks, self._leaf_hooks)
        if (handle := self.optimizers.prepare_at_first_step()) is not None:
            release.callback(handle.remove)
        release.callback(self.params.restore_grad_dtypes)
        for link in links:
            release.callback(link.leave)
        release.callback(self.passes.upkeep.close)
        self._release = weakref.finalize(self, release.close)  # a wrapper that is dropped leaves nothing behind
        self._release.atexit = False

    def close(self) -> None:
        """Give the module back. Sends nothing."""
        self._release()
        self.optimizers.close()

    def hook_roots(self, output: object) -> None:
        """Let the reducer know when backward comes by one of the output's tensors."""
        _remove_hooks(self._leaf_hooks)
        on_root = partial(self.passes.on_root, self.passes.reduces)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                hook = tensor.register_hook(on_root)
                if tensor.is_leaf:  # lives on after this pass, unlike a tensor with a graph
                    self._leaf_hooks.append(hook)

    def broadcast_params(self) -> None:
        """Give every rank the group's rank 0's parameters."""
        self.passes.require_usable()
        params = [param for _, param in named_parameters(self.params.module)]
        with self.passes.peers.waiting_for("the parameters"):
            broadcast_tensors(params, self.collectives, self.passes.peers.poll)
        restart_masters(params)

    @torch.no_grad()
    def average_loss(self, loss: Tensor | float | None, device: torch.device) -> Tensor | None:
        """The loss as its gradients are averaged; None if no rank has one.

        Args:
            loss: This rank's; None if it has none.
            device: Where the mean is to be.
        """
        counts = self.passes.joining.counts()
        mine = torch.zeros(3, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        if loss is not None:
            mine[1] = 1
            if counts:
                mine[0] = loss.detach().reshape(()) if isinstance(loss, Tensor) else loss
        mine[2] = int(counts)
        with self.passes.peers.waiting_for("the mean of the losses"):
            self.collectives.all_reduce_mean(mine).wait(self.passes.peers.poll)
        if loss is None and not mine[1]:
            return None
        mean = mine[0] / mine[2] if self.passes.joining.divides_by_active else mine[0]
        if isinstance(loss, Tensor) and loss.is_floating_point():
            return mean.to(loss.dtype)
        return mean.to(torch.get_default_dtype())


def without_group(options: Options, runtime: Runtime | None) -> Options:
    """The options for a copy or a pickle, whose group is the default one of the process that loads it.

    Raises:
        RuntimeError: If the group is another one.
    """
    state = options.comm_hook_state
    in_state = isinstance(state, dist.ProcessGroup)
    if (runtime is not None and not runtime.collectives.is_default()) or (in_state and state is not dist.group.WORLD):
        raise RuntimeError(
            "expected the default process group where a BucketDDP is copied or pickled, found another one, which "
            "cannot be; copy or pickle its module, and wrap that"
        )
    # torch's hooks take None for the default group.
    return replace(options, process_group=None, device_mesh=None, comm_hook_state=None if in_state else state)


def refuse(process_group: dist.ProcessGroup | None, timeout: timedelta | None, problem: Exception) -> NoReturn:
    """Raise what is wrong on this rank before a :class:`Runtime` could be made, when the others have heard of it."""
    Peers(Collectives(process_group), timeout).require_same(_AGREED, [], problem)
    raise problem


def require_fit_group(process_group: dist.ProcessGroup | None, timeout: timedelta | None) -> None:
    """Requires, on all ranks alike, that no collectives of a failed pass are under way in the group.

    For callers that use the group themselves before they wrap: their collectives would be paired with those.

    Raises:
        RuntimeError: On a rank that left some.
        PeerFailureError: On the other ranks.
    """
    collectives = Collectives(process_group)
    problem: Exception | None = None
    try:
        collectives.require_nothing_left_behind()
    except RuntimeError as error:
        problem = error
    Peers(collectives, timeout).require_same("the process group", [], problem)


def group_of(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks that train together, whatever way they were given; None for all.

    Raises:
        WrapError: If both were given, or the mesh has several dimensions.
    """
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise WrapError("expected a process_group or a device_mesh, found both")
    if device_mesh.ndim != 1:
        raise WrapError(
            f"expected a device mesh of one dimension, found {device_mesh}; name the dimension to train over, as in "
            'mesh["dp"]'
        )
    return device_mesh.get_group()


def _agree(
    params: ModuleParams,
    options: Options,
    collectives: Collectives,
    peers: Peers,
    take_over: Callable[[set[int]], None],
) -> CommHook | None:
    """Have all ranks wrap the same module with the same options; a problem on one of them is raised on all.

    Returns:
        What reduces the buckets instead of an all-reduce.
    """
    hook: CommHook | None = None
    lines: list[Entry] = []
    problem: Exception | None = None
    try:
        require_divides(options.shard_group_size, collectives.world_size)
        collectives.require_nothing_left_behind()
        hook = choose_hook(options, collectives)
        take_over({id(param) for _, param in params.named if param.requires_grad})
        params.prepare(options)
        described = hook.options() if hook is not None else {"comm_hook": None}
        lines = [Entry(f"option {name}", repr(value)) for name, value in described.items()]
        lines += params.entries()
    except (TypeError, ValueError, RuntimeError) as error:
        problem = error  # the others must hear of it before it is raised
    peers.require_same(_AGREED, lines, problem)
    return hook


def _remove_hooks(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
