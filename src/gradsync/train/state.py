"""Everything needed to go on exactly, out of a run and back into one.

Rank 0 alone reads and writes checkpoints and hands what it read to the others: the run directory
has to be reachable from one host only, and all ranks surely continue from the same bytes.
Random state is not saved because there is none: see [Note: Keyed streams].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gradsync.checkpoint.optimizer_state import check_packed, pack_optimizer
from gradsync.checkpoint.store import CheckpointStore, Snapshot, resolve
from gradsync.checkpoint.weights import pack_weights
from gradsync.comm.base import Communicator
from gradsync.comm.values import broadcast_json
from gradsync.core.files import one_line
from gradsync.data.loader import Loader
from gradsync.data.streaming import StreamLoader
from gradsync.errors import CheckpointError
from gradsync.models.config import GPTConfig
from gradsync.train.config import TrainConfig
from gradsync.train.fingerprint import Fingerprint, compare
from gradsync.train.setup import Data, Learner

RANDOM_STREAMS = "keyed by (seed, step, leaf), version 1"
_STATE: dict[str, Any] = {
    "optimizer": dict,
    "data": dict,
    "model": dict,
    "config": dict,
    "tokenizer": str | None,
    "scaler": dict | None,
}


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run starts."""

    step: int = 0
    """Optimizer steps done."""
    source: str = ""
    """Checkpoint directory, "" for a fresh start."""
    notes: tuple[str, ...] = ()
    """Notes for the user: damaged checkpoints, changed numerics."""


def snapshot(
    step: int,
    config: TrainConfig,
    learner: Learner,
    data: Data,
    *,
    weights: Mapping[str, Tensor],
    fingerprint: Fingerprint,
) -> Snapshot:
    """The state after `step` optimizer steps; shares the run's tensors, save it at once.

    `weights` are whole, and so is the optimizer's state at this moment (`GradientSync.gather`).
    """
    named = list(learner.model.named_parameters())
    optimizer_tensors, optimizer_state = pack_optimizer(learner.optimizer, named)
    return Snapshot(
        step=step,
        tensors={
            "model": pack_weights(weights),
            "optimizer": optimizer_tensors,
            "sync": learner.sync.state_tensors(),
        },
        state=run_state(config, learner, data, optimizer=optimizer_state),
        fingerprint=fingerprint,
    )


def run_state(
    config: TrainConfig, learner: Learner, data: Data, *, optimizer: dict[str, Any]
) -> dict[str, Any]:
    """All that is no tensor."""
    return {
        "optimizer": optimizer,
        "data": dict(data.train.state_dict()),
        "tokenizer": data.tokenizer,
        "scaler": None if learner.scaler is None else learner.scaler.state_dict(),
        "random": {"streams": RANDOM_STREAMS, "seed": config.seed},
        "model": asdict(learner.model.config),
        "config": asdict(config),
    }


def find_checkpoint(resume: str, store: CheckpointStore) -> tuple[Path | None, list[str]]:
    """Which checkpoint `--resume` means, and a note for each damaged one that was passed over.

    Raises:
        ConfigError, CheckpointError: nothing, or nothing good, is there; with `auto`, only damage.
    """
    if resume == "none":
        return None, []
    if resume != "auto":
        return resolve(Path(resume))
    info, problems = store.latest()
    if info is None and problems:
        raise CheckpointError(
            "no good checkpoint is left: "
            + "; ".join(problems)
            + " (choose another --out to start "
            "anew)"
        )
    notes = [f"{problem}; using {info.path.name}" for problem in problems if info is not None]
    return (info.path if info else None), notes


