"""Files that are almost right: read, or refused with one line, within five seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given

from gradsync.checkpoint.optimizer_state import unpack_optimizer
from gradsync.checkpoint.store import CheckpointStore
from gradsync.checkpoint.tensor_file import read_tensors
from gradsync.commands.models.gpt import GPT
from gradsync.commands.train.config import recipe
from gradsync.commands.train.learner import build_optimizer
from gradsync.commands.train.state import check_state, saved_model
from gradsync.errors import GradsyncError
from support.foreign_files import make_run, replace_header
from support.fuzz import changed, damaged, fuzzed, randoms, text_of, within_seconds


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(scope="module")
def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "step-00000001"


@contextmanager
def read_or_refused() -> Iterator[None]:
    """Nothing but the package's own errors, in one line."""
    said = ""
    with within_seconds():
        try:
            yield
        except GradsyncError as error:
            said = str(error)
    assert "\n" not in said
    assert len(said) < 2_000


@contextmanager
def in_place_of(path: Path, content: bytes) -> Iterator[None]:
    good = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(good)


def test_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    good = path.read_bytes()
    body = json.loads(good)["manifest"]
    store = CheckpointStore(checkpoint.parent)

    @fuzzed
    @given(randoms)
    def holds(random: Random) -> None:
        other = changed(body, random)
        content = damaged(good, random)
        if random.random() < 0.5:
            content = text_of({"manifest": other, "sha256": "0" * 64}, random)
        with in_place_of(path, content):
            with read_or_refused():
                store.latest()
            with read_or_refused():
                store.load(checkpoint)

    holds()


@pytest.mark.parametrize("stem", ["model", "optimizer"])
def test_header(checkpoint: Path, tmp_path: Path, stem: str) -> None:
    good = (checkpoint / f"{stem}.safetensors").read_bytes()
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    path = tmp_path / "some.safetensors"

    @fuzzed
    @given(randoms)
    def holds(random: Random) -> None:
        path.unlink(missing_ok=True)  # tensors of the one before may be mapped
        path.write_bytes(good)
        if random.random() < 0.7:
            replace_header(path, text_of(changed(header, random), random))
        else:
            path.write_bytes(damaged(good, random))
        with read_or_refused():
            for tensor in read_tensors(path, {}).values():
                tensor.sum()

    holds()


def test_state(checkpoint: Path) -> None:
    """Beyond the three: what a run takes from `state.json` reaches no optimizer unlooked at."""
    found = CheckpointStore(checkpoint.parent).load(checkpoint)
    model = GPT(saved_model(found, checkpoint))
    optimizer = build_optimizer(model, recipe("tiny").optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    @fuzzed
    @given(randoms)
    def holds(random: Random) -> None:
        state = changed(found.state, random)
        with read_or_refused():
            other = replace(found, state=state if isinstance(state, dict) else {})
            check_state(other, checkpoint)
            saved_model(other, checkpoint)
            unpack_optimizer(
                optimizer, model.named_parameters(), found.tensors["optimizer"], state["optimizer"]
            )
            optimizer.step()

    holds()
