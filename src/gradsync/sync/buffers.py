"""Synchronisation of buffers that a forward changes, for example BatchNorm's running statistics.

[Note: Buffers] All ranks start with rank 0's buffers. Within a step every leaf's forward starts
from the buffers' values at the beginning of the step. At the end of the step a buffer becomes

    floating, complex     start + mean over leaves of (value after the leaf - start)
    integer, bool         start + the largest change by any leaf

Leaves that did not change a buffer do not count, and neither do leaves of weight 0 (all padding).
BatchNorm's `num_batches_tracked` therefore counts *steps*, not forwards, and its running mean moves
by `momentum` towards the mean of the leaves' means. (The running variance moves towards the mean of
the variances *within* leaves, without the variance between them; larger leaves include more of it.)

Ranks do not appear in this rule, and the mean is exact ([Note: Sums without an order]): any number
of ranks, with any distribution of leaves, ends with the same bits. A refused or discarded step
does not change buffers. A buffer that no forward changes is neither copied nor sent. In the user's
training loop the end of a leaf is unknown, so a rank's forwards count as one leaf.

[Note: Whose change] Hooks on the root and on modules with buffers attribute each change:

    between two steps          a new start; ranks compare it before they update (except what was
                               written without autograd's knowledge, by `.data` or NumPy)
    in a leaf                  the leaf's; only its forward sees it
    by hand between leaves     the next leaf's
    under no_grad, in eval     undone before that module's next training forward, or at the step's
                               end; the leaf's, if the module has no training forward in it
    without a backward         the next leaf's, or undone at the step's end

If no hook runs (a compiled function calls the model), changes by a first leaf count as made between
steps, for buffers that no leaf has changed before.

[Note: Tensors come back] After a leaf a module gets back the tensor it had before. A tensor that
the forward assigned is never written: the user or a graph may hold it. The returned tensor is
written in place if necessary, and autograd notices. If that is impossible, or only a graph holds
it, a new one is used. BatchNorm's are written without a version bump: backward never reads them.

A step costs one message of 8 bytes per buffer and, if any buffer changed, two messages of 8 bytes
per element, plus one copy of all buffers. Checkpoints need only the buffers, taken between steps.

[Note: Sums without an order] For each element all ranks agree on the largest exponent. Every value
becomes an integer of at most 62 - log2(most) bits on that scale, and ranks add the integers. Bits
depend on neither order nor grouping. For up to 512 leaves this is at least as fine as float64 for
the largest value. An element with an infinite or undefined value sums to nan. (The bins of a step's
message, [Note: Fixed bins], would be too large to send for many elements.)
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator, Work
from gradsync.core.torch_private import (
    BatchNorm,
    in_transform,
    run_when_traced,
    storage_address,
    storage_uses,
    uses,
    version,
)
from gradsync.errors import ConfigError
from gradsync.sync.check_replicas import hash_bits
from gradsync.sync.step_metadata import hash_text, mark_of
from gradsync.sync.watch import ModuleHook

if TYPE_CHECKING:
    from torch import nn

    from gradsync.sync.batch_norm import BatchNormHandling


class BufferSync:
    """Keeps the buffers of equal replicas equal, by the rule of [Note: Buffers].

    Per leaf: forward, `leaf_begins`, backward, `leaf_ends`. Per step: `step_begins` and
    `step_ends`, on all ranks, including those without leaves.

    Args:
        model, comm: buffers are equal on all ranks.
        batch_norm: from `choose_batch_norm`; its ranks meet at the same phases.
        equal_replicas: False if replicas drift between rounds and the strategy averages buffers
            itself when ranks meet; then nothing is watched here.
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
        synced = batch_norm is not None and batch_norm.choice == "sync"
        self._meeting = batch_norm if synced else None  # its forwards send messages of their own
        skip = batch_norm.own_buffers if batch_norm else ()
        self._buffers = _find_buffers(model, skip) if equal_replicas else []
        self._leaves: list[_Values] = []  # changed buffers after each leaf of this step
        self._ending = self._leaves  # of the step that is ending
        self._changed: set[_Buffer] = set()  # in the open leaf
        self._strays: _Values = {}  # values before forwards that belong to no leaf
        self._edited: set[_Buffer] = set()  # between steps, not compared yet
        self._moving: set[_Buffer] = set()  # changed by leaves so far
        self._trained: set[nn.Module] = set()  # called in the open leaf
        self._in_step = self._in_forward = False
        self._num_leaves = 0
        self._hooks = self._watch() if self._buffers else []

    def _watch(self) -> list[Any]:
        this = weakref.ref(self)  # hooks must not keep the model's buffers alive
        modules = {self._model, *(buffer.owner for buffer in self._buffers)}
        known = weakref.WeakSet(m for m in modules if not isinstance(m, torch.jit.ScriptModule))

        def traced() -> None:
            if (alive := this()) is not None:
                alive._look()

        run_when_traced(traced)

        def before_forward(alive: BufferSync, module: nn.Module, _: Any) -> None:
            if torch.compiler.is_compiling():
                traced()
            # A copy has this hook too.
            elif not alive._in_forward and module in known and not in_transform():
                alive._forward_begins(module)

        # Prepended: a hook of torch's older spectral_norm changes buffers.
        hook, loading = ModuleHook(self, before_forward), ModuleHook(self, BufferSync._look)
        hooks: list[Any] = [m.register_forward_pre_hook(hook, prepend=True) for m in known]
        return [*hooks, self._model.register_load_state_dict_post_hook(loading)]

    def _forward_begins(self, module: nn.Module) -> None:
        """Begin a forward that no other forward encloses."""
        self._look()
        if not (self._trained or self._in_step):  # writes through `.data` do not bump the version
            first = self._buffers if self._num_leaves < 2 else self._moving
            for buffer in set(first) - self._strays.keys():
                buffer.start.copy_(buffer.value)
        before: _Values | None = None
        if module.training and torch.is_grad_enabled():
            self._undo_strays(module)
            self._trained.add(module)
        else:
            before = {buffer: buffer.value.clone() for buffer in self._changed}
        self._in_forward = True

        def after_forward(alive: BufferSync, *_: Any) -> None:
            handle.remove()
            if alive._in_forward:
                alive._in_forward = False
                alive._forward_ended(module, before)

        hook = ModuleHook(self, after_forward)
        handle = module.register_forward_hook(hook, always_call=True)

    def _forward_ended(self, module: nn.Module, before: _Values | None) -> None:
        """End a forward; if it belongs to no leaf, `before` holds the values already changed."""
        written = self._written()
        silent = {b for b in self._buffers if b.is_silent or self._num_leaves < 2}
        silent -= written if before is not None else written | self._changed
        for buffer in silent & self._part(module) if silent else ():
            values = (before or {}).get(buffer, buffer.start)
            if not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (buffer.value, values))):
                buffer.is_silent = True
                written.add(buffer)
        if before is None:
            self._changed |= written
        else:
            starts = {buffer: before.get(buffer, buffer.start) for buffer in written}
            self._strays = starts | self._strays

    def _undo_strays(self, *modules: nn.Module) -> None:
        if self._strays:
            for buffer in set().union(*map(self._part, modules)) & self._strays.keys():
                buffer.put(self._strays.pop(buffer))

    def _part(self, module: nn.Module) -> set[_Buffer]:
        """The buffers of a module and of its submodules."""
        inside = set(module.modules())
        return {buffer for buffer in self._buffers if buffer.owner in inside}

    def _written(self) -> set[_Buffer]:
        """Buffers of modules that have written to any of their buffers since the last call.

        Decided per module: torch's batch_norm does not report that it wrote to running_mean, but
        BatchNorm's counter shows it (for InstanceNorm it is the other way round).
        """
        owners = {id(buffer.owner) for buffer in self._buffers if buffer.was_written()}
        return {buffer for buffer in self._buffers if id(buffer.owner) in owners}

    def _look(self, *_: Any) -> None:
        if self._trained or self._in_step:
            self._changed |= self._written()
        else:
            self.refresh()

    def refresh(self, but: Collection[_Buffer] = ()) -> None:
        """Take what was written between steps, except buffers in `but`, as the new start;
        `load_state_dict` calls it, and so does the first forward of a step."""
        for buffer in self._buffers:
            if buffer not in but and buffer.was_written():
                buffer.take_start()
                self._edited.add(buffer)
                self._strays.pop(buffer, None)

    @contextmanager
    def untouched(self) -> Generator[None]:
        """Restore all buffers of the model on exit; for throwaway forwards."""
        before = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        try:
            yield
        finally:
            for buffer, value in before:
                buffer.data.copy_(value)
        self.leaf_ends(counts=False)

    def leaf_begins(self, *, last: bool) -> None:
        """Begin a backward (`last`: communication begins in it)."""
        if self._meeting is not None:
            self._meeting.meet("the backward of the last micro-batch" if last else "a backward")

    def leaf_ends(self, *, counts: bool = True) -> None:
        """Keep the buffers' changes, unless the leaf has weight 0 (`counts=False`), and reset."""
        if not (self._trained or self._in_step) and self._num_leaves:  # no hook saw a forward
            self.refresh(but=self._moving)
        self._changed |= self._written()
        self._undo_strays(*self._trained)
        self._changed |= self._strays.keys()
        self._strays.clear()
        if counts and self._changed:
            self._leaves.append({buffer: buffer.value.clone() for buffer in self._changed})
        for buffer in self._changed:
            buffer.put()
        self._moving |= self._changed
        self._changed.clear()
        self._trained.clear()
        self._in_forward = False
        self._in_step |= counts
        self._num_leaves += 1

    def step_begins(self) -> list[int]:
        """For each buffer, the number of this rank's leaves that changed it in this step. The
        caller sums them over all ranks, in a message that it sends anyway, for `step_ends`."""
        if self._meeting is not None:
            self._meeting.meet("the step's end")
        if self._trained:  # a forward without backward
            self.leaf_ends(counts=False)
        self._look()
        self._undo_strays(self._model)
        by_hand = self._changed.difference(*self._leaves)  # after the last leaf
        for buffer in by_hand:
            buffer.take_start()
        self._edited |= by_hand
        self._changed.clear()
        self._in_step = False
        self._ending, self._leaves = self._leaves, []  # also if the step is refused
        return [sum(buffer in leaf for leaf in self._ending) for buffer in self._buffers]

    @property
    def mark(self) -> int | None:
        """A number that is equal on ranks that changed buffers equally between steps."""
        edited = [
            (buffer.name, buffer.text()) for buffer in self._buffers if buffer in self._edited
        ]
        return mark_of(repr(edited).encode()) if self._buffers else None

    def texts(self) -> dict[str, str]:
        """The start of each buffer, or its hash, for messages about ranks that differ."""
        return {f"buffer {buffer.name!r}": buffer.text() for buffer in self._buffers}

    @torch.no_grad()
    def step_ends(self, counts: Sequence[float], under_way: Sequence[Work]) -> None:
        """Set the buffers' new values, equal on all ranks. `counts` are the sums of `step_begins`,
        () if the step is discarded; work `under_way` ends before messages are sent."""
        if self._trained:  # a forward in the update
            self.leaf_ends(counts=False)
        changed = {b: count for b, count in zip(self._buffers, counts, strict=False) if count}
        if changed:
            for work in under_way:
                work.wait()
            _combine(changed, self._ending or [{}], self._comm)
            self._strays = {b: was for b, was in self._strays.items() if b not in changed}
        if counts:  # ranks have compared their changes
            self._edited.clear()
        self._ending = []

    def close(self) -> None:
        """Remove the hooks and restore BatchNorm's methods; buffers do not change."""
        if self._batch_norm is not None:
            self._batch_norm.close()
        for hook in self._hooks:
            hook.remove()