def restore(
    config: TrainConfig,
    learner: Learner,
    loader: Loader | StreamLoader,
    *,
    fingerprint: Fingerprint,
    comm: Communicator,
    store: CheckpointStore,
) -> Resumed:
    """Find, check and load what `config.resume` asks for, on all ranks.

    Raises:
        CheckpointError: unreadable, of another model, or with other numerics.
        DataError: of another data set or seed.
    """
    found: Snapshot | None = None
    remembered: Mapping[str, Tensor] = {}
    header: dict[str, Any] = {"path": "", "notes": []}
    if comm.rank == 0:
        path, notes = find_checkpoint(config.resume, store)
        if path is not None:
            found = store.load(path)
            check_state(found, path)
            _check_model(learner.model.config, found.state["model"], path)
            notes += compare(
                found.fingerprint, fingerprint, allow_change=config.allow_numeric_change
            )
            remembered, left_behind = take_strategy_state(found, config.sync)
            notes += left_behind
            header = {"path": str(path), "step": found.step, "state": found.state}
        header["notes"] = notes
    header = broadcast_json(comm, header)
    notes = tuple(header["notes"])
    if not header["path"]:
        return Resumed(notes=notes)
    state = header["state"]
    saved = {} if found is None else {**found.tensors, "sync": remembered}
    loader.load_state_dict(state["data"])
    learner.load(comm, saved, state["optimizer"])
    if learner.scaler is not None and state["scaler"]:
        try:
            learner.scaler.load_state_dict(state["scaler"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{header['path']}: no state of a loss scaler") from error
    return Resumed(header["step"], header["path"], notes)


def check_state(found: Snapshot, path: Path) -> None:
    """Whether a checkpoint holds what `snapshot` puts into one.

    Raises:
        CheckpointError: naming what it does not.
    """
    for name, kinds in _STATE.items():
        if not isinstance(found.state.get(name), kinds):
            raise CheckpointError(f"{path}: state.json has no {name} of a training run")
    try:
        check_packed(found.state["optimizer"])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None
    params, slots = found.state["optimizer"]["params"], ("step", "exp_avg", "exp_avg_sq")
    for key, tensor in found.tensors.get("optimizer", {}).items():
        slot, _, name = key.partition("/")
        shape = () if slot == "step" else tuple(params.get(name, {}).get("shape", ()))
        if slot not in slots or tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise CheckpointError(
                f"{path}: {one_line(key)} of shape {tuple(tensor.shape)} is not what AdamW keeps"
            )
    for name, entry in params.items():
        if entry["values"] or sorted(entry["slots"]) not in ([], sorted(slots)):
            raise CheckpointError(f"{path}: {one_line(name)} has not the state that AdamW keeps")


def saved_model(found: Snapshot, path: Path) -> GPTConfig:
    """The shape of a checkpoint's model, compared with its tensors before anything is built.

    Raises:
        CheckpointError: no shape of a model, or that of a larger or smaller one.
    """
    try:
        shape = GPTConfig(**found.state["model"])
        expected = shape.num_params()
    except ValueError as error:
        raise CheckpointError(
            f"{path}: state.json has no model to build: {one_line(error)}"
        ) from None
    except TypeError:
        raise CheckpointError(f"{path}: state.json has other fields than a model's") from None
    distinct = {id(tensor): tensor for tensor in found.tensors.get("model", {}).values()}
    held = sum(tensor.numel() for tensor in distinct.values())
    if held != expected:
        raise CheckpointError(
            f"{path}: state.json is of a model of {expected:,} parameters, the file of "
            f"tensors holds {held:,}"
        )
    return shape


def take_strategy_state(found: Snapshot, sync: str) -> tuple[Mapping[str, Tensor], list[str]]:
    """Strategy tensors that `sync` goes on with, out of those that were saved.

    Returns:
        the tensors, and a note where those of another strategy are left behind. A checkpoint that
        does not say which strategy saved it is taken for one of `sync`.
    """
    tensors = found.tensors.get("sync", {})
    saved_by = found.state.get("config", {}).get("sync", sync)
    if saved_by == sync or not tensors:
        return tensors, []
    kinds = sorted({name.partition("/")[0].replace("_", " ") for name in tensors})
    what = f"{' and '.join(kinds)} is left behind"
    return {}, [f"{saved_by}'s {what}: the run goes on with {sync}"]


def _check_model(now: GPTConfig, saved: dict[str, Any], path: Path) -> None:
    """Shapes are compared before anything is loaded, by the names users know."""
    current = asdict(now)
    differs = [
        f"model.{name} is {saved.get(name)!r} there, {value!r} here"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    if differs:
        raise CheckpointError(f"{path} is of another model: {one_line('; '.join(differs))}")
