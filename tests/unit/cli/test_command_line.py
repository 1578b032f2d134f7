"""The version, as a bug report needs it."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest
import torch

from gradsync.commands.cli import version
from gradsync.commands.cli.main import main


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
