"""Loaders of map-style data sets: endless global batches, the same for every world size; exact
evaluation."""

from __future__ import annotations

import hashlib
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import resource_tracker
from operator import index
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from gradsync.core.torch_private import end_workers
from gradsync.data.batch_plan import (
    SampleOrder,
    StepSpan,
    cut_step,
    derive_key,
    require_at_least,
    solve_batch_plan,
)
from gradsync.data.micro_batch import Batch, MicroBatch, make_micro_batch
from gradsync.data.tokens import TokenDataset
from gradsync.errors import ConfigError, DataError
from gradsync.runtime.seeds import kept_generators, seed_draws, seed_micro_batch, stream_seed
from gradsync.runtime.signals import HANDLED
from gradsync.world import World

log = logging.getLogger("gradsync")

Collate = Callable[[list[Any]], Any]

WORKER_OPTIONS = ("timeout", "prefetch_factor", "multiprocessing_context", "worker_init_fn")
WORKER_OPTIONS += ("persistent_workers",)
"""The options of torch's `DataLoader` that do not change the contents of a micro-batch."""
_HELD = HANDLED if hasattr(signal, "sigwaitinfo") else ()
_DEEPEST = 4
"""Depth of nested lists and data sets that `glimpse_of` looks into."""


class _Reader(Dataset[Any]):
    """Reads whole micro-batches: indexed with a micro-batch's key and its samples, int64 [B], it
    returns the batch.

    The same object works in this process and in DataLoader workers, so both give the same batch.
    The key is (seed, step, micro-batch) for the data set's random draws; None leaves generators
    alone. A data set may offer `read_batch(indices) -> batch` (as `TokenDataset` does) or torch's
    `__getitems__(indices) -> list of samples`; else samples are read one by one.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn or default_collate
        self._whole = collate_fn is None and hasattr(dataset, "read_batch")

    def __getitem__(self, index: tuple[tuple[int, int, int] | None, np.ndarray]) -> Any:
        key, indices = index
        if key is not None and type(self._dataset) is not TokenDataset:  # it draws nothing
            seed_draws(key[0], "read", *key[1:])
        if self._whole:
            return self._dataset.read_batch(indices)
        numbers = indices.tolist()
        if hasattr(self._dataset, "__getitems__"):
            return self._collate_fn(self._dataset.__getitems__(numbers))
        return self._collate_fn([self._dataset[number] for number in numbers])


class Loader:
    """Global batches of a map-style data set; this rank gets its contiguous micro-batches of each.

    Iterating yields one `Batch` at a time; a new loop continues with the next step. A step counts
    as consumed when it is handed out; batches that workers read ahead do not count.

    Nothing is padded, repeated or dropped: within an epoch each sample comes exactly once, and a
    global batch may cross the end of an epoch. The samples of step k depend only on the seed and
    the global batch size; the world size only decides which rank computes them.

    With `num_epochs` the stream ends after exactly `num_epochs * len(dataset)` samples. Its last
    step and micro-batch may be shorter; with fewer micro-batches than ranks, `is_last` is False on
    all of them.

    Args:
        dataset: anything with `__len__` and `__getitem__`.
        world: this rank's world.
        global_batch_size: samples in a step, over all ranks; a multiple of `micro_batch_size`.
        micro_batch_size: samples in a micro-batch.
        seed: determines the order, and the random numbers (dropout) of each micro-batch; None uses
            the seed of `gs.init`.
        num_workers: DataLoader worker processes that read ahead; 0 reads in this process. Workers
            hold no state, so order and exact resume do not depend on it.
        worker_options: options of torch's `DataLoader` for these workers, such as `timeout`.
        collate_fn: list of samples to batch; None uses torch's `default_collate`.
        num_epochs: passes over the data; None never ends.
        shuffle: False keeps the order of the data set.
        seed_micro_batches: seed torch's, numpy's and Python's global generators by (seed, step)
            before and after a step's micro-batches and by (seed, step, micro-batch) at each
            micro-batch, so that dropout depends on the micro-batch, not the rank. False leaves them
            alone.
        device: destination of batches; None uses the world's device.

    Raises:
        ConfigError: the batch arithmetic is not exact, or ranks outnumber micro-batches; a worker
            option that could change micro-batches.
        DataError: the data set is empty or not map-style.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int | None = None,
        num_workers: int = 0,
        worker_options: Mapping[str, Any] | None = None,
        collate_fn: Collate | None = None,
        num_epochs: int | None = None,
        shuffle: bool = True,
        seed_micro_batches: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        require_at_least(1, num_epochs=num_epochs)
        self._worker_options = dict(worker_options or {})
        if other := self._worker_options.keys() - {*WORKER_OPTIONS}:
            raise ConfigError(
                f"worker_options takes {', '.join(WORKER_OPTIONS)}; got {min(other)!r}"
            )
        self.plan = solve_batch_plan(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            world_size=world.world_size,
        )
        """The batch arithmetic; `plan.describe()` prints it."""
        self._reader = _Reader(dataset, collate_fn)
        seed = index(world.seed if seed is None else seed)  # of NumPy too
        shuffle = bool(shuffle)
        self._order = SampleOrder(size_of(dataset), seed, shuffle)
        self._fingerprint = fingerprint_of(dataset)
        self._described = self._glimpse = ""
        group_size = dist.get_world_size() if dist.is_initialized() else 1
        if group_size == world.world_size:
            # Detects ranks with different data. Not `_fingerprint`: a Hugging Face data set may
            # have a different one in each process.
            own = getattr(dataset, "fingerprint", None)
            self._glimpse = own if isinstance(own, str) else glimpse_of(dataset)
            self._described = (
                f"{type(dataset).__name__} of {self._order.num_samples} ({self._glimpse}), seed "
                f"{seed}{', shuffled' * shuffle}, {global_batch_size} by {micro_batch_size}"
            )
        self._world = world
        self._device = torch.device(world.device if device is None else device)
        self._num_workers = num_workers
        self._seed = seed if seed_micro_batches else None
        self._stop = math.inf if num_epochs is None else num_epochs * self._order.num_samples
        self._samples = self._steps = 0
        self._dealt_again = False
        self._latest: tuple[Batch, int] | None = None  # the last one, and where it began
        self._batches: Iterator[Any] | None = None  # of the iteration in progress
        self._dealt_for = (0, 0)  # this rank's number, and that of the ranks

    @property
    def epoch(self) -> float:
        """Epochs consumed: 1.25 is a quarter through the second epoch."""
        return self._samples / self._order.num_samples

    @property
    def _position(self) -> tuple[int, int]:
        """Samples and steps before the next batch: the last one again if nothing has read it."""
        if self._latest is None or self._latest[0].is_read:
            return self._samples, self._steps
        return self._latest[1], self._latest[0].number

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self._samples, self._steps = self._position
        if self._samples >= self._stop and self._world.is_main:
            log.warning(
                "gs.loader gives no batches: all epochs of num_epochs= are done. Either gs.load "
                "restored a finished run, or this is a second loop: one loop gives all epochs"
            )
        batches = self._open_batches()
        finalizing = sys.is_finalizing  # at exit this module's names may be gone
        length = self._order.num_samples
        try:
            for span, stop in self._spans(self._samples):
                if self._dealt_for != (self._world.rank, self._world.world_size):
                    end_workers(batches)
                    batches = self._open_batches()  # ranks were lost
                number, start = self._steps, self._samples
                order = self._described and f"{self._described}, sample {start}"
                self._samples, self._steps = stop, number + 1
                batch = Batch(
                    span,
                    partial(self._read, batches),
                    number=number,
                    device=self._device,
                    seed=self._seed,
                    order=order,
                    ends_epoch=stop % length < stop - start,
                    dealt_for=self._dealt_for,
                    deal=partial(self._deal_again, start, stop, number),
                )
                self._latest = batch, start
                yield batch
                if self._dealt_again and self._batches is not None:
                    self._dealt_again, batches = False, self._batches
                self._check_current(batches)
                batch.drain()
        finally:
            if (self._batches is batches or self._dealt_again) and not finalizing():
                self.close()
                if self._seed is not None:
                    seed_draws(self._seed, "after", self._steps)

    def _deal_again(
        self, start: int, stop: int, number: int
    ) -> tuple[StepSpan, Callable[[], Any], tuple[int, int]]:
        """This rank's part of the step in progress and its reader, dealt among the ranks that there
        are; this rank's number, and theirs."""
        end_workers(self._batches)
        self._samples, self._steps = start, number
        batches, self._dealt_again = self._open_batches(), True
        span, _ = next(self._spans(start))
        self._samples, self._steps = stop, number + 1
        return span, partial(self._read, batches), self._dealt_for

    def close(self) -> None:
        """End the iteration in progress and its worker processes, if any."""
        batches, self._batches = self._batches, None
        end_workers(batches)

    def _check_current(self, batches: Iterator[Any]) -> None:
        if self._batches is not batches:
            raise RuntimeError(
                "this iteration of the loader is over: it was closed, began anew or was moved"
            )

    def _read(self, batches: Iterator[Any]) -> Any:
        """The next micro-batch's batch."""
        self._check_current(batches)
        return next(batches)

    def state_dict(self) -> dict[str, Any]:
        """Position of the loader after the last batch that was read: equal on all ranks, valid for
        any world size, `num_workers` and global batch size."""
        samples, steps = self._position
        return {
            "samples": samples,
            "steps": steps,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "dataset": self._fingerprint,
            "glimpse": self._glimpse,
            "global_batch_size": self.plan.global_batch_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`, saved with any world size; an iteration in progress ends. DataError
        if the state is malformed, or from another data set, seed or order."""
        known = ("glimpse",) if state.get("glimpse") and self._glimpse else ()
        fixed = ("dataset", *known, "seed", "shuffle")
        check_state(state, self.state_dict(), ("samples", "steps"), fixed)
        self.close()
        self._samples, self._steps, self._latest = state["samples"], state["steps"], None

    def _spans(self, start: int) -> Iterator[tuple[StepSpan, int]]:
        """The steps from stream position `start`, each with the position after it."""
        while start < self._stop:
            stop = int(min(start + self.plan.global_batch_size, self._stop))
            span = cut_step(
                start,
                stop,
                micro_batch_size=self.plan.micro_batch_size,
                rank=self._world.rank,
                world_size=self._world.world_size,
            )
            yield span, stop
            start = stop

    def _open_batches(self) -> Iterator[Any]:
        """The batches of this rank's micro-batches, read here or ahead by workers: the iteration
        in progress."""
        self._dealt_for = self._world.rank, self._world.world_size
        self.plan = solve_batch_plan(
            global_batch_size=self.plan.global_batch_size,
            micro_batch_size=self.plan.micro_batch_size,
            world_size=self._world.world_size,
        )
        items = (
            (
                None if self._seed is None else (self._seed, step, micro_batch.index),
                self._order.indices(micro_batch.start, micro_batch.count),
            )
            for step, (span, _) in enumerate(self._spans(self._samples), self._steps)
            for micro_batch in span.micro_batches
        )
        if not self._num_workers:
            self._batches = map(self._reader.__getitem__, items)
            return self._batches
        # A separate generator: DataLoader would draw from the global one, and `num_workers` would
        # change the model's dropout.
        generator = torch.Generator()
        generator.manual_seed(derive_key(self._order.seed, self._samples, self._world.rank) >> 1)
        options = dict(self._worker_options)
        options["worker_init_fn"] = partial(_begin_worker, options.get("worker_init_fn"))
        context = _start_method(options.pop("multiprocessing_context", None))
        workers = DataLoader(
            self._reader,
            sampler=items,
            batch_size=None,  # a micro-batch is one item: the reader makes the batch
            collate_fn=_unchanged,
            num_workers=self._num_workers,
            pin_memory=self._device.type == "cuda",
            generator=generator,
            multiprocessing_context=context,
            **options,
        )
        self._batches = _begin_reading(workers)
        return self._batches


loader = Loader
"""The name in training loops: `for batch in gs.loader(...)`."""


# -- worker processes: torch's, except for stop signals and their end -----------------------------


def _unchanged(batch: Any) -> Any:
    return batch


def _start_method(asked: Any) -> Any:
    """DataLoader's `multiprocessing_context` for `asked`. A fork server would also get a stop
    signal, end, and take its workers along; spawn does the same without a server."""
    # The first method is the system's default, which the user may still change.
    default = multiprocessing.get_start_method(allow_none=True)
    method = asked or default or multiprocessing.get_all_start_methods()[0]
    name = getattr(method, "get_start_method", lambda: method)()
    return "spawn" if name == "forkserver" else asked


def _begin_reading(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the workers, with stop signals blocked from their start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        if getattr(loader.multiprocessing_context, "get_start_method", str)() == "spawn":
            resource_tracker.ensure_running()  # its start unblocks some of them
            signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(then: Callable[[int], None] | None, number: int) -> None:
    """Ignore stop signals in a worker: the rank still needs batches to finish its step."""
    if _HELD:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
        threading.Thread(target=_end_when_told, daemon=True).start()
    if then is not None:
        then(number)


def _end_when_told() -> None:
    rank = multiprocessing.parent_process()
    while told := signal.sigwaitinfo(_HELD):
        if told.si_signo == signal.SIGTERM and rank is not None and told.si_pid == rank.pid:
            os._exit(0)


# -- what identifies data and a place in it -------------------------------------------------------


def check_state(
    state: Mapping[str, Any], mine: Mapping[str, Any], counters: Sequence[str], fixed: Sequence[str]
) -> None:
    """Check a saved state before a loader with state `mine` takes it: `counters` must hold numbers
    of at least 0, `fixed` keys must be equal. A DataError names the key."""
    for name in fixed:
        if state.get(name) != mine[name]:
            what = {"dataset": "data set", "glimpse": "samples"}.get(name, name)
            hint = " (data drawn anew, as by random_split, need a seed; or set dataset.fingerprint)"
            raise DataError(
                f"the data state was saved with {what} {state.get(name)!r}, this loader has "
                f"{mine[name]!r}; a run can only go on with the same{hint * (name == 'glimpse')}"
            )
    for name in counters:
        value = state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise DataError(f"the data state has no usable {name!r}: {value!r}")


def size_of(dataset: Any) -> int:
    """Number of samples; DataError when the data set is not map-style."""
    if isinstance(dataset, DataLoader):
        raise DataError("this is a DataLoader: give its data set instead (its .dataset)")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        kind = type(dataset).__name__
        raise DataError(f"{kind} has no __len__ and __getitem__; gs.stream_loader takes iterables")
    return len(dataset)


def fingerprint_of(dataset: Any) -> str:
    """A name for the data set's content, as far as known: class, length, and its `fingerprint`
    attribute (else `_fingerprint`, as Hugging Face data sets have), if present.

    If that is not enough, or it changes without reason, assign `dataset.fingerprint`.
    """
    parts = [type(dataset).__name__]
    if hasattr(dataset, "__len__"):
        parts.append(str(len(dataset)))
    own = (getattr(dataset, name, None) for name in ("fingerprint", "_fingerprint"))
    parts += [value for value in own if isinstance(value, str)][:1]
    return ":".join(parts)


def glimpse_of(dataset: Any) -> str:
    """A hash of some of the data in memory: a list's items, a `Subset`'s indices, a tensor's or an
    array's elements, also in attributes and nested data sets. It differs between ranks that
    generated their own data by seed, or divided the data themselves.

    "" if nothing is found. It reads no sample, which could have side effects. Floating-point
    numbers count to three digits, since the last bits may differ between hosts; of paths, only the
    file's name counts.
    """
    found = _glimpses(dataset, 0)
    return hashlib.sha256(repr(found).encode()).hexdigest()[:8] if found else ""


def _glimpses(value: Any, depth: int) -> list[str]:
    if isinstance(value, Tensor | np.ndarray):
        try:
            rows = value[:: max(1, len(value) // 16)].reshape(-1)
            value = rows[:: max(1, len(rows) // 61)].tolist()  # 61 meets various columns
        except (TypeError, RuntimeError):  # no rows, sparse, on no device
            return []
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return [f"{value:.3g}"]
    if isinstance(value, int | str | PurePath):
        return [PurePath(str(value)).name[:1000]]
    if depth > _DEEPEST:
        return []
    if isinstance(value, dict):
        some = value.values() if depth else ()
    elif isinstance(value, list | tuple | range):
        some = value[:: max(1, len(value) // 8)]
    elif hasattr(value, "__getitem__"):
        # Plain attributes may belong to the rank, such as its number or a folder.
        plain = int | float | str | np.generic | PurePath
        parts = getattr(value, "__dict__", {}).values()
        some = [part for part in parts if not isinstance(part, plain)]
    else:
        some = ()
    return [text for part in some for text in _glimpses(part, depth + 1)]


class EvalLoader:
    """Micro-batches for an evaluation: all samples in order, each once, over all ranks.

    Nothing is padded or repeated, so the last micro-batch may be shorter. A rank takes a contiguous
    share, so `gs.gather` of the ranks' results has the data set's order. May be iterated again.

    Ranks may have different numbers of micro-batches, or none: do not communicate within the loop,
    but after it, as by `gs.all_reduce` of (sum, count). Random numbers (augmentation, dropout left
    on) depend on the seed and the micro-batch, not the rank; training does not notice them.

    Args:
        dataset: as for `gs.loader`.
        world: this rank's world.
        micro_batch_size: samples in a micro-batch.
        max_samples: only the first ones, counted over all ranks; None takes all.
        collate_fn: list of samples to batch; None uses torch's `default_collate`.

    Raises:
        ConfigError: a size below 1.
        DataError: the data set is empty or not map-style.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        micro_batch_size: int,
        max_samples: int | None = None,
        *,
        collate_fn: Collate | None = None,
    ) -> None:
        require_at_least(1, micro_batch_size=micro_batch_size, max_samples=max_samples)
        num_samples = size_of(dataset)
        self.total_samples = num_samples if max_samples is None else min(max_samples, num_samples)
        """Samples over all ranks: the sum of `num_samples` over all micro-batches."""
        self._micro_batch_size, self._world = micro_batch_size, world
        self.fingerprint = fingerprint_of(dataset)
        self._reader = _Reader(dataset, collate_fn)
        self._device, self._seed = world.device, stream_seed(world.seed, "evaluation")

    @property
    def _span(self) -> StepSpan:
        """This rank's share, among the ranks that there are now."""
        return cut_step(
            0,
            self.total_samples,
            micro_batch_size=self._micro_batch_size,
            rank=self._world.rank,
            world_size=self._world.world_size,
        )

    @property
    def most(self) -> int:
        """Largest number of micro-batches of a rank."""
        return math.ceil(self._span.num_micro_batches / self._world.world_size)

    def __len__(self) -> int:
        return len(self._span.micro_batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        with kept_generators():  # after the evaluation, training goes on as without it
            for span in self._span.micro_batches:
                batch = self._reader[
                    (self._seed, 0, span.index), np.arange(span.start, span.start + span.count)
                ]
                micro_batch = make_micro_batch(
                    batch,
                    index=span.index,
                    step=0,
                    num_samples=span.count,
                    is_last=False,
                    device=self._device,
                )
                seed_micro_batch(self._seed, 0, span.index)
                yield micro_batch


eval_loader = EvalLoader
"""The name in scripts: `for micro_batch in gs.eval_loader(...)`."""
