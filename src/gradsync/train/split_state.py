"""A split model's state as a checkpoint: one file of each rank that holds another part of it.

Every rank of the first replica sends the pieces it owns to rank 0, which writes a file for each of
them: two tensors of the others at a time are in its memory. Loading is `SplitLearner.load`: rank 0
reads whole tensors, joined where the checkpoint is of a split model, and sends each rank its
pieces.
"""

from __future__ import annotations

from gradsync.checkpoint.optimizer_state import pack_optimizer
from gradsync.checkpoint.pieces import PartFiles, part_stem, places_of
from gradsync.checkpoint.store import Snapshot
from gradsync.parallel.layout import join_states, place_tensors
from gradsync.parallel.transfer import collect
from gradsync.train.config import TrainConfig
from gradsync.train.fingerprint import Fingerprint
from gradsync.train.setup import Data
from gradsync.train.split_setup import SplitLearner
from gradsync.train.state import run_state


def split_snapshot(
    step: int,
    config: TrainConfig,
    learner: SplitLearner,
    data: Data,
    *,
    fingerprint: Fingerprint,
) -> Snapshot | None:
    """On rank 0, the state after `step` steps, whose tensors arrive while it is saved: do so at
    once. The other ranks send theirs and get None; all ranks call it."""
    part, comm = learner.part, learner.groups.model
    if part.place.data:
        return None
    named = list(learner.model.named_parameters())
    kept, state = pack_optimizer(learner.optimizer, named)
    tensors = {f"model/{name}": parameter.detach() for name, parameter in named}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in kept.items()}
    pieces = place_tensors(part, ((name, tuple(t.shape)) for name, t in tensors.items()))
    note = {"places": places_of(pieces), "optimizer": state}
    notes, contents = collect(comm, {name: tensors[name] for name in pieces}, note)
    if comm.rank:
        return None
    stems = [part_stem(index, comm.world_size) for index in range(comm.world_size)]
    states = [note["optimizer"] for note in notes]
    return Snapshot(
        step=step,
        tensors=PartFiles(stems, contents),
        state=run_state(config, learner, data, optimizer=join_states(part, states)),
        fingerprint=fingerprint,
        places={stem: note["places"] for stem, note in zip(stems, notes, strict=True)},
    )
