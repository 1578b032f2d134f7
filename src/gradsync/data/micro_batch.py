"""One rank's view of a global batch, and its micro-batches on their way to the model.

[Note: What counts as a target] `micro_batch.num_targets` is the micro-batch's share in the mean
loss:

    batch                                    counted
    (inputs, integer targets)                each target that is not -100, whatever their shape: a
                                             class for each sample, token or pixel, a bit of a
                                             multi-label target; bool counts as integer
    (inputs, float targets)                  samples: values, probabilities, multi-label as floats
    a dict with integer "labels"             each label that is not -100
    everything else                          samples: a tensor, three or more parts, other dicts

Samples are the rows of the batch's tensors if a collate function has dropped some. If the loss
averages over another count, pass it: `sync.backward(..., weight=...)`. Language models of
`transformers` shift the labels: `weight=micro_batch.num_shifted_targets`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsync.data.batch_plan import StepSpan
from gradsync.errors import ConfigError, DataError
from gradsync.runtime.seeds import seed_draws, seed_micro_batch, stream_seed

IGNORED_TARGET = -100
"""Targets with this value are not counted; torch's `cross_entropy` has the same default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One micro-batch, collated and on the device."""

    index: int
    """Place in the step, counted over all ranks."""
    step: int
    """Number of the step in the stream, from 0."""
    batch: Any
    """Output of the collate function for the samples."""
    num_samples: int
    """Samples in this micro-batch: the rows that the collate function kept, if the tensors show
    it."""
    num_targets: int
    """Weight of this micro-batch in the mean loss: targets other than -100, or samples; see
    [Note: What counts as a target]."""
    is_last: bool
    """True on a rank's last micro-batch, if every rank has a micro-batch in this step. So all ranks
    synchronise, or none does."""
    order: str = ""
    """Describes the order of samples: ranks with different orders would not share one batch.
    `sync.step` compares it; "" is not compared."""
    num_micro_batches: int = 0
    """Micro-batches of the step over all ranks; `sync.step` expects them if `order` is known."""
    world_size: int = field(default=0, repr=False, compare=False)
    """Ranks among which the step was dealt; 0 is not compared."""
    shifted: int | None = field(default=None, repr=False, compare=False)
    """See `num_shifted_targets`; None if the batch has no such labels."""
    key: tuple[int, int, int] | None = field(default=None, repr=False, compare=False)
    """Seeds its random numbers, see [Note: Keyed streams]; None seeds nothing."""
    is_passed: bool = field(default=False, repr=False, compare=False)
    """Whether iteration has passed this micro-batch, so that something else was seeded."""
    is_read: bool = field(default=False, repr=False, compare=False)
    """Whether its batch was read since its last backward."""

    def __getattribute__(self, name: str) -> Any:
        if name == "batch" and self.key is not None and not self.is_read:
            object.__setattr__(self, "is_read", True)
            if self.is_passed:
                seed_micro_batch(*self.key)
        return object.__getattribute__(self, name)

    def backward_ended(self) -> None:
        """Make the next read of its batch, as in a second pass over `list(step)`, start with fresh
        random numbers."""
        if self.key is not None:
            seed, step, index = self.key
            object.__setattr__(self, "key", (stream_seed(seed, "again"), step, index))
            object.__setattr__(self, "is_read", False)

    @property
    def num_shifted_targets(self) -> int:
        """`num_targets` without the first label of each sequence, for language models of
        `transformers`, which predict `labels[:, 1:]`. DataError if the batch is no dict with
        integer "labels", [B, T]."""
        if self.shifted is None:
            raise DataError(f"micro_batch.num_shifted_targets: {_described(self.batch)}")
        return self.shifted

    @property
    def inputs(self) -> Any:
        """First part of a tuple or list, else the whole batch; a dict is a DataError."""
        if isinstance(self.batch, Mapping):
            raise DataError(f"micro_batch.inputs: {_described(self.batch)}")
        return self.batch[0] if _has_parts(self.batch) else self.batch

    @property
    def targets(self) -> Any:
        """Second part of a tuple or list; DataError if it has none."""
        if _has_parts(self.batch) and len(self.batch) > 1:
            return self.batch[1]
        raise DataError(f"micro_batch.targets: {_described(self.batch)}")


