"""The loader: endless global batches of any map-style data set, the same for every world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch.utils.data import DataLoader

from gradsync.core.torch_private import end_workers
from gradsync.data.leaf import Leaf, make_leaf
from gradsync.data.limits import require_at_least
from gradsync.data.order import SampleOrder
from gradsync.data.permutation import derive_key
from gradsync.data.plan import BatchPlan, solve_batch_plan
from gradsync.data.reader import BatchReader, fingerprint_of, size_of
from gradsync.data.spans import StepSpan, cut_step
from gradsync.data.step import Step
from gradsync.errors import DataError
from gradsync.runtime.seeds import seed_leaf
from gradsync.world import World


class LoaderState(TypedDict):
    """Where a loader stands: the same on all ranks, valid for any world size and `num_workers`."""

    samples: int
    """Samples of all steps that were handed out."""
    steps: int
    """Steps that were handed out."""
    seed: int
    """Seed of the order."""
    shuffle: bool
    """Whether the order is shuffled."""
    dataset: str
    """Fingerprint of the data set."""
    global_batch_size: int
    """Samples in a step; for information, another one may go on from here."""


class Loader:
    """Iterating gives `Step`s from where the loader stands; see `loader` for the arguments.

    Leaving the loop and iterating again goes on with the next step. A step counts as consumed
    when it is handed out; batches that workers read ahead do not count.
    """

    def __init__(
        self,
        reader: BatchReader,
        order: SampleOrder,
        plan: BatchPlan,
        *,
        rank: int,
        device: torch.device,
        fingerprint: str,
        num_workers: int = 0,
        num_epochs: int | None = None,
        seed_leaves: bool = True,
    ) -> None:
        self.plan = plan
        """The batch arithmetic; `plan.describe()` says it in words."""
        self._reader = reader
        self._order = order
        self._rank = rank
        self._device = device
        self._fingerprint = fingerprint
        self._num_workers = num_workers
        self._seed_leaves = seed_leaves
        self._stop = None if num_epochs is None else num_epochs * order.num_samples
        self._samples = 0
        self._steps = 0
        self._source: _BatchSource | None = None

    @property
    def epoch(self) -> float:
        """Epochs consumed: 1.25 is a quarter into the second."""
        return self._samples / self._order.num_samples

    def __iter__(self) -> Iterator[Step]:
        self.close()
        source = self._source = self._open_source()
        try:
            while (stop := self._end_of_step(self._samples)) > self._samples:
                span = self._cut(self._samples, stop)
                number = self._steps
                self._samples, self._steps = stop, number + 1
                step = Step(
                    self._leaves(span, number, source),
                    number=number,
                    num_leaves=span.num_leaves,
                    num_local_leaves=len(span.leaves),
                )
                yield step
                source.check_open()
                step.drain()
        finally:
            source.close()

    def close(self) -> None:
        """End the iteration in progress and its worker processes, if there are any."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def state_dict(self) -> LoaderState:
        """Where the loader stands: after the last step that was handed out."""
        return {
            "samples": self._samples,
            "steps": self._steps,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "dataset": self._fingerprint,
            "global_batch_size": self.plan.global_batch_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, whatever the world size that saved it. Ends an iteration in progress.

        Raises:
            DataError: when the state is malformed, or of another data set, seed or order.
        """
        check_state(state, self.state_dict(), ("samples", "steps"), ("dataset", "seed", "shuffle"))
        self.close()
        self._samples, self._steps = state["samples"], state["steps"]

    def _end_of_step(self, start: int) -> int:
        stop = start + self.plan.global_batch_size
        return stop if self._stop is None else min(stop, self._stop)

    def _cut(self, start: int, stop: int) -> StepSpan:
        return cut_step(
            start,
            stop,
            micro_batch_size=self.plan.micro_batch_size,
            rank=self._rank,
            world_size=self.plan.world_size,
        )

    def _index_lists(self, start: int) -> Iterator[np.ndarray]:
        """Dataset indices of this rank's leaves from stream position `start` on, leaf by leaf."""
        while (stop := self._end_of_step(start)) > start:
            for leaf in self._cut(start, stop).leaves:
                yield self._order.indices(leaf.start, leaf.count)
            start = stop

    def _open_source(self) -> _BatchSource:
        index_lists = self._index_lists(self._samples)
        if not self._num_workers:
            return _BatchSource(map(self._reader.__getitem__, index_lists))
        # A generator of its own: DataLoader would draw from the global one, and `num_workers`
        # would change the model's dropout.
        generator = torch.Generator()
        generator.manual_seed(derive_key(self._order.seed, self._samples, self._rank) >> 1)
        return _BatchSource(
            iter(
                DataLoader(
                    self._reader,
                    sampler=index_lists,
                    batch_size=None,  # an index list is one item: the reader makes the batch
                    collate_fn=_unchanged,
                    num_workers=self._num_workers,
                    pin_memory=self._device.type == "cuda",
                    generator=generator,
                )
            )
        )

    def _leaves(self, span: StepSpan, step: int, source: _BatchSource) -> Iterator[Leaf]:
        for place, leaf in enumerate(span.leaves, start=1):
            # Before the read: what a data set draws in this process is keyed by the leaf, too.
            if self._seed_leaves:
                seed_leaf(self._order.seed, step, leaf.index)
            yield make_leaf(
                source.take(),
                index=leaf.index,
                step=step,
                num_samples=leaf.count,
                is_last=span.everyone_has_leaves and place == len(span.leaves),
                device=self._device,
            )


class _BatchSource:
    """Collated batches in order. Everything else holds this and not the iterator inside, so that
    `close` ends the workers at once, whoever still keeps a step."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches: Iterator[Any] | None = batches

    def take(self) -> Any:
        self.check_open()
        assert self._batches is not None
        return next(self._batches)

    def check_open(self) -> None:
        if self._batches is None:
            raise RuntimeError(
                "this iteration of the loader is over: it was closed, began anew or was moved"
            )

    def close(self) -> None:
        batches, self._batches = self._batches, None
        end_workers(batches)


def loader(
    dataset: Any,
    world: World,
    *,
    global_batch_size: int,
    micro_batch_size: int,
    seed: int = 0,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed_leaves: bool = True,
    device: torch.device | str | None = None,
) -> Loader:
    """Global batches of a map-style data set, of which this rank gets its contiguous leaves.

    Nothing is padded, repeated or left out: within an epoch each sample comes exactly once, and
    a global batch may cross the end of an epoch. Which samples form step k depends on the seed and
    the global batch size alone; the world size only says which rank computes them.

    With `num_epochs` the stream ends after exactly `num_epochs * len(dataset)` samples. Its last
    step and leaf may be shorter; with fewer leaves than ranks, `is_last` is False on all of them.

    Args:
        dataset: anything with `__len__` and `__getitem__`.
        world: who we are.
        global_batch_size: samples in a step, over all ranks; a multiple of `micro_batch_size`.
        micro_batch_size: samples in a leaf.
        seed: names the order, and the random numbers (dropout) of each leaf.
        num_workers: DataLoader worker processes that read ahead; 0 reads in this process. Workers
            hold no state, so the order and the exactness of resuming do not depend on it.
        collate_fn: list of samples to batch; None is torch's `default_collate`.
        num_epochs: passes over the data; None never ends.
        shuffle: False keeps the order of the data set.
        seed_leaves: seed torch's generators by (seed, step, leaf) before each leaf, so dropout is
            the leaf's and not the rank's; False leaves them alone. See [Note: Keyed streams].
        device: where batches go; None is the world's device.

    Raises:
        ConfigError: when the batch arithmetic is not exact, or ranks outnumber leaves.
        DataError: when the data set is empty or not map-style.
    """
    require_at_least(0, num_workers=num_workers)
    require_at_least(1, num_epochs=num_epochs)
    plan = solve_batch_plan(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        world_size=world.world_size,
    )
    return Loader(
        BatchReader(dataset, collate_fn),
        SampleOrder(size_of(dataset), seed, shuffle),
        plan,
        rank=world.rank,
        device=torch.device(world.device if device is None else device),
        fingerprint=fingerprint_of(dataset),
        num_workers=num_workers,
        num_epochs=num_epochs,
        seed_leaves=seed_leaves,
    )


def check_state(
    state: Mapping[str, Any],
    mine: Mapping[str, Any],
    counters: Sequence[str],
    fixed: Sequence[str],
) -> None:
    """Check the state of a loader before it is taken.

    Args:
        state: what was saved.
        mine: the state of the loader that shall take it.
        counters: keys that must hold numbers of at least 0.
        fixed: keys whose values must be equal.

    Raises:
        DataError: naming the key.
    """
    for name in fixed:
        if state.get(name) != mine[name]:
            what = "data set" if name == "dataset" else name
            raise DataError(
                f"the data state was saved with {what} {state.get(name)!r}, "
                f"this loader has {mine[name]!r}; a run can only go on with the same"
            )
    for name in counters:
        value = state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise DataError(f"the data state has no usable {name!r}: {value!r}")


def _unchanged(batch: Any) -> Any:
    return batch
