"""Gradients reduced without a backward, and more, under the names of Megatron-LM's DDP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.comm.broadcast import broadcast_tensors
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.optim.masters import restart_masters
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.wrapper.validation import names_to_ignore


class MegatronCalls:
    """The methods that training code written for Megatron-LM's contiguous-buffer DDP calls."""

    module: nn.Module
    _collectives: Collectives
    _reducer: Reducer

    def zero_grad_buffer(self) -> None:
        """Sets all gradients to zero in place: one fill per buffer, for all parameters that ever were trainable.

        Unlike after ``zero_grad(set_to_none=True)`` optimizers see zeros for parameters that get no gradient.
        """
        self._reducer.zero_gradients()

    def start_grad_sync(self) -> None:
        """Starts the reduction of every gradient that is there, such as what local passes accumulated.

        All ranks must call this; ``.grad`` is None until :meth:`finish_grad_sync`.

        Raises:
            RuntimeError: Inside ``join``, where ranks without data would not take part.
            PeerFailureError: If another rank has failed.
            RankMismatchError: If ranks disagree on which parameters are trainable.
        """
        self._reducer.start_reduction()

    def finish_grad_sync(self) -> None:
        """Waits for what :meth:`start_grad_sync` started; ``.grad`` holds the reduced gradients afterwards.

        Raises:
            PeerFailureError: If another rank has failed.
            RuntimeError: If nothing was started.
        """
        self._reducer.finish_reduction()

    def allreduce_gradients(self) -> None:
        """Reduces every gradient that is there: :meth:`start_grad_sync` and :meth:`finish_grad_sync`."""
        self.start_grad_sync()
        self.finish_grad_sync()

    @torch.no_grad()
    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiplies every gradient that is there, in place.

        Args:
            factor: A number, or a tensor of no dimension.
        """
        grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def broadcast_params(self) -> None:
        """Gives every rank the group's rank 0's parameters. All ranks must call this."""
        self._reducer.require_usable()
        ignored = names_to_ignore(self.module)
        params = [param for name, param in self.module.named_parameters() if name not in ignored]
        with self._reducer.peers.waiting_for("the parameters"):
            broadcast_tensors(params, self._collectives, self._reducer.peers.poll)
        restart_masters(params)

    def state_dict_for_save_checkpoint(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The module's method of that name if it has one, as Megatron-LM's have; else its state dict."""
        save = getattr(self.module, "state_dict_for_save_checkpoint", self.module.state_dict)
        given = {} if destination is None else {"destination": destination}
        return save(**given, prefix=prefix, keep_vars=keep_vars)
