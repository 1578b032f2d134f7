"""Everything needed to go on exactly, out of a run and back into one.

Rank 0 alone reads and writes checkpoints and hands what it read to the others: the run directory
has to be reachable from one host only, and all ranks surely continue from the same bytes.
Random state is not saved because there is none: see [Note: Keyed streams].

Whole replicas are saved as whole tensors. State that ranks share out (`zero1`, `zero2`, `fsdp`) has
one file of each rank:

    part-00000-of-00002   optimizer/exp_avg/embed.weight  …      what rank 0 holds
    part-00001-of-00002   optimizer/exp_avg/embed.weight  …      what rank 1 holds
    model                 weights, where every rank has them whole (`zero1`, `zero2`)

Each rank sends its shares to rank 0, which writes them as they arrive: two tensors of the others at
a time are in its memory. To load, rank 0 reads whole tensors, whatever the checkpoint is of (whole
replicas, a split model, shares of another number of ranks), and sends each rank its shares alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsync.checkpoint.optimizer_state import (
    check_packed,
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
from gradsync.checkpoint.store import CheckpointStore, Snapshot, resolve
from gradsync.checkpoint.weights import clean_name, clean_names, match_weights, pack_weights
from gradsync.comm.base import Communicator
from gradsync.comm.finite import non_finite
from gradsync.comm.values import (
    all_gather_json,
    broadcast_json,
    broadcast_tensors,
    from_rank_0,
)
from gradsync.core.files import one_line
from gradsync.data.batch_plan import BatchPlan
from gradsync.errors import CheckpointError, ConfigError, DataError, DivergenceError
from gradsync.models.config import GPTConfig
from gradsync.parallel.transfer import collect, describe, hand_out, layout_of
from gradsync.runtime import environ
from gradsync.sync.buckets import TREE_VERSION
from gradsync.sync.options import DilocoOptions, LocalSgdOptions
from gradsync.sync.registry import find_strategy
from gradsync.sync.sharded_state import HeldState, Share
from gradsync.train.config import TrainConfig
from gradsync.train.foreign import read_hf
from gradsync.world import World

if TYPE_CHECKING:
    from gradsync.models.gpt import GPT
    from gradsync.train.learner import Learner
    from gradsync.train.loop import Trainer

Whole = Mapping[str, Tensor]
Keep = Callable[[Mapping[str, Whole], dict[str, Any], dict[str, Any]], None]
"""Saves tensors by file and name, the rest of the optimizer's state, and the tensors' places; at
once, since tensors are the run's own or arrive while they are saved."""
Fingerprint = dict[str, str | int | float | bool | None]

RANDOM_STREAMS = "keyed by (seed, step, leaf), version 1"
ADVICE = "lower --optim.lr, or look at the data of that step"
_STATE: dict[str, Any] = {
    **dict.fromkeys(("optimizer", "data", "model", "config"), dict),
    "tokenizer": str | None,
    "scaler": dict | None,
}
_ONCE_ALL = {"architecture": "llama", "bias": False}  # Models saved before there were others
_MACHINE = {"torch", "device", "cpu_capability", "math_env", "threads", "tf32"}
_SPLIT = "parallel"  # The layout of a split model; whole ones do not have it
_MATH_VARIABLES = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def numeric_fingerprint(
    config: TrainConfig, world: World, plan: BatchPlan, *, threads: int
) -> Fingerprint:
    """Everything that decides a run's bits apart from data and weights, equal on all its ranks.

    Measured: 16 of 56 fp32 operations change bits with the thread count, ten settings of the CPU's
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
        "loss_rows": config.loss_rows,
        "leaf_shape": f"{plan.micro_batch_size}x{plan.seq_len}",
        "num_leaves": plan.num_leaves,
        "world_size": None if invariant else world.world_size,
        **split,
    }


def compare(saved: Mapping[str, Any], now: Fingerprint, *, allow_change: bool) -> list[str]:
    """Differences that only deserve a warning.

    Between world sizes or layouts most strategies promise the same samples, not the same bits, so
    there what the machine decides only warns. Under the invariant order the world size does not
    appear, and everything counts. ConfigError names each field that changes the bits.
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


def save_run(run: Trainer, step: int) -> None:
    """Save the state after `step` optimizer steps; all ranks call it, rank 0 writes."""
    config, scaler = run.config, run.learner.scaler

    def keep(
        tensors: Mapping[str, Whole], optimizer: dict[str, Any], places: dict[str, Any]
    ) -> None:
        state = {
            "optimizer": optimizer,
            "data": dict(run.data.train.state_dict()),
            "tokenizer": run.data.tokenizer,
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": {"streams": RANDOM_STREAMS, "seed": config.seed},
            "model": asdict(run.learner.model.config),
            "config": asdict(config),
        }
        run.store.save(
            Snapshot(
                step=step, tensors=tensors, state=state, fingerprint=run.fingerprint, places=places
            )
        )

    run.learner.save(step, keep)


