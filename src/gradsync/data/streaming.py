"""Global batches of a data set that can only be read in order, the same for every world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, TypedDict

import torch
from torch.utils.data import default_collate

from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator
from gradsync.comm.values import all_gather_json, same_on_all_ranks
from gradsync.data.leaf import Leaf, make_leaf
from gradsync.data.limits import require_at_least
from gradsync.data.loader import check_state
from gradsync.data.plan import BatchPlan, solve_batch_plan
from gradsync.data.reader import fingerprint_of
from gradsync.data.step import Step
from gradsync.data.stream_source import Place, StreamSource, digest_of
from gradsync.errors import ConfigError, DataError
from gradsync.runtime.seeds import seed_leaf, stream_seed
from gradsync.world import World

_NO_GLOBAL_BATCH = (
    "stream_loader takes global_batch_size= (samples of a step over all ranks); leaves_per_rank= "
    "made it grow with the number of ranks"
)


class StreamState(TypedDict):
    """Where a stream loader stands: the same on all ranks, valid for any world size.

    The last leaf that was read is read again, to see that the stream is still the same.
    """

    samples: int
    """Samples of all steps that were handed out."""
    steps: int
    """Steps that were handed out."""
    epoch: int
    """Passes over the data set that were complete before the last leaf."""
    epoch_samples: int
    """Samples of the pass in progress before the last leaf."""
    last_leaf: int
    """Number of the last leaf in its step."""
    last_samples: int
    """Samples in the last leaf."""
    digest: str
    """Names the content of the last leaf; "" where ranks are not compared."""
    source: Any
    """The data set's own state before the last leaf, None where it has none that is exact."""
    seed: int
    """Seed of the leaves' random streams."""
    dataset: str
    """Fingerprint of the data set."""
    global_batch_size: int
    """Samples in a step; for information, another one may go on from here."""


