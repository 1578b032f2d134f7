"""Synchronisation of buffers that a forward changes, such as BatchNorm's running statistics.

[Note: Buffers] All ranks start with rank 0's buffers. Within a step every leaf's forward starts
from the same values, those at the step's beginning; at its end a buffer becomes

    floating, complex     start + mean over leaves of (value after the leaf - start)
    integer, bool         start + the largest change by any leaf

where leaves that did not change a buffer do not count, nor leaves of weight 0 (all padding). So
BatchNorm's `num_batches_tracked` counts *steps*, not forwards, and its running mean moves by
`momentum` towards the mean of the leaves' means. (The running variance moves towards the mean of
the variances *within* leaves, without the variance between them; larger leaves include more of it.)

Ranks do not appear in this rule, and the mean is exact ([Note: Sums without an order]): any number
of ranks, with any distribution of leaves, ends with the same bits. Neither a forward in training
mode without a backward nor a step that is refused or discarded leaves a trace. A buffer that no
forward changes is not touched, read or sent, and may be changed by hand between steps, on all ranks
alike. In the user's training loop, where a leaf's end is unknown, a rank's forwards are one leaf.

A step costs one message of 8 bytes per buffer and, if any changed, two of 8 bytes per element; one
copy of all buffers is kept. Checkpoints need only the buffers themselves, taken between steps.

[Note: Sums without an order] Per element all ranks agree on the largest exponent, every value
becomes an integer of at most 62 - log2(most) bits on that scale, and the integers are added,
wherever they are: bits depend on neither order nor grouping. For up to 512 leaves that is at least
as fine as float64 for the largest value. An element with an infinite or undefined value sums to
nan. (The bins of a step's message, [Note: Fixed bins], would be much to send for many elements.)
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.core.torch_private import version
from gradsync.errors import ConfigError
from gradsync.sync.watch import ModuleHook

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gradsync.sync.batch_norm import BatchNormHandling


class BufferSync:
    """Keeps the buffers of equal replicas equal, by the rule of [Note: Buffers].

    Per leaf: forward, `leaf_begins`, backward, `leaf_ends`. Per step: `step_begins`, `step_ends`,
    on all ranks, including those without leaves.

    Args:
        model, comm: buffers are equal on all ranks.
        batch_norm: from `choose_batch_norm`; its ranks meet at the same phases.
        equal_replicas: False when replicas drift between rounds, and the strategy averages buffers
            itself when ranks meet: nothing is watched here then.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        batch_norm: BatchNormHandling | None = None,
        *,
        equal_replicas: bool = True,
    ) -> None:
        self._model, self._comm, self._batch_norm = model, comm, batch_norm
        self._buffers: list[_Buffer] = []
        self._leaves: list[dict[int, Tensor]] = []  # of this step: changed buffers after each
        self._ending = self._leaves  # of the step that ends
        self._leaf_is_open = False
        self._hooks: list[Any] = []
        # Steps that look for buffers that came later:
        self._looks = 2 if equal_replicas and comm.world_size > 1 > comm.rank else 0
        if not equal_replicas:
            return
        self._buffers = _find_buffers(model, batch_norm.own_buffers if batch_norm else ())
        # Hooks must not keep this object, which holds the model's buffers, alive.
        this, root = weakref.ref(self), weakref.ref(model)

        def before_forward(module: nn.Module, _: Any) -> None:
            if torch.compiler.is_compiling() or module is not root():  # a copy has this hook too
                return
            alive = this()
            if alive is not None and module.training and torch.is_grad_enabled():
                if not alive._leaf_is_open and not alive._leaves:
                    alive.refresh()
                alive._leaf_is_open = True

        def after_loading(module: nn.Module, _: Any) -> None:
            alive = this()
            if alive is not None and module is root():
                alive.refresh()

        self._hooks += [
            model.register_forward_pre_hook(ModuleHook(before_forward)),
            model.register_load_state_dict_post_hook(ModuleHook(after_loading)),
        ]

    @contextmanager
    def untouched(self) -> Generator[None]:
        """Restore all buffers of the model on exit: for throwaway forwards."""
        before = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        try:
            yield
        finally:
            for buffer, value in before:
                buffer.data.copy_(value)
        self.leaf_ends(counts=False)

    def refresh(self) -> None:
        """Read the start values again, after buffers were changed between steps.

        `load_state_dict` does it, and the root module's forward; call it only where neither runs
        (tensors copied in by hand, and a compiled model or one whose root is not called).
        """
        for index in self._changed():
            self._buffers[index].take_start()

    def leaf_begins(self, *, last: bool) -> None:
        """Begin a backward (`last`: communication begins in it)."""
        if self._batch_norm is not None and self._batch_norm.choice == "sync":
            self._batch_norm.meet("the backward of the last leaf" if last else "a backward")

    def leaf_ends(self, *, counts: bool = True) -> None:
        """Keep the changes to buffers, unless the leaf has weight 0 (`counts=False`); reset."""
        changed = self._changed()
        if counts and changed:
            self._leaves.append({i: self._buffers[i].value.clone() for i in changed})
        for index in changed:
            self._buffers[index].set_back()
        self._leaf_is_open = False

    def step_begins(self) -> list[int]:
        """For each buffer, the number of this rank's leaves that changed it in this step.

        The caller sums them over all ranks, in a message it sends anyway, for `step_ends`.
        """
        if self._batch_norm is not None and self._batch_norm.choice == "sync":
            self._batch_norm.meet("the step's end")
        if self._leaf_is_open:  # a forward without backward
            self.leaf_ends(counts=False)
        self._ending, self._leaves = self._leaves, []  # a step that is refused ends with this
        return [sum(i in leaf for leaf in self._ending) for i in range(len(self._buffers))]

    @torch.no_grad()
    def step_ends(self, counts: Sequence[float]) -> None:
        """Set the buffers' new values, equal on all ranks; `counts` are `step_begins` summed."""
        if self._leaf_is_open:  # a forward in the update
            self.leaf_ends(counts=False)
        changed = [index for index, count in enumerate(counts) if count]
        if changed:
            self._combine(changed, counts)
        self._ending = []
        if self._looks:
            known = {(buffer.owner, buffer.key) for buffer in self._buffers}
            found = _find_buffers(self._model, getattr(self._batch_norm, "own_buffers", ()))
            new = [buffer.name for buffer in found if (buffer.owner, buffer.key) not in known]
            self._looks = 0 if new else self._looks - 1
            if new:
                logging.getLogger("gradsync").warning(
                    "buffer %r was registered after gs.replicate and is not synchronised: register "
                    "it in __init__ if its values may differ between ranks",
                    new[0],
                )

    def close(self) -> None:
        """Remove the hooks and restore BatchNorm's methods; buffers stay as they are."""
        if self._batch_norm is not None:
            self._batch_norm.close()
        for hook in self._hooks:
            hook.remove()

    def _changed(self) -> list[int]:
        """Buffers whose module has changed any of its own since their start was taken.

        Judged by module: torch's batch_norm does not report that it wrote to running_mean, but
        BatchNorm's counter does (and for InstanceNorm it is the other way round).
        """
        owners = {id(buffer.owner) for buffer in self._buffers if buffer.was_written()}
        return [i for i, buffer in enumerate(self._buffers) if id(buffer.owner) in owners]

    def _combine(self, changed: list[int], counts: Sequence[float]) -> None:
        """Set new values for `changed`, from all leaves of all ranks."""
        moving = [i for i in changed if self._buffers[i].is_floating]
        counting = [i for i in changed if not self._buffers[i].is_floating]
        device = self._buffers[changed[0]].start.device
        leaves = self._ending or [{}]
        moves = [self._flat_changes(leaf, moving, torch.float64, device) for leaf in leaves]
        jumps = [self._flat_changes(leaf, counting, torch.int64, device) for leaf in leaves]
        sums = exact_sum(torch.stack(moves), torch.stack(jumps), self._comm, most=int(max(counts)))
        for indices, flat in zip((moving, counting), sums, strict=True):
            sizes = [self._buffers[index].start.numel() for index in indices]
            for index, change in zip(indices, flat.split(sizes), strict=True):
                buffer = self._buffers[index]
                buffer.move(change / counts[index] if buffer.is_floating else change)

    def _flat_changes(
        self, leaf: dict[int, Tensor], indices: list[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """One leaf's changes of some buffers, concatenated; 0.0 or least int64 if it has none."""
        nothing = 0.0 if dtype == torch.float64 else torch.iinfo(torch.int64).min
        parts = [torch.zeros(0, dtype=dtype, device=device)]
        for index in indices:
            start = self._buffers[index].start.reshape(-1).to(device, dtype)
            if index in leaf:
                parts.append(leaf[index].reshape(-1).to(device, dtype) - start)
            else:
                parts.append(torch.full_like(start, nothing))
        return torch.cat(parts)


@dataclass(slots=True)
class _Buffer:
    """One buffer, its module, and its value at the beginning of the step."""

    name: str
    owner: nn.Module
    key: str
    start: Tensor
    seen: Tensor
    """The tensor that was the buffer when `start` was taken, and its version then."""
    version: int = -1

    @property
    def is_floating(self) -> bool:
        return self.start.is_floating_point()  # complex ones are viewed as pairs

    @property
    def current(self) -> Tensor:
        """The buffer as it is now; it must keep its shape and dtype."""
        now = self.owner._buffers.get(self.key)
        if now is None or now.shape != self.seen.shape or now.dtype != self.seen.dtype:
            what = "was removed" if now is None else f"became {list(now.shape)} {now.dtype}"
            raise ConfigError(
                f"buffer {self.name!r} {what}; replicas can only share buffers that keep their "
                f"shape and dtype ({list(self.seen.shape)} {self.seen.dtype})"
            )
        return now

    @property
    def value(self) -> Tensor:
        """Its values, writable past autograd: torch's batch_norm saves running_mean for backward,
        does not use it there, and would report a change as an error."""
        data = self.current.data
        return torch.view_as_real(data) if data.is_complex() else data

    def was_written(self) -> bool:
        now = self.current
        return now is not self.seen or version(now) != self.version

    def take_start(self) -> None:
        self.start = self.value.clone()
        self._note()

    def set_back(self) -> None:
        self.value.copy_(self.start)
        self._note()

    def move(self, change: Tensor) -> None:
        """Set to start + change, shape [numel], float64 or int64."""
        start = self.start.reshape(-1)
        moved = start.to(change.device, change.dtype) + change
        self.start = moved.to(start.device, start.dtype).reshape(self.start.shape)
        self.set_back()

    def _note(self) -> None:
        self.seen = self.current
        self.version = version(self.seen)


def _find_buffers(model: nn.Module, skip: Collection[nn.Module]) -> list[_Buffer]:
    """All buffers outside of `skip`, tied ones once, in `named_buffers` order."""
    found: list[_Buffer] = []
    ids: set[int] = set()
    for prefix, module in model.named_modules():
        for key, tensor in () if module in skip else module.named_buffers(recurse=False):
            if tensor.numel() and id(tensor) not in ids:
                ids.add(id(tensor))
                name = f"{prefix}.{key}" if prefix else key
                found.append(_Buffer(name, module, key, start=tensor, seen=tensor))
                found[-1].take_start()
    return found


_NOTHING = -2000
"""Exponent of 0: below those of all float64 numbers."""
_NOT_FINITE = 5000
"""Exponent of inf and nan: above all others."""


def exact_sum(
    values: Tensor, jumps: Tensor, comm: Communicator, *, most: int
) -> tuple[Tensor, Tensor]:
    """Sum `values` over leaves and ranks ([Note: Sums without an order]), and take the largest of
    `jumps`, on all ranks.

    Two all-reduces over the whole group, int64 [n + m] and int64 [n]; nothing overlaps them.

    Args:
        values: float64 [L, n], L >= 1; a rank without leaves gives zeros.
        jumps: int64 [L, m]; the smallest int64 stands for none.
        comm: the ranks.
        most: largest number of values that any element has over all ranks.

    Returns:
        float64 [n] and int64 [m].
    """
    num_values = values.shape[1]
    exponents = torch.frexp(values).exponent.long().masked_fill(values == 0, _NOTHING)
    exponents = exponents.masked_fill(~values.isfinite(), _NOT_FINITE)
    largest = torch.cat([exponents.amax(0), jumps.amax(0)])
    comm.all_reduce(largest, "max").wait()
    exponent, largest_jump = largest[:num_values], largest[num_values:]
    bits = 62 - math.ceil(math.log2(max(most, 1)))
    shift = bits - exponent.clamp(-900, 1024)
    scaled = torch.where(values.isfinite(), values, 0.0) * _power_of_two(shift)
    total = scaled.round().long().sum(0)
    comm.all_reduce(total, "sum").wait()
    sums = total.double() * _power_of_two(-shift)
    return sums.masked_fill(exponent == _NOT_FINITE, math.nan), largest_jump


def _power_of_two(exponent: Tensor) -> Tensor:
    """2.0 ** exponent, exactly, from its bits; float64, exponent in -1022 .. 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)
