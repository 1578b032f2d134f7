"""The command line as a whole: examples, and the version."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

import pytest
import torch
import tyro

from gradsync.cli import version
from gradsync.cli.examples import EXAMPLES
from gradsync.cli.main import main


class Parsed(Exception):  # noqa: N818
    """Raised where a command would begin its work."""


def check_parses(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes these arguments; it does not run."""
    cli = tyro.cli

    def only(*args: object, **options: object) -> None:
        raise Parsed(cli(*args, **options))

    with monkeypatch.context() as patch:
        patch.setattr(tyro, "cli", only)
        with pytest.raises(Parsed):
            main(words)


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in EXAMPLES[command]:
        words = shlex.split(line, comments=True)
        words = words[words.index("gradsync") + 1 :]
        assert " ".join(words).startswith(command)
        check_parses(words, monkeypatch)


def test_the_version_tells_what_a_bug_report_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--version"]) == 0
    first, python, built, devices, launchers = capsys.readouterr().out.splitlines()
    assert first.startswith("gradsync ")
    assert python.startswith("python 3.")
    assert f"torch {torch.__version__}, built for " in built
    assert " cores, " in devices
    assert launchers.startswith("launchers: ")
    monkeypatch.setattr(version, "find_spec", lambda name: ModuleSpec(name, None, origin=None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "torch: not installed" in version.describe()
