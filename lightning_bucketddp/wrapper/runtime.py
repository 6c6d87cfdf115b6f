"""The part of a wrapper that belongs to one process. A copy of a wrapper makes its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.comm.devices import is_accelerator, wait_for_device, widest_float
from lightning_bucketddp.comm.gloo import collectives_of, end_subgroups_with
from lightning_bucketddp.comm.groups import Group
from lightning_bucketddp.comm.hooks import choose_hook
from lightning_bucketddp.comm.shard_groups import require_divides
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.optim.lazy_all_gather import reads_past_python
from lightning_bucketddp.optim.optimizers import Optimizers
from lightning_bucketddp.optim.swap import restart_masters
from lightning_bucketddp.peers.agreement import Entry, WrapError
from lightning_bucketddp.peers.end_signals import end_signals
from lightning_bucketddp.peers.machines import Node, nodes_of
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.ranks import Ranks
from lightning_bucketddp.reducer.context import WrapperContext
from lightning_bucketddp.reducer.passes import Passes
from lightning_bucketddp.replicas.nested import tensors_in
from lightning_bucketddp.wrapper.compiled import bytes_per_graph, frames_are_compiled
from lightning_bucketddp.wrapper.join import UnevenInputs
from lightning_bucketddp.wrapper.module_buffers import ModuleBuffers
from lightning_bucketddp.wrapper.module_params import ModuleParams
from lightning_bucketddp.wrapper.sync_batchnorm import links_of
from lightning_bucketddp.wrapper.validation import named_parameters, require_no_sync_batchnorm

_AGREED = "parameters, module buffers and options"


class Runtime:
    """A wrapper's process group, passes and hooks. All ranks make it at the same point of the program.

    Args:
        module: The module.
        options: The wrapper's options.
        take_over: Takes the ids of parameters, and closes the open wrappers that average gradients of some of them.
        node: This rank's node, where whoever made the ranks says that there are several nodes.
        in_training: Whether backwards are passes now.

    Attributes:
        collectives: The collectives of the group.
        ranks: Its ranks.
        params: The module's parameters and module buffers.
        passes: Opens and ends passes.
        module_buffers: Synchronises module buffers.
        uneven: Keeps ranks with and without data in step.
        optimizers: Prepares optimizers for masters and shards.
        bytes_per_graph: How many bytes of parameters a compiled graph has; None to leave graphs whole.
    """

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        take_over: Callable[[set[int]], None],
        node: Node | None,
        in_training: Callable[[], bool],
    ) -> None:
        group, device = group_of(options.process_group, options.device_mesh), next(module.parameters()).device
        self.collectives = collectives = collectives_of(group, device)
        peers = Peers(collectives, options.timeout, options.report_after)
        self.ranks = ranks = Ranks(collectives, peers)
        self.params = params = ModuleParams(module, options)
        release = ExitStack()  # calls the last callback first
        release.callback(params.restore_grad_dtypes)
        with _agreeing(_AGREED, peers) as entries:
            require_divides(options.shard_group_size, collectives)
            if "oom" in options.skip_step_on:
                require_no_sync_batchnorm(module, "skip_step_on that has 'oom'", "ran out of memory")
            collectives.require_nothing_left_behind()
            hook = choose_hook(options, collectives)
            take_over({id(param) for _, param in params.named if param.requires_grad})
            params.prepare()
            described = hook.options() if hook is not None else {"comm_hook": None}
            entries += [Entry(f"option {name}", repr(value)) for name, value in described.items()]
            entries += params.entries()
        with ranks.waiting_for("whether the backend averages"):
            collectives.probe(device)
        what = "the parameters and module buffers of rank 0"
        with ranks.waiting_for(what):
            if options.init_sync:
                buffers = params.named_buffers().values() if options.init_sync_module_buffers else ()
                ranks.broadcast([*(param for _, param in params.named), *buffers], what)
            wait_for_device(device)  # NCCL splits a communicator for a part only when nothing is under way in it
        nodes = nodes_of(collectives, peers, node)
        links = links_of(module)
        with ranks.waiting_for("the process groups of this wrapper"):
            context = WrapperContext(params, ranks, options, nodes)
        self.passes = Passes(context, hook, links, in_training)
        for link in links:
            link.join(peers, self.passes.joining.counts)
            release.callback(link.leave)
        release.callback(self.passes.wrapped.close)
        self.module_buffers = ModuleBuffers(params, ranks, options)
        self.uneven = UnevenInputs(params, self.passes, self.module_buffers, ranks, options)
        self.optimizers = Optimizers(module, params.optimizers, self.passes, ranks, options)
        reducer = self.passes.reducer
        largest = reducer.planner.largest_bucket(reducer.storage.layout.nbytes)
        self.bytes_per_graph = bytes_per_graph(options, largest)
        for handle in self.optimizers.follow_steps():
            release.callback(handle.remove)
        self._leaf_hooks: list[RemovableHandle] = []
        release.callback(_remove, self._leaf_hooks)
        self._release = weakref.finalize(self, release.close)  # a wrapper that is dropped leaves nothing behind
        self._release.atexit = False
        end_subgroups_with(self, collectives)
        self._device = device

    def close(self) -> None:
        """Give the module back. Sends nothing.

        An accelerator has finished by then: streams of the user's may still read memory that is freed here.
        """
        if self.passes.peers.failure is None:  # else it may wait for ranks that do not come
            wait_for_device(self._device)
        self._release()
        self.optimizers.close()
        groups = self.passes.wrapped.context.groups
        # In parts the whole state of optimizers is still gathered, if shards are divided among some ranks.
        if (groups is None or groups.across is None) and self.passes.peers.failure is None:
            self.collectives.end_subgroups()
        end_signals.release()

    def require_right(self) -> None:
        """Require that an accelerator has trained with values of all ranks: before anything is saved, and at the end.

        The host runs ahead of the device, and so of a rank that has failed since. It waits for the device here, and
        reads what that tells late.

        Raises:
            PeerFailureError, RankMismatchError: If a rank failed, or ranks met in different passes.
        """
        if is_accelerator(self._device):
            wait_for_device(self._device)
            self.passes.peers.require_usable()
            self.passes.wrapped.context.control.read_what_arrived()

    def forward_begins(self, wrapper: Joinable, trains: bool, replicated: bool) -> None:
        """Wait for parameters, meet the other ranks inside ``join``, and synchronise module buffers if that is due.

        Args:
            wrapper: The wrapper whose forward it is.
            trains: Whether its gradients are enabled and averaged.
            replicated: Whether several threads run the module.
        """
        parts = self.optimizers.parts
        if parts.gathering and (replicated or frames_are_compiled() or reads_past_python(self.params.module)):
            parts.wait()  # else forward would use parameters without waiting, or wait in several threads at once
        joining = wrapper._join_config.enable and self.passes.joining.uneven
        if joining:
            self.uneven.meet(wrapper, trains)
        if not trains:
            return
        self.optimizers.restore()
        self.passes.wrapped.require_usable()
        self.passes.note_forward()
        if self.module_buffers.due and not joining:
            self.module_buffers.synchronise(self.uneven.active)
        self.module_buffers.forward_begins(self.passes.synchronise)

    def hook_roots(self, output: object) -> None:
        """Let the reducer know when backward reaches one of the output's tensors."""
        if self._leaf_hooks:
            _remove(self._leaf_hooks)
        on_root = partial(self.passes.on_root, self.passes.reduces)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                hook = tensor.register_hook(on_root)
                if tensor.is_leaf:  # lives on after this pass, unlike a tensor with a graph
                    self._leaf_hooks.append(hook)

    def broadcast_params(self) -> None:
        """Give every rank the parameters of the group's rank 0."""
        self.passes.wrapped.require_usable()
        params = [param for _, param in named_parameters(self.params.module)]
        self.ranks.broadcast(params, "the parameters")
        restart_masters(params)

    @torch.no_grad()
    def average_loss(self, loss: Tensor | float | None, device: torch.device) -> Tensor | None:
        """The loss as its gradients are averaged; None if no rank has one.

        Args:
            loss: This rank's; None if it has none.
            device: The device of the mean.
        """
        joining = self.passes.joining
        mine = torch.zeros(3, dtype=widest_float(device), device=device)
        by_samples = (weight := self.passes.wrapped.context.divisor.weight) is not None
        weight = int(joining.counts()) if weight is None else weight
        mine[1], mine[2] = int(loss is not None), weight
        if loss is not None and weight:
            mine[0] = weight * (loss.detach().reshape(()) if isinstance(loss, Tensor) else loss)
        self.ranks.mean(mine, "the mean of the losses")
        if loss is None and not mine[1]:
            return None
        mean = mine[0] / mine[2] if joining.divides_by_active or by_samples else mine[0]
        if isinstance(loss, Tensor) and loss.is_floating_point():
            return mean.to(loss.dtype)
        return mean.to(torch.get_default_dtype())


