"""Global batches of a data set that can only be read in order, the same for every world size."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator
from gradsync.comm.values import all_gather_json, same_on_all_ranks
from gradsync.data.batch_plan import require_at_least, solve_batch_plan
from gradsync.data.leaf import Leaf, Step, make_leaf
from gradsync.data.loader import check_state, fingerprint_of
from gradsync.errors import ConfigError, DataError
from gradsync.runtime.seeds import seed_after, seed_leaf, seeded_read
from gradsync.world import World


class StreamLoader:
    """Global batches of an iterable data set, such as a Hugging Face `IterableDataset`.

    Iterating gives a `Step` at a time; leaving the loop and iterating again goes on with the next.
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
        seed, seed_leaves: as in `loader`.
        compare: refuse ranks that read different samples, and a resume that finds others than
            before; False, for samples that are random on purpose, looks at their number alone.
        leaves_per_rank: refused.

    Raises:
        ConfigError: inexact batch arithmetic; a data set split for ranks, or readable only once.
        DataError: it is not iterable; while iterating: ranks read different streams.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        micro_batch_size: int,
        global_batch_size: int | None = None,
        comm: Communicator | None = None,
        num_epochs: int | None = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int | None = None,
        seed_leaves: bool = True,
        compare: bool = True,
        device: torch.device | str | None = None,
        leaves_per_rank: int | None = None,
    ) -> None:
        require_at_least(1, num_epochs=num_epochs)
        if leaves_per_rank is not None or global_batch_size is None:
            raise ConfigError(
                "stream_loader takes global_batch_size= (samples of a step over all ranks); "
                "leaves_per_rank= made it grow with the number of ranks"
            )
        _check_whole(dataset, num_epochs)
        self.plan = solve_batch_plan(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            world_size=world.world_size,
        )
        """The batch arithmetic; `plan.describe()` says it in words."""
        self.remedy = (
            "give all ranks, and a run that goes on, the same data in the same order (a shuffle "
            "needs a seed, files must be equal, nothing may be split by rank; compare=False if "
            "samples are random on purpose)"
        )
        """Advice about samples that are not the same, for errors."""
        self._source = _Source(dataset, num_epochs)
        self._rank = world.rank
        self._comm = comm or communicator(world)
        self._collate_fn = collate_fn or default_collate
        self._device = torch.device(world.device if device is None else device)
        self._seed_leaves, self._compare = seed_leaves, compare
        # `epoch` and `epoch_samples` (of that pass) are where the last leaf began, `source` is the
        # data set's own state there, `last_leaf` its number in its step, `digest` its content.
        self._state: dict[str, Any] = {
            **{"samples": 0, "steps": 0, "epoch": 0, "epoch_samples": 0},
            **{"last_leaf": 0, "last_samples": 0, "digest": "", "source": None},
            "seed": world.seed if seed is None else seed,
            "dataset": fingerprint_of(dataset),
            "global_batch_size": global_batch_size,
        }

    def __iter__(self) -> Iterator[Step]:
        finalizing = sys.is_finalizing  # then this module's own names may be gone
        try:
            while (step := self._next_step()) is not None:
                yield step
        finally:
            if self._seed_leaves and not finalizing():
                seed_after(self._state["seed"], self._state["steps"])

    def close(self) -> None:
        """Close what the data set has opened."""
        self._source.close()

    def state_dict(self) -> dict[str, Any]:
        """Position of the loader, after the last step that was handed out: the same on all ranks,
        valid for any world size. Loading it reads the last leaf again, to see that the stream
        is still the same."""
        return self._state.copy()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, whatever the world size that saved it.

        A data set with a state of its own continues from that; any other one, and a shuffle
        buffer of `datasets`, is read from the beginning of the pass and dropped up to there.
        DataError when the state is malformed, of another data set or seed, or when the stream has
        other samples at that place than it had.
        """
        counters = ("samples", "steps", "epoch", "epoch_samples", "last_leaf", "last_samples")
        check_state(state, self._state, counters, ("dataset", "seed"))
        self._state |= {name: state[name] for name in counters}
        self._state |= {"digest": str(state.get("digest", "")), "source": state.get("source")}
        place = _Place(state["epoch"], state["epoch_samples"], state.get("source"))
        if place.state is not None:
            with suppress(Exception):  # whatever a data set says to a state that it cannot take
                if self._same_leaf(place):
                    return
        if self._same_leaf(place._replace(state=None)):
            return
        raise DataError(
            f"the stream has other samples before step {state['steps']} than when the state was "
            f"saved: {self.remedy}"
        )

    def _same_leaf(self, place: _Place) -> bool:
        """Go to the last leaf's `place` and read it once more."""
        if not self._source.seek(place):
            return False
        last = self._state
        group = self._read_leaf(last["steps"] - 1, last["last_leaf"], last["last_samples"])
        same = not (self._compare and last["digest"]) or digest_of(group) == last["digest"]
        return same and len(group) == last["last_samples"]

    def _next_step(self) -> Step | None:
        """Read the next global batch, keep what is this rank's, and see that all read the same."""
        start, number = self._source.place(), self._state["steps"]
        try:
            own, places, digests, count = self._read_step(number)
            self._check_equal(number, count, digests)
        except BaseException:
            self._source.rewind(start)  # iterating again begins this step again
            raise
        if not count:
            return None
        last_leaf = len(digests) - 1
        self._state |= {
            "samples": self._state["samples"] + count,
            "steps": number + 1,
            "epoch": places[-1].epoch,
            "epoch_samples": places[-1].taken,
            "last_leaf": last_leaf,
            "last_samples": count - last_leaf * self.plan.micro_batch_size,
            "digest": digests[-1],
            "source": places[-1].state,
        }
        last_rank = self.plan.leaves_of(self.plan.world_size - 1)
        return Step(
            self._leaves(own, number, everyone_has_leaves=last_rank[0] < len(digests)),
            number=number,
            num_leaves=len(digests),
            num_local_leaves=len(own),
        )

    def _read_step(self, step: int) -> tuple[dict[int, list[Any]], list[_Place], list[str], int]:
        """This rank's leaves as samples; where each leaf began, its digest; samples in all."""
        own, mine = {}, self.plan.leaves_of(self._rank)
        places, digests, count = [], [], 0
        for index in range(self.plan.num_leaves):
            place = self._source.place()
            group = self._read_leaf(step, index, self.plan.micro_batch_size)
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
        with seeded_read(self._state["seed"], step, index) if self._seed_leaves else nullcontext():
            return list(islice(self._source, count))

    def _check_equal(self, step: int, count: int, digests: list[str]) -> None:
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
        raise DataError(f"the ranks read different streams at step {step}: {what}; {self.remedy}")

    def _leaves(
        self, own: dict[int, list[Any]], step: int, *, everyone_has_leaves: bool
    ) -> Iterator[Leaf]:
        for index, group in own.items():
            if self._seed_leaves:
                seed_leaf(self._state["seed"], step, index)
            yield make_leaf(
                self._collate_fn(group),
                index=index,
                step=step,
                num_samples=len(group),
                is_last=everyone_has_leaves and index == max(own),
                device=self._device,
            )


