"""Global batches of a data set that is only readable in order, the same for every world size."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import nullcontext, suppress
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator
from gradsync.comm.values import all_gather_json, same_on_all_ranks
from gradsync.data.batch_plan import MicroBatchSpan, StepSpan, require_at_least, solve_batch_plan
from gradsync.data.loader import check_state, fingerprint_of
from gradsync.data.micro_batch import Batch
from gradsync.errors import ConfigError, DataError
from gradsync.runtime.seeds import seed_draws
from gradsync.world import World

Place = Mapping[str, Any]
"""A place between two samples of a stream, equal on every rank: steps and samples before it,
complete passes, samples taken of the current pass, a digest of all samples before it, and the data
set's own state there (None if it has no usable one)."""
_START: Place = dict(steps=0, samples=0, epoch=0, taken=0, digest="", source=None)  # noqa: C408
_COMPARED = 8
"""Steps that are read again and compared when a data set resumes from its own state: that state
may lack samples, such as a shuffle buffer's."""
_REMEDY = (
    "give all ranks, and a run that goes on, the same data in the same order (a shuffle needs a "
    "seed, files must be equal, nothing may be split by rank, as by split_dataset_by_node)"
)


class StreamLoader:
    """Global batches of an iterable data set, such as a Hugging Face `IterableDataset`.

    Iterating yields one `Batch` at a time; a new loop continues with the next step. Steps and
    micro-batches are those of `loader`, keyed by position in the stream: any number of ranks takes
    the same samples in the same micro-batches. The data set determines the order of samples.

    Every rank reads the whole stream and keeps its own micro-batches. That costs reading, decoding
    and a digest of every sample on every rank, and a small message per step that compares the
    digests.

    Args:
        dataset: any iterable; `set_epoch(n)` is called before pass n if it exists.
        world: this rank's world.
        micro_batch_size: samples in a micro-batch.
        global_batch_size: samples in a step, over all ranks; a multiple of `micro_batch_size`.
        comm: carries the comparison; None takes the world's own.
        num_epochs: passes over the data; None never ends.
        collate_fn, device: as in `loader`.
        seed, seed_micro_batches: as in `loader`.

    Raises:
        ConfigError: inexact batch arithmetic; a data set readable only once, for several passes.
        DataError: a DataLoader of batches; while iterating: ranks read different streams.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        comm: Communicator | None = None,
        num_epochs: int | None = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int | None = None,
        seed_micro_batches: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        require_at_least(1, num_epochs=num_epochs)
        if isinstance(dataset, DataLoader) and dataset.batch_sampler is not None:
            raise DataError("this DataLoader gives batches, not samples: give it batch_size=None")
        if isinstance(dataset, Iterator) and num_epochs != 1:
            raise ConfigError(
                f"{type(dataset).__name__} can be read once and num_epochs is {num_epochs}: give "
                "an iterable that begins anew whenever it is iterated"
            )
        self.plan = solve_batch_plan(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            world_size=world.world_size,
        )
        """The batch arithmetic; `plan.describe()` prints it."""
        self._source = _Source(dataset, num_epochs)
        self._rank = world.rank
        self._comm = comm or communicator(world)
        self._collate_fn = collate_fn or default_collate
        self._device = torch.device(world.device if device is None else device)
        self._state: dict[str, Any] = {
            **{"samples": 0, "steps": 0, "digest": ""},
            "seed": world.seed if seed is None else seed,
            "dataset": fingerprint_of(dataset),
            "global_batch_size": global_batch_size,
            "micro_batch_size": micro_batch_size,
        }
        self._seed = self._state["seed"] if seed_micro_batches else None
        self._first = _START  # start of the first step of this pass
        self._recent: deque[Place] = deque(maxlen=_COMPARED)  # starts of the last steps
        self._is_lost = False  # whether the data set's position is unknown, as after an error
        self._latest: tuple[Batch, tuple[Place, list[str], int]] | None = None  # not counted yet

    def __iter__(self) -> Iterator[Batch]:
        finalizing = sys.is_finalizing  # at exit this module's names may be gone
        self._is_lost = self._is_lost or not self._settle()
        try:
            while (step := self._next_step()) is not None:
                yield step
        finally:
            if self._seed is not None and not finalizing():
                self._settle()
                seed_draws(self._seed, "after", self._state["steps"])

    def close(self) -> None:
        """Close the data set's resources."""
        self._source.close()
        self._is_lost = True

    def state_dict(self) -> dict[str, Any]:
        """Position of the loader after the last batch that was read: equal on all ranks, valid for
        any world size. Loading it reads samples again, to check that the stream is unchanged."""
        self._settle()
        recent = self._recent[0] if self._recent else _START
        return deepcopy(self._state | {"recent": recent, "first": self._first})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`, saved with any world size.

        A data set with its own state continues from it if the last steps are unchanged; if passes
        follow, it needs `set_epoch` too. Any other data set is read from the start of the pass, or,
        without `set_epoch`, of the stream, and all of it is compared. DataError if the state is
        malformed, or from another data set or seed, or if the stream's samples have changed.
        """
        counters = ("samples", "steps", "global_batch_size", "micro_batch_size")
        check_state(state, self._state, counters, ("dataset", "seed"))
        state = {"digest": "", "first": _START, **state}
        self._is_lost, self._latest = True, None
        for place in (state.get("recent"), state["first"], _START):
            if not isinstance(place, Mapping) or place.keys() < _START.keys():
                continue
            check_state(place, {}, ("steps", "samples", "epoch", "taken"), ())
            try:
                # Ignore any error of a data set about a state that it cannot load.
                with suppress(Exception) if place["source"] else nullcontext():
                    self._is_lost = not self._read_again(place, state)
            finally:
                self._state |= {name: state[name] for name in ("samples", "steps", "digest")}
            if not self._is_lost:
                return
        raise DataError(
            f"the stream has other samples before step {state['steps']} than when the state was "
            f"saved: {_REMEDY}"
        )

    def _read_again(self, place: Place, state: Mapping[str, Any]) -> bool:
        """Go to `place`, read up to the place of `state`, and check that nothing has changed."""
        if not self._source.seek(place):
            return False
        self._recent.clear()
        self._first = place if place["source"] is None else state["first"]
        self._state |= {name: place[name] for name in ("steps", "samples", "digest")}
        while left := state["samples"] - self._state["samples"]:
            start, count = self._place(), min(state["global_batch_size"], left)
            _, digests, count = self._read_step(count, state["micro_batch_size"], ())
            if not count:
                return False
            self._count(start, digests, count)
        return state["digest"] in ("", self._state["digest"])

    def _place(self) -> Place:
        here = {name: self._state[name] for name in ("steps", "samples")}
        return {**here, **self._source.place()}

    def _next_step(self) -> Batch | None:
        """Read the next global batch, keep this rank's part, and compare the batch over ranks."""
        if self._is_lost:
            self.load_state_dict(self.state_dict())
        self._settle(read=True)
        start, number = self._place(), self._state["steps"]
        mine = self.plan.micro_batches_of(self._rank)
        self._is_lost = True  # after an error, iterating again restarts this step
        own, digests, count = self._read_step(
            self.plan.global_batch_size, self.plan.micro_batch_size, mine
        )
        self._check_equal(number, count, digests)
        self._is_lost = False
        if not count:
            return None
        last_rank = self.plan.micro_batches_of(self.plan.world_size - 1)
        first, size = start["samples"], self.plan.micro_batch_size
        parts = [MicroBatchSpan(i, first + i * size, held) for i, (_, held) in own.items()]
        batch = Batch(
            StepSpan(len(digests), parts, everyone_has_some=last_rank[0] < len(digests)),
            iter([batch for batch, _ in own.values()]).__next__,
            number=number,
            device=self._device,
            seed=self._seed,
        )
        self._latest = batch, (start, digests, count)
        return batch

    def _read_step(
        self, count: int, size: int, mine: Container[int]
    ) -> tuple[dict[int, tuple[Any, int]], list[str], int]:
        """Read up to `count` samples as micro-batches of `size`. Returns the micro-batches in
        `mine`, each with its number of samples; the digest after each micro-batch; all samples.

        Random draws of the data set and the collate function belong to the micro-batch.
        """
        own, digests, total = {}, [], 0
        for index, begin in enumerate(range(0, count, size)):
            if self._seed is not None:
                seed_draws(self._seed, "read", self._state["steps"], index)
            group = list(islice(self._source, min(size, count - begin)))
            if not group:
                break
            digests.append(self._source.digest)
            total += len(group)
            if index in mine:
                own[index] = (self._collate_fn(group), len(group))
        return own, digests, total

    def _settle(self, *, read: bool = False) -> bool:
        """Count the last batch if it was read; whether it was, or there is none."""
        if self._latest is None:
            return True
        batch, counts = self._latest
        if read or batch.is_read:
            self._latest = None
            self._count(*counts)
        return self._latest is None

    def _count(self, start: Place, digests: list[str], count: int) -> None:
        """Record a step that began at `start`."""
        if start["epoch"] != self._first["epoch"]:
            self._first = {**start, "source": None}
        self._recent.append(start)
        self._state["steps"] += 1
        self._state["samples"] += count
        self._state["digest"] = digests[-1] if digests else ""

    def _check_equal(self, step: int, count: int, digests: list[str]) -> None:
        # Whole communicator, one all-gather, int64 [1], before the step; overlaps nothing.
        if same_on_all_ranks(self._comm, f"{count} {digests}".encode()):
            return
        found = all_gather_json(self._comm, [count, digests])
        other = next(rank for rank, what in enumerate(found) if what != found[0])
        (mine, first), (theirs, second) = found[0], found[other]
        what = f"{mine} samples on rank 0, {theirs} on rank {other}"
        if mine == theirs:
            number = next(n for n, digest in enumerate(first) if digest != second[n])
            what = f"micro-batch {number} has other samples on rank {other} than on rank 0"
        raise DataError(f"the ranks read different streams at step {step}: {what}; {_REMEDY}")


stream_loader = StreamLoader
"""The name in training loops: `for batch in gs.stream_loader(...)`."""


class _Source:
    """The samples of an iterable data set, pass after pass; it can return to an earlier one.

    A pass without samples is the last one, regardless of `num_epochs`.
    """

    def __init__(self, dataset: Any, num_epochs: int | None) -> None:
        self._dataset, self._num_epochs = dataset, num_epochs
        self._beginning = self._own_state()
        self._from_state = False
        """Whether iterating the data set again may start from a loaded state."""
        self._samples: Iterator[Any] | None = None
        self._epoch = self._taken = 0
        self.digest = ""
        """A digest of all samples so far."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._num_epochs is None or self._epoch < self._num_epochs:
            if self._samples is None:
                self._begin_pass()
            assert self._samples is not None
            try:
                for sample in self._samples:
                    self._taken += 1
                    self.digest = digest_of(sample, self.digest)
                    return sample
            except BaseException:
                self.close()  # a generator that raised would look finished
                raise
            self.close()
            if not self._taken:
                break
            self._epoch, self._taken = self._epoch + 1, 0
        raise StopIteration

    def place(self) -> Place:
        """Place of the next sample."""
        source = None if self._samples is None else self._own_state()
        here = {"epoch": self._epoch, "taken": self._taken, "digest": self.digest}
        return here | {"source": source}

    def seek(self, place: Place) -> bool:
        """Go to `place`, by the data set's own state if it has one, else by reading up to it in its
        pass. False if the pass has fewer samples, or if finding that pass or the next one takes a
        `set_epoch`, which the data set lacks."""
        self.close()
        own = place["source"]
        self._epoch, self._taken, self.digest = (place[n] for n in ("epoch", "taken", "digest"))
        is_alone = not self._epoch if own is None else self._epoch + 1 == self._num_epochs
        if not is_alone and not hasattr(self._dataset, "set_epoch"):
            return False
        self._from_state = True  # whatever it did before
        if own is not None or self._taken:  # else with the micro-batch, for its random draws
            self._begin_pass(own)
        skipped = 0 if own is not None else self._taken
        return sum(1 for _ in islice(self._samples or (), skipped)) == skipped

    def close(self) -> None:
        """End the pass in progress, and close the data set's resources."""
        samples, self._samples = self._samples, None
        close = getattr(samples, "close", None)
        if close is not None:
            close()

    def _begin_pass(self, own: Any = None) -> None:
        dataset = self._dataset
        if self._from_state and own is None and self._beginning is not None:
            dataset.load_state_dict(deepcopy(self._beginning))
        if hasattr(dataset, "set_epoch"):  # after the state, which may hold another epoch
            dataset.set_epoch(self._epoch)
        if own is not None:
            dataset.load_state_dict(deepcopy(own))
        self._from_state = own is not None
        self._samples = iter(dataset)

    def _own_state(self) -> Any:
        """A copy, since a state may hold a buffer that changes later; None if the data set has no
        state, or one that takes arguments, cannot be copied or cannot be loaded."""
        if hasattr(self._dataset, "load_state_dict"):
            with suppress(Exception):
                return deepcopy(self._dataset.state_dict())
        return None


def digest_of(sample: Any, before: str = "") -> str:
    """A digest of a sample and all `before` it: equal for equal ones in every process.

    Numbers, text, lists and mappings count as their JSON; tensors, arrays and images by type, shape
    and CRC-32 of their bytes; other objects by their type alone.
    """
    text = before + json.dumps(sample, default=_content, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return [str(value.dtype), list(value.shape), zlib.crc32(bits.numpy().data)]
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [value.dtype.str, value.shape, zlib.crc32(value.tobytes())]
    if isinstance(value, bytes | bytearray | memoryview):
        return zlib.crc32(value)
    if hasattr(value, "tobytes"):  # numpy's scalars, images
        return [type(value).__name__, zlib.crc32(value.tobytes())]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return type(value).__name__