@dataclass(slots=True, eq=False)
class _Buffer:
    """One buffer, its module, and its value at the beginning of the step."""

    name: str
    owner: nn.Module
    key: str
    start: Tensor
    home: Tensor
    """The tensor that is the buffer between steps, and its version when it last held `start`."""
    seen: Tensor | None
    """The tensor that was the buffer at the last look, and its version then."""
    home_version: int = -1
    version: int = -1
    is_silent: bool = False
    """Whether forwards write to it without a version bump."""

    def text(self) -> str:
        """Its start, or a hash of the start, for messages."""
        values = self.start
        few = values.numel() <= 4
        return str(values.tolist()) if few else hash_text(repr(hash_bits(values).tolist()).encode())

    @property
    def value(self) -> Tensor:
        """The buffer's current value; it must keep its shape and dtype."""
        now = self.owner._buffers.get(self.key)
        if now is None or now.shape != self.start.shape or now.dtype != self.start.dtype:
            what = "was removed" if now is None else f"became {list(now.shape)} {now.dtype}"
            raise ConfigError(
                f"buffer {self.name!r} {what}; replicas can only share buffers that keep their "
                f"shape and dtype ({list(self.start.shape)} {self.start.dtype})"
            )
        return now.detach()

    def was_written(self) -> bool:
        """Whether it was assigned or written since the last call, as far as torch records it."""
        before = self.seen, self.version
        self.seen = self.owner._buffers.get(self.key)
        self.version = -1 if self.seen is None or self.seen.is_inference() else version(self.seen)
        return self.seen is not before[0] or self.version != before[1]

    def take_start(self) -> None:
        """Start from the buffer's current value."""
        with torch.inference_mode(False):
            self.start = self.value.clone()
        self.was_written()
        assert self.seen is not None
        self.home, self.home_version = self.seen, self.version

    def put(self, values: Tensor | None = None) -> None:
        """Set the buffer to `values`, or to the start; see [Note: Tensors come back]."""
        self.owner._buffers[self.key] = self.seen = self.home
        past = isinstance(self.owner, BatchNorm)
        fixed = self.home.is_inference() or 0 in self.home.stride()  # cannot be written
        dirty = past or self.is_silent or fixed or self.home_version != version(self.home)
        if dirty or values is not None:
            values = self.start if values is None else values
            if past:
                self.home.data.copy_(values)
            elif fixed or self._only_graphs_hold():
                self.owner._buffers[self.key] = self.home = values.clone()
            else:
                with torch.no_grad():
                    self.home.copy_(values)
        self.was_written()
        if values is None or values is self.start:
            self.home_version = self.version

    def move(self, change: Tensor) -> None:
        """Set to start + change, shape [numel], float64 or int64."""
        start = _flat(self.start)
        moved = (start.to(change.device, change.dtype) + change).to(start.device, start.dtype)
        if self.start.is_complex():
            moved = torch.view_as_complex(moved.reshape(-1, 2))
        self.start = moved.reshape(self.start.shape)
        self.put(self.start)

    def _only_graphs_hold(self) -> bool:
        """Whether graphs refer to `home`, and apart from them only its module does."""
        ours = 5  # references: the module, `home`, `seen`, all graphs, this call
        shared = storage_uses(storage_address(self.home.untyped_storage())) > 2
        return uses(self.home) > 1 and not shared and sys.getrefcount(self.home) <= ours