def _remove(hooks: list[RemovableHandle]) -> None:
    while hooks:
        hooks.pop().remove()


def without_group(options: Options, runtime: Runtime | None) -> Options:
    """The options for a copy or a pickle. Its group is the default one of the process that loads it.

    Raises:
        RuntimeError: If the wrapper, or its communication hook, has another group.
    """
    state = options.comm_hook_state
    in_state = isinstance(state, dist.ProcessGroup)
    if (runtime is not None and not runtime.collectives.is_default()) or (in_state and state is not dist.group.WORLD):
        raise RuntimeError(
            "expected the default process group where a BucketDDP is copied or pickled, found another one; copy or "
            "pickle its module, and wrap that"
        )
    # torch's hooks take None for the default group.
    return replace(options, process_group=None, device_mesh=None, comm_hook_state=None if in_state else state)


def refuse(given: Mapping[str, Any], problem: Exception) -> NoReturn:
    """Tell the other ranks of an error that this rank found before it made a :class:`Runtime`, and raise the error."""
    timeout = given.get("timeout")  # may be the problem, as the group may
    in_time = isinstance(timeout, timedelta) and timeout > timedelta(0)
    with suppress(Exception):
        group = group_of(given.get("process_group"), given.get("device_mesh"))
        Peers(Group(group), timeout if in_time else None).require_same(_AGREED, [], problem)
    raise problem