class StreamLoader:
    """Iterating gives `Step`s from where the loader stands; see `stream_loader`.

    Leaving the loop and iterating again goes on with the next step.
    """

    def __init__(
        self,
        dataset: Any,
        plan: BatchPlan,
        *,
        rank: int,
        comm: Communicator,
        num_epochs: int | None,
        collate_fn: Callable[[list[Any]], Any],
        device: torch.device,
        seed: int,
        seed_leaves: bool,
        compare: bool,
    ) -> None:
        self.plan = plan
        """The batch arithmetic; `plan.describe()` says it in words."""
        self.remedy = (
            "give all ranks, and a run that goes on, the same data in the same order (a shuffle "
            "needs a seed, files must be equal, nothing may be split by rank; compare=False if "
            "samples are random on purpose)"
        )
        """Advice about samples that are not the same, for errors."""
        self._source = StreamSource(dataset, num_epochs)
        self._fingerprint = fingerprint_of(dataset)
        self._rank = rank
        self._comm = comm
        self._collate_fn = collate_fn
        self._device = device
        self._seed = seed
        self._seed_leaves = seed_leaves
        self._compare = compare
        self._samples = self._steps = 0
        self._last = Place(0, 0)
        self._last_leaf = self._last_samples = 0
        self._digest = ""

    def __iter__(self) -> Iterator[Step]:
        while (step := self._next_step()) is not None:
            yield step

    def close(self) -> None:
        """Close what the data set has opened."""
        self._source.close()

    def state_dict(self) -> StreamState:
        """Where the loader stands: after the last step that was handed out."""
        return {
            "samples": self._samples,
            "steps": self._steps,
            "epoch": self._last.epoch,
            "epoch_samples": self._last.taken,
            "last_leaf": self._last_leaf,
            "last_samples": self._last_samples,
            "digest": self._digest,
            "source": self._last.state,
            "seed": self._seed,
            "dataset": self._fingerprint,
            "global_batch_size": self.plan.global_batch_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, whatever the world size that saved it.

        A data set with a state of its own continues from that; any other one, and a shuffle
        buffer of `datasets`, is read from the beginning of the pass and dropped up to there.

        Raises:
            DataError: when the state is malformed, of another data set or seed, or when the stream
                has other samples at that place than it had.
        """
        counters = ("samples", "steps", "epoch", "epoch_samples", "last_leaf", "last_samples")
        check_state(state, self.state_dict(), counters, ("dataset", "seed"))
        self._samples, self._steps = state["samples"], state["steps"]
        self._last_leaf, self._last_samples = state["last_leaf"], state["last_samples"]
        self._digest = str(state.get("digest", ""))
        self._last = place = Place(state["epoch"], state["epoch_samples"], state.get("source"))
        if place.state is not None:
            with suppress(Exception):  # whatever a data set says to a state that it cannot take
                if self._same_leaf(place):
                    return
        if self._same_leaf(place._replace(state=None)):
            return
        raise DataError(
            f"the stream has other samples before step {self._steps} than when the state was "
            f"saved: {self.remedy}"
        )

    def _same_leaf(self, place: Place) -> bool:
        """Go to the last leaf's `place` and read it once more."""
        if not self._source.seek(place):
            return False
        group = self._read_leaf(self._steps - 1, self._last_leaf, self._last_samples)
        same = not (self._compare and self._digest) or digest_of(group) == self._digest
        return same and len(group) == self._last_samples

    def _next_step(self) -> Step | None:
        """Read the next global batch, keep what is this rank's, and see that all read the same."""
        start, number = self._source.place(), self._steps
        try:
            own, places, digests, count = self._read_step()
            self._check_equal(count, digests)
        except BaseException:
            self._source.rewind(start)  # iterating again begins this step again
            raise
        if not count:
            return None
        self._samples, self._steps = self._samples + count, number + 1
        self._last, self._digest, self._last_leaf = places[-1], digests[-1], len(digests) - 1
        self._last_samples = count - self._last_leaf * self.plan.micro_batch_size
        last_rank = self.plan.leaves_of(self.plan.world_size - 1)
        return Step(
            self._leaves(own, number, everyone_has_leaves=last_rank[0] < len(digests)),
            number=number,
            num_leaves=len(digests),
            num_local_leaves=len(own),
        )

    def _read_step(self) -> tuple[dict[int, list[Any]], list[Place], list[str], int]:
        """This rank's leaves as samples; where each leaf began, its digest; samples in all."""
        own, mine = {}, self.plan.leaves_of(self._rank)
        places, digests, count = [], [], 0
        for index in range(self.plan.num_leaves):
            place = self._source.place()
            group = self._read_leaf(self._steps, index, self.plan.micro_batch_size)
            if not group:
                break
            if index in mine:
                own[index] = group
            places.append(place)
            digests.append(digest_of(group) if self._compare else "")
            count += len(group)
        return own, places, digests, count

    def _read_leaf(self, step: int, index: int, count: int) -> list[Any]:
        """The next samples; what a data set draws while they are read is the leaf's too."""
        if self._seed_leaves:
            # The CPU's generator alone, which costs a tenth of seeding all of them.
            torch.default_generator.manual_seed(stream_seed(self._seed, "read", step, index))
        return list(islice(self._source, count))

    def _check_equal(self, count: int, digests: list[str]) -> None:
        # Whole communicator, one all-gather, int64 [1], before the step; overlaps nothing.
        if same_on_all_ranks(self._comm, f"{count} {digests}".encode()):
            return
        found = all_gather_json(self._comm, [count, digests])
        other = next(rank for rank, what in enumerate(found) if what != found[0])
        first, theirs = found[0], found[other]
        if first[0] != theirs[0]:
            what = f"{first[0]} samples on rank 0, {theirs[0]} on rank {other}"
        else:
            pairs = enumerate(zip(first[1], theirs[1], strict=True))
            leaf = next(index for index, (one, two) in pairs if one != two)
            what = f"leaf {leaf} has other samples on rank {other} than on rank 0"
        raise DataError(
            f"the ranks read different streams at step {self._steps}: {what}; {self.remedy}"
        )

    def _leaves(
        self, own: dict[int, list[Any]], step: int, *, everyone_has_leaves: bool
    ) -> Iterator[Leaf]:
        for index, group in own.items():
            if self._seed_leaves:
                seed_leaf(self._seed, step, index)
            yield make_leaf(
                self._collate_fn(group),
                index=index,
                step=step,
                num_samples=len(group),
                is_last=everyone_has_leaves and index == max(own),
                device=self._device,
            )


def stream_loader(
    dataset: Any,
    world: World,
    *,
    micro_batch_size: int,
    global_batch_size: int | None = None,
    comm: Communicator | None = None,
    num_epochs: int | None = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    seed_leaves: bool = True,
    compare: bool = True,
    device: torch.device | str | None = None,
    leaves_per_rank: int | None = None,
) -> StreamLoader:
    """Global batches of an iterable data set, such as a Hugging Face `IterableDataset`.

    Steps and leaves are those of `loader`, keyed by position in the stream: any number of ranks
    takes the same samples in the same leaves. The order of samples is the data set's own.

    Every rank reads the whole stream and keeps its own leaves: that costs reading, decoding and a
    digest of every sample on every rank, and a small message a step that compares the digests.

    Args:
        dataset: any iterable; `set_epoch(n)` is called before pass n where it has that.
        world: who we are.
        micro_batch_size: samples in a leaf.
        global_batch_size: samples in a step, over all ranks; a multiple of `micro_batch_size`.
        comm: carries the comparison; None takes the world's own.
        num_epochs: passes over the data; None never ends.
        collate_fn, device: as in `loader`.
        seed, seed_leaves: as in `loader`; the CPU's generator is seeded before a leaf is read, too.
        compare: refuse ranks that read different samples, and a resume that finds others than
            before; False, for samples that are random on purpose, looks at their number alone.
        leaves_per_rank: refused.

    Raises:
        ConfigError: inexact batch arithmetic; a data set split for ranks, or readable only once.
        DataError: it is not iterable; while iterating: ranks read different streams.
    """
    require_at_least(1, num_epochs=num_epochs)
    if leaves_per_rank is not None or global_batch_size is None:
        raise ConfigError(_NO_GLOBAL_BATCH)
    _check_whole(dataset, num_epochs)
    return StreamLoader(
        dataset,
        solve_batch_plan(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            world_size=world.world_size,
        ),
        rank=world.rank,
        comm=comm or communicator(world),
        num_epochs=num_epochs,
        collate_fn=collate_fn or default_collate,
        device=torch.device(world.device if device is None else device),
        seed=seed,
        seed_leaves=seed_leaves,
        compare=compare,
    )


def _check_whole(dataset: Any, num_epochs: int | None) -> None:
    if not hasattr(dataset, "__iter__"):
        raise DataError(f"{type(dataset).__name__} is no iterable data set: it has no __iter__")
    if isinstance(dataset, Iterator) and num_epochs != 1:
        raise ConfigError(
            f"{type(dataset).__name__} can be read once and num_epochs is {num_epochs}: give an "
            "iterable that begins anew whenever it is iterated"
        )
    split = getattr(dataset, "_distributed", None)  # of `datasets`; nothing public says it
    if split is not None and split.world_size > 1:
        raise ConfigError(
            f"the data set was split by split_dataset_by_node (rank {split.rank} of "
            f"{split.world_size}): leave that call out, stream_loader deals the samples to ranks"
        )
