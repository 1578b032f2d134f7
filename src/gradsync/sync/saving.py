"""Checkpoints of a script's own: `gs.save` and `gs.load`, for any number of ranks.

Files, checksums and rotation are those of `gradsync train`, see `gradsync.checkpoint.store`. What a
state holds beside tensors is kept as JSON: nothing is pickled.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.checkpoint.background import BackgroundWriter, wait_for_writes
from gradsync.checkpoint.manifest import MANIFEST_NAME
from gradsync.checkpoint.store import STEP_NAME, CheckpointStore, Snapshot
from gradsync.checkpoint.weights import clean_names
from gradsync.comm.values import broadcast_tensors, from_rank_0
from gradsync.core.files import one_line
from gradsync.errors import CheckpointError, ConfigError
from gradsync.sync.gradient_sync import HANDLE, GradientSync
from gradsync.sync.state_dict import is_extra_state
from gradsync.sync.step import Optimizers

log = logging.getLogger("gradsync")


def save(
    folder: str | os.PathLike[str],
    *,
    step: int,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    loader: Any = None,
    extra: Any = None,
    keep_last: int = 3,
) -> None:
    """Save a run after `step` steps as `folder/step-…`, and write it while training goes on.

    All ranks call it, between two steps; rank 0 writes. The step waits for a copy only. The next
    save, `sync.close` and the program's end wait for the write; the end of `gs.init` does not.
    After a step whose result says `stop`, it is written on return. Under
    `gs.init(on_loss="shrink")` ranks that were started again join before the next step.

    Args:
        folder: of this model's checkpoints; no other run or model may write there.
        step: optimizer steps done.
        model: as given to `gs.replicate`.
        optimizer: one, or the list passed to `sync.step`.
        loader: of `gs.loader`, or another with `state_dict`, `load_state_dict`; rank 0's counts.
        extra: what else the script needs: nested dicts, lists and tuples of tensors, numbers and
            texts, such as `{"scheduler": scheduler.state_dict()}`. Rank 0's counts.
        keep_last: good checkpoints to keep.

    Raises:
        ConfigError: the model is not replicated; between `backward` and `step`; on rank 0, a value
            that is none of the above.
        CheckpointError: on rank 0, here, in a later `sync.step` or in `sync.close`: it cannot be
            written (a full disk), or holds nan or inf (a mask of -inf:
            `register_buffer(persistent=False)`). A program that is over by then ends with exit
            code 1.
    """
    handle, place = _handle_of(model), Path(folder).absolute()
    if type(step) is not int or step < 0:
        raise ConfigError(f"gs.save: step is {step!r}; expected the number of steps done, an int")
    if loader is not None and not hasattr(loader, "state_dict"):
        raise ConfigError(f"gs.save: {type(loader).__name__} has no state_dict; give gs.loader's")

    def write() -> None:
        state = handle.state_dict(optimizer, rank0_only=True)
        if handle.comm.rank != 0:
            return
        store = CheckpointStore(place, keep_last)
        writer = handle.writers.setdefault(place, BackgroundWriter(store))
        writer.store.keep_last = store.keep_last
        writer.save(_snapshot(step, state, loader, extra), owned=True)
        if handle.stopping:
            writer.wait()

    handle.saved_with = optimizer
    if handle.world.waits_to_join:
        return
    write()
    if (recovery := handle.world.recovery) is not None:
        wrote = handle.comm.rank == 0

        def one_waits() -> bool:
            if found := recovery.one_waits(str(place)):
                for each in recovery.handles:
                    each.finish_writing()
            return found

        # Whole group, from rank 0: whether a rank that was started again waits for this checkpoint.
        if not recovery.saved(step, lambda: from_rank_0(handle.comm, one_waits)) and not wrote:
            write()  # rank 0 may be lost

        # Whole group, from rank 0: that it has been written.
        recovery.unsure.append(
            (step, lambda: from_rank_0(handle.comm, handle.finish_writing), write)
        )


def _snapshot(step: int, state: Mapping[str, Any], loader: Any, extra: Any) -> Snapshot:
    """What a checkpoint holds: the handle's state, the loader's, and the script's own."""
    others = {name: part for name, part in state["model"].items() if is_extra_state(name)}
    given = {
        "optimizer": {key: part for key, part in state.items() if key != "model"},
        "data": None if loader is None else loader.state_dict(),
        "script": {"modules": others, "extra": extra},
    }
    weights = {name: part for name, part in state["model"].items() if name not in others}
    tensors: dict[str, dict[str, Tensor]] = {"model": weights, **{stem: {} for stem in given}}
    found = {stem: _to_json(part, stem, tensors[stem]) for stem, part in given.items()}
    for stem in ("data", "script"):  # the rest is copied already
        tensors[stem] = {name: t.detach().clone() for name, t in tensors[stem].items()}
    return Snapshot(step=step, tensors=tensors, state={"script": found})


