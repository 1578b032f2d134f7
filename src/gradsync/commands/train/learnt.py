"""Save and load a replica's trained state.

Whole replicas are saved as whole tensors. State that ranks divide (`zero1`, `zero2`, `fsdp`) has
one file per rank:

    part-00000-of-00002   optimizer/exp_avg/embed.weight  …      what rank 0 holds
    part-00001-of-00002   optimizer/exp_avg/embed.weight  …      what rank 1 holds
    model                 weights, if every rank has them whole (`zero1`, `zero2`)

Each rank sends its shares to rank 0, which writes them as they arrive and holds at most two of the
others' tensors. To load, rank 0 reads whole tensors from any checkpoint (whole replicas, a split
model, shares of another number of ranks), and sends each rank only its shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradsync.checkpoint.optimizer_state import (
    pack_optimizer,
    state_device,
    unpack_optimizer,
    unpack_settings,
)
from gradsync.checkpoint.pieces import (
    AnyPiece,
    PartFiles,
    part_stem,
    piece_of_run,
    places_of,
    whole_piece,
)
from gradsync.checkpoint.weights import clean_name, clean_names, match_weights, pack_weights
from gradsync.comm.base import Communicator
from gradsync.comm.finite import non_finite
from gradsync.comm.values import all_gather_json, broadcast_json, broadcast_tensors
from gradsync.commands.parallel.transfer import collect, describe, hand_out, layout_of
from gradsync.errors import CheckpointError, DivergenceError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.shares import HeldState, Share

Whole = Mapping[str, Tensor]
Keep = Callable[[Mapping[str, Whole], dict[str, Any], dict[str, Any]], None]
"""Saves tensors by file and name, the rest of the optimizer's state, and the tensors' places. It
saves at once: tensors belong to the run, or arrive while they are saved."""
Fingerprint = dict[str, str | int | float | bool | None]

RANDOM_STREAMS = "keyed by (seed, step, leaf), version 1"
ADVICE = "lower --optim.lr, or look at the data of that step"


class Replica(Protocol):
    """The parts of a learner that are saved."""

    @property
    def model(self) -> nn.Module:
        """All or part of the model."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its optimizer."""
        ...

    @property
    def sync(self) -> GradientSync:
        """Its synchronisation handle."""
        ...

    @property
    def comm(self) -> Communicator:
        """All ranks."""
        ...


def check_finite(comm: Communicator, step: int, named: Iterable[tuple[str, Tensor]]) -> None:
    """Check what each rank holds before a checkpoint: two small all-gathers. Raises DivergenceError
    on all ranks if any holds nan or inf, which no run could resume from."""
    for rank, found in enumerate(all_gather_json(comm, non_finite(named))):
        if found:
            raise DivergenceError(
                f"after step {step} there is nan or inf in {found} (rank {rank}), so it is not "
                f"saved; {ADVICE}"
            )


def save_replica(learner: Replica, step: int, keep: Keep) -> None:
    """Whole tensors, from rank 0."""
    comm, sync = learner.comm, learner.sync
    sync.replica.gather(learner.optimizer)
    weights = sync.replica.full_weights(copy=False)
    kept, state = pack_optimizer(learner.optimizer, learner.model.named_parameters())
    remembered = sync.replica.state_tensors()
    check_finite(comm, step, chain(weights.items(), kept.items(), remembered.items()))
    if comm.rank == 0:
        tensors = {"model": pack_weights(weights), "optimizer": kept, "sync": remembered}
        keep(tensors, state, {})
    sync.replica.scatter(learner.optimizer)


def save_shares(learner: Replica, held: HeldState, step: int, keep: Keep) -> None:
    """Each rank's shares; `held` is its `GradientSync.sharded_state_dict`."""
    comm, sync = learner.comm, learner.sync
    # First: after a forward FSDP2 may still hold whole parameters in place of the sharded ones.
    weights = sync.replica.sharded_weights()
    named = list(learner.model.named_parameters())
    clean = clean_names(name for name, _ in named)
    names = {parameter: clean[name] for name, parameter in named}
    whole: dict[str, Whole] = {}
    if weights is None:
        whole["model"] = sync.replica.full_weights(copy=False)
    remembered = sync.replica.state_tensors()
    placed = dict(chain(_placed_weights(weights or {}), _placed_state(held, names)))
    tensors = {name: tensor for name, (_, tensor) in placed.items()}
    here = chain(tensors.items(), whole.get("model", {}).items(), remembered.items())
    check_finite(comm, step, here)
    note = {
        "places": places_of({name: piece for name, (piece, _) in placed.items()}),
        "params": {
            names[parameter]: {
                "slots": [slot for slot, value in state.items() if isinstance(value, Tensor)],
                "values": {s: value for s, value in state.items() if not isinstance(value, Tensor)},
            }
            for parameter, (_, state) in held.items()
            if state
        },
    }
    notes, parts = collect(comm, tensors, note)
    if comm.rank:
        return
    if weights is None:
        whole["model"] = pack_weights(whole["model"])
    if remembered:
        whole["sync"] = remembered
    _, state = pack_optimizer(learner.optimizer, named)
    for told in notes:
        for name, entry in told["params"].items():
            state["params"][name] |= entry
    stems = [part_stem(index, comm.world_size) for index in range(comm.world_size)]
    files = PartFiles([*whole, *stems], chain(whole.values(), parts))
    keep(files, state, {stem: told["places"] for stem, told in zip(stems, notes, strict=True)})


