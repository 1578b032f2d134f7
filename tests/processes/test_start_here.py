"""The commands of docs/guide/start-here.md, one after the other, with few steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from support.fork_server import WITH_RANKS, run_forked
from support.small_run import summary_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "start-here.md").read_text()
SHORTER = {
    "train": "--steps 2 --tokens-per-update 512 --micro-batch-size 1 --eval.max-tokens 512",
    "sample": "--tokens 8",
    "verify": "--models mlp",
}
ELSEWHERE = ("doctor",)
"""Commands that other tests run, in this form."""


def commands() -> list[list[str]]:
    """Arguments of each `gradsync` line of the page's blocks, in order, each once."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`(gradsync sample [^`]*)`", PAGE)
    found = [line for line in (*lines, *inline) if line.startswith("gradsync ")]
    return [shlex.split(line, comments=True)[1:] for line in dict.fromkeys(found)]


@pytest.mark.slow
@pytest.mark.timeout(240)  # eleven commands, a minute where nothing else computes
def test_its_commands_run_and_its_two_hashes_are_one(tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    ran = []
    for name, *words in commands():
        if name not in ELSEWHERE:
            shorter = shlex.split(SHORTER.get(name, ""))
            command = ["-m", "gradsync", name, *words, *shorter]
            run_forked(command, [WITH_RANKS], cwd=tmp_path)[0].ok()
            ran.append(name)
    assert set(ran) == {"train", "sample", "prepare", "report", "watch", "verify"}
    assert (tmp_path / "runs/first/report.html").exists()
    one, two = (summary_of(tmp_path / "runs" / name) for name in ("one", "two"))
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["weights_sha256"] == two["weights_sha256"]
