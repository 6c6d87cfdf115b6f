"""``BucketDDP``: a module whose gradients are averaged over the ranks."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.agreement import Agreement, Entry, PeerFailureError, RankMismatchError
from lightning_bucketddp.collectives import Collectives
from lightning_bucketddp.layout import MIB, Layout, ParamSpec
from lightning_bucketddp.module_state import ModuleBuffers, ModuleBufferSync, broadcast_tensors
from lightning_bucketddp.module_watch import ModuleWatch
from lightning_bucketddp.reducer import PassState, Reducer, is_reducers_own

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others to agree on something; torch's default for process groups."""

_open_wrappers: weakref.WeakValueDictionary[int, BucketDDP] = weakref.WeakValueDictionary()


class BucketDDP(nn.Module):
    """Trains ``module`` data-parallel, with gradients in contiguous buffers that are averaged during backward.

    After a synchronised backward ``param.grad`` is a view into a buffer and holds the mean over the ranks. It is
    valid until the next backward; clone it to keep it longer. A parameter that no rank used keeps the ``.grad`` it
    had (None stays None), without a flag.

    Args:
        module: The module; the same on every rank but for the values, which are taken from rank 0.
        process_group: The ranks that train together; the default group if None.
        bucket_cap_mb: Largest bucket in MiB. None: 1/32 of the gradients, from 1 to 25 MiB, smaller at both ends.
        module_buffers: What happens to module buffers (BatchNorm statistics and the like) in the first training
            forward after a synchronised pass: ``"broadcast"`` rank 0's, ``"mean"`` (floating ones), ``"off"``.
        find_unused_parameters: Not needed for parameters without gradients. In plain PyTorch, lets a rank whose loss
            reaches no parameter take part, as long as its backward comes by an output of ``forward``. In a Trainer,
            looks at the graph of each loss, so that gradients which will not come are not waited for.
        init_sync: Whether parameters and module buffers are copied from rank 0 at first.
        timeout: How long a rank waits for the others to agree through the store; torch's 30 minutes if None.

    Raises:
        ValueError: If no parameter requires grad, if parameters are on several types of device, uninitialised, with
            sparse gradients or with post-accumulate-grad hooks, if an option is out of range, or if a parameter is
            wrapped already.
        PeerFailureError: If another rank raises one of these.
        RankMismatchError: If ranks disagree on parameters, module buffers or options; names the first difference.
        RuntimeError: If ``torch.distributed`` is not initialised, a rank stays silent for the whole timeout, or the
            group holds collectives of a pass that failed.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        module_buffers: ModuleBufferSync = "broadcast",
        find_unused_parameters: bool = False,
        init_sync: bool = True,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group
        self._leaf_hooks: list[RemovableHandle] = []
        self._collectives = Collectives(process_group)
        agreement = Agreement(self._collectives, timeout if timeout is not None else DEFAULT_TIMEOUT)
        params = list(module.named_parameters())
        options: dict[str, object] = {
            "bucket_cap_mb": bucket_cap_mb,
            "module_buffers": module_buffers,
            "find_unused_parameters": find_unused_parameters,
            "init_sync": init_sync,
        }
        problem: Exception | None = None
        entries: list[Entry] = []
        try:
            _require_valid_options(bucket_cap_mb, module_buffers)
            _require_valid_parameters(module, params)
            self._collectives.require_nothing_left_behind()
            entries = _entries(module, params, options)
        except (ValueError, RuntimeError) as error:
            problem = error  # the others must hear of it before it is raised
        agreement.require_same("parameters, module buffers and options", entries, problem)
        self._collectives.probe(next(param.device for _, param in params if param.requires_grad))
        if init_sync:
            broadcast_tensors([param for _, param in params] + list(module.buffers()), self._collectives)
        self._module_buffers = ModuleBuffers(module, self._collectives, module_buffers)
        self._reducer = Reducer(
            params,
            self._collectives,
            agreement,
            int(bucket_cap_mb * MIB) if bucket_cap_mb is not None else None,
            find_unused_parameters,
        )
        self._watch = ModuleWatch(module)
        self._buffers_as_of_pass = 0
        weakref.finalize(self, _remove_hooks, self._reducer.hooks)  # a wrapper that is dropped leaves nothing behind
        for _, param in params:
            if param.requires_grad:
                _open_wrappers[id(param)] = self

    # -- passes --------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module. In training, synchronises module buffers first if a pass has gone by since."""
        if not torch.is_grad_enabled() or self._reducer.state is PassState.CLOSED:
            return self.module(*args, **kwargs)
        self._reducer.require_usable()
        self._reducer.note_forward()
        self._watch.look()
        if self.training:
            self.synchronise_module_buffers()
        output = self.module(*args, **kwargs)
        self._hook_roots(output)
        return output

    def _hook_roots(self, output: object) -> None:
        """Lets the reducer know when backward comes by one of the output's tensors."""
        _remove_hooks(self._leaf_hooks)
        on_root = partial(self._reducer.on_root, self._reducer.synchronise)
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                hook = tensor.register_hook(on_root)
                if tensor.is_leaf:  # lives on after this pass, unlike a tensor with a graph
                    self._leaf_hooks.append(hook)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates gradients without reducing them; the next pass outside reduces the sum.

        As with torch DDP the forward decides: run it inside too. May be nested.
        """
        before = self._reducer.synchronise
        self._reducer.synchronise = False
        try:
            yield
        finally:
            self._reducer.synchronise = before

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

    def synchronise_module_buffers(self) -> None:
        """Makes module buffers the same on all ranks, if a synchronised pass has gone by since the last time.

        All ranks must call this at the same point of the program.
        """
        if self._buffers_as_of_pass != self._reducer.pass_number:
            self._buffers_as_of_pass = self._reducer.pass_number
            with self._reducer.waiting_for("the module buffers"):
                self._module_buffers.synchronise(self._reducer.raise_if_a_peer_failed)

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

    def publish_failure(self, error: BaseException) -> None:
        """Tells ranks that wait for this one in a pass that it has failed, so that they raise instead of waiting.

        Args:
            error: What was raised here.
        """
        if isinstance(error, PeerFailureError | RankMismatchError):
            return  # the others know, or find the same and say it better
        self._reducer.publish_failure(f"raised {type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends gradient synchronisation: removes all hooks, gives ``.grad`` back as plain tensors, frees the buffers.

        Sends nothing. The wrapper still forwards to the module, but gradients are no longer averaged.
        """
        self._reducer.close()
        _remove_hooks(self._leaf_hooks)
        self._watch.close()
        for param in self.module.parameters():
            if _open_wrappers.get(id(param)) is self:
                del _open_wrappers[id(param)]

    # -- what is going on ----------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Where the gradients lie: buckets in launch order, slots, buffers and their sizes in bytes."""
        return self._reducer.layout

    @property
    def passes(self) -> int:
        """How many synchronised passes have been completed."""
        return self._reducer.pass_number

    @property
    def early_launches(self) -> int:
        """How many buckets the last synchronised pass put on their way before backward had ended."""
        return self._reducer.early_launches

    # -- state ---------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict; keys have no prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads into the module; keys have no prefix.

        Raises:
            ValueError: With ``assign=True``, which would replace the parameters whose gradients are averaged.
        """
        if assign:
            raise ValueError(
                "expected assign=False, found True: it would replace the parameters whose gradients this wrapper "
                "averages. Load into the module before wrapping it"
            )
        return self.module.load_state_dict(state_dict, strict=strict)


def require_fit_group(process_group: dist.ProcessGroup | None, timeout: timedelta | None) -> None:
    """Requires, on all ranks alike, that no collectives of a failed pass are under way in the group.

    For callers that use the group themselves before they wrap: their collectives would be paired with those.

    Raises:
        RuntimeError: On a rank that left some.
        PeerFailureError: On the other ranks.
    """
    collectives = Collectives(process_group)
    agreement = Agreement(collectives, timeout if timeout is not None else DEFAULT_TIMEOUT)
    problem: Exception | None = None
    try:
        collectives.require_nothing_left_behind()
    except RuntimeError as error:
        problem = error
    agreement.require_same("the process group", [], problem)


def _remove_hooks(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _require_valid_options(bucket_cap_mb: float | None, module_buffers: str) -> None:
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        raise ValueError(f"expected bucket_cap_mb to be None or a positive number of MiB, found {bucket_cap_mb!r}")
    if module_buffers not in get_args(ModuleBufferSync):
        raise ValueError(f"expected module_buffers to be one of {get_args(ModuleBufferSync)}, found {module_buffers!r}")


def _require_valid_parameters(module: nn.Module, params: list[tuple[str, nn.Parameter]]) -> None:
    trainable = [(name, param) for name, param in params if param.requires_grad]
    if not trainable:
        raise ValueError(
            "expected at least one parameter that requires grad, found none; there is nothing to average. Use the "
            "module as it is"
        )
    for name, param in params:
        if nn.parameter.is_lazy(param):
            raise ValueError(f"parameter {name!r} is uninitialised; run a forward pass before wrapping a lazy module")
        if param.requires_grad and id(param) in _open_wrappers:
            raise ValueError(
                f"expected parameters that are not wrapped, found {name!r}, whose gradient another BucketDDP averages; "
                "close() that one first"
            )
        # Private, like everything that tells of such hooks; without it they go unnoticed. A test notices.
        hooks = (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
        if not all(is_reducers_own(hook) for hook in hooks):  # of a wrapper in which it is frozen too
            raise ValueError(
                f"parameter {name!r} has a post-accumulate-grad hook: it would run before the gradient is averaged, "
                "and an optimizer that steps there lets the ranks drift apart. Step after backward instead; a hook "
                "that only looks at this rank's gradient may be registered after wrapping"
            )
    types = sorted({param.device.type for _, param in params})
    if len(types) > 1 or types == ["meta"]:
        raise ValueError(f"expected parameters on one type of device that holds values, found {types}")
    for name, owner in module.named_modules():
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse and owner.weight.requires_grad:
            raise ValueError(f"module {name!r} makes sparse gradients, which are not supported; set sparse=False")


def _entries(module: nn.Module, params: list[tuple[str, nn.Parameter]], options: dict[str, object]) -> list[Entry]:
    entries = [Entry(f"option {name}", repr(value)) for name, value in options.items()]
    for name, param in params:
        spec = ParamSpec.of(name, param)
        frozen = "" if param.requires_grad else ", frozen"
        entries.append(
            Entry(f"parameter {name!r}", f"shape {spec.shape}, {spec.dtype}, strides {spec.strides}{frozen}")
        )
    for name, buffer in module.named_buffers():
        entries.append(Entry(f"module buffer {name!r}", f"shape {tuple(buffer.shape)}, {buffer.dtype}"))
    return entries


def _tensors_in(output: object) -> Iterator[Tensor]:
    """The tensors in nested containers and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, list | tuple | set | frozenset):
        for value in output:
            yield from _tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors_in(getattr(output, field.name, None))
