"""``BucketDDP``: a module whose gradients are averaged over the ranks."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from lightning_bucketddp.comm.hooks import CommHook, HookFunction
from lightning_bucketddp.layout.options import Options
from lightning_bucketddp.layout.plan import Layout
from lightning_bucketddp.layout.require import require, require_names
from lightning_bucketddp.optim.swap import Swap
from lightning_bucketddp.peers.machines import Node
from lightning_bucketddp.reducer.passes import Passes
from lightning_bucketddp.reducer.record import PassRecord
from lightning_bucketddp.replicas.forward import ReplicatedForward, replicated_forward
from lightning_bucketddp.replicas.nested import move_to
from lightning_bucketddp.wrapper.compiled import cutting_graphs, leave_untraced
from lightning_bucketddp.wrapper.join import UnevenInputs
from lightning_bucketddp.wrapper.names import add_own_name, members_of, without_prefix
from lightning_bucketddp.wrapper.runtime import Runtime, refuse, without_group
from lightning_bucketddp.wrapper.validation import input_device, names_to_ignore, require_valid_parameters

leave_untraced("lightning_bucketddp")

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)

_open_wrappers: weakref.WeakSet[BucketDDP] = weakref.WeakSet()


class BucketDDP(nn.Module, Joinable):
    """Trains ``module`` data-parallel: averages gradients over the ranks while backward runs, in contiguous buffers.

    Replaces ``torch.nn.parallel.DistributedDataParallel``, whose arguments it takes, and Megatron-LM's DDP::

        model = BucketDDP(model)
        model(inputs).sum().backward()  # param.grad is now the mean over the ranks
        optimizer.step()

    After a synchronised backward ``param.grad`` is a view into a gradient buffer. It is valid until the next backward;
    clone it to keep it longer. A parameter that no rank used keeps the ``.grad`` that it had, without a flag.

    Args:
        module: The module, the same on every rank. Rank 0's values become everybody's. As in torch, parameters and
            module buffers named in its attribute ``_ddp_params_and_buffers_to_ignore`` are left alone.
        device_ids: None, or the device of the parameters, to which forward moves its arguments. With several devices,
            as in torch DDP of 2020, each forward divides its batch between replicas of the module, which run in
            threads. The first device holds the module; ``"cpu"`` or an accelerator may be named several times.
            Gradients are the same as on one device, module buffers are the first replica's. For debuggers and
            notebooks: one process per device is faster.
        output_device: The device on which outputs of several devices are joined; the first if None.
        dim: The dimension along which batches are divided between several devices, and outputs joined.
        torch_options: torch DDP's next arguments by position: ``broadcast_buffers``, ``init_sync``, ``process_group``,
            ``bucket_cap_mb``, ``find_unused_parameters``, ``check_reduction``, ``gradient_as_bucket_view`` and
            ``static_graph``. They are options too.
        options: The fields of :class:`Options`, which documents each of them.

    Raises:
        TypeError: If ``module`` is no module, an option has the wrong type, ``device_ids`` names no device, or a
            compiled or scripted module is to run on several devices.
        WrapError: If no parameter requires grad, or parameters are on several types of device, uninitialised or with
            post-accumulate-grad hooks. A ValueError and a RuntimeError, as torch DDP raises either.
        ValueError: If an option is out of range, contradicts another or names no parameter. With several devices, if
            the module is not on the first of them or has a ``SyncBatchNorm``.
        RankMismatchError: If ranks differ in parameters, module buffers or options; names the first difference.
        PeerFailureError: If another rank raised one of these errors.
        RuntimeError: If ``torch.distributed`` is not initialised, a rank stays silent for the whole timeout, or a pass
            failed half-way in the group.
    """

    module: nn.Module
    closed: bool
    """Whether :meth:`close` was called."""
    _may_be_frozen = False
    """Whether all parameters may be frozen at first. In a Trainer they may: callbacks unfreeze them."""
    _node: Node | None = None
    """This rank's node, where a strategy knows that there are several."""
    _input_device: torch.device | None = None
    _replicated: ReplicatedForward | None = None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *torch_options: Any,
        **options: Any,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self.module = module
        self.device_ids, self.output_device, self.dim = device_ids, output_device, dim
        self.closed = self._replaced = False
        self.register_load_state_dict_pre_hook(add_own_name)
        given = {**dict(zip(Options.__match_args__, torch_options, strict=False)), **options}
        try:
            require_names(type(self).__name__, options, Options.__match_args__)
            self._options = Options(*torch_options, **options)
            require("module", module, "an nn.Module", nn.Module)
            require_valid_parameters(module, self._may_be_frozen)
            self._replicated = replicated_forward(module, device_ids, output_device, dim)
            if self._replicated is None:
                self._input_device = input_device(module, device_ids, output_device)
        except (TypeError, ValueError, RuntimeError) as error:
            refuse(given, error)
        self._make_runtime()
        self.find_unused_parameters = self._options.find_unused_parameters
        self.static_graph = self._options.static_graph
        self.gradient_as_bucket_view = self._options.use_contiguous_buffers

    # -- copies and pickles --------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        runtime: Runtime | None = state.pop("_runtime", None)
        state["_options"] = without_group(self._options, runtime)
        if runtime is not None:
            runtime.passes.reducer.storage.bind_main_grads(False)  # each would take its whole buffer along
        return state

    def __getattr__(self, name: str) -> Any:
        if name == "_runtime" and "_options" in self.__dict__:  # of a copy: all ranks make it when they first train
            if self.closed:
                raise AttributeError("expected an open BucketDDP, found a copy of a closed one; wrap its module again")
            return self._make_runtime()
        module = self.__dict__.get("_modules", {}).get("module")
        if name != "module" and module is not None and name in members_of(module):
            return getattr(module, name)  # get_submodule() and get_parameter() go by names without a prefix
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        # `torch.func.functional_call` with names without a prefix sets the module's own parameters and buffers here.
        module = self.__dict__.get("_modules", {}).get("module") if isinstance(value, Tensor) else None
        for tensors in () if module is None else (module._parameters, module._buffers):
            if name in tensors:
                tensors[name] = value
                return
        super().__setattr__(name, value)

    def _make_runtime(self) -> Runtime:
        """Make the part that belongs to this process. All ranks must call this."""
        self._runtime = Runtime(
            self.module, self._options, self._take_over, self._node, _in_training(weakref.ref(self))
        )
        _open_wrappers.add(self)
        return self._runtime

    def _in_training(self) -> bool:
        """Whether backwards are passes now, and forwards with gradients begin them."""
        return True

    @property
    def _passes(self) -> Passes:
        return self._runtime.passes

    @property
    def _uneven(self) -> UnevenInputs:
        return self._runtime.uneven

    # -- wrapping again ------------------------------------------------------------------------------

    def _take_over(self, trained: set[int]) -> None:
        """Close the open wrappers that average gradients of some of these parameters, given by id.

        Those inside this one then forward to the module; training forwards of the others raise.

        Raises:
            WrapError: If an optimizer steps on shards or masters of such a wrapper.
        """
        inside = set(self.module.modules())
        for wrapper in list(_open_wrappers):
            if trained & wrapper._passes.wrapped.trains():
                wrapper._runtime.optimizers.require_none()
                wrapper._replaced = wrapper not in inside
                wrapper.close()

    def _require_current(self) -> None:
        if self._replaced:
            raise RuntimeError(
                "expected the BucketDDP that wrapped the module last, found an earlier one: gradients are averaged by "
                "the later one. Train through the later one"
            )

    # -- passes --------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        With gradients enabled, synchronise module buffers before, unless the last such forward was inside
        :meth:`no_sync`. Unlike in torch DDP, forwards without gradients neither send nor count.
        """
        if self._input_device is not None:
            args, kwargs = move_to(args, self._input_device), move_to(kwargs, self._input_device)
        call = self._replicated or self.module
        if torch.is_grad_enabled():
            self._require_current()
        trains = torch.is_grad_enabled() and not self.closed and self._in_training()
        if "_runtime" not in self.__dict__:  # a copy; a frozen one, such as a teacher, does not train
            trains = trains and any(param.requires_grad for param in self.parameters())
        runtime = self._runtime if trains else self.__dict__.get("_runtime")
        if runtime is None:  # a copy that does not train, perhaps on this rank alone
            return call(*args, **kwargs)
        runtime.forward_begins(self, trains, replicated=self._replicated is not None)
        nbytes = runtime.bytes_per_graph if trains else None
        with runtime.optimizers.parts.in_forward(trains), cutting_graphs(nbytes):
            output = call(*args, **kwargs)
        if trains:
            runtime.hook_roots(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside accumulate gradients without reducing them. The next pass outside reduces the sum.

        As with torch DDP the forward decides: run it inside too. Contexts may be nested. With ``scatter_every_pass``
        backward reduces all the same, and adds the result to earlier ones.
        """
        self._require_current()
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """False inside :meth:`no_sync`; torch DDP's name."""
        return self._passes.synchronise

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._passes.set_synchronise(value)

    def backward_pass(self, loss: Tensor) -> AbstractContextManager[None]:
        """A context in which the caller runs ``loss.backward()``.

        It does more than the bare call: a rank whose loss reaches no parameter takes part, and the other ranks hear of
        an exception at once. ``no_sync`` decides here rather than in forward.

        Args:
            loss: The tensor from which backward starts, or which it passes.

        Raises:
            PeerFailureError: On leaving, if another rank failed in this pass.
            RankMismatchError: On entering, if ranks disagree on which parameters are trainable.
        """
        return self._passes.backward_pass(loss)

    def synchronise_module_buffers(self) -> None:
        """Make module buffers the same on all ranks, which must call this at the same point of the program."""
        self._runtime.module_buffers.synchronise(self._uneven.active)

    def register_comm_hook(self, state: Any, hook: HookFunction) -> None:
        """Let ``hook(state, bucket)`` reduce the buckets from the next pass on; torch DDP's signature and rules.

        The hook returns a ``torch.futures.Future`` of one tensor with as many elements as ``bucket.buffer()``, of any
        dtype. The wrapper copies it into the bucket when the future is completed. The hook divides by the world size
        itself, and starts the same collectives on every rank. It is called for every bucket in launch order. A
        parameter that no rank used keeps its ``.grad``.

        torch's ``allreduce_hook``, ``fp16_compress_hook``, ``bf16_compress_hook``, their wrappers, ``powerSGD_hook``,
        ``post_localSGD_hook`` and ``noop_hook`` work unmodified. ``batched_powerSGD_hook`` (broken in torch 2.13) does
        not, nor do torch's quantization hooks on gloo. Other hooks have one bucket under way at a time: they may start
        further collectives when the first is completed.

        ``bucket.index()`` changes after the first pass, and when other parameters become trainable. The wrapper then
        clears a ``PowerSGDState``; a hook with a memory of its own compares ``bucket.parameters()``. Between parameters
        buffers may have padding, which is zero. Hooks see gradients row-major, as in torch, and complex ones as real.

        Args:
            state: Passed to the hook.
            hook: The hook; the same on every rank. All ranks must call this at the same point.

        Raises:
            TypeError: If the hook is not callable.
            ValueError: If its annotations allow no bucket or no future, if there is a ``wire_dtype``, or if gradients
                are not divided by the world size.
            RuntimeError: If there is a hook already, or a pass is under way.
            RankMismatchError: If ranks register different hooks.
        """
        self._passes.wrapped.register_comm_hook(lambda: CommHook(hook, state, self._runtime.collectives.leave_behind))
        self._options = replace(self._options, comm_hook=hook, comm_hook_state=state)

    def begin_step(self) -> None:
        """Note that a training step begins. For callers that run one step after the other on every rank.

        Ranks that meet in a pass from different steps then raise: one of them skipped a backward.
        """
        self._passes.peers.here.begin_step()

    def end_step(self) -> None:
        """Note that all backwards of the step have run.

        If this rank ran none, ranks that wait for it in this step raise within seconds.
        """
        self._passes.end_step()

    def _end_training(self) -> None:
        """Note that this rank runs no further pass. Ranks that do raise, instead of waiting for it."""
        self._passes.peers.end_training()

    def _compare_ranks(self) -> None:
        """Compare the ranks' parameters now, if ``check_ranks_every`` asks for comparisons. All ranks must call this.

        Raises:
            RankMismatchError: On every rank, if parameters differ and ``check_ranks`` makes that an error.
        """
        if (check := self._passes.wrapped.context.ranks_check) is not None:
            check.compare()

    def preempted(self, *, no_pass_follows: bool = False) -> bool:
        """Whether some rank got SIGTERM or SIGUSR1, so that all ranks should save a checkpoint and end.

        It turns true on every rank after the same pass, and stays so: ask after each optimizer step. The news travels
        with the gradients; nothing else is sent. On accelerators it takes one pass longer.

        The first call puts handlers for the two signals in place, and :meth:`close` puts the earlier ones back. After a
        signal, a second one (more than a second later) ends this process. A rank that then waits for another one for
        more than 30 s raises an error.

        Args:
            no_pass_follows: Ask the other ranks through the store. All ranks must call this. For the end of training,
                where no later pass tells.

        Raises:
            ValueError: If the first call is not in the main thread, where Python handles signals.
            PeerFailureError: If another rank has failed, or does not come.
        """
        return self._passes.wrapped.context.control.to_end(no_pass_follows)

    def count_tokens(self, tokens: int | Tensor) -> None:
        """Add to the number that gradients are divided by, with ``gradient_divide_by="tokens"``.

        Call it once or more per backward, local ones included, with the number of tokens that the loss sums over. The
        counts of all ranks and of all passes since the last reduction travel with the gradients.

        Args:
            tokens: How many, 0 for none. The host does not wait for a tensor on the device; it has no dimension.

        Raises:
            ValueError: If the number is negative.
            RuntimeError: If gradients are divided by something else.
        """
        self._passes.count(tokens, "tokens")

    def count_samples(self, samples: int) -> None:
        """Add to the number that gradients are weighted and divided by, with ``gradient_divide_by="samples"``.

        Call it before each backward, local ones included, with the number of samples that the loss is the mean of. A
        rank's gradient since the last reduction is weighted by its number of samples since then.

        Args:
            samples: How many, 0 for none.

        Raises:
            ValueError: If the number is negative.
            RuntimeError: If gradients are divided by something else.
        """
        self._passes.count(samples, "samples")

    def skip_step(self, why: str = "asked to skip the step") -> Tensor:
        """Have all ranks drop the gradients of this step, for example because this rank's forward ran out of memory.

        Run the backward of the tensor that this returns in place of the one that this rank cannot run, in
        :meth:`backward_pass` or by ``fabric.backward``, so that the ranks stay in step. The gradients of all passes
        since the last reduction go, inside :meth:`no_sync` those of the reduction to come.

        Args:
            why: For the warning, as the end of a sentence that begins with the rank.

        Returns:
            A loss, NaN, that reaches no parameter.

        Raises:
            RuntimeError: Without ``skip_step_on`` and ``skip_norm_above``.
        """
        self._passes.ask_to_skip(why)
        return torch.full((), math.nan, device=self.device, requires_grad=True)

    def step_skipped(self) -> bool:
        """Whether all ranks skip the step of the last backward; see the options ``skip_step_on``, ``skip_norm_above``.

        No parameter has a gradient then, so that ``optimizer.step()`` changes nothing. Leave the scheduler's step out.
        In a Trainer or Fabric with a ``GradScaler``, gradients that are not finite stay: the scaler skips the step.
        """
        skips = self._passes.wrapped.context.skips
        return skips is not None and skips.skipped

    def average_loss(self, loss: Tensor | float | None) -> Tensor | None:
        """The loss as its gradients are averaged, for optimizers that look at it. All ranks must call this.

        Args:
            loss: This rank's, of one element; None counts as zero. The loss of a repeated batch does
                not count.

        Returns:
            A new tensor without a graph or dimension, on the module's device; None if no rank has a loss.

        Raises:
            PeerFailureError: If another rank has failed.
        """
        return self._runtime.average_loss(loss, self.device)

    def _publish_failure(self, error: BaseException) -> None:
        """Tell ranks that wait for this one in a pass that it has failed, so that they raise.

        Args:
            error: The exception that this rank raised.
        """
        self._passes.peers.failed_by(error)

    def close(self) -> None:
        """End gradient synchronisation: remove all hooks, make ``.grad`` plain tensors, free the gradient buffers.

        Sends nothing. The wrapper still forwards to the module.
        """
        self.closed = True
        runtime: Runtime | None = self.__dict__.get("_runtime")
        if runtime is None:  # a copy that was never used
            return
        runtime.close()
        if self._replicated is not None:
            self._replicated.forget()
        _open_wrappers.discard(self)

    # -- gradients and optimizers, sharded or not ------------------------------------------------------

    def prepare_optimizer(self, optimizer: _Optimizer) -> _Optimizer:
        """Have an optimizer step on fp32 master parameters, or on this rank's shard, from now on.

        With ``master_params`` or ``shard_optimizer`` an optimizer's first step does this. Call it before
        ``optimizer.load_state_dict``, so that training goes on bit for bit.

        Args:
            optimizer: An optimizer that holds parameters of the module.

        Returns:
            The same optimizer.

        Raises:
            TypeError: If it is no torch optimizer.
            ValueError: If it refuses the dtype that ``grad_dtype`` gives to gradients; with ``shard_optimizer``, if it
                is not known to be element-wise.
        """
        self._swap_of(optimizer)
        return optimizer

    def _swap_of(self, optimizer: Optimizer) -> Swap | None:
        """An optimizer's swap, made if need be; None if it steps on its parameters."""
        return self._runtime.optimizers.prepare(optimizer)

    def refresh_masters(self) -> None:
        """Let fp32 masters follow parameters that were changed through ``param.data`` since the last step."""
        self._runtime.optimizers.refresh_masters()

    def wait_for_parameters(self) -> None:
        """Wait for the lazy all-gather of new parameters, with ``shard_optimizer``.

        torch's functions and forwards of modules wait by themselves. Call this before you replay a captured CUDA graph,
        script a module, or read memory past torch outside of a module's forward. On accelerators the current stream
        waits.
        """
        runtime: Runtime | None = self.__dict__.get("_runtime")
        if runtime is not None:
            runtime.optimizers.parts.wait()

    def grad_norm(self, norm_type: float = 2.0, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """The norm of all gradients together, as if they were one vector. All ranks must call this.

        Args:
            norm_type: The order of the norm; ``inf`` for the largest absolute value.
            parameters: Whose gradients; the module's if None.

        Returns:
            An fp32 tensor without a dimension, the same on every rank.
        """
        return self._runtime.optimizers.grad_norm(norm_type, parameters)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        parameters: Iterable[Tensor] | None = None,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale gradients so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

        All ranks must call this.

        Args:
            max_norm: The largest norm.
            norm_type: As for :meth:`grad_norm`.
            parameters: As for :meth:`grad_norm`.
            error_if_nonfinite: Whether to raise if the norm is NaN or infinite.

        Returns:
            The norm before.

        Raises:
            RuntimeError: If the norm is not finite and ``error_if_nonfinite`` is True.
        """
        return self._runtime.optimizers.clip_grad_norm(max_norm, norm_type, parameters, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float, parameters: Iterable[Tensor] | None = None) -> None:
        """Clamp gradients to ``[-clip_value, clip_value]``, as ``torch.nn.utils.clip_grad_value_`` does."""
        self._runtime.optimizers.clip_grad_value(clip_value, parameters)

    def full_grad(self, param: Tensor) -> Tensor | None:
        """A copy of a parameter's whole gradient; None if it has none. All ranks must call this."""
        return self._runtime.optimizers.full_grad(param)

    def optimizer_state_dict(self, optimizer: Optimizer, *, every_rank: bool = False) -> dict[str, Any] | None:
        """An optimizer's whole state, with the keys and shapes that ``optimizer.state_dict()`` has in one process.

        A copy, put together on the CPU bucket by bucket. All ranks must call this; they may after :meth:`close` too. It
        loads into the same optimizer over the same module at any world size, sharded or not.

        Args:
            optimizer: An optimizer that holds parameters of the module.
            every_rank: Whether every rank gets it.

        Returns:
            None on ranks other than 0, unless every rank gets it.
        """
        return self._runtime.optimizers.state_dict(optimizer, every_rank or self.rank == 0)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load an optimizer's whole state, from :meth:`optimizer_state_dict` or any strategy's checkpoint.

        Each rank keeps the state of its shard, and moves nothing else to the device.

        Args:
            optimizer: An optimizer that holds parameters of the module.
            state_dict: The same on every rank.

        Raises:
            TypeError: If this rank has no state.
        """
        if state_dict is None:
            raise TypeError(
                f"rank {self.rank}: expected the whole state on every rank, found None. optimizer_state_dict() gives "
                "it to rank 0 alone: call it with every_rank=True, or read the state from a file on each rank"
            )
        self.prepare_optimizer(optimizer)
        optimizer.load_state_dict(dict(state_dict))

    def save_sharded(
        self,
        path: str | os.PathLike[str],
        optimizers: Sequence[Optimizer] = (),
        *,
        extra: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Save the module and its optimizers into a directory. Each rank writes its own parts.

        All ranks must call this; an error on one is an error on all. The format is ``torch.distributed.checkpoint``'s,
        with the names and shapes that tensors have in one process: torch's ``dcp_to_torch_save`` makes one file of it.
        Module buffers are rank 0's. fp32 masters have a key of their own. Needs NumPy, which torch does not bring.

        Args:
            path: The directory, on a file system that all ranks share. Until everything is written it is called
                ``<path>.partial``. An older checkpoint stays until the new one is complete: a save that is killed
                leaves one of them, and :meth:`load_sharded` finds it.
            optimizers: Optimizers of the module, in the order in which they will be loaded.
            extra: Further objects to save; rank 0's, pickled.
            overwrite: Whether to replace an existing directory.

        Raises:
            FileExistsError: If ``path`` exists and is not to be replaced.
            ValueError: If an optimizer holds parameters that are not the module's.
            RuntimeError: If anything else went wrong on some rank; says where and what.
        """
        self._runtime.optimizers.checkpoint().save(Path(path), optimizers, extra, overwrite)

    def load_sharded(
        self, path: str | os.PathLike[str], optimizers: Sequence[Optimizer] = (), *, strict: bool = True
    ) -> dict[str, Any]:
        """Load a checkpoint of :meth:`save_sharded` at any world size, sharded or not.

        All ranks must call this; an error on one is an error on all. Each rank reads the overlap with its own parts;
        then parameters are gathered. Names and shapes are compared before anything is read. An error while reading
        leaves the module half loaded.

        Args:
            path: The directory.
            optimizers: As many as were saved, with the same parameters in the same groups; none to load the module
                alone.
            strict: Whether the module must have exactly the saved names.

        Returns:
            The saved ``extra``; empty if there was none. It is unpickled: load only files that you trust.

        Raises:
            ValueError: If names, shapes or parameter groups differ; names the first.
            RuntimeError: If anything else went wrong on some rank; says where and what.
        """
        if self.closed:
            raise RuntimeError("expected an open BucketDDP, found one after close(); load before that")
        return self._runtime.optimizers.checkpoint().load(Path(path), optimizers, strict)

    # -- ranks with different numbers of batches ---------------------------------------------------------

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """A context in which ranks may have different numbers of batches, as torch DDP's.

        A rank that leaves its loop takes part in the others' collectives without contributing, until all have left.
        Then every rank gets the parameters and module buffers of a rank that was among the last. A joined rank has the
        ``.grad`` that it left its loop with.

        Run one forward and at most one backward per iteration, and do not freeze or unfreeze parameters. For several
        joinables, such as a ``ZeroRedundancyOptimizer``, use torch's ``Join`` directly: joined ranks receive the
        averaged gradients that its shard needs.

        Args:
            divide_by_initial_world_size: Divide by the world size; otherwise by the number of ranks that have data.
            enable: Whether ranks may have different numbers of batches at all.
            throw_on_early_termination: Raise a RuntimeError on all ranks when the first one runs out of data.

        Raises:
            ValueError: If a ``SyncBatchNorm`` or a sharded optimizer needs all ranks until the end.
        """
        uneven, throw = self._uneven, throw_on_early_termination
        if enable and not throw:
            uneven.require_ranks_may_leave()
        try:
            with Join([self], enable, throw, divide_by_initial_world_size=divide_by_initial_world_size):
                yield
        except BaseException as error:
            if not throw:  # which raises on all ranks
                self._publish_failure(error)
            raise
        finally:
            uneven.end()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that torch's ``Join`` calls on a rank that has run out of data.

        Args:
            kwargs: ``divide_by_initial_world_size``; others are for other members of the context.

        Raises:
            ValueError: If gradients are not divided by the world size to begin with.
        """
        self._uneven.begin(divide_by_active=not kwargs.get("divide_by_initial_world_size", True))
        return self._uneven

    # -- Megatron-LM's names ----------------------------------------------------------------------------

    def zero_grad_buffer(self) -> None:
        """Set all gradients to zero in place: one fill per buffer, for all parameters that ever were trainable.

        Unlike after ``zero_grad(set_to_none=True)`` optimizers see zeros for parameters that get no gradient.
        """
        self._passes.wrapped.zero_gradients()

    def start_grad_sync(self) -> None:
        """Start to reduce every gradient that is there, for example after local passes.

        All ranks must call this; ``.grad`` is None until :meth:`finish_grad_sync`.

        Raises:
            RuntimeError: Inside ``join``, where ranks without data would not take part.
            PeerFailureError: If another rank has failed.
            RankMismatchError: If ranks disagree on which parameters are trainable.
        """
        self._passes.start_reduction()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Wait for :meth:`start_grad_sync`; then ``.grad`` holds the reduced gradients. All ranks must call this.

        By itself it reduces every gradient that is there, for example after local passes. After a synchronised backward
        outside of :meth:`no_sync` there is nothing left to do.

        Args:
            force_all_reduce: Whether each rank needs whole gradients. It has them, but with ``shard_optimizer``.

        Raises:
            ValueError: With ``force_all_reduce`` and ``shard_optimizer``.
            PeerFailureError: If another rank has failed.
            RuntimeError: As for :meth:`start_grad_sync`.
        """
        if force_all_reduce and self._options.shard_optimizer:
            raise ValueError(
                f"rank {self.rank}: expected force_all_reduce=False with shard_optimizer=True, found True: each rank "
                "keeps its shard of a gradient; call full_grad(param) for a whole one"
            )
        self._passes.finish_reduction()

    def allreduce_gradients(self) -> None:
        """Reduce every gradient that is there: :meth:`start_grad_sync` and :meth:`finish_grad_sync`."""
        self.start_grad_sync()
        self.finish_grad_sync()

    @torch.no_grad()
    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply every gradient that is there, in place.

        Args:
            factor: A number, or a tensor without a dimension.
        """
        grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def broadcast_params(self) -> None:
        """Give every rank the parameters of the group's rank 0. All ranks must call this."""
        self._runtime.broadcast_params()

    def state_dict_for_save_checkpoint(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The module's method of that name if it has one, as Megatron-LM's have; else its state dict."""
        save = getattr(self.module, "state_dict_for_save_checkpoint", self.module.state_dict)
        given = {} if destination is None else {"destination": destination}
        return save(**given, prefix=prefix, keep_vars=keep_vars)

    # -- state of the wrapper ------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    join_device = device
    """The device of the tensors that torch's ``Join`` sends."""

    @property
    def rank(self) -> int:
        """This process's rank among those that train together."""
        return self._runtime.collectives.rank

    @property
    def broadcast_buffers(self) -> bool:
        """Whether forward synchronises module buffers."""
        return self._options.module_buffers != "off"

    forward_sync_buffers = broadcast_buffers
    """torch DDP's newer name."""

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next training forward synchronises module buffers, if there are any; torch DDP's name."""
        return self._runtime.module_buffers.due

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._runtime.module_buffers.due = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next training forward sends module buffers; torch DDP's method."""
        buffers = self._runtime.params.named_buffers()
        return self.require_forward_param_sync and self.broadcast_buffers and bool(buffers)

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of the parameters and module buffers that are left alone; torch DDP's name."""
        return set(names_to_ignore(self.module))

    @property
    def bucket_bytes_cap(self) -> int:
        """The largest size of a bucket in bytes, unless one parameter is larger; torch DDP's name."""
        return self._passes.reducer.planner.largest_bucket(self.layout.nbytes)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that train together."""
        return self._runtime.collectives.group

    join_process_group = process_group
    """The group in which ranks join."""

    @property
    def layout(self) -> Layout:
        """Where the gradients lie: buckets in launch order, slots, buffers and their sizes in bytes."""
        return self._passes.reducer.storage.layout

    @property
    def passes(self) -> int:
        """How many synchronised passes have been completed."""
        return self._passes.peers.position.pass_number if "_runtime" in self.__dict__ else 0

    def last_pass(self) -> PassRecord | None:
        """The record of the last synchronised pass: sizes, times, order. ``print`` it for a table.

        Times are the host's. With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` the logger ``lightning_bucketddp`` gets every
        pass's table at level INFO, and with ``INFO`` a line whenever gradients are laid out.

        Returns:
            None before the first one. A pass that was dropped leaves no record.
        """
        return self._passes.wrapped.context.recorder.last() if "_runtime" in self.__dict__ else None

    def _set_static_graph(self) -> None:
        """Do nothing: static graphs need no special treatment here. Some libraries call torch DDP's method."""

    # -- names and state of the module ---------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict; keys have no prefix.

        On an accelerator the host waits for the device.

        Raises:
            PeerFailureError, RankMismatchError: On an accelerator, after a failure: its values may be any.
        """
        if "_runtime" in self.__dict__ and not self.closed:
            self._runtime.require_right()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the module. Keys have no prefix, or ``module.`` as in a state dict of torch DDP's.

        With ``assign=True`` the module gets new parameters: make a new optimizer.
        """
        return self.module.load_state_dict(without_prefix(state_dict, self.module), strict=strict, assign=assign)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper and the module under one name, then the module's own; without a prefix, as :meth:`state_dict`.

        Names of parameters and module buffers follow from these, in a module around this one too.
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

        Private to torch, which has no public way: it knows its own DDP class by ``isinstance``.
        """
        return dict.fromkeys(members_of(self.module), "module")


def _in_training(wrapper: weakref.ref[BucketDDP]) -> Callable[[], bool]:
    """Make a function that asks a wrapper, and does not keep it alive: hooks call it."""

    def ask() -> bool:
        return (found := wrapper()) is None or found._in_training()

    return ask