def check_finite(comm: Communicator, step: int, named: Iterable[tuple[str, Tensor]]) -> None:
    """Before a checkpoint, on all ranks, each with what it holds: two small all-gathers.
    DivergenceError on all: some rank holds nan or inf, which no run could go on from."""
    for rank, found in enumerate(all_gather_json(comm, non_finite(named))):
        if found:
            raise DivergenceError(
                f"after step {step} there is nan or inf in {found} (rank {rank}), so it is not "
                f"saved; {ADVICE}"
            )


def save_replica(learner: Learner, step: int, keep: Keep) -> None:
    """Whole tensors, from rank 0."""
    comm, sync = learner.comm, learner.sync
    sync.gather(learner.optimizer)
    weights = sync.full_weights(copy=False)
    kept, state = pack_optimizer(learner.optimizer, learner.model.named_parameters())
    remembered = sync.state_tensors()
    check_finite(comm, step, chain(weights.items(), kept.items(), remembered.items()))
    if comm.rank == 0:
        tensors = {"model": pack_weights(weights), "optimizer": kept, "sync": remembered}
        keep(tensors, state, {})
    sync.scatter(learner.optimizer)


def save_shares(learner: Learner, held: HeldState, step: int, keep: Keep) -> None:
    """Each rank's part of what ranks share out; `held` is its `GradientSync.sharded_state_dict`."""
    comm, sync = learner.comm, learner.sync
    # First: after a forward FSDP2 may still have whole parameters in place of the sharded ones.
    weights = sync.sharded_weights()
    named = list(learner.model.named_parameters())
    clean = clean_names(name for name, _ in named)
    names = {parameter: clean[name] for name, parameter in named}
    whole: dict[str, Whole] = {}
    if weights is None:
        whole["model"] = sync.full_weights(copy=False)
    remembered = sync.state_tensors()
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
        is_new = not tensor.numel() or tensor.data_ptr() not in seen  # tied ones once
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


@dataclass(frozen=True, slots=True)
class Resumed:
    """Start of a run."""

    step: int = 0  # Optimizer steps done
    source: str = ""  # Checkpoint directory, "" for a fresh start
    notes: tuple[str, ...] = ()  # Notes for the user: damaged checkpoints, changed numerics


