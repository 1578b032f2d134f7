"""Everything that a run needs to resume exactly: saved from a run, restored into one.

Rank 0 alone reads and writes checkpoints and sends what it reads to the others: only one host has
to reach the run directory, and all ranks resume from the same bytes. There is no random state to
save: see [Note: Keyed streams].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gradsync.checkpoint.optimizer_state import check_packed
from gradsync.checkpoint.store import CheckpointStore, Snapshot, resolve
from gradsync.comm.values import from_rank_0
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT
from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.foreign import read_hf
from gradsync.commands.train.learner import Fingerprint, Whole
from gradsync.commands.train.loop import Trainer
from gradsync.core.files import one_line
from gradsync.data.batch_plan import BatchPlan
from gradsync.errors import CheckpointError, ConfigError, DataError
from gradsync.runtime import environ
from gradsync.sync.buckets import TREE_VERSION
from gradsync.sync.options import DilocoOptions, LocalSgdOptions
from gradsync.sync.registry import find_strategy
from gradsync.world import World

_STATE: dict[str, Any] = {
    **dict.fromkeys(("optimizer", "data", "model", "config"), dict),
    "tokenizer": str | None,
    "scaler": dict | None,
}
_ONCE_ALL = {"architecture": "llama", "bias": False}  # Models saved before others existed
_MACHINE = {"torch", "device", "cpu_capability", "math_env", "threads", "tf32"}
_SPLIT = "parallel"  # The layout of a split model; whole models do not have it
_MATH_VARIABLES = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def numeric_fingerprint(
    config: TrainConfig, world: World, plan: BatchPlan, *, threads: int
) -> Fingerprint:
    """Everything but data and weights that determines a run's bits, equal on all its ranks.

    Measured: 16 of 56 fp32 operations change bits with the thread count; ten settings of the CPU's
    instruction set gave eight different weight hashes. So a resume that differs is refused by name.
    """
    strategy = find_strategy(config.sync)
    invariant = strategy.same_on_any_ranks
    tree = f"invariant tree {TREE_VERSION}{', bf16' if strategy.promise == 'lossy' else ''}"
    on_cuda = world.device.type == "cuda"
    settings = [f"{name}={value}" for name in _MATH_VARIABLES if (value := environ.get(name))]
    layout = config.layout(world.world_size)
    split = {} if layout.model_ranks == 1 else {_SPLIT: str(layout)}
    return {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(world.device) if on_cuda else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "math_env": " ".join(settings),
        "threads": threads,
        "tf32": config.tf32 if on_cuda else False,
        "dtype": config.named_dtype + ("" if config.named_dtype == "fp32" else ", one cast"),
        "sync": tree if invariant else config.sync,
        "compile": "blocks" if config.compile == "model" else config.compile,
        "leaf_shape": f"{plan.micro_batch_size}x{plan.seq_len}",
        "num_leaves": plan.num_micro_batches,
        "world_size": None if invariant else world.world_size,
        **split,
    }


def compare(saved: Mapping[str, Any], now: Fingerprint, *, allow_change: bool) -> list[str]:
    """Differences that only deserve a warning; ConfigError names each field that changes the bits.

    Between world sizes or layouts most strategies promise the same samples, not the same bits, so
    differences of the machine only warn there. Under the invariant order the world size is not
    compared, and every difference counts.
    """
    differs = {
        name: f"{name}: {saved.get(name)!r} then, {now.get(name)!r} now"
        for name in {**now, _SPLIT: None}
        if saved.get(name) != now.get(name)
    }
    tolerated = {"world_size", _SPLIT}
    if tolerated & differs.keys():
        tolerated |= _MACHINE
    refused = [text for name, text in differs.items() if name not in tolerated]
    if refused and not allow_change:
        raise ConfigError(
            "the checkpoint was computed with other numerics, bits would change: "
            + one_line("; ".join(refused))
            + " (restore the setting, or go on with --allow-numeric-change)"
        )
    return list(differs.values())


@dataclass(frozen=True, slots=True)
class Resumed:
    """The start of a run."""

    step: int = 0  # Optimizer steps done
    source: str = ""  # Checkpoint directory, "" for a fresh start
    notes: tuple[str, ...] = ()  # Notes for the user: damaged checkpoints, changed numerics


def restore(run: Trainer) -> Resumed:
    """Find, check and load what `config.resume` asks for, on all ranks. ConfigError: another model,
    or other numerics; DataError: another data set or seed."""
    config, comm, learner = run.config, run.comm, run.learner
    saved: dict[str, Whole] = {}

    def load() -> dict[str, Any]:
        path, notes = _find_checkpoint(config.resume, run.store)
        if path is None:
            return {"path": "", "notes": notes}
        found = run.store.load(path)
        check_state(found, path)
        if not found.state["data"]:
            raise CheckpointError(
                f"{path} holds a model from elsewhere, and no run to go on with: name another "
                f"--out, and begin with its weights by --init {path}"
            )
        _check_model(asdict(learner.model.config), _ONCE_ALL | found.state["model"], path)
        allowed = config.allow_numeric_change
        notes += compare(found.fingerprint, run.fingerprint, allow_change=allowed)
        remembered, left_behind = take_strategy_state(found, config.sync)
        notes += left_behind
        notes += changed_settings(found.state["config"], config)
        saved.update(found.tensors, sync=remembered)
        return {"path": str(path), "step": found.step, "state": found.state, "notes": notes}

    header = from_rank_0(comm, load)
    notes = tuple(header["notes"])
    if not header["path"]:
        if config.init:
            whole = _start_weights(Path(config.init), learner.model) if comm.rank == 0 else {}
            learner.load_weights(whole)
            notes = (*notes, f"weights of {config.init}")
        return Resumed(notes=notes)
    state = header["state"]
    try:
        run.data.train.load_state_dict(state["data"])
    except DataError as error:
        before = {name: state["config"].get(name) for name in ("seed", "data")}
        raise DataError(
            f"{header['path']} was trained with --seed {before['seed']} --data "
            f"{one_line(before['data']) or repr('')}: give it the same, or begin anew from its "
            f"weights (--init, and another --out); {error}"
        ) from error
    learner.load(saved, state["optimizer"])
    if learner.scaler is not None and state["scaler"]:
        learner.scaler.load_state_dict(state["scaler"])
    return Resumed(header["step"], header["path"], notes)


def changed_settings(saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """A line that names the changed settings of the optimizer, the strategy, the schedule and, if
    rounds end there, of evaluations and checkpoints; `compare` refuses those that change bits."""
    rounds = isinstance(find_strategy(config.sync).defaults, LocalSgdOptions | DilocoOptions)
    found = [
        f"{part}.{name} {one_line(before[name])} -> {value}"
        for part in ("optim", "sync_options", "eval", "checkpoint")
        if isinstance(before := saved.get(part), dict)
        for name, value in asdict(getattr(config, part)).items()
        if part in ("optim", "sync_options") or (rounds and name == "every")
        if before.get(name, value) != value
    ]
    steps = saved.get("steps", config.steps)
    if steps != config.steps and config.optim.schedule != "constant":
        found.append(f"steps {one_line(steps)} -> {config.steps} (learning rates follow)")
    return [f"resuming with changed settings: {', '.join(found)}"] if found else []


def _find_checkpoint(resume: str, store: CheckpointStore) -> tuple[Path | None, list[str]]:
    """The checkpoint that `--resume` means, and a note for each damaged one it skips."""
    if resume == "none":
        return None, []
    if resume != "auto":
        return resolve(Path(resume))
    info, problems = store.latest()
    if info is None and problems:
        raise CheckpointError(
            f"no good checkpoint is left: {'; '.join(problems)} (choose another --out to start "
            "anew)"
        )
    notes = [f"{problem}; using {info.path.name}" for problem in problems if info is not None]
    return (info.path if info else None), notes


def check_state(found: Snapshot, path: Path) -> None:
    """Refuse a checkpoint without the contents that `Trainer` saves."""
    for name, kinds in _STATE.items():
        if name not in found.state or not isinstance(found.state[name], kinds):
            raise CheckpointError(f"{path}: state.json has no {name} of a training run")
    try:
        check_packed(found.state["optimizer"])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None


def open_checkpoint(path: Path) -> tuple[Path, Snapshot, GPTConfig]:
    """The checkpoint of a run that `path` means, what it holds, and its model's shape."""
    path, _ = resolve(path)
    found = CheckpointStore(path.parent).load(path)
    check_state(found, path)
    try:
        return path, found, GPTConfig(**found.state["model"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: state.json has no model to build: {one_line(error)}"
        ) from None


def take_strategy_state(found: Snapshot, sync: str) -> tuple[Whole, list[str]]:
    """The saved tensors that strategy `sync` resumes with, and a note if those of another strategy
    are dropped. A checkpoint that does not name its strategy counts as one of `sync`."""
    tensors = found.tensors.get("sync", {})
    saved_by = found.state.get("config", {}).get("sync", sync)
    if saved_by == sync or not tensors:
        return tensors, []
    kinds = sorted({name.partition("/")[0].replace("_", " ") for name in tensors})
    what = f"{' and '.join(kinds)} is left behind"
    return {}, [f"{one_line(saved_by)}'s {what}: the run goes on with {sync}"]


def _start_weights(path: Path, model: GPT) -> Whole:
    """Whole weights under our names, from a run, a checkpoint or transformers."""
    if (path / "config.json").exists():
        shape, weights = read_hf(path)
    else:
        path, found, shape = open_checkpoint(path)
        weights = found.tensors["model"]
    _check_model(_sizes(model.config), _sizes(shape), path)
    return weights


def _sizes(shape: GPTConfig) -> dict[str, Any]:
    """The fields of a shape that weights depend on, all resolved."""
    found = asdict(shape) | {"n_kv_head": shape.num_kv_heads, "hidden_dim": shape.mlp_dim}
    left_out = {"dropout"} if shape.is_gpt2 else {"dropout", "block_size"}
    return {name: size for name, size in found.items() if name not in left_out}


def _check_model(now: dict[str, Any], saved: dict[str, Any], path: Path) -> None:
    """Compare shapes before anything is loaded, by the names that users know."""
    differs = [
        f"model.{name} is {saved.get(name)!r} there, {value!r} here"
        for name, value in now.items()
        if saved.get(name) != value
    ]
    if differs:
        raise ConfigError(
            f"{path} is of another model: {one_line('; '.join(differs))} (give it the same preset "
            "and --model flags, or take another --out)"
        )
