"""`gradsync sample`: generate text from a checkpoint, in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from gradsync.core.files import one_line
from gradsync.errors import ConfigError, DataError
from gradsync.runtime.arguments import parse


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    """Generate text from a checkpoint."""

    path: Annotated[Positional[str], tyro.conf.arg(metavar="PATH")]
    """Run directory or checkpoint."""
    prompt: str = ""
    """Text to continue; empty: a new line."""
    tokens: int = 300
    """Tokens to add."""
    temperature: float = 0.8
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int = 50
    """Sample among the k most likely tokens; 0 among all."""
    seed: int = 0
    """Seed of the draws."""
    data: str = ""
    """Data directory for its tokenizer; empty: the one that the run was trained on."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: bool = False
    """Print one JSON document."""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ConfigError(f"--tokens must not be negative; got {self.tokens}")


def run(argv: list[str]) -> int:
    """See `gradsync sample --help`."""
    arguments = parse(SampleOptions, argv, "sample")
    if arguments.json:
        checkpoint, text = sample(Path(arguments.path), arguments)
        print(json.dumps({"checkpoint": str(checkpoint), "text": text}))
    else:
        sample(Path(arguments.path), arguments, partial(print, end="", flush=True))
        print()
    return 0


def sample(
    path: Path, config: SampleOptions, write: Callable[[str], object] = len
) -> tuple[Path, str]:
    """Continue `config.prompt` with the model under `path`. Returns the checkpoint used, and prompt
    and continuation as text; `write` gets this text piece by piece during generation."""
    from gradsync.checkpoint.store import CheckpointStore, resolve
    from gradsync.checkpoint.weights import load_weights
    from gradsync.commands.models.gpt import GPT, generate
    from gradsync.commands.train.state import check_state, saved_model
    from gradsync.runtime.device import choose_device
    from gradsync.runtime.machine import choose_threads, pin_threads

    try:
        config.prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"--prompt is not UTF-8: {ascii(config.prompt)[:60]}") from error
    checkpoint, _ = resolve(path)
    snapshot = CheckpointStore(checkpoint.parent).load(checkpoint)
    check_state(snapshot, checkpoint)
    tokenizer = tokenizer_of(snapshot.state, config.data)
    prompt = tokenizer.encode(config.prompt or "\n").tolist()
    shape = saved_model(snapshot, checkpoint)
    if not shape.is_gpt2:  # unused positions need no rotary table
        needed = max(1, min(shape.block_size, len(prompt) + config.tokens))
        shape = replace(shape, block_size=needed)
    model = GPT(shape)
    load_weights(model, snapshot.tensors["model"])
    model.to(choose_device(config.device, 0))
    # Less work is not worth a thread: it would mostly wait for the next operation.
    with ExitStack() as stack:
        threads = min(choose_threads(1), -(-shape.num_params() // 2**24))
        stack.callback(pin_threads, pin_threads(threads))
        ids = generate(
            model,
            prompt,
            config.tokens,
            temperature=config.temperature,
            top_k=config.top_k or None,
            seed=config.seed,
            show=(pieces := TextPieces(tokenizer.decode, write)).show,
        )
    pieces.show(ids, end=True)
    return checkpoint, tokenizer.decode(ids)


class TextPieces:
    """Writes the text of a growing list of tokens; waits for all tokens of a character.

    Args:
        decode: text of tokens; U+FFFD for an invalid or incomplete character.
        write: gets the pieces; together they are the text of all tokens.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], write: Callable[[str], object]
    ) -> None:
        self._decode, self._write = decode, write
        self._done = 0  # Tokens whose text is written
        self._shown = 0  # Written characters of the tokens after those

    def show(self, ids: Sequence[int], *, end: bool = False) -> None:
        """Write the new text of `ids`; all of it at the `end`."""
        text = self._decode(ids[self._done :])
        whole = text if end else text.rstrip("\ufffd")
        if whole[self._shown :]:
            self._write(whole[self._shown :])
        self._shown = len(whole)
        if whole == text:
            self._done, self._shown = len(ids), 0


def tokenizer_of(state: Mapping[str, Any], data: str) -> Any:
    """The tokenizer of a checkpoint's `state`, from the folder `data`, or from the one that the run
    was trained on; DataError if it is different or missing."""
    from gradsync.commands.prepare.documents import is_stream
    from gradsync.commands.prepare.prepare import default_corpus
    from gradsync.data.meta import read_meta
    from gradsync.data.tokenizer import load_tokenizer

    saved, trained_with = state["config"], state["tokenizer"]
    source = str(saved.get("data", ""))
    directory = data or (str(saved.get("tokenizer", "")) if is_stream(source) else source)
    path = Path(directory) if directory else default_corpus()
    meta = read_meta(path)
    if meta is None:
        found = _bare_tokenizer(path) if trained_with is None else None
        if found is not None:
            return found
        raise DataError(
            f"{one_line(path)} has no meta.json, so its tokenizer is unknown; give --data DIR"
        )
    if trained_with not in (None, meta.tokenizer_identity):
        raise DataError(
            f"{path} has another tokenizer ({meta.tokenizer_identity}) than the model was trained "
            f"with ({one_line(trained_with)}); give --data DIR of the training data"
        )
    return load_tokenizer(meta, path)


def _bare_tokenizer(path: Path) -> Any:
    """The tokenizer of a folder that gradsync did not prepare: a `tokenizer.json`, or the
    characters in nanoGPT's `meta.pkl`; None without either."""
    from gradsync.checkpoint.plain_pickle import read_plain
    from gradsync.data.tokenizer import FILE_NAME, BpeTokenizer

    if (path / FILE_NAME).is_file():
        return BpeTokenizer.load(path / FILE_NAME)
    file = path / "meta.pkl"
    if not file.is_file():
        return None
    try:
        ids = read_plain(file)["stoi"]
        if not all(isinstance(c, str) and len(c) == 1 and type(i) is int for c, i in ids.items()):
            raise ValueError("stoi: expected a number for each character")
        return BpeTokenizer.of_characters(ids)
    except ConfigError:
        raise
    except Exception as error:  # any error in a pickle, or in its numbers
        raise DataError(f"{file}: is no list of characters: {one_line(error)}") from error
