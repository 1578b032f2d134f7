"""Numbers and times that nothing could use are refused by name."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import pytest

from gradsync.commands.cli.main import main
from gradsync.commands.train.config import TrainConfig
from gradsync.errors import ConfigError
from gradsync.runtime.bounds import LONGEST_S, check_times
from gradsync.runtime.session_options import SessionOptions


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 1.01 * LONGEST_S])
@pytest.mark.parametrize(
    "options", [TrainConfig(), SessionOptions()], ids=lambda o: type(o).__name__
)
def test_no_time_is_taken_that_clocks_cannot_count(options: Any, value: float) -> None:
    for name in [field.name for field in fields(options) if field.name.endswith("_s")]:
        with pytest.raises(ConfigError, match=name):
            check_times(replace(options, **{name: value}))


@pytest.mark.parametrize(
    "words", ["train tiny --timeout-s=1e300 --dry-run", "bench scaling --world-sizes=1000000000"]
)
def test_no_command_takes_one(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_longest_times_fit_what_they_are_given_to() -> None:
    options = SessionOptions(timeout_s=LONGEST_S, rendezvous_timeout_s=LONGEST_S)
    assert timedelta(seconds=options.timeout_s).days == 11_574
    with pytest.raises(ConfigError, match="silence_s must be at least 1"):
        SessionOptions(silence_s=0.5)