def require_fit_group(process_group: dist.ProcessGroup | None, timeout: timedelta | None) -> None:
    """Require, on all ranks alike, a group in which no collective of a failed pass is under way.

    For callers that use the group before they wrap: their collectives would be paired with those.

    Raises:
        RuntimeError: On a rank that left collectives behind.
        PeerFailureError: On the other ranks.
    """
    group = Group(process_group)
    with _agreeing("the process group", Peers(group, timeout)):
        group.require_nothing_left_behind()


def group_of(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks that train together, given as a group or as a mesh; None for all.

    Raises:
        WrapError: If both were given, or the mesh has several dimensions.
    """
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise WrapError("expected a process_group or a device_mesh, found both; leave one of them out")
    if device_mesh.ndim != 1:
        raise WrapError(
            f'expected a device mesh of one dimension, found {device_mesh}; pass one of its dimensions, as mesh["dp"]'
        )
    return device_mesh.get_group()


@contextmanager
def _agreeing(topic: str, peers: Peers) -> Iterator[list[Entry]]:
    """Require that all ranks list the same entries inside. An error inside is raised when the others know of it."""
    entries: list[Entry] = []
    problem: Exception | None = None
    try:
        yield entries
    except (TypeError, ValueError, RuntimeError) as error:
        problem = error
    peers.require_same(topic, entries, problem)
