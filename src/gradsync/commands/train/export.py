"""`gradsync export`: convert a trained model for transformers, or make a run of one of theirs."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from gradsync.commands.arguments import parse
from gradsync.commands.train.sample import tokenizer_of
from gradsync.errors import CheckpointError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Write a trained model as a folder for transformers: config.json, model.safetensors,
    tokenizer. Weights are the checkpoint's, bit for bit, under any strategy. With --from hf, make a
    run of a model of transformers: for `gradsync sample`, for `gradsync export`, and for `gradsync
    train RUN/config.yaml`, which continues with its weights.
    """

    path: Annotated[Positional[str], tyro.conf.arg(metavar="PATH")]
    """Run directory or checkpoint; with --from hf, the folder of a Llama or a GPT-2."""
    source: Annotated[Literal["run", "hf"], tyro.conf.arg(name="from")] = "run"
    """The program that wrote PATH. run: gradsync. hf: transformers."""
    out: str = ""
    """Folder to create, which must be missing or empty; default: hf in the run directory; with
    --from hf: PATH's name and -run."""
    data: str = ""
    """Data directory for its tokenizer; empty: the run's. With --from hf, the directory to record
    in the new run; empty: PATH, whose tokenizer.json is used."""


def run(argv: list[str]) -> int:
    """See `gradsync export --help`."""
    options = parse(ExportOptions, argv, "export")
    path, out = Path(options.path), Path(options.out) if options.out else None
    if options.source == "run":
        folder = export(path, out, options.data)
        following = f"loaded by: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    else:
        folder = bring(path, out, options.data)
        place = shlex.quote(str(folder))
        following = f"next: gradsync sample {place}, gradsync train {place}/config.yaml"
    print(f"written to {folder}\n{following}")
    return 0


def export(path: Path, out: Path | None, data: str = "") -> Path:
    """Write the model under `path` for transformers; returns the folder."""
    from safetensors.torch import save_file

    from gradsync.commands.prepare.tokenizer import END_OF_TEXT
    from gradsync.commands.train.foreign import hf_config, to_gpt2, to_llama
    from gradsync.commands.train.state import open_checkpoint

    checkpoint, snapshot, shape = open_checkpoint(path)
    tokenizer = tokenizer_of(snapshot.state, data)
    end = tokenizer.end_of_text_id if tokenizer.end_of_text_id < shape.vocab_size else None
    config = hf_config(shape, end_of_text=end)
    weights = snapshot.tensors["model"]
    weights = to_gpt2(weights) if shape.is_gpt2 else to_llama(weights)
    documents = {
        "config.json": config,
        "tokenizer.json": tokenizer.document(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "model_max_length": shape.block_size,
            "clean_up_tokenization_spaces": False,
        },
    }
    folder = out or checkpoint.parent.parent / "hf"
    _make_empty(folder)
    for name, document in documents.items():
        text = json.dumps(document, indent=2, ensure_ascii=False)
        (folder / name).write_text(f"{text}\n", encoding="utf-8")
    file = folder / "model.safetensors"
    file.touch()
    mode = file.stat().st_mode  # the usual one; safetensors writes with its own
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(mode)
    return folder


def bring(path: Path, out: Path | None, data: str = "") -> Path:
    """Make a run of a model of transformers: a checkpoint with weights only, and the `config.yaml`
    of a run that continues from them; returns its directory."""
    from gradsync.checkpoint.store import CheckpointStore, Snapshot
    from gradsync.commands.train.config import recipe
    from gradsync.commands.train.config_io import write_config
    from gradsync.commands.train.foreign import read_hf

    folder = out or path.parent / f"{path.stem or 'model'}-run"
    try:
        shape, weights = read_hf(path)
    except CheckpointError as error:
        raise UsageError(f"{path}: {error}") from error
    _make_empty(folder, mode=0o700)
    begin = {"model": shape, "init": str(folder), "data": data or str(path)}
    config = replace(recipe("tiny"), **begin)
    state = {
        "optimizer": {"class": "AdamW", "groups": [], "params": {}},
        "data": {},  # no data were read: `restore` does not go on from here
        "tokenizer": None,
        "scaler": None,
        "model": asdict(shape),
        "config": asdict(config),
    }
    snapshot = Snapshot(step=0, tensors={"model": weights}, state=state)
    CheckpointStore(folder / "checkpoints").save(snapshot)
    write_config(config, folder / "config.yaml")
    return folder


def _make_empty(folder: Path, mode: int = 0o777) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} holds something already: name another --out, or empty it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode, exist_ok=True)