Placed = tuple[AnyPiece, Tensor]


def _placed_weights(weights: Mapping[str, tuple[Share, Tensor]]) -> Iterator[tuple[str, Placed]]:
    clean = clean_names(weights)
    seen: set[int] = set()
    for name, (share, tensor) in weights.items():
        is_new = not tensor.numel() or tensor.data_ptr() not in seen  # tied tensors once
        seen.add(tensor.data_ptr())
        if share.saves and is_new:
            yield f"model/{clean[name]}", _place(share, tensor)


def _placed_state(held: HeldState, names: Mapping[Any, str]) -> Iterator[tuple[str, Placed]]:
    for parameter, (share, state) in held.items():
        for slot, value in state.items():
            if not isinstance(value, Tensor):
                continue
            name = f"optimizer/{slot}/{names[parameter]}"
            if value.dim() and share.saves:
                yield name, _place(share, value)
            elif share.saves_numbers and not value.dim():
                yield name, (whole_piece(()), value)


def _place(share: Share, flat: Tensor) -> Placed:
    piece = piece_of_run(share.shape, share.start, share.stop)
    return piece, flat.reshape(piece.shape)


def load_learnt(learner: Replica, saved: Mapping[str, Whole], state: Mapping[str, Any]) -> None:
    """See `Learner.load`: whole tensors on all ranks, or each rank's shares only."""
    comm, sync, optimizer = learner.comm, learner.sync, learner.optimizer
    # Settings come from the configuration, state from the checkpoint.
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    held = sync.replica.sharded_state_dict(optimizer)
    load_weights(learner, comm, saved.get("model", {}))
    named = list(learner.model.named_parameters())
    if held is None:
        unpack_optimizer(optimizer, named, broadcast_tensors(comm, saved.get("optimizer")), state)
        sync.replica.scatter(optimizer)
    else:
        states = _states_of_shares(learner, held, saved.get("optimizer", {}), state)
        sync.replica.load_sharded_state_dict(optimizer, states)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    sync.replica.load_state_tensors(broadcast_tensors(comm, saved.get("sync")))


def _states_of_shares(
    learner: Replica, held: HeldState, whole: Whole, state: Mapping[str, Any]
) -> dict[Any, dict[str, Any]]:
    """The optimizer's state of each parameter that this rank holds a share of."""
    comm = learner.comm
    layout = layout_of(broadcast_json(comm, describe(whole)))
    named = list(learner.model.named_parameters())
    states: dict[Any, dict[str, Any]] = {}
    runs: dict[str, tuple[int, int]] = {}
    homes: dict[str, tuple[Tensor, str, torch.device]] = {}
    found = unpack_settings(learner.optimizer, named, layout, state)
    for name, (parameter, group) in found.items():
        if parameter not in held:
            continue
        entry = state["params"][name]
        states[parameter] = dict(entry["values"])
        for slot in entry["slots"]:
            key = f"{slot}/{name}"
            runs[key] = _run(key, tuple(layout[key].shape), held[parameter][0])
            homes[key] = parameter, slot, state_device(slot, parameter, group)
    got = hand_out(comm, whole or layout, runs)
    for key, (parameter, slot, device) in homes.items():
        value = got[key] if layout[key].dim() else got[key].view(())
        states[parameter][slot] = value.to(device)
    return states


def load_weights(learner: Replica, comm: Communicator, whole: Whole) -> None:
    """Load whole weights that rank 0 has; each rank keeps its part."""
    held = learner.sync.replica.sharded_weights()
    if held is None:
        weights = match_weights(learner.model, broadcast_tensors(comm, whole))
        learner.sync.replica.load_full_weights(weights)
        return
    layout = layout_of(broadcast_json(comm, describe(whole)))
    match_weights(learner.model, layout)
    saved_as = {clean: name for name, clean in clean_names(layout).items()}
    sources = {name: saved_as.get(clean_name(name)) for name in held}  # None: tied to another
    runs = {
        source: (held[name][0].start, held[name][0].stop)
        for name, source in sources.items()
        if source is not None
    }
    got = hand_out(comm, whole or layout, runs)
    weights = {name: got[source] for name, source in sources.items() if source}
    learner.sync.replica.load_sharded_weights(weights)


def _run(key: str, shape: tuple[int, ...], share: Share) -> tuple[int, int]:
    """The elements of a state tensor that go with a share: the share's, or the single number."""
    if shape == share.shape:
        return share.start, share.stop
    if shape == ():
        return 0, 1
    raise CheckpointError(
        f"optimizer state {key!r} has shape {shape} for a parameter of shape {share.shape}: "
        "neither elementwise nor a single number; ranks cannot share it out"
    )
