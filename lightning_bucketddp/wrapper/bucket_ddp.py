"""``BucketDDP``: a module whose gradients are averaged over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.comm.broadcast import broadcast_tensors
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.hooks import CommHook, HookFunction, choose_hook
from lightning_bucketddp.comm.shard_groups import require_divides
from lightning_bucketddp.grads.sharded_runs import ShardedRuns
from lightning_bucketddp.layout.options import BucketCap, Options
from lightning_bucketddp.layout.plan import Layout, default_bucket_cap
from lightning_bucketddp.layout.require import require
from lightning_bucketddp.optim.lazy_all_gather import reads_past_python
from lightning_bucketddp.optim.masters import MasterParams, holders_of_masters, prepare_at_first_step
from lightning_bucketddp.optim.masters import master_params as masters_of
from lightning_bucketddp.optim.sharded_params import ShardedParams
from lightning_bucketddp.optim.sharding import Sharding
from lightning_bucketddp.peers.agreement import Entry, PeerFailureError, RankMismatchError, WrapError
from lightning_bucketddp.peers.machines import on_one_machine
from lightning_bucketddp.peers.peers import Peers
from lightning_bucketddp.peers.status import Phase
from lightning_bucketddp.reducer.record import PassRecord
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.forward import ReplicatedForward, replicated_forward, warn_of_replicas
from lightning_bucketddp.replicas.nested import move_to, tensors_in
from lightning_bucketddp.wrapper.compiled import GraphCuts, cutting_graphs, frames_are_compiled, leave_untraced
from lightning_bucketddp.wrapper.join import UnevenInputs, UnevenRanks
from lightning_bucketddp.wrapper.megatron import MegatronCalls
from lightning_bucketddp.wrapper.module_buffers import ModuleBuffers
from lightning_bucketddp.wrapper.module_params import ModuleParams
from lightning_bucketddp.wrapper.sharded_calls import ShardedCalls
from lightning_bucketddp.wrapper.sync_batchnorm import StatisticsLink, links_of
from lightning_bucketddp.wrapper.validation import input_device, require_valid_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

leave_untraced("lightning_bucketddp")

_open_wrappers: weakref.WeakSet[BucketDDP] = weakref.WeakSet()

_MADE_BY_START = frozenset(
    {
        "_collectives",
        "_reducer",
        "_module_buffers",
        "_params",
        "_uneven",
        "_preparing",
        "_graph_cuts",
        "_links",
        "_leaf_hooks",
        "_release",
        "_followed",
        "_module_buffers_due",
        "_sharding",
    }
)
"""Attributes that belong to this process, which a copy or a loaded pickle makes for itself."""


class BucketDDP(nn.Module, MegatronCalls, ShardedCalls, UnevenRanks):
    """Trains ``module`` data-parallel, with gradients in contiguous buffers that are averaged during backward.

    Takes the place of ``torch.nn.parallel.DistributedDataParallel``, whose arguments it accepts, and of Megatron-LM's
    contiguous-buffer DDP.

    After a synchronised backward ``param.grad`` is a view into a buffer and holds the mean over the ranks. It is
    valid until the next backward; clone it to keep it longer. A parameter that no rank used keeps the ``.grad`` it
    had (None stays None), without a flag.

    Args:
        module: The module; the same on every rank but for the values, which are taken from rank 0. Parameters and
            module buffers named in its attribute ``_ddp_params_and_buffers_to_ignore`` (torch's) are left alone.
        device_ids: None, or the one device that holds the parameters: arguments of ``forward`` are then moved there.
            None for modules on the CPU or on several devices. Several devices, the first of which holds the module, as
            in torch DDP of 2020: each ``forward`` divides its arguments between replicas of the module there, which
            run in threads, and joins what they return. Gradients are those of the same loss on one device; of module
            buffers the first replica's updates last. ``"cpu"`` or an accelerator may be named several times. For
            debuggers, notebooks and wherever no processes can be started: one process per device is faster.
        output_device: Where several devices' outputs are joined; the first of them if None. With one device outputs
            stay where the module puts them.
        dim: The dimension along which tensors are divided between several devices, and joined.
        broadcast_buffers: This argument and the seven that follow are options; they stand here for torch DDP's order.
        options: Every other field of :class:`Options`, which says what each of them means.

    Raises:
        TypeError: If the module is none, an option has a value of the wrong type, something in ``device_ids`` is no
            device, or a module that is compiled or scripted is to run on several.
        WrapError: If no parameter requires grad, or parameters are on several types of device, uninitialised or with
            post-accumulate-grad hooks. A ValueError and a RuntimeError, as torch DDP raises either.
        ValueError: If several devices are named and the module is not on the first or has a ``SyncBatchNorm``, if an
            option is out of range or contradicts another, or a name in ``sparse_parameters`` is unknown.
        GradientError: In backward, if a gradient is not what ``max_abs_grad`` asks for.
        PeerFailureError: If another rank raises one of these.
        RankMismatchError: If ranks disagree on parameters, module buffers or options; names the first difference.
        RuntimeError: If ``torch.distributed`` is not initialised, a rank stays silent for the whole timeout, or the
            group holds collectives of a pass that failed.
    """

    module: nn.Module
    _may_be_frozen = False
    """Whether all parameters may be frozen at first. A Trainer's may: callbacks unfreeze them."""
    _input_device: torch.device | None = None
    _replicated: ReplicatedForward | None = None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: BucketCap = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        UnevenRanks.__init__(self)
        self.module = module
        self.device_ids, self.output_device, self.dim = device_ids, output_device, dim
        self._closed = self._replaced = False
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.register_load_state_dict_pre_hook(_add_own_name)
        problem: Exception | None = None
        try:
            self._options = Options(
                broadcast_buffers=broadcast_buffers,
                init_sync=init_sync,
                process_group=process_group,
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=find_unused_parameters,
                check_reduction=check_reduction,
                gradient_as_bucket_view=gradient_as_bucket_view,
                static_graph=static_graph,
                **options,
            )
        except (TypeError, ValueError) as error:
            problem = error  # the others must hear of it before it is raised
        self._start(group_of(process_group, options.get("device_mesh")), problem)
        self.gradient_as_bucket_view = self._options.use_contiguous_buffers
        if self._replicated is not None:
            warn_of_replicas(len(self._replicated.devices), stacklevel=2)

    def _start(self, process_group: dist.ProcessGroup | None, problem: Exception | None = None) -> None:
        """Makes everything that belongs to this process and its group. All ranks must call this.

        Args:
            process_group: The group.
            problem: What is wrong with the options on this rank, for all ranks to hear.
        """
        module = self.module
        self._leaf_hooks: list[RemovableHandle] = []
        collectives = self._collectives = Collectives(process_group)
        peers = Peers(collectives, None if problem is not None else self._options.timeout)
        lines: list[Entry] = []
        hook: CommHook | None = None
        try:
            if problem is not None:
                raise problem
            require("module", module, "an nn.Module", nn.Module)
            params = self._params = ModuleParams(module, self._may_be_frozen)
            require_divides(self._options.shard_group_size, collectives.world_size)
            require_valid_parameters(module, params.named, self._may_be_frozen)
            replaced = _wrappers_that_train(params)
            self._replicated = replicated_forward(module, self.device_ids, self.output_device, self.dim)
            if self._replicated is None:
                self._input_device = input_device(params.named, self.device_ids, self.output_device)
            collectives.require_nothing_left_behind()
            hook = choose_hook(self._options, collectives)
            for wrapper in replaced:
                wrapper._give_way(inside=wrapper in set(module.modules()))
            params.prepare(self._options)
            described = hook.options() if hook is not None else {"comm_hook": None}
            lines = [Entry(f"option {name}", repr(value)) for name, value in described.items()]
            lines += params.entries()
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error  # the others must hear of it before it is raised
        peers.require_same("parameters, module buffers and options", lines, problem)
        options = self._options
        device = params.named[0][1].device
        collectives.probe(device)
        buffers = [buffer for name, buffer in module.named_buffers() if name not in params.ignored]
        if options.init_sync:
            tensors = [param for _, param in params.named] + (buffers if options.init_sync_module_buffers else [])
            broadcast_tensors(tensors, collectives)
        self._find_module_buffers()
        one_machine = options.bucket_cap_mb is None and on_one_machine(peers)
        self._reducer = Reducer(params, collectives, peers, options, hook, one_machine)
        if self._replicated is not None:
            self._replicated.groups = self._reducer.arriving_together
        self._links = links_of(module)
        for link in self._links:
            link.join(peers, self._reducer.counts)
        self._reducer.on_backward_end = partial(_end_backward, self._links)
        self._followed = params.changes
        self._preparing: list[RemovableHandle] = []
        self._sharding: Sharding | None = None
        if options.shard_optimizer:
            runs = self._reducer.runs
            assert isinstance(runs, ShardedRuns)
            self._sharding = Sharding(self._reducer.slots, runs, collectives, peers)
            self._preparing.append(_shard_at_first_step(self._sharding, bool(options.master_params)))
        elif options.master_params:
            self._preparing.append(prepare_at_first_step(partial(_trains, weakref.ref(self._reducer))))
        self._graph_cuts = _graph_cuts(options, self._reducer.layout, collectives.world_size, one_machine)
        self._uneven = UnevenInputs(collectives, device)
        self._module_buffers_due = True
        # A wrapper that is dropped leaves nothing behind.
        hooks = [self._leaf_hooks, self._preparing]
        self._release = weakref.finalize(self, _release, self._reducer, self._links, params, hooks)
        self._release.atexit = False
        _open_wrappers.add(self)

    # -- copies and pickles --------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        hook_state = self._options.comm_hook_state
        has_own_group = "_collectives" in self.__dict__ and not self._collectives.is_default()
        if has_own_group or (isinstance(hook_state, dist.ProcessGroup) and hook_state is not dist.group.WORLD):
            raise RuntimeError(
                "expected the default process group where a BucketDDP is copied or pickled, found another one, which "
                "cannot be; copy or pickle its module, and wrap that"
            )
        state = {name: value for name, value in self.__dict__.items() if name not in _MADE_BY_START}
        # The default group is that of the process which loads the copy; torch's hooks take it for None.
        hook_state = None if isinstance(hook_state, dist.ProcessGroup) else hook_state
        state["_options"] = replace(self._options, process_group=None, device_mesh=None, comm_hook_state=hook_state)
        if "_reducer" in self.__dict__:
            self._reducer.unbind_main_grads()  # each would take its whole buffer along
        return state

    def __getattr__(self, name: str) -> Any:
        # A copy, or one that was loaded from a pickle, starts when it is first used for training: on all ranks then,
        # which cannot be asked of copying and loading.
        if name in _MADE_BY_START and "_options" in self.__dict__ and "_reducer" not in self.__dict__:
            if self._closed:
                raise AttributeError(
                    "expected an open BucketDDP, found a copy of one after close(); wrap its module again"
                )
            self._start(None)
            return self.__dict__[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name not in _members_of(module):
                raise
            return getattr(module, name)  # names have no prefix: get_submodule() and get_parameter() go by them

    def __setattr__(self, name: str, value: Any) -> None:
        # `torch.func.functional_call` with names without a prefix sets the module's own parameters and buffers here.
        module = self.__dict__.get("_modules", {}).get("module") if isinstance(value, Tensor) else None
        for tensors in () if module is None else (module._parameters, module._buffers):
            if name in tensors:
                tensors[name] = value
                return
        super().__setattr__(name, value)

    # -- passes --------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        With gradients enabled, first synchronises module buffers, unless the last such forward was inside
        :meth:`no_sync`. That is torch DDP's rule, but for forwards without gradients: those neither send nor count.
        """
        if self._input_device is not None:
            args, kwargs = move_to(args, self._input_device), move_to(kwargs, self._input_device)
        self._wait_for_untraced()
        if torch.is_grad_enabled():
            self._require_current()
        trains = torch.is_grad_enabled() and not self._closed
        started = "_reducer" in self.__dict__
        if not started and not trains:
            return self._callee(*args, **kwargs)  # a copy that is only looked at, perhaps on this rank alone
        joining = started and self._meet_joined_ranks(trains)
        if not trains:
            return self._callee(*args, **kwargs)
        if self._sharding is not None:
            self._sharding.look_for_raised_steps()
        self._reducer.require_usable()
        self._reducer.note_forward()
        if self._followed != self._params.changes:
            self._follow_changes()
        if self._module_buffers_due and not joining:
            self.synchronise_module_buffers()
        self._module_buffers_due = self._reducer.synchronise
        with cutting_graphs(self._graph_cuts):
            output = self._callee(*args, **kwargs)
        if self._replicated is not None:
            self._reducer.in_one_replica = self._replicated.parts == 1
        self._hook_roots(output)
        return output

    def _follow_changes(self) -> None:
        """Look the module over again, as the last backward took in other parameters."""
        self._followed = self._params.changes
        self._find_module_buffers()
        if self._replicated is not None:
            self._replicated.forget()
            self._replicated.groups = self._reducer.arriving_together

    def _find_module_buffers(self) -> None:
        """Look up the module's buffers."""
        mode = self._options.module_buffers
        assert mode is not None, "one of its values since Options.__post_init__"
        self._module_buffers = ModuleBuffers(self.module, self._collectives, mode, self._params.ignored)

    @property
    def _callee(self) -> Callable[..., Any]:
        """What a forward calls."""
        return self._replicated or self.module

    def _wait_for_untraced(self) -> None:
        """Waits for all parameters where not every use of them can be noticed."""
        sharding = self.__dict__.get("_sharding")
        if sharding is None or not sharding.gathering:
            return
        if self._replicated is not None or frames_are_compiled() or reads_past_python(self.module):
            sharding.wait()  # threads must not wait for the same parameter at the same time

    def _hook_roots(self, output: object) -> None:
        """Lets the reducer know when backward comes by one of the output's tensors."""
        _remove_hooks(self._leaf_hooks)
        on_root = partial(self._reducer.on_root, self._reducer.reduces)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                hook = tensor.register_hook(on_root)
                if tensor.is_leaf:  # lives on after this pass, unlike a tensor with a graph
                    self._leaf_hooks.append(hook)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates gradients without reducing them; the next pass outside reduces the sum.

        As with torch DDP the forward decides: run it inside too. May be nested. With ``scatter_every_pass`` backward
        reduces all the same, and adds the result to what is there.
        """
        self._require_current()
        before = self._reducer.synchronise
        self._reducer.synchronise = False
        try:
            yield
        finally:
            self._reducer.synchronise = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """False inside :meth:`no_sync`; torch DDP's name."""
        return self._reducer.synchronise

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._reducer.synchronise = value

    def backward_pass(self, loss: Tensor) -> AbstractContextManager[None]:
        """A context for calling ``loss.backward()`` in, for code that owns the call.

        More robust than the bare call: a rank whose loss reaches no parameter takes part, and an exception is
        made known to the other ranks at once. ``no_sync`` decides here rather than in forward.

        Args:
            loss: The tensor that backward starts from, or comes by.

        Raises:
            PeerFailureError: On leaving, if another rank failed in this pass.
            RankMismatchError: On entering, if ranks disagree on which parameters are trainable.
        """
        return self._reducer.backward_pass(loss)

    def synchronise_module_buffers(self, active: Sequence[int] | None = None) -> None:
        """Makes module buffers the same on all ranks, which must call this at the same point of the program.

        Args:
            active: The ranks whose values count, if not all of them.
        """
        peers = self._reducer.peers
        peers.here.begin_exchange()
        with peers.waiting_for("the module buffers", Phase.EXCHANGE):
            active = self._uneven.active if active is None else active
            self._module_buffers.synchronise(peers.poll, active)

    def register_comm_hook(self, state: Any, hook: HookFunction) -> None:
        """Lets ``hook(state, bucket)`` reduce the buckets from the next pass on; torch DDP's signature and rules.

        The hook returns a ``torch.futures.Future`` of one tensor with as many elements as ``bucket.buffer()``, of any
        dtype, which is copied into the bucket when the future is completed. It sends what it likes, but the same on
        every rank, and divides by the world size itself. It is called for every bucket in launch order, also in a pass
        that failed on this rank. A parameter that no rank used keeps its ``.grad``, whatever the hook gives.

        torch's ``allreduce_hook``, ``fp16_compress_hook``, ``bf16_compress_hook``, their wrappers, ``powerSGD_hook``,
        ``post_localSGD_hook`` and ``noop_hook`` work unmodified. ``batched_powerSGD_hook`` (broken in torch 2.13) does
        not, nor do torch's quantization hooks on gloo. Hooks that are not torch's own have one bucket under way at a
        time: they may start further collectives when the first is completed.

        ``bucket.index()`` is stable only while the layout stands: it changes after the first pass, and when other
        parameters become trainable. A ``PowerSGDState`` is cleared then of what it knows of buckets; a hook with a
        memory of its own compares ``bucket.parameters()``. Buffers have padding between parameters, of zeros.
        Gradients are shown row-major, as in torch, and complex ones as real.

        Args:
            state: Passed to the hook.
            hook: The hook; the same on every rank, all of which must call this at the same point.

        Raises:
            TypeError: If the hook is not callable.
            ValueError: If there is a ``wire_dtype``, or gradients are not divided by the world size.
            RuntimeError: If there is a hook already, or in the middle of a pass.
            RankMismatchError: If ranks register different hooks.
        """
        self._reducer.register_comm_hook(lambda: CommHook(hook, state, self._collectives.leave_behind))
        self._options = replace(self._options, comm_hook=hook, comm_hook_state=state)

    def begin_step(self) -> None:
        """Says that a training step begins. For callers that run one step after the other on every rank.

        Ranks that meet in a pass from different steps, because one of them skipped a backward, then raise.
        """
        self._reducer.begin_step()

    def end_step(self) -> None:
        """Says that all backwards of the step have been run.

        If there was none on this rank, ranks that wait for it in this step raise within seconds.
        """
        self._reducer.end_step()

    def end_training(self) -> None:
        """Says that this rank runs no further pass: ranks that do raise, instead of waiting for it."""
        self._reducer.peers.end_training()

    def count_tokens(self, tokens: int | Tensor) -> None:
        """Adds to the number that gradients will be divided by, with ``gradient_divide_by="tokens"``.

        Call it once or more per backward, local ones included, with what the loss is summed over. The counts of all
        ranks and of all passes since the last reduction are added up and travel with the gradients.

        Args:
            tokens: How many, 0 for none. A tensor of no dimension on the device does not make the host wait.

        Raises:
            ValueError: If the number is negative.
            RuntimeError: If gradients are divided by something else.
        """
        self._reducer.count_tokens(tokens)

    @torch.no_grad()
    def average_loss(self, loss: Tensor | float | None) -> Tensor | None:
        """The loss as its gradients are averaged, for optimizers that look at it; all ranks must call this.

        Args:
            loss: This rank's, of one element; None if it has none, which counts as zero. That of a batch which is
                gone through once more (:meth:`set_active_ranks`) does not count.

        Returns:
            A new tensor without a graph or dimension, on the module's device; None if no rank has a loss.

        Raises:
            PeerFailureError: If another rank has failed.
        """
        counts = not self._reducer.replaying
        mine = torch.zeros(3, dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)
        if loss is not None:
            mine[1] = 1
            if counts:
                mine[0] = loss.detach().reshape(()) if isinstance(loss, Tensor) else loss
        mine[2] = int(counts)
        with self._reducer.peers.waiting_for("the mean of the losses"):
            self._collectives.all_reduce_mean(mine).wait(self._reducer.peers.poll)
        if loss is None and not mine[1]:
            return None
        mean = mine[0] / mine[2] if self._reducer.divisor.divide_by_active else mine[0]
        if isinstance(loss, Tensor) and loss.is_floating_point():
            return mean.to(loss.dtype)
        return mean.to(torch.get_default_dtype())

    def publish_failure(self, error: BaseException) -> None:
        """Tells ranks that wait for this one in a pass that it has failed, so that they raise instead of waiting.

        Args:
            error: What was raised here.
        """
        if isinstance(error, PeerFailureError | RankMismatchError):
            return  # the others know, or find the same and say it better
        self._reducer.peers.publish_failure(f"raised {type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends gradient synchronisation: removes all hooks, gives ``.grad`` back as plain tensors, frees the buffers.

        Sends nothing. The wrapper still forwards to the module, but gradients are no longer averaged.
        """
        self._closed = True
        if "_reducer" not in self.__dict__:  # a copy that was never used
            return
        self._release()
        if self._replicated is not None:
            self._replicated.forget()
        _open_wrappers.discard(self)
        if self._sharding is not None:
            self._sharding.close()

    def _give_way(self, inside: bool) -> None:
        """Close, as another wrapper takes the module over.

        Args:
            inside: Whether the other one wraps this one, which then only forwards.

        Raises:
            WrapError: If an optimizer steps on this wrapper's shards or masters.
        """
        holders = holders_of_masters(self._reducer.trains())
        if self._sharding is not None:
            holders += self._sharding.optimizers()
        if holders:
            raise WrapError(
                f"expected a module that can be wrapped again, found an open BucketDDP around it and an "
                f"{type(holders[0]).__name__} with shards or fp32 masters of its parameters; close() that wrapper first"
            )
        self._replaced = not inside
        self.close()

    def _require_current(self) -> None:
        if self._replaced:
            raise RuntimeError(
                "expected the BucketDDP that wrapped the module last, found an earlier one: gradients are averaged by "
                "the later one. Train through that"
            )

    def prepare_optimizer(self, optimizer: Optimizer) -> MasterParams | ShardedParams | None:
        """Has an optimizer step on fp32 master parameters, or on this rank's shard, from now on.

        With ``master_params`` or ``shard_optimizer`` that happens by itself in an optimizer's first step. Before
        ``optimizer.load_state_dict`` call this, for training to go on bit for bit.

        Args:
            optimizer: An optimizer that holds parameters of the module.

        Returns:
            The masters, or what knows of the shard; None without ``master_params`` and ``shard_optimizer``.

        Raises:
            TypeError: If it is no torch optimizer.
            ValueError: With ``shard_optimizer``, if it is not known to be element-wise.
        """
        self._params.optimizers.add(optimizer)
        with_masters = bool(self._options.master_params)
        if self._sharding is not None:
            return self._sharding.sharded(optimizer) or self._sharding.shard(optimizer, with_masters)
        return masters_of(optimizer) if with_masters else None

    # -- what is going on ----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def rank(self) -> int:
        """This process's rank among those that train together."""
        return self._collectives.rank

    @property
    def broadcast_buffers(self) -> bool:
        """Whether module buffers are synchronised in forward."""
        return self._options.module_buffers != "off"

    @property
    def forward_sync_buffers(self) -> bool:
        """The same; torch DDP's newer name."""
        return self.broadcast_buffers

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that train together."""
        return self._collectives.group

    @property
    def layout(self) -> Layout:
        """Where the gradients lie: buckets in launch order, slots, buffers and their sizes in bytes."""
        return self._reducer.layout

    @property
    def passes(self) -> int:
        """How many synchronised passes have been completed."""
        return self._reducer.pass_number if "_reducer" in self.__dict__ else 0

    def last_pass(self) -> PassRecord | None:
        """What happened in the last synchronised pass: sizes, times, order; ``print`` it for a table.

        Times are the host's. With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` the logger ``lightning_bucketddp`` gets every
        pass's table at level INFO, and with ``INFO`` a line whenever gradients are laid out.

        Returns:
            None before the first one. A pass that was dropped, all ranks having raised, leaves no record.
        """
        return self._reducer.last_pass() if "_reducer" in self.__dict__ else None

    @property
    def early_launches(self) -> int:
        """How many buckets the last synchronised pass put on their way before backward had ended."""
        return self._reducer.early_launches

    def _set_static_graph(self) -> None:
        """Does nothing: what torch DDP's method allows is always allowed. Some libraries call it."""

    # -- state ---------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict; keys have no prefix."""
        return self.module.state_dict(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper and the module under one name, and the module's own; as in :meth:`state_dict` without a prefix.

        Names of parameters and module buffers follow from these, also those of a module that contains this one.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Where names without a prefix lead, for ``torch.distributed.checkpoint.state_dict``.

        Private to torch, which knows its own DDP class by ``isinstance``. There is no public way; a test notices.
        """
        return dict.fromkeys(_members_of(self.module), "module")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads into the module; keys have no prefix, or ``module.`` as in a state dict of torch DDP's.

        With ``assign=True`` the module gets new parameters: make a new optimizer.
        """
        prefix = "module."
        if state_dict and all(key.startswith(prefix) for key in state_dict) and not hasattr(self.module, "module"):
            state_dict = {key.removeprefix(prefix): value for key, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def _shard_at_first_step(sharding: Sharding, with_masters: bool) -> RemovableHandle:
    """Shards every optimizer that steps on some of the parameters, in its first step if it was not before."""
    ref = weakref.ref(sharding)

    def look(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # torch calls the optimizer's own hooks after the global ones, and so the one that is registered here.
        live = ref()
        if live is None or live.sharded(optimizer) is not None:
            return
        if any(live.find(param) is not None for group in optimizer.param_groups for param in group["params"]):
            live.shard(optimizer, with_masters)

    return register_optimizer_step_pre_hook(look)


def require_fit_group(process_group: dist.ProcessGroup | None, timeout: timedelta | None) -> None:
    """Requires, on all ranks alike, that no collectives of a failed pass are under way in the group.

    For callers that use the group themselves before they wrap: their collectives would be paired with those.

    Raises:
        RuntimeError: On a rank that left some.
        PeerFailureError: On the other ranks.
    """
    collectives = Collectives(process_group)
    peers = Peers(collectives, timeout)
    problem: Exception | None = None
    try:
        collectives.require_nothing_left_behind()
    except RuntimeError as error:
        problem = error
    peers.require_same("the process group", [], problem)


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


def _members_of(module: nn.Module) -> set[str]:
    """The names of what a module holds itself, as they begin in its state dict."""
    return {*module._modules, *module._parameters, *module._buffers}


def _add_own_name(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Before a module that contains a wrapper loads: the wrapper's keys have no name of its own, as it saves them."""
    own = f"{prefix}module."
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if not key.startswith(own) or hasattr(module.module, "module"):
            state_dict[own + key.removeprefix(prefix)] = state_dict.pop(key)


def _graph_cuts(options: Options, layout: Layout, world_size: int, one_machine: bool) -> GraphCuts | None:
    if not options.overlap or not options.use_contiguous_buffers:
        return None  # every bucket waits for the end of backward
    cap = options.bucket_cap_bytes
    if cap is None:
        cap = default_bucket_cap(layout.nbytes, world_size, one_machine)
    return GraphCuts.after(cap)


def _end_backward(links: list[StatisticsLink], raised: bool) -> None:
    for link in links:
        link.backward_ended(raised)


def _wrappers_that_train(params: ModuleParams) -> list[BucketDDP]:
    """The open wrappers that average gradients of some of the parameters that require grad."""
    mine = {id(param) for _, param in params.named if param.requires_grad}
    return [wrapper for wrapper in list(_open_wrappers) if mine & wrapper._reducer.trains()]


def _trains(reducer: weakref.ref[Reducer]) -> set[int]:
    live = reducer()
    return set() if live is None else live.trains()


def _release(
    reducer: Reducer, links: list[StatisticsLink], params: ModuleParams, hooks: list[list[RemovableHandle]]
) -> None:
    """Give the module back. Sends nothing."""
    reducer.close()
    for link in links:
        link.leave()
    params.restore_grad_dtypes()
    for some in hooks:
        _remove_hooks(some)


def _remove_hooks(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
