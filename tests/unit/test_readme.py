"""The README tells the truth: its script runs, its links and its tables hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradsync.cli.main import COMMANDS
from gradsync.sync.registry import STRATEGIES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_script_is_the_examples() -> None:
    """What the README shows stands, line for line, in the example that the launchers run."""
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block
    example = (ROOT / "examples" / "spiral.py").read_text()
    for line in block[1].splitlines():
        code = line.split("  #")[0].rstrip()
        if code and not code.lstrip().startswith("print("):
            assert code in example, code


def test_the_example_learns() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "spiral.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert losses[0] > 0.6
    assert losses[-1] < 0.01


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def test_the_strategy_table_is_the_registry() -> None:
    for name, strategy in STRATEGIES.items():
        assert f"| `{name}` | {strategy.summary} | {strategy.cost} | {strategy.promise} |" in README


def test_every_command_is_shown() -> None:
    for name in COMMANDS:
        assert f"gradsync {name} " in README


def test_the_tree_is_complete() -> None:
    tree = README.partition("## The tree")[2]
    for path in (ROOT / "src" / "gradsync").iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert f"  {path.name}/ " in tree, path.name