_Values = dict[_Buffer, Tensor]
"""Values of some buffers."""


def _flat(values: Tensor) -> Tensor:
    """Flatten to one dimension, with complex numbers as pairs."""
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)


def _find_buffers(model: nn.Module, skip: Collection[nn.Module]) -> list[_Buffer]:
    """All buffers except those in `skip`, tied ones under each name, in `named_buffers` order."""
    found: list[_Buffer] = []
    for prefix, module in model.named_modules():
        for key, tensor in () if module in skip else module._buffers.items():
            if tensor is not None and tensor.numel():
                name = f"{prefix}.{key}" if prefix else key
                found.append(_Buffer(name, module, key, start=tensor, home=tensor, seen=tensor))
                found[-1].take_start()
    return found


def _combine(counts: dict[_Buffer, float], leaves: Sequence[_Values], comm: Communicator) -> None:
    """Set new values of the buffers in `counts`, which as many leaves of all ranks have changed, of
    them this rank's `leaves`."""
    counting, moving = list[_Buffer](), list[_Buffer]()
    for buffer in counts:
        is_moving = buffer.start.is_floating_point() or buffer.start.is_complex()
        (moving if is_moving else counting).append(buffer)

    def changes(buffers: list[_Buffer], nothing: Tensor) -> Tensor:
        """One row per leaf; `nothing` for leaves that did not change the buffer."""
        starts = {buffer: _flat(buffer.start).to(nothing) for buffer in buffers}
        rows = [
            [
                _flat(leaf[b]).to(x) - x if b in leaf else nothing.expand_as(x)
                for b, x in starts.items()
            ]
            for leaf in leaves
        ]
        return torch.stack([torch.cat([nothing.new_zeros(0), *row]) for row in rows])

    device = next(iter(counts)).start.device
    moves = changes(moving, torch.zeros((), dtype=torch.float64, device=device))
    least = torch.iinfo(torch.int64).min
    jumps = changes(counting, torch.full((), least, device=device))
    sums = exact_sum(moves, jumps, comm, most=int(max(counts.values())))
    for buffers, flat in zip((moving, counting), sums, strict=True):
        sizes = [_flat(buffer.start).numel() for buffer in buffers]
        for buffer, change in zip(buffers, flat.split(sizes), strict=True):
            buffer.move(change / counts[buffer] if buffers is moving else change)


_NOTHING = -2000
"""Exponent of 0, below the exponents of all float64 numbers."""
_NOT_FINITE = 5000
"""Exponent of inf and nan, above all others."""


def exact_sum(
    values: Tensor, jumps: Tensor, comm: Communicator, *, most: int
) -> tuple[Tensor, Tensor]:
    """Sum `values` over leaves and ranks ([Note: Sums without an order]), and take the maximum of
    `jumps`, on all ranks.

    Two all-reduces over the whole group, int64 [n + m] and int64 [n]; nothing overlaps them.

    Args:
        values: float64 [L, n], L >= 1; a rank without leaves gives zeros.
        jumps: int64 [L, m]; the smallest int64 means no jump.
        comm: the ranks.
        most: largest number of values of any element over all ranks.

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