def restore(run: Trainer) -> Resumed:
    """Find, check and load what `config.resume` asks for, on all ranks. ConfigError: of another
    model, or with other numerics; DataError: of another data set or seed."""
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
            _load_weights(learner, comm, whole)
            notes = (*notes, f"weights of {config.init}")
        return Resumed(notes=notes)
    state = header["state"]
    try:
        run.data.train.load_state_dict(state["data"])
    except DataError as error:
        before, seed = (state["config"].get(name) for name in ("data", "seed"))
        if seed != config.seed:
            raise DataError(
                f"{header['path']} was begun with --seed {seed}, this is {config.seed}: leave "
                "--seed out, or take another --out"
            ) from error
        if before == config.data:
            raise
        was, now = (one_line(data or "the built-in text") for data in (before, config.data))
        raise DataError(
            f"{header['path']} was trained on {was}, not on {now}: name the same --data, or begin "
            f"anew from its weights (--init); {error}"
        ) from error
    learner.load(saved, state["optimizer"])
    if learner.scaler is not None and state["scaler"]:
        try:
            learner.scaler.load_state_dict(state["scaler"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{header['path']}: no state of a loss scaler") from error
    return Resumed(header["step"], header["path"], notes)


def changed_settings(saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """A line that names the changed settings of the optimizer, the strategy and the schedule,
    and what ends rounds where there are any; `compare` refuses settings that change bits."""
    found = []
    rounds = isinstance(find_strategy(config.sync).defaults, LocalSgdOptions | DilocoOptions)
    ends = {"eval": ("every",), "checkpoint": ("every",)} if rounds else {}
    for part, names in {"optim": None, "sync_options": None, **ends}.items():
        before = saved.get(part)
        for name, value in asdict(getattr(config, part)).items():
            counts = names is None or name in names
            if counts and isinstance(before, dict) and before.get(name, value) != value:
                found.append(f"{part}.{name} {one_line(before[name])} -> {value}")
    steps = saved.get("steps", config.steps)
    if steps != config.steps and config.optim.schedule != "constant":
        found.append(f"steps {one_line(steps)} -> {config.steps} (learning rates follow)")
    return [f"resuming with changed settings: {', '.join(found)}"] if found else []


def _find_checkpoint(resume: str, store: CheckpointStore) -> tuple[Path | None, list[str]]:
    """Which checkpoint `--resume` means, and a note for each damaged one that was passed over."""
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
    metrics = store.directory.parent / "metrics.jsonl"
    if info is None and metrics.exists() and metrics.stat().st_size:
        notes.append(
            "the start before left no checkpoint: this one begins at step 1 again "
            "(--checkpoint.every N saves every N steps)"
        )
    return (info.path if info else None), notes


def check_state(found: Snapshot, path: Path) -> None:
    """Refuse a checkpoint that does not hold what `save_run` puts into one."""
    for name, kinds in _STATE.items():
        if name not in found.state or not isinstance(found.state[name], kinds):
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
    """The shape of a checkpoint's model, compared with its tensors before anything is built."""
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


def take_strategy_state(found: Snapshot, sync: str) -> tuple[Whole, list[str]]:
    """The saved tensors that strategy `sync` goes on with, and a note where those of another one
    are left behind. A checkpoint that does not say which saved it is taken for one of `sync`."""
    tensors = found.tensors.get("sync", {})
    saved_by = found.state.get("config", {}).get("sync", sync)
    if saved_by == sync or not tensors:
        return tensors, []
    kinds = sorted({name.partition("/")[0].replace("_", " ") for name in tensors})
    what = f"{' and '.join(kinds)} is left behind"
    return {}, [f"{one_line(saved_by)}'s {what}: the run goes on with {sync}"]


def _start_weights(path: Path, model: GPT) -> Whole:
    """Whole weights under our names, of a run or checkpoint, or of transformers."""
    if not (path / "config.json").exists():
        path, _ = resolve(path)
        snapshot = CheckpointStore(path.parent).load(path)
        check_state(snapshot, path)
        _check_model(_sizes(model.config), _sizes(saved_model(snapshot, path)), path)
        return snapshot.tensors["model"]
    found = read_hf(path)
    _check_model(_sizes(model.config), _sizes(found.shape), path)
    return found.weights


def _sizes(shape: GPTConfig) -> dict[str, Any]:
    """The parts of a shape that weights depend on, none left to its default."""
    found = asdict(shape) | {"n_kv_head": shape.num_kv_heads, "hidden_dim": shape.mlp_dim}
    left_out = {"dropout"} if shape.is_gpt2 else {"dropout", "block_size"}
    return {name: size for name, size in found.items() if name not in left_out}


def _check_model(now: dict[str, Any], saved: dict[str, Any], path: Path) -> None:
    """Shapes are compared before anything is loaded, by the names users know."""
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


def load_learnt(learner: Learner, saved: Mapping[str, Whole], state: Mapping[str, Any]) -> None:
    """See `Learner.load`: whole tensors on all ranks, or each rank's shares alone."""
    comm, sync, optimizer = learner.comm, learner.sync, learner.optimizer
    # The configuration says the settings, a checkpoint the state.
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    held = sync.sharded_state_dict(optimizer)
    _load_weights(learner, comm, saved.get("model", {}))
    named = list(learner.model.named_parameters())
    if held is None:
        unpack_optimizer(optimizer, named, broadcast_tensors(comm, saved.get("optimizer")), state)
        sync.scatter(optimizer)
    else:
        states = _states_of_shares(learner, held, saved.get("optimizer", {}), state)
        sync.load_sharded_state_dict(optimizer, states)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    sync.load_state_tensors(broadcast_tensors(comm, saved.get("sync")))


def _states_of_shares(
    learner: Learner, held: HeldState, whole: Whole, state: Mapping[str, Any]
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


def _load_weights(learner: Learner, comm: Communicator, whole: Whole) -> None:
    held = learner.sync.sharded_weights()
    if held is None:
        weights = match_weights(learner.model, broadcast_tensors(comm, whole))
        learner.sync.load_full_weights(weights)
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
    learner.sync.load_sharded_weights(weights)


def _run(key: str, shape: tuple[int, ...], share: Share) -> tuple[int, int]:
    """Which elements of a state tensor go with a share: its own, or the single number."""
    if shape == share.shape:
        return share.start, share.stop
    if shape == ():
        return 0, 1
    raise CheckpointError(
        f"optimizer state {key!r} has shape {shape} for a parameter of shape {share.shape}: "
        "neither elementwise nor a single number; ranks cannot share it out"
    )