stream_loader = StreamLoader
"""The name in training loops: `for step in gs.stream_loader(...)`."""


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


class _Place(NamedTuple):
    """A place between two samples of a stream, the same on every rank: passes that are complete,
    samples taken of the one in progress, and the data set's own state there, in JSON's types (None
    where it has none that can be used)."""

    epoch: int
    taken: int
    state: Any = None


class _Source:
    """The samples of an iterable data set, pass after pass, and how to come back to one of them.

    A pass without a sample is the last one, whatever `num_epochs` says.
    """

    def __init__(self, dataset: Any, num_epochs: int | None) -> None:
        self._dataset = dataset
        self._beginning = dataset.state_dict() if hasattr(dataset, "state_dict") else None
        self._begins = True
        """Whether iterating the data set starts a pass, not where a state left off."""
        self._num_epochs = num_epochs
        self._samples: Iterator[Any] | None = None
        self._epoch = self._taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._num_epochs is None or self._epoch < self._num_epochs:
            if self._samples is None and not self.seek(self._here()):
                raise DataError(f"pass {self._epoch} has fewer than {self._here().taken} samples")
            assert self._samples is not None
            try:
                for sample in self._samples:
                    self._taken += 1
                    return sample
            except BaseException:
                self.close()  # a generator that has raised would look as if it had ended
                raise
            self.close()
            if not self._taken:
                break
            self._epoch, self._taken = self._epoch + 1, 0
        raise StopIteration

    def place(self) -> _Place:
        """Place of the next sample."""
        save = getattr(self._dataset, "state_dict", None)
        if self._samples is None or save is None or _holds_samples_back(self._dataset):
            return self._here()
        return self._here()._replace(state=save())

    def seek(self, place: _Place) -> bool:
        """Go to `place`, by the data set's own state where there is one, else by reading up to it;
        False when the pass has fewer samples."""
        self.rewind(place)
        dataset = self._dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(place.epoch)
        if place.state is not None:
            dataset.load_state_dict(place.state)
        elif not self._begins:
            dataset.load_state_dict(self._beginning)
        self._begins = place.state is None
        self._samples = iter(dataset)
        if place.state is None:
            self._taken = sum(1 for _ in islice(self._samples, place.taken))
        return self._taken == place.taken

    def rewind(self, place: _Place) -> None:
        """Let the next sample be the one at `place`; it is looked for when it is asked for."""
        self.close()
        self._epoch, self._taken = place.epoch, place.taken

    def close(self) -> None:
        """End the pass in progress, and with it what the data set has opened."""
        samples, self._samples = self._samples, None
        close = getattr(samples, "close", None)
        if close is not None:
            close()

    def _here(self) -> _Place:
        return _Place(self._epoch, self._taken)


def digest_of(samples: Sequence[Any]) -> str:
    """A name for the content of samples: equal for equal ones in every process.

    Numbers, text, lists and mappings count as JSON writes them; tensors, arrays and images by type,
    shape and CRC-32 of their bytes; other objects by their type alone.
    """
    text = json.dumps(samples, default=_content, skipkeys=True)
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


def _holds_samples_back(dataset: Any) -> bool:
    """Whether a shuffle buffer of `datasets` is in it: its state does not say what the buffer
    holds, so going on from there would lose samples."""
    links = [getattr(dataset, "_ex_iterable", None)]
    while links:
        link = links.pop()
        if hasattr(link, "buffer_size"):
            return True
        links += [getattr(link, "ex_iterable", None), *getattr(link, "ex_iterables", ())]
        links = [link for link in links if link is not None]
    return False
