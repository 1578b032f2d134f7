"""Warnings of the package in a program that sets up no logging, and in one that does."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import pytest
import torch

from gradsync.core import torch_private
from gradsync.runtime.session import Session, SessionOptions, log, name_warnings
from gradsync.world import World


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


@pytest.mark.parametrize(("newest", "rank", "lines"), [("2.0", 0, 1), ("2.0", 1, 0), ("9.9", 0, 0)])
def test_a_session_says_once_that_torch_is_newer_than_what_was_tested(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    newest: str,
    rank: int,
    lines: int,
) -> None:
    monkeypatch.setattr(torch_private, "NEWEST_TESTED", newest)
    session = Session(SessionOptions(device="cpu", threads=1), env={})
    session._set_up_compute(World(rank=rank, local_rank=rank, world_size=2, local_world_size=2))
    session.close()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == lines
    assert all(f"torch {torch.__version__}" in line and newest in line for line in said)
