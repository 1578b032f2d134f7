"""`gradsync sample`: generate text from a checkpoint, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from gradsync.commands.arguments import parse
from gradsync.core.files import one_line
from gradsync.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    """Generate text from a checkpoint."""

    path: Annotated[Positional[str], tyro.conf.arg(metavar="PATH")]  # Run directory or checkpoint.
    prompt: str = ""  # Text to continue; empty: a new line.
    tokens: int = 300  # Tokens to add.
    temperature: float = 0.8  # Logits are divided by it; 0 takes the most likely token.
    top_k: int = 50  # Sample among the k most likely tokens; 0 among all.
    seed: int = 0  # Seed of the draws.
    data: str = ""  # Data directory for its tokenizer; empty: the one that the run was trained on.
    device: str = "auto"  # auto, cpu, cuda or cuda:N.


def run(argv: list[str]) -> int:
    """See `gradsync sample --help`."""
    options = parse(SampleOptions, argv, "sample")
    print(sample(Path(options.path), options))
    return 0


def sample(path: Path, config: SampleOptions) -> str:
    """Continue `config.prompt` with the model under `path`; prompt and continuation as text."""
    from gradsync.checkpoint.weights import load_weights
    from gradsync.commands.models.gpt import GPT, generate
    from gradsync.commands.train.state import open_checkpoint
    from gradsync.runtime.device import choose_device
    from gradsync.runtime.machine import choose_threads, pin_threads

    _, snapshot, shape = open_checkpoint(path)
    tokenizer = tokenizer_of(snapshot.state, config.data)
    prompt = tokenizer.encode(config.prompt or "\n").tolist()
    if not shape.is_gpt2:  # unused positions need no rotary table
        needed = max(1, min(shape.block_size, len(prompt) + config.tokens))
        shape = replace(shape, block_size=needed)
    model = GPT(shape)
    load_weights(model, snapshot.tensors["model"])
    model.to(choose_device(config.device, 0))
    # Less work is not worth a thread: it would mostly wait for the next operation.
    before = pin_threads(min(choose_threads(1), -(-shape.num_params() // 2**24)))
    try:
        ids = generate(
            model,
            prompt,
            config.tokens,
            temperature=config.temperature,
            top_k=config.top_k or None,
            seed=config.seed,
        )
    finally:
        pin_threads(before)
    return tokenizer.decode(ids)


def tokenizer_of(state: Mapping[str, Any], data: str) -> Any:
    """The tokenizer of a checkpoint's `state`, from the folder `data`, or from the one that the run
    was trained on; DataError if it is different or missing."""
    from gradsync.commands.prepare.prepare import default_corpus, is_stream
    from gradsync.commands.prepare.tokenizer import FILE_NAME, BpeTokenizer, load_tokenizer
    from gradsync.data.meta import read_meta

    saved, trained_with = state["config"], state["tokenizer"]
    source = str(saved.get("data", ""))
    directory = data or (str(saved.get("tokenizer", "")) if is_stream(source) else source)
    path = Path(directory) if directory else default_corpus()
    meta = read_meta(path)
    if meta is None:
        if trained_with is None and (path / FILE_NAME).is_file():
            return BpeTokenizer.load(path / FILE_NAME)
        raise DataError(
            f"{one_line(path)} has no meta.json, so its tokenizer is unknown; give --data DIR"
        )
    if trained_with not in (None, meta.tokenizer_identity):
        raise DataError(
            f"{path} has another tokenizer ({meta.tokenizer_identity}) than the model was trained "
            f"with ({one_line(trained_with)}); give --data DIR of the training data"
        )
    return load_tokenizer(meta, path)
