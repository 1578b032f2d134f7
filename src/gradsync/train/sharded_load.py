"""A checkpoint into state that ranks share out: rank 0 reads, each rank gets its shares alone.

Whatever the checkpoint is of (whole replicas, a split model, shares of another number of ranks),
rank 0 reads it as whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.checkpoint.optimizer_state import state_device, unpack_settings
from gradsync.checkpoint.weights import clean_name, clean_names, match_weights
from gradsync.comm.base import Communicator
from gradsync.comm.values import broadcast_json, broadcast_tensors
from gradsync.errors import CheckpointError
from gradsync.parallel.transfer import describe, hand_out, layout_of
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.sharded_state import HeldState, Share

Whole = Mapping[str, Tensor]
_Run = tuple[int, int]
_Wanted = tuple[_Run, Tensor, str, torch.device]


def load_sharded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sync: GradientSync,
    *,
    held: HeldState,
    comm: Communicator,
    saved: Mapping[str, Whole],
    optimizer_state: Mapping[str, Any],
) -> None:
    """Take weights and optimizer from what rank 0 has read; all ranks call it.

    Args:
        model: of the run.
        optimizer: its own.
        sync: a strategy that shares out state.
        held: what this rank holds of it.
        comm: all ranks.
        saved: whole tensors by kind and name on rank 0, {} elsewhere.
        optimizer_state: what of it is no tensor, on all ranks.

    Raises:
        CheckpointError: of another model or optimizer; on all ranks.
    """
    _load_weights(model, sync, comm, saved.get("model", {}))
    whole = saved.get("optimizer", {})
    layout = layout_of(broadcast_json(comm, describe(whole)))
    states, wanted = _plan(model, optimizer, held, layout, optimizer_state)
    got = hand_out(comm, whole or layout, {key: run for key, (run, *_) in wanted.items()})
    for key, (_, parameter, slot, device) in wanted.items():
        value = got[key] if layout[key].dim() else got[key].view(())
        states[parameter][slot] = value.to(device)
    sync.load_sharded_state_dict(optimizer, states)
    sync.load_state_tensors(broadcast_tensors(comm, saved.get("sync")))


def _load_weights(model: nn.Module, sync: GradientSync, comm: Communicator, whole: Whole) -> None:
    held = sync.sharded_weights()
    if held is None:
        sync.load_full_weights(match_weights(model, broadcast_tensors(comm, whole)))
        return
    layout = layout_of(broadcast_json(comm, describe(whole)))
    match_weights(model, layout)
    saved_as = {clean: name for name, clean in clean_names(layout).items()}
    sources = {name: saved_as.get(clean_name(name)) for name in held}  # None: tied to another
    runs = {
        source: (held[name][0].start, held[name][0].stop)
        for name, source in sources.items()
        if source is not None
    }
    got = hand_out(comm, whole or layout, runs)
    sync.load_sharded_weights({name: got[source] for name, source in sources.items() if source})


def _plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    held: HeldState,
    layout: Whole,
    state: Mapping[str, Any],
) -> tuple[dict[Any, dict[str, Any]], dict[str, _Wanted]]:
    """This rank's states without their tensors, and these: elements, parameter, slot, device."""
    states: dict[Any, dict[str, Any]] = {}
    wanted: dict[str, _Wanted] = {}
    named = list(model.named_parameters())
    for name, (parameter, group) in unpack_settings(optimizer, named, layout, state).items():
        if parameter not in held:
            continue
        entry = state["params"][name]
        states[parameter] = dict(entry["values"])
        for slot in entry["slots"]:
            key = f"{slot}/{name}"
            run = _run(key, tuple(layout[key].shape), held[parameter][0])
            wanted[key] = run, parameter, slot, state_device(slot, parameter, group)
    return states, wanted


def _run(key: str, shape: tuple[int, ...], share: Share) -> _Run:
    """Which elements of a state tensor go with a share: its own, or the single number."""
    if shape == share.shape:
        return share.start, share.stop
    if shape == ():
        return 0, 1
    raise CheckpointError(
        f"optimizer state {key!r} has shape {shape} for a parameter of shape {share.shape}: "
        "neither elementwise nor a single number; ranks cannot share it out"
    )
