"""Numbers that nothing could use are refused by name, whichever field or flag they come by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from gradsync.commands.cli.main import main
from gradsync.commands.train.config import TrainConfig
from gradsync.errors import ConfigError
from gradsync.runtime.bounds import LONGEST_S, check_numbers
from gradsync.runtime.session import SessionOptions

FLOATS = (float("nan"), float("inf"), float("-inf"), 1e300)
INTEGERS = (10**30, -(10**30), 10**400)
SECONDS = (*FLOATS, 0.0, -1.0, 1.01 * LONGEST_S)


def _numbers(options: Any) -> Iterator[tuple[Any, str, Any]]:
    """Each field with each value that it may not have: its dataclass, its name, the value."""
    for field in fields(options):
        if is_dataclass(part := getattr(options, field.name)):
            yield from _numbers(part)
        elif "float" in str(field.type):
            seconds = field.name.endswith("_s")
            yield from ((options, field.name, bad) for bad in (SECONDS if seconds else FLOATS))
        elif "int" in str(field.type):
            yield from ((options, field.name, bad) for bad in INTEGERS)


@pytest.mark.parametrize(
    "options", [TrainConfig(), SessionOptions()], ids=lambda o: type(o).__name__
)
def test_no_field_takes_a_number_that_nothing_could_use(options: Any) -> None:
    checked = 0
    for part, name, bad in _numbers(options):
        with pytest.raises(ConfigError, match=name):
            check_numbers(replace(part, **{name: bad}))
        checked += 1
    assert checked >= 20


@pytest.mark.parametrize(
    "words",
    [
        "train tiny --timeout-s=1e300 --dry-run",
        "train tiny --silence-s=1e6 --dry-run",
        "train tiny --nproc-per-node=1000000000",
        "launch --nproc-per-node=1 --nnodes=1000000000 -- train",
        "verify --world-size=1000000000",
        "sample somewhere --temperature=nan",
        "submit --nodes=1000000000 --time 1:00:00 -- train tiny",
    ],
)
def test_no_command_takes_one(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert "must be" in said
    assert len(said.splitlines()) == 1


def test_the_longest_times_fit_what_they_are_given_to() -> None:
    options = SessionOptions(timeout_s=LONGEST_S, rendezvous_timeout_s=LONGEST_S, silence_s=86_400)
    assert timedelta(seconds=options.timeout_s).days == 11_574
    with pytest.raises(ConfigError, match="silence_s must be at least 1"):
        SessionOptions(silence_s=0.5)
