"""Warnings of the package in a program that sets up no logging, and in one that does."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import pytest

from gradsync.runtime.session import log, name_warnings


def test_they_begin_with_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers: list[logging.Handler] = []
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    with ExitStack() as stack:
        name_warnings(stack)
        name_warnings(stack)  # a second session
        log.warning("careful")
        assert capsys.readouterr().err == "gradsync: WARNING: careful\n"
        handlers.append(logging.NullHandler())
        log.warning("careful")
        assert capsys.readouterr().err == ""
    assert log.handlers == []
