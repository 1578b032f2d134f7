"""`gradsync export`: convert a trained model for other programs (transformers, safetensors), or
from them (transformers, nanoGPT)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from gradsync.commands.cli.sample import tokenizer_of
from gradsync.errors import CheckpointError, RunError, UsageError
from gradsync.runtime.arguments import parse

if TYPE_CHECKING:
    from torch import Tensor

    from gradsync.checkpoint.store import Snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Write a trained model for other programs. Weights are the checkpoint's, bit for bit, under
    any strategy. With --from, make a run of another program's model: for `gradsync sample`, for
    `gradsync export`, and for `gradsync train RUN/config.yaml`, which continues with its weights.
    """

    path: Annotated[Positional[str], tyro.conf.arg(metavar="PATH")]
    """Run directory or checkpoint; with --from, what the other program saved."""
    to: Literal["hf", "safetensors"] = "hf"
    """hf: a folder for transformers: config.json, model.safetensors, tokenizer; its logits are
    equal except for the last bits. safetensors: one file of weights."""
    source: Annotated[Literal["run", "hf", "nanogpt"], tyro.conf.arg(name="from")] = "run"
    """The program that wrote PATH. run: gradsync. hf: transformers, a folder of a Llama or a GPT-2.
    nanogpt: its ckpt.pt; no pickled code is executed."""
    out: str = ""
    """Folder or file to create, which must be missing or empty; default: hf or model.safetensors in
    the run directory; with --from: PATH's name and -run."""
    data: str = ""
    """Data directory for its tokenizer; empty: the run's. With --from, the directory to record in
    the new run: nanoGPT's, with its meta.pkl, or a folder with a tokenizer.json."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document."""


_LOADED_BY = {
    "hf": "loaded by: transformers.AutoModelForCausalLM.from_pretrained({!r})",
    "safetensors": "loaded by: safetensors.torch.load_file({!r})",
}


def run(argv: list[str]) -> int:
    """Run `gradsync export ARGV`; returns the exit code.

    Raises:
        UsageError: the folder is not empty.
        CheckpointError, DataError: nothing to export.
    """
    options = parse(ExportOptions, argv, "export")
    path, out = Path(options.path), Path(options.out) if options.out else None
    if options.source != "run":
        if options.to != "hf":
            raise UsageError(
                f"--from {options.source} makes a run: leave --to out, and then export that run"
            )
        written = bring(path, out, options.source, options.data)
    elif options.to == "hf":
        written = export(path, out, options.data)
    else:
        written = write_weights(path, out)
    kind = "folder" if written.is_dir() else "file"
    print(json.dumps({kind: str(written)}) if options.as_json else f"written to {written}")
    place = str(written)
    if options.source != "run":
        run = shlex.quote(place)
        following = f"next: gradsync sample {run}, gradsync train {run}/config.yaml"
    else:
        following = _LOADED_BY[options.to].format(place)
    if not options.as_json:
        print(following)
    return 0


def export(path: Path, out: Path | None, data: str = "") -> Path:
    """Write the model under `path` for transformers; returns the folder."""
    from gradsync.commands.models.gpt2 import gpt2_config, to_gpt2
    from gradsync.commands.models.llama import llama_config, to_llama
    from gradsync.commands.train.state import check_state, saved_model

    checkpoint, snapshot = _load(path)
    check_state(snapshot, checkpoint)
    tokenizer = tokenizer_of(snapshot.state, data)
    shape = saved_model(snapshot, checkpoint)
    end = tokenizer.end_of_text_id if tokenizer.end_of_text_id < shape.vocab_size else None
    config = (gpt2_config if shape.is_gpt2 else llama_config)(shape, end_of_text=end)
    weights = snapshot.tensors["model"]
    weights = to_gpt2(weights, turned=True) if shape.is_gpt2 else to_llama(weights)
    documents = _tokenizer_files(tokenizer, shape.block_size) | {"config.json": config}
    folder = out or checkpoint.parent.parent / "hf"
    with _whole(folder) as part:
        part.mkdir()
        for name, document in documents.items():
            text = json.dumps(document, indent=2, ensure_ascii=False)
            (part / name).write_text(f"{text}\n", encoding="utf-8")
        _save(weights, {}, part / "model.safetensors")
    return folder


def bring(path: Path, out: Path | None, source: str, data: str = "") -> Path:
    """Make a run of another program's model; returns its directory.

    Raises:
        UsageError: it cannot be read, or the decoder does not support the model.
    """
    from gradsync.commands.train.foreign import read_hf, read_nanogpt, write_start

    folder = out or path.parent / f"{path.stem or 'model'}-run"
    try:
        found = read_nanogpt(path) if source == "nanogpt" else read_hf(path)
    except CheckpointError as error:
        raise UsageError(f"{path}: {error}") from error
    with _whole(folder) as part:
        part.mkdir(mode=0o700)
        write_start(found, part, folder, data)
    return folder


def write_weights(path: Path, out: Path | None) -> Path:
    """Write the weights under `path` as one file, tied tensors once, with their other names as in
    safetensors' own `save_model`; returns the file."""
    from gradsync.checkpoint.tensor_file import split_aliases

    checkpoint, snapshot = _load(path)
    target = out or checkpoint.parent.parent / "model.safetensors"
    with _whole(target, file=True) as part:
        _save(*split_aliases(snapshot.tensors["model"]), part)
    return target


def _load(path: Path) -> tuple[Path, Snapshot]:
    from gradsync.checkpoint.store import CheckpointStore, resolve

    checkpoint, _ = resolve(path)
    return checkpoint, CheckpointStore(checkpoint.parent).load(checkpoint)


def _save(weights: dict[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    """Write a safetensors file with the usual permissions for new files."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(weights, path, metadata={"format": "pt", **metadata})
    path.chmod(mode)


@contextmanager
def _whole(target: Path, *, file: bool = False) -> Generator[Path]:
    """A path for writing `target`, which then appears complete or not at all."""
    from safetensors import SafetensorError

    if target.exists() and (file or not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} holds something already: name another --out, or empty it")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        yield part
        part.replace(target)
    except (OSError, SafetensorError) as error:
        said = getattr(error, "strerror", None) or error
        raise RunError(f"cannot write to {target}: {said}") from error
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
