"""Models saved by other programs: transformers' folders, nanoGPT's checkpoints. Loading builds and
calls nothing in them: safetensors, JSON, and torch's `weights_only`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.checkpoint.tensor_file import read_tensors
from gradsync.checkpoint.weights import match_tensors, pack_weights
from gradsync.comm.finite import non_finite
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt2 import from_gpt2, gpt2_shape, nanogpt_shape, plain_names, to_gpt2
from gradsync.commands.models.llama import from_llama, shape_of
from gradsync.commands.parallel.layout import weights_of
from gradsync.commands.train.config import OptimConfig, recipe
from gradsync.commands.train.config_io import write_config
from gradsync.core.files import one_line, read_object
from gradsync.errors import CheckpointError, ConfigError, DataError

_EMBED, _HEAD = "transformer.wte.weight", "lm_head.weight"
_OPTIM = {
    **{"learning_rate": "lr", "warmup_iters": "warmup_steps", "weight_decay": "weight_decay"},
    **{"beta1": "beta1", "beta2": "beta2"},
}
"""nanoGPT's settings, and ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A model from another program."""

    shape: GPTConfig
    weights: dict[str, Tensor]  # Under our names; all weights of the shape
    data: str  # Where its tokenizer may be
    step: int = 0  # Optimizer steps of its training
    settings: Mapping[str, Any] = field(default_factory=dict)  # Fields of `TrainConfig`


def read_hf(folder: Path) -> Foreign:
    """A Llama or GPT-2 of transformers: `config.json` and `*.safetensors`. ConfigError,
    CheckpointError: a shape or a tensor that the decoder does not have, or a missing one."""
    config, files = read_object(folder / "config.json"), sorted(folder.glob("*.safetensors"))
    theirs = {name: t for file in files for name, t in read_tensors(file, {}).items()}
    is_gpt2 = config.get("model_type") == "gpt2"
    shape = gpt2_shape(config) if is_gpt2 else shape_of(config)
    if shape.tie_head:  # some files hold the embedding again under the head's name
        theirs.pop(_HEAD, None)
    if is_gpt2:
        weights = _from_gpt2(theirs, shape, turned=True)
    else:
        own = _expected(shape)
        weights = match_tensors(own, from_llama(theirs, own))
    return Foreign(shape=shape, weights=weights, data=str(folder))


def read_nanogpt(path: Path) -> Foreign:
    """The `ckpt.pt` that nanoGPT's train.py writes; DataError if it cannot be read, or holds
    something else."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever torch raises
        reason = one_line(str(error).partition("\n")[0] or type(error).__name__)
        raise DataError(
            f"{path}: not readable as a checkpoint of tensors and plain values ({reason})"
        ) from error
    try:
        return _nanogpt(found, path)
    except (ConfigError, CheckpointError, AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no checkpoint of nanoGPT: {one_line(error)}") from error


def _nanogpt(found: Any, path: Path) -> Foreign:
    if not isinstance(found, dict) or not {"model", "model_args"} <= found.keys():
        raise ConfigError("expected a dict with model, model_args, iter_num and config")
    theirs = plain_names(pack_weights(found["model"]))
    embed, head = theirs.get(_EMBED), theirs.get(_HEAD)
    is_tied = head is None or (embed is not None and torch.equal(embed, head))
    shape = nanogpt_shape(found["model_args"], tie_head=is_tied)
    if is_tied:
        theirs.pop(_HEAD, None)
    weights = {n: t.float() for n, t in _from_gpt2(theirs, shape, turned=False).items()}
    if bad := non_finite(weights.items()):
        raise ConfigError(f"nan or inf in {bad}")
    settings = found.get("config", {})
    dataset = settings.get("dataset")
    return Foreign(
        shape=shape,
        weights=weights,
        data=f"data/{one_line(dataset)}" if dataset else str(path.parent),
        step=int(found.get("iter_num", 0)),
        settings=_settings(settings, shape),
    )


def _expected(shape: GPTConfig) -> dict[str, Tensor]:
    return {each.name: torch.empty(each.shape, device="meta") for each in weights_of(shape)}


def _from_gpt2(
    theirs: Mapping[str, Tensor], shape: GPTConfig, *, turned: bool
) -> dict[str, Tensor]:
    own = _expected(shape)
    matched = match_tensors(to_gpt2(own, turned=turned), plain_names(theirs))
    return from_gpt2(matched, own, turned=turned)


def write_start(foreign: Foreign, part: Path, folder: Path, data: str) -> None:
    """Make `part`, which becomes `folder`, a run to start from: a checkpoint with weights only, and
    the `config.yaml` of a run that continues from them."""
    begin = {"model": foreign.shape, "init": str(folder), "data": data or foreign.data}
    config = replace(recipe("tiny"), **begin, **foreign.settings)
    state = {
        "optimizer": {"class": "AdamW", "groups": [], "params": {}},
        "data": {},  # no data were read: `restore` does not go on from here
        **{"tokenizer": None, "scaler": None},
        "model": asdict(foreign.shape),
        "config": asdict(config),
    }
    snapshot = Snapshot(step=foreign.step, tensors={"model": foreign.weights}, state=state)
    CheckpointStore(part / "checkpoints").save(snapshot)
    write_config(config, part / "config.yaml")


def _settings(theirs: Mapping[str, Any], shape: GPTConfig) -> dict[str, Any]:
    """Batch and optimizer settings from the numbers in nanoGPT's `config`."""
    given = {
        name: value
        for name, value in theirs.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    optim: dict[str, Any] = {ours: given[name] for name, ours in _OPTIM.items() if name in given}
    if "grad_clip" in given:
        optim["clip_norm"] = given["grad_clip"] or None
    if given.get("learning_rate") and "min_lr" in given:
        optim["min_lr_ratio"] = given["min_lr"] / given["learning_rate"]
    if theirs.get("decay_lr") is False:
        optim["schedule"] = "constant"
    found: dict[str, Any] = {"optim": OptimConfig(**optim)} if optim else {}
    if "max_iters" in given:
        found["steps"] = given["max_iters"]
    if "batch_size" in given:
        size, times = int(given["batch_size"]), int(given.get("gradient_accumulation_steps", 1))
        found["micro_batch_size"] = size
        found["tokens_per_update"] = size * times * shape.block_size
    replace(recipe("tiny"), model=shape, **found)  # validates
    return found