def load(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    loader: Any = None,
) -> tuple[int, Any]:
    """Restore the newest good checkpoint that `gs.save` wrote, on any number of ranks.

    All ranks call it after `gs.replicate`; rank 0 reads, checks every byte, and sends the others
    what it read. A rank that was started again waits here for the others' next `gs.save`, and joins
    them at the next step.

    Args:
        folder: as for `save`, or one `step-…` in it.
        model: as given to `gs.replicate`; another strategy than the saved one is possible.
        optimizer: as for `save`; None restores weights only.
        loader: as for `save`; None leaves it at its beginning.

    Returns:
        The optimizer steps done, and `extra` as given to `save`, its tensors on the CPU. (0, None)
        if the folder has no checkpoint; then nothing changes.

    Raises:
        CheckpointError: on all ranks: there are checkpoints, but none is good; it is of `gradsync
            train`; `folder` is a `step-…` that is missing.
        ConfigError: on all ranks, before anything is loaded: another model or other optimizers.
        DataError: on all ranks: the loader reads other data.
    """
    handle, place = _handle_of(model), Path(folder).absolute()
    handle.saved_with, recovery = optimizer, handle.world.recovery
    joins = recovery is not None and recovery.waits_to_join
    expected = recovery.wait_outside(str(place)) if joins else None
    tensors: dict[str, Tensor] = {}
    header = from_rank_0(handle.comm, lambda: _read(handle, place, tensors))
    if joins and (header is None or header["step"] != expected):
        raise CheckpointError(f"{place} has no step {expected}, which the others saved to join at")
    if header is None:
        return 0, None
    tensors = broadcast_tensors(handle.comm, tensors)
    try:
        parts = {stem: _from_json(part, stem, tensors) for stem, part in header["script"].items()}
        weights = {n.removeprefix("model/"): t for n, t in tensors.items() if n[:6] == "model/"}
        own = {clean: name for name, clean in clean_names(model.state_dict()).items()}
        state = {
            "model": {own.get(n, n): t for n, t in weights.items()} | parts["script"]["modules"],
            **parts["optimizer"],
        }
        position, extra = parts["data"], parts["script"]["extra"]
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{header['path']}: state.json: {one_line(error)}") from None
    if loader is not None and position is None:
        raise ConfigError(f"{header['path']} has no state of a loader: none was given to save")
    handle.load_state_dict(state, optimizer)
    if loader is not None:
        loader.load_state_dict(position)
    return header["step"], extra


def _read(handle: GradientSync, place: Path, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    """The newest good checkpoint in `place`, or that one, its tensors in `tensors`; on rank 0."""
    handle.finish_writing()
    wait_for_writes(place)  # of another handle
    path = place
    if not (place / MANIFEST_NAME).exists():
        info, problems = CheckpointStore(place).latest()
        if info is None:
            problems += [f"{MANIFEST_NAME} is missing"] * bool(STEP_NAME.fullmatch(place.name))
            problems += ["give its checkpoints/"] * any(place.glob("checkpoints/step-*/*.json"))
            if problems:
                raise CheckpointError(f"{place}: no good checkpoint: {'; '.join(problems)}")
            return None
        path = info.path
        for problem in problems:
            log.warning("%s; using %s", problem, path.name)
    snapshot = CheckpointStore(path.parent).load(path)
    if not isinstance(snapshot.state.get("script"), dict):
        raise CheckpointError(f"{path}: gs.save did not write it; expected a script's state")
    for stem, part in snapshot.tensors.items():
        tensors.update((f"{stem}/{name}", tensor) for name, tensor in part.items())
    return {"path": str(path), "step": snapshot.step, "script": snapshot.state["script"]}


def _handle_of(model: nn.Module) -> GradientSync:
    handle = model.__dict__.get(HANDLE)
    if handle is None or handle.model is not model:
        kind = type(model).__name__
        raise ConfigError(f"{kind} is not replicated: give the model that gs.replicate was given")
    return handle


def _to_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON, with its tensors moved to `tensors`, by path."""
    if isinstance(value, Tensor):
        path = path.replace(".", "/")  # dotted names lose the names of wrappers in a file
        while path in tensors:  # {"a/b": …} and {"a": {"b": …}}
            path += "'"
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        pairs = [[_to_json(key, f"{path}'s key", {}), key] for key in value]
        if odd := [key for held, key in pairs if isinstance(held, dict)]:
            raise ConfigError(f"gs.save: {path} has the key {odd[0]!r}; expected texts or numbers")
        kind = "counter" if isinstance(value, Counter) else "dict"  # of MultiStepLR
        return {kind: [[k, _to_json(value[key], f"{path}/{key}", tensors)] for k, key in pairs]}
    if isinstance(value, list | tuple):
        parts = [_to_json(part, f"{path}/{n}", tensors) for n, part in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    if getattr(value, "shape", None) == ():  # a number of numpy
        value = value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return "".join(value) if isinstance(value, str) else kind(value)  # also of an Enum
    if value is not None:
        raise ConfigError(
            f"gs.save: {path} is a {type(value).__name__}; expected dicts, lists and tuples of "
            "tensors, numbers, texts and None"
        )
    return None


def _from_json(value: Any, stem: str, tensors: Mapping[str, Tensor]) -> Any:
    """What `_to_json` was given. Tensors are copies, because the store's are backed by the file."""
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return torch.clone(tensors[f"{stem}/{held}"])
    if kind in ("dict", "counter"):
        found = {key: _from_json(part, stem, tensors) for key, part in held}
        return Counter(found) if kind == "counter" else found
    parts = [_from_json(part, stem, tensors) for part in held]
    return tuple(parts) if kind == "tuple" else parts
