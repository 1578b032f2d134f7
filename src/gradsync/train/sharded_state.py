"""A checkpoint of state that ranks share out (`zero1`, `zero2`, `fsdp`): one file of each rank.

    part-00000-of-00002   optimizer/exp_avg/embed.weight  …      what rank 0 holds
    part-00001-of-00002   optimizer/exp_avg/embed.weight  …      what rank 1 holds
    model                 weights, where every rank has them whole (`zero1`, `zero2`)

Each rank sends its shares to rank 0, which writes them as they arrive: two tensors of the others at
a time are in its memory, the others need nothing. Loading: `sharded_load.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from gradsync.checkpoint.optimizer_state import pack_optimizer
from gradsync.checkpoint.pieces import (
    AnyPiece,
    PartFiles,
    part_stem,
    piece_of_run,
    places_of,
    whole_piece,
)
from gradsync.checkpoint.store import Snapshot
from gradsync.checkpoint.weights import clean_names, pack_weights
from gradsync.comm.base import Communicator
from gradsync.parallel.transfer import collect
from gradsync.sync.sharded_state import HeldState, Share
from gradsync.train.config import TrainConfig
from gradsync.train.fingerprint import Fingerprint
from gradsync.train.setup import Data, Learner
from gradsync.train.state import run_state

Placed = tuple[AnyPiece, Tensor]


def sharded_snapshot(
    step: int,
    config: TrainConfig,
    learner: Learner,
    data: Data,
    *,
    held: HeldState,
    comm: Communicator,
    fingerprint: Fingerprint,
) -> Snapshot | None:
    """On rank 0, the state after `step` steps, whose tensors arrive while it is saved: do so at
    once. The other ranks send theirs and get None; all ranks call it.

    Args:
        step: optimizer steps done.
        config: of the run.
        learner: what it trains.
        data: what it reads.
        held: this rank's part of the optimizer's state, from `GradientSync.sharded_state_dict`.
        comm: all ranks.
        fingerprint: what the numbers depend on.
    """
    # First: after a forward FSDP2 may still have whole parameters in place of the sharded ones.
    weights = learner.sync.sharded_weights()
    named = list(learner.model.named_parameters())
    clean = clean_names(name for name, _ in named)
    names = {parameter: clean[name] for name, parameter in named}
    placed = dict(chain(_weights(weights or {}), _optimizer_tensors(held, names)))
    note = {
        "places": places_of({name: piece for name, (piece, _) in placed.items()}),
        "params": _entries(held, names),
    }
    tensors = {name: tensor for name, (_, tensor) in placed.items()}
    notes, parts = collect(comm, tensors, note)
    if comm.rank:
        return None
    whole: dict[str, Mapping[str, Tensor]] = {}
    if weights is None:
        whole["model"] = pack_weights(learner.sync.full_weights())
    if remembered := learner.sync.state_tensors():
        whole["sync"] = remembered
    _, state = pack_optimizer(learner.optimizer, named)
    for told in notes:
        for name, entry in told["params"].items():
            state["params"][name] |= entry
    stems = [part_stem(index, comm.world_size) for index in range(comm.world_size)]
    return Snapshot(
        step=step,
        tensors=PartFiles([*whole, *stems], chain(whole.values(), parts)),
        state=run_state(config, learner, data, optimizer=state),
        fingerprint=fingerprint,
        places={stem: told["places"] for stem, told in zip(stems, notes, strict=True)},
    )


def _weights(weights: Mapping[str, tuple[Share, Tensor]]) -> Iterator[tuple[str, Placed]]:
    clean = clean_names(weights)
    seen: set[int] = set()
    for name, (share, tensor) in weights.items():
        is_new = not tensor.numel() or tensor.data_ptr() not in seen  # tied ones once
        seen.add(tensor.data_ptr())
        if share.saves and is_new:
            yield f"model/{clean[name]}", _place(share, tensor)


def _optimizer_tensors(held: HeldState, names: Mapping[Any, str]) -> Iterator[tuple[str, Placed]]:
    for parameter, (share, state) in held.items():
        for slot, value in state.items():
            if not isinstance(value, Tensor):
                continue
            name = f"optimizer/{slot}/{names[parameter]}"
            if value.dim() and share.saves:
                yield name, _place(share, value)
            elif share.saves_numbers and not value.dim():
                yield name, (whole_piece(()), value)


def _entries(held: HeldState, names: Mapping[Any, str]) -> dict[str, dict[str, Any]]:
    """Entries of each parameter's state, as `pack_optimizer` describes them."""
    return {
        names[parameter]: {
            "slots": [slot for slot, value in state.items() if isinstance(value, Tensor)],
            "values": {s: value for s, value in state.items() if not isinstance(value, Tensor)},
        }
        for parameter, (_, state) in held.items()
        if state
    }


def _place(share: Share, flat: Tensor) -> Placed:
    piece = piece_of_run(share.shape, share.start, share.stop)
    return piece, flat.reshape(piece.shape)