class Batch:
    """The global batch of one optimizer step; iterating gives this rank's micro-batches, once.

    Micro-batches are read on request. `len(batch)` is this rank's number of micro-batches, which is
    0 for some ranks if the step has fewer micro-batches than ranks.
    """

    def __init__(
        self,
        span: StepSpan,
        read: Callable[[], Any],
        *,
        number: int,
        device: torch.device,
        seed: int | None = None,
        order: str = "",
        ends_epoch: bool | None = None,
        dealt_for: tuple[int, int] = (0, 0),
        deal: Callable[[], tuple[StepSpan, Callable[[], Any], tuple[int, int]]] | None = None,
    ) -> None:
        """`read` returns this rank's collated micro-batches, one after the other, of a step that is
        `dealt_for` this rank's number and that of the ranks. `deal` deals it again among the ranks
        that there are."""
        self._span, self._read = span, read
        self._device, self._seed, self._order, self._ends_epoch = device, seed, order, ends_epoch
        self._dealt_for, self._deal = dealt_for, deal
        self._begin(number)
        self.number = number
        """Number of the step in the stream, from 0."""
        self.num_micro_batches = span.num_micro_batches
        """Micro-batches of the step over all ranks."""

    def _begin(self, number: int) -> None:
        self._left = deque(self._span.micro_batches)
        self.is_read = False  # Whether iteration of its micro-batches has begun
        if self._seed is not None:
            seed_draws(self._seed, "before", number)

    @property
    def can_be_dealt_again(self) -> bool:
        """Whether other ranks could take this step over."""
        return self._deal is not None

    def deal_again(self) -> None:
        """Begin anew, dealt among the ranks that are left."""
        assert self._deal is not None, "checked by `sync.attempts`"
        self._span, self._read, self._dealt_for = self._deal()
        self._begin(self.number)

    def follow(self, rank: int, world_size: int) -> None:
        """Deal it again if the ranks have changed since; this is rank `rank` of `world_size`.

        Raises:
            ConfigError: its micro-batches were read already.
        """
        if self._dealt_for == (rank, world_size):
            return
        if self.is_read:
            raise ConfigError(
                f"the micro-batches of step {self.number} were read before ranks were lost or "
                "joined: read them in the block of sync.attempts(batch)"
            )
        self.deal_again()

    @property
    def ends_epoch(self) -> bool:
        """Whether it holds the last sample of a pass over the data; equal on all ranks. DataError
        for a stream, whose end only the next read shows."""
        if self._ends_epoch is None:
            raise DataError(
                "batch.ends_epoch is not known for a stream: only the next read shows its end; "
                "count samples or steps, or use gs.loader"
            )
        return self._ends_epoch

    def __len__(self) -> int:
        return len(self._span.micro_batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        if self.is_read:
            raise RuntimeError(
                f"the micro-batches of step {self.number} can be read once, before the next step "
                "begins (or in each attempt of a step whose batches are given to sync.attempts)"
            )
        self.is_read = True
        return self._hand_out()

    def _hand_out(self) -> Iterator[MicroBatch]:
        given = 0
        while self._left:
            part = self._left.popleft()
            given += 1
            micro_batch = make_micro_batch(
                self._read(),
                index=part.index,
                step=self.number,
                num_samples=part.count,
                is_last=self._span.everyone_has_some and not self._left,
                device=self._device,
                seed=self._seed,
                order=self._order,
                num_micro_batches=self.num_micro_batches if self._order else 0,
                world_size=self._dealt_for[1],
            )
            if micro_batch.key is not None:
                seed_micro_batch(*micro_batch.key)
            yield micro_batch
            object.__setattr__(micro_batch, "is_passed", True)
        if self._seed is not None:
            seed_draws(self._seed, "behind", self.number)
        if given < len(self):  # unordered sums would hide that
            raise DataError(
                f"step {self.number + 1} brought {given} of its {len(self)} micro-batches on this "
                "rank: no rank may take this for the global batch"
            )

    def drain(self) -> None:
        """Read the rest of the step, so that the next one starts in the right place."""
        self.is_read = True
        while self._left:
            self._left.popleft()
            self._read()


def _has_parts(batch: Any) -> bool:
    """Whether it is (inputs, targets, ...); a list of texts or numbers is itself a batch."""
    if not isinstance(batch, (tuple, list)):
        return False
    return any(not isinstance(part, (str, bytes, int, float)) for part in batch)


def _described(batch: Any) -> str:
    """The reason for an error: the kind of batch, and what to write instead."""
    keys = f" ({', '.join(map(repr, batch))})" if isinstance(batch, Mapping) else ""
    return (
        f"this batch is a {type(batch).__name__}{keys}: use micro_batch.batch, as in "
        "model(**batch); only a tuple or list of two or more has targets"
    )


def make_micro_batch(
    batch: Any,
    *,
    index: int,
    step: int,
    num_samples: int,
    is_last: bool,
    device: torch.device,
    seed: int | None = None,
    order: str = "",
    num_micro_batches: int = 0,
    world_size: int = 0,
) -> MicroBatch:
    """A `MicroBatch` with its rows and targets counted and its tensors on `device`."""
    num_samples = count_rows(batch, num_samples)
    num_targets = count_targets(batch, num_samples)  # before the move, see `count_targets`
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    shifted = None
    if isinstance(labels, Tensor) and labels.ndim == 2:
        shifted = count_targets({"labels": labels[:, 1:]}, num_samples)
    return MicroBatch(
        index=index,
        step=step,
        batch=move_to(batch, device),
        num_samples=num_samples,
        num_targets=num_targets,
        shifted=shifted,
        is_last=is_last,
        order=order,
        num_micro_batches=num_micro_batches,
        world_size=world_size,
        key=None if seed is None else (seed, step, index),
    )


def count_rows(batch: Any, num_samples: int) -> int:
    """Samples that a collate function has kept of `num_samples`: the number of rows that the
    tensors of `batch` share. More rows are padding. Other batches are not counted: lists of
    samples, and batches whose second dimension is the samples' (`pad_sequence`, `nn.LSTM`)."""
    nested = list(batch.values()) if isinstance(batch, Mapping) else batch
    parts = nested if isinstance(nested, list | tuple) else [batch]
    tensors = [part for part in parts if isinstance(part, Tensor) and part.ndim]
    rows = {len(tensor) for tensor in tensors}
    alike = len({(t.ndim, t.dtype) for t in tensors}) == 1
    is_samples = len(parts) == num_samples > 2 and alike
    time_first = all(t.ndim > 1 and t.shape[1] == num_samples for t in tensors)
    time_first &= any(t.ndim > 2 for t in tensors)  # [T, B, C]; [n, 8] is ambiguous
    if len(rows) != 1 or is_samples or time_first:
        return num_samples
    return min(num_samples, *rows)


def count_targets(batch: Any, num_samples: int) -> int:
    """Targets, or else samples, see [Note: What counts as a target]. Call it before the batch moves
    to a GPU, where the count would wait for the device."""
    targets = None
    if isinstance(batch, Mapping):
        targets = batch.get("labels")
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        targets = batch[1]
    if not isinstance(targets, Tensor) or not targets.ndim:
        return num_samples
    if targets.is_floating_point() or targets.is_complex():
        return num_samples
    if not targets.dtype.is_signed:  # compared with uint8, -100 would be 156
        return targets.numel()
    return int((targets != IGNORED_TARGET).sum())


def move_to(batch: Any, device: torch.device) -> Any:
    """`batch` with everything that has a `to` on `device`. Copies to a GPU use page-locked memory
    and are asynchronous."""

    def move(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part.to(device) if hasattr(part, "to") else part
        if device.type == "cuda" and part.device.type == "cpu" and not part.is_pinned():
            part = part.pin_memory()
        return part.to(device, non_blocking=True)

    return _map(batch, move)


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Apply `fn` to each tensor in nested tuples, lists and mappings; the structure is the same."""
    return _map(value, lambda part: fn(part) if isinstance(part, Tensor) else part)


def _map(value: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(value, MutableMapping):
        mapped = copy(value)  # keeps the type: models' outputs are often mappings with attributes
        for key, part in value.items():
            mapped[key] = _map(part, fn)
        return mapped
    if isinstance(value, Mapping):
        return {key: _map(part, fn) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_map(part, fn) for part in value]
        # A named tuple takes its fields as separate arguments.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return fn(value)
