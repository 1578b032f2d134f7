"""`gradsync export`: a trained model for other programs: transformers, safetensors, torch's DCP."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from gradsync.cli.sample import tokenizer_of
from gradsync.errors import UsageError
from gradsync.runtime.arguments import parse

if TYPE_CHECKING:
    from torch import Tensor

    from gradsync.checkpoint.store import Snapshot

_SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Write a trained model for other programs. Weights are the checkpoint's, bit for bit, whatever
    strategy saved it."""

    path: Annotated[Positional[str], tyro.conf.arg(metavar="PATH")]
    """Run directory or checkpoint; for --to safetensors also a DCP folder, for --to dcp also a
    .safetensors file."""
    to: Literal["hf", "safetensors", "dcp"] = "hf"
    """hf: a folder for transformers: config.json, model.safetensors, tokenizer; its logits are the
    same up to the last bits. safetensors: one file of weights. dcp: a folder for
    torch.distributed.checkpoint.load, with weights under model, the optimizer's state under
    optimizer."""
    out: str = ""
    """Folder or file to make, which must not hold anything yet; default: hf, model.safetensors or
    dcp in the run directory; beside PATH where that is no run."""
    data: str = ""
    """Data directory for its tokenizer; empty takes the one the run was trained on."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document."""


def run(argv: list[str]) -> int:
    """Carry out `gradsync export ARGV`; returns the exit code.

    Raises:
        UsageError: the folder holds something already.
        CheckpointError, DataError: nothing there that could be exported.
    """
    options = parse(ExportOptions, argv, "export")
    path, out = Path(options.path), Path(options.out) if options.out else None
    if options.to == "hf":
        written = export(path, out, options.data)
    else:
        written = convert(path, out, options.to)
    kind = "folder" if written.is_dir() else "file"
    print(json.dumps({kind: str(written)}) if options.as_json else f"written to {written}")
    return 0


def export(path: Path, out: Path | None, data: str = "") -> Path:
    """Write the model under `path` for transformers; returns the folder."""
    from gradsync.models.llama import llama_config, to_llama
    from gradsync.train.state import check_state, saved_model

    checkpoint, snapshot = _load(path)
    check_state(snapshot, checkpoint)
    tokenizer = tokenizer_of(snapshot.state, data)
    shape = saved_model(snapshot, checkpoint)
    config = llama_config(shape, end_of_text=tokenizer.end_of_text_id)
    weights = to_llama(snapshot.tensors["model"])
    documents = _tokenizer_files(tokenizer, shape.block_size) | {"config.json": config}
    folder = out or checkpoint.parent.parent / "hf"
    with _whole(folder) as part:
        part.mkdir()
        for name, document in documents.items():
            text = json.dumps(document, indent=2, ensure_ascii=False)
            (part / name).write_text(f"{text}\n", encoding="utf-8")
        _save(weights, part / "model.safetensors", {})
    return folder


def convert(path: Path, out: Path | None, to: str) -> Path:
    """Write the weights under `path` as one file, or with the optimizer's state for DCP."""
    from gradsync.checkpoint.dcp import is_dcp, optimizer_of, read_dcp, write_dcp
    from gradsync.checkpoint.optimizer_state import check_packed
    from gradsync.checkpoint.tensor_file import read_tensors, split_aliases

    state: dict[str, Any] = {}
    target = path.with_name(path.stem + (_SUFFIX if to == "safetensors" else "-dcp"))
    if to == "safetensors" and is_dcp(path):
        weights = read_dcp(path)
    elif to == "dcp" and path.suffix == _SUFFIX:
        weights = read_tensors(path, {})
    else:
        checkpoint, snapshot = _load(path)
        target = checkpoint.parent.parent / (f"model{_SUFFIX}" if to == "safetensors" else "dcp")
        weights = dict(snapshot.tensors["model"])
        if "optimizer" in snapshot.state:
            check_packed(snapshot.state["optimizer"])
            kept = snapshot.tensors.get("optimizer", {})
            state["optimizer"] = optimizer_of(kept, snapshot.state["optimizer"])
    target = out or target
    with _whole(target, file=to == "safetensors") as part:
        if to == "dcp":
            write_dcp(part, {"model": weights, **state})
        else:  # tied tensors once, their other names as safetensors' own `save_model` notes them
            once, aliases = split_aliases(weights)
            _save(once, part, aliases)
    return target


def _load(path: Path) -> tuple[Path, Snapshot]:
    from gradsync.checkpoint.store import CheckpointStore, resolve

    checkpoint, _ = resolve(path)
    return checkpoint, CheckpointStore(checkpoint.parent).load(checkpoint)


def _save(weights: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a file of safetensors with the permissions of the user's other new files."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(weights, path, metadata={"format": "pt", **metadata})
    path.chmod(mode)


@contextmanager
def _whole(target: Path, *, file: bool = False) -> Iterator[Path]:
    """A path at which to write `target`, so that it is whole or not there."""
    if target.exists() and (file or not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} holds something already: name another --out, or empty it")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        yield part
        part.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if part.exists():
            part.unlink()


def _tokenizer_files(tokenizer: Any, longest: int) -> dict[str, Any]:
    """`tokenizer.json` and its configuration."""
    from gradsync.data.tokenizer import END_OF_TEXT

    return {
        "tokenizer.json": tokenizer.document(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "model_max_length": longest,
            "clean_up_tokenization_spaces": False,
        },
    }
