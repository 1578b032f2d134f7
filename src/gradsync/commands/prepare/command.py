"""`gradsync prepare`: convert text files to token files."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gradsync.commands.arguments import parse
from gradsync.commands.prepare.prepare import prepare
from gradsync.core.files import counted
from gradsync.data.meta import Meta
from gradsync.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Turn text into a data directory: train.bin, val.bin (nanoGPT's layout) and meta.json.

    gradsync prepare my_texts/ --out data/
    """

    paths: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="PATHS", help_behavior_hint="(required)"),
    ]
    """Files, folders (read recursively) and .jsonl files."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR", help_behavior_hint="(required)")] = ""
    """The directory to create."""
    tokenizer: Literal["byte", "bpe"] = "byte"
    """byte: 257 tokens, no dependency. bpe: trained on this text (extra gradsync[tokenizers])."""
    vocab_size: int | None = None
    """Tokens of the bpe vocabulary; default: 4096."""
    val_fraction: float = 0.05
    """Share of the documents to hold out for validation, whole and chosen by content; with fewer
    than 20 documents, share of the tokens: the last ones. 0 writes no val.bin."""
    text_key: str = "text"
    """Key of the text in .jsonl files."""
    overwrite: bool = False
    """Replace --out if it already holds prepared data."""


def run(argv: list[str]) -> int:
    """See `gradsync prepare --help`."""
    options = parse(PrepareOptions, argv, "prepare")
    if not options.paths or not options.out:
        raise ConfigError("name texts and a directory: gradsync prepare my_texts/ --out data/")
    out = Path(options.out)
    meta = prepare(
        options.paths,
        out,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        val_fraction=options.val_fraction,
        text_key=options.text_key,
        overwrite=options.overwrite,
    )
    print(_describe(meta, out))
    return 0


def _describe(meta: Meta, out: Path) -> str:
    skipped = f", {meta.skipped_files} hidden or binary skipped" if meta.skipped_files else ""
    held_out = 100 * meta.tokens.get("val", 0) / sum(meta.tokens.values())
    how = {"documents": "whole documents, chosen by content", "tail": "the last ones"}
    splits = ", ".join(f"{name} {tokens:,}" for name, tokens in meta.tokens.items())
    return (
        f"read      {counted(meta.documents, 'document')}, {meta.text_bytes:,} bytes{skipped}\n"
        f"tokens    {splits} ({meta.tokenizer}, vocabulary {meta.vocab_size:,}, {meta.dtype})\n"
        f"held out  {held_out:.1f} % of the tokens: {how.get(meta.split_by, 'no val.bin')}\n"
        f"unigrams  {meta.unigram_entropy_nats:.3f} nats: a model should get well below\n"
        f"written   {out}\n"
        f"next      gradsync train tiny --data {shlex.quote(str(out))}"
    )
