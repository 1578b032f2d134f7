"""Detection of weights that change between steps: on each rank alone; compared once one noticed.

An edit on one rank (a checkpoint that only rank 0 loads, `weight.mul_` in one rank's branch) makes
replicas that differ. Where ranks divide the update among themselves the next step mixes them, and
they are equal again: so it must be detected before the update. Cheap signs of an edit:

    version counters       any in-place operation of autograd, `load_state_dict`
    addresses              `parameter.data = other`
    samples, on a CPU      `parameter.data.mul_`, a NumPy array over the memory: some elements of
                           each of `_SAMPLED` parameters, others after every step

`check_replicas` reads everything, and finds the edits that these miss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_numbers
from gradsync.core.torch_private import version
from gradsync.sync.agreement import Agreement
from gradsync.sync.hyperparameters import Settings, refuse_difference
from gradsync.sync.replicas import check_replicas

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_SAMPLED = 64
"""Parameters that are sampled after a step, and before the next; about 3 us each."""
_ELEMENTS = 8
"""Elements sampled of each parameter."""


class ReplicaWatch:
    """State of this rank's replica after the last step.

    Args:
        model: all of its parameters, frozen ones too.
        comm: the ranks that hold replicas.
        equal: False where ranks hold different weights on purpose: these are not watched then.
    """

    def __init__(self, model: nn.Module, comm: Communicator, *, equal: bool) -> None:
        self._comm = comm
        watched = equal and comm.world_size > 1
        self._named = list(model.named_parameters()) if watched else []
        self._weights = [parameter for _, parameter in self._named if _is_plain(parameter)]
        self._states: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._turn = 0
        self._edited = False
        self.remember()

    def remember(self, *optimizers: Optimizer) -> None:
        """Accept weights, and the state of `optimizers`, as they are on this rank."""
        self._marks = self._marks_now()
        self._turn += 1
        self._sample = self._sample_now()
        for optimizer in optimizers:
            self._states[optimizer] = optimizer.state

    def state_of(self, optimizer: Optimizer) -> str:
        """Origin of its state, the same on ranks that load alike."""
        if optimizer not in self._states:
            # Merely reading `state[parameter]` makes an empty entry.
            loaded = any(optimizer.state.values())
            return "loaded before the first step" if loaded else "empty"
        kept = self._states[optimizer] is optimizer.state
        return "kept from the last step" if kept else "loaded since the last step"

    def changed(self, *optimizers: Optimizer) -> bool:
        """Whether weights have changed, or one of these states was loaded, since `remember`; or
        were found so before, and never compared."""
        if not self._edited:
            loaded = any(self.state_of(optimizer).startswith("loaded") for optimizer in optimizers)
            same = self._marks == self._marks_now() and self._sample == self._sample_now()
            self._edited = loaded or not same
        return self._edited

    def refuse_unlike(self, agreed: Agreement, settings: Settings, why: str) -> None:
        """Raise on all ranks when they differ in the values that the step's message compared.

        Args:
            agreed: the same on all ranks; nothing is compared in a step that is discarded.
            settings: this rank's settings, whose digest was in the message.
            why: see `refuse_difference`.

        Raises:
            ConfigError: other settings, see `refuse_difference`.
            RunError: weights that were changed on some ranks, see `_compare`.
        """
        if agreed.discard:
            return
        if not agreed.alike:
            refuse_difference(self._comm, settings, why)
        if agreed.changed:
            self._compare()

    def _compare(self) -> None:
        """Raise unless hashes of all weights are equal on all ranks.

        One all-gather, int64 [1], whole group, and the cost of `check_replicas`.
        """
        told = all_gather_numbers(self._comm, int(self._edited))
        self._edited = True
        edited = [rank for rank, number in enumerate(told) if number]
        check_replicas(self._named, self._comm, edited=edited)
        self._edited = False

    def _marks_now(self) -> tuple[list[int], list[int]]:
        return [version(w) for w in self._weights], [w.data_ptr() for w in self._weights]

    def _sample_now(self) -> bytes:
        """The bits of a few elements of some parameters."""
        count = len(self._weights)
        first = self._turn * _SAMPLED % count if count > _SAMPLED else 0
        parts = [_few(w.detach()) for w in self._weights[first : first + _SAMPLED] if _readable(w)]
        return torch.cat(parts).view(torch.uint8).numpy().tobytes() if parts else b""


def _is_plain(weight: Tensor) -> bool:
    """Whether the tensor has memory to look at, and counts its versions."""
    is_dense = type(weight) is torch.nn.Parameter and weight.layout == torch.strided
    return is_dense and not weight.is_inference()


def _readable(weight: Tensor) -> bool:
    """Whether it can be read without waiting for a device."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        and weight.is_contiguous()
        and weight.numel() > 0
    )


def _few(weight: Tensor) -> Tensor:
    """Up to `_ELEMENTS` elements at equal distances, the first one among them."""
    count = min(_ELEMENTS, weight.numel())
    return weight.as_strided((count,), ((weight.numel() - 1) // max(count - 1, 1) or 1,))
