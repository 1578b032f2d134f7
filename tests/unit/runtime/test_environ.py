"""The one door to the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradsync.runtime import environ
from support.launchers import run_python


def test_exported_for_the_length_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMETHING", "old")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NOTHING", raising=False)
    before = dict(os.environ)
    assert (environ.get("SOMETHING", "default"), environ.get("NOTHING", "default")) == (
        "old",
        "default",
    )
    with environ.exported({"SOMETHING": "new", "NOTHING": "1", "EMPTY": "2"}):
        assert [os.environ[name] for name in ("SOMETHING", "NOTHING", "EMPTY")] == ["new", "1", "2"]
        with environ.exported({"NOTHING": "inner"}):
            assert os.environ["NOTHING"] == "inner"
        assert os.environ["NOTHING"] == "1"
    assert dict(os.environ) == before


def test_put_back_after_an_exception_and_a_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMETHING", "old")
    before = dict(os.environ)

    def block() -> None:
        with environ.exported({"SOMETHING": "new", "NOTHING": "1"}):
            del os.environ["SOMETHING"], os.environ["NOTHING"]
            raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        block()
    assert dict(os.environ) == before


def test_a_block_that_is_never_left_touches_nothing_at_the_end() -> None:
    """A generator would be closed when `os` has gone: "'NoneType' has no attribute 'environ'"."""
    code = (
        "from contextlib import ExitStack; from gradsync.runtime import environ\n"
        "environ.kept = ExitStack(); environ.kept.enter_context(environ.exported({'A': '1'}))\n"
        "environ.os = None"
    )
    assert tuple(run_python(["-c", code])) == (0, "", "")


@pytest.mark.parametrize(
    ("own", "base", "expected"),
    [
        ("/own", "/base", "/own"),
        ("/own", None, "/own"),
        ("", "/base", "/base/gradsync"),  # empty counts as unset
        (None, None, "/home/me/.cache/gradsync"),
        ("", "", "/home/me/.cache/gradsync"),
    ],
)
def test_cache_dir(
    own: str | None, base: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("GRADSYNC_CACHE", own), ("XDG_CACHE_HOME", base)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert environ.cache_dir() == Path(expected)
