"""The measurement, on every rank: turns in rotated order, every sample kept.

A round gives each contestant one turn of `steps` optimizer steps; the next round begins with the
next contestant, so that whatever else happens on the machine meets all of them alike. Ranks meet
before each step, outside of the time that is taken. A step takes as long as on its slowest rank.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from contestants import Contestant, Settings, enter
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator, share_placement
from gradsync.comm.values import all_gather_json
from gradsync.commands.bench.meter import bytes_sent, operations_issued
from gradsync.sync.registry import STRATEGIES
from gradsync.world import World

_SNAPSHOTS = 3
"""Memory is looked at so often; the least of them counts."""
_ARRIVE_S = 0.05
"""Before each look, once all ranks have sent theirs: messages under way arrive and their
temporaries go, seconds."""


@dataclass(slots=True)
class Samples:
    """Samples of one contestant on this rank."""

    step_s: list[list[float]] = field(default_factory=list)
    """Per round and step, seconds."""
    exposed_s: list[list[float]] = field(default_factory=list)
    """Per round and step: communication that nothing hid, seconds."""
    sent_bytes: int = 0
    """In all recorded steps."""
    operations: int = 0
    """In all recorded steps; a batch of messages counts as one."""
    held_bytes: int = 0
    """At the end of backward: weights, gradients, optimizer state, buckets."""


def measure(settings: Settings, world: World) -> dict[str, Any]:
    """Run everything; returns the record's measured part, the same on all ranks."""
    comm = communicator(world)
    names = settings.names()
    hosts = share_placement(comm, world) if "hierarchical" in names else None
    batch = _batch(settings, world.rank)
    contestants, samples = {}, {}
    for name in names:
        before = _tensor_bytes(comm)  # the last contestant's messages are no part of this one
        contestants[name] = enter(name, settings, world, hosts)
        held = _warm_up(contestants[name], settings, batch, comm)
        samples[name] = Samples(held_bytes=held - before)
    for number in range(settings.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            _turn(contestants[name], samples[name], settings.steps, batch, comm)
    for contestant in contestants.values():
        contestant.close()
    gradient_bytes = sum(p.numel() * 4 for p in _parameters(contestants[names[0]]))
    mine = {name: _as_json(found) for name, found in samples.items()}
    by_rank = all_gather_json(comm, mine) if world.world_size > 1 else [mine]
    return {
        "gradient_bytes": gradient_bytes,
        "contestants": {name: _describe(name, settings, by_rank) for name in names},
    }


def _batch(settings: Settings, rank: int) -> tuple[Tensor, Tensor]:
    """A leaf of random tokens, [sequences, tokens] twice; another one on each rank."""
    shape = (2, settings.sequences, settings.tokens)
    generator = torch.Generator().manual_seed(rank)
    inputs, targets = torch.randint(settings.model.vocab_size, shape, generator=generator)
    return inputs, targets


def _warm_up(
    contestant: Contestant, settings: Settings, batch: tuple[Tensor, Tensor], comm: Communicator
) -> int:
    """Two turns that are not recorded; returns what all tensors hold after backward, bytes."""
    least: list[int] = []
    for number in reversed(range(2 * settings.steps)):
        contestant.backward(*batch)
        if number < min(_SNAPSHOTS, settings.steps):
            least.append(_tensor_bytes(comm))
        contestant.update()
    return min(least)


def _turn(
    contestant: Contestant,
    samples: Samples,
    steps: int,
    batch: tuple[Tensor, Tensor],
    comm: Communicator,
) -> None:
    step_s, exposed_s = [], []
    for _ in range(steps):
        comm.barrier()
        bytes_before, surplus = bytes_sent(), contestant.surplus
        operations = operations_issued()
        begin = time.perf_counter()
        contestant.backward(*batch)
        exposed_s.append(contestant.update())
        step_s.append(time.perf_counter() - begin)
        samples.sent_bytes += bytes_sent() - bytes_before
        samples.operations += operations_issued() - operations - (contestant.surplus - surplus)
    samples.step_s.append(step_s)
    samples.exposed_s.append(exposed_s)


def _tensor_bytes(comm: Communicator) -> int:
    """Bytes of all tensors that Python knows of, once messages under way have arrived and two looks
    find the same; memory that several share counts once."""
    comm.barrier()
    before, found = -1, 0
    while found != before:
        time.sleep(_ARRIVE_S)
        before, found = found, _bytes_now()
    return found


def _bytes_now() -> int:
    gc.collect()
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        # By type: `isinstance` would ask some of torch's deprecated objects for their class.
        if issubclass(type(found), torch.Tensor) and not issubclass(type(found), DTensor):
            # A gradient may be known to C++ alone until it is asked for.
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is not None and not isinstance(tensor, DTensor):
                    storage = tensor.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _parameters(contestant: Any) -> list[Tensor]:
    return list(contestant.model.parameters())


def _as_json(found: Samples) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Samples.__slots__}


def _describe(name: str, settings: Settings, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' samples of one contestant; lists have one entry per rank."""
    found = [rank[name] for rank in by_rank]
    return {
        "promise": STRATEGIES[name].promise if name in STRATEGIES else None,
        "options": settings.said(name),
        **{key: [rank[key] for rank in found] for key in found[0]},
    }
