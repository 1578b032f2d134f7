"""`gradsync export`: a trained model as a folder that transformers opens."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from gradsync.cli.sample import tokenizer_of
from gradsync.errors import UsageError
from gradsync.runtime.arguments import parse


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Write a trained model as a folder that transformers opens: `config.json`,
    `model.safetensors` and the tokenizer. The logits are the same (up to the last bits).

    gradsync export runs/first --out first-hf
    """

    path: Annotated[Positional[str], tyro.conf.arg(metavar="PATH")]
    """Run directory or checkpoint."""
    to: Literal["hf"] = "hf"
    """hf: AutoModelForCausalLM.from_pretrained(FOLDER) and AutoTokenizer."""
    out: str = ""
    """Folder to make, which must not hold files yet; default: hf beside the run's checkpoints."""
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
    options = parse(ExportOptions, argv, "export", pairs=False)
    written = export(Path(options.path), Path(options.out) if options.out else None, options.data)
    print(json.dumps({"folder": str(written)}) if options.as_json else f"written to {written}")
    return 0


def export(path: Path, out: Path | None, data: str = "") -> Path:
    """Write the model under `path` for transformers; returns the folder."""
    from safetensors.torch import save_file

    from gradsync.checkpoint.store import CheckpointStore, resolve
    from gradsync.models.llama import llama_config, to_llama
    from gradsync.train.state import check_state, saved_model

    checkpoint, _ = resolve(path)
    snapshot = CheckpointStore(checkpoint.parent).load(checkpoint)
    check_state(snapshot, checkpoint)
    tokenizer = tokenizer_of(snapshot.state, data)
    folder = out or checkpoint.parent.parent / "hf"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} holds something already: name another --out, or empty it")
    shape = saved_model(snapshot, checkpoint)
    config = llama_config(shape, end_of_text=tokenizer.end_of_text_id)
    weights = to_llama(snapshot.tensors["model"])
    documents = _tokenizer_files(tokenizer, shape.block_size) | {"config.json": config}
    part = folder.with_name(f".{folder.name}-{os.getpid()}")  # whole, or not there
    part.mkdir(parents=True)
    try:
        for name, document in documents.items():
            text = json.dumps(document, indent=2, ensure_ascii=False)
            (part / name).write_text(f"{text}\n", encoding="utf-8")
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
        part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


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
