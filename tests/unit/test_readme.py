"""The README and its pages are right: the script runs, links and tables hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradsync.commands.cli.main import COMMANDS
from gradsync.sync.registry import STRATEGIES
from support.fork_server import run_forked

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
DECISIONS = ROOT / "docs" / "decisions"


def test_the_script_is_the_examples() -> None:
    """The README's script stands, line for line, in the example that the launchers run."""
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block
    example = (ROOT / "examples" / "spiral.py").read_text()
    for line in block[1].splitlines():
        code = line.split("  #")[0].rstrip()
        if code and not code.lstrip().startswith("print("):
            assert code in example, code


def test_the_example_learns(tmp_path: Path) -> None:
    """In a third of its epochs."""
    script = (ROOT / "examples" / "spiral.py").read_text().replace("epochs=30", "epochs=10")
    (tmp_path / "spiral.py").write_text(script)
    done = run_forked([tmp_path / "spiral.py"])[0].ok()
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert losses[0] > 0.6
    assert losses[-1] < 0.1


def anchor_of(heading: str) -> str:
    """As the common Markdown renderers make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for name, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)]+))?\)", document.read_text()):
        target = document.parent / name if name else document
        if not name.startswith("http"):
            assert target.exists(), name
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [anchor_of(heading) for heading in headings], (name, anchor)


def test_it_stays_short() -> None:
    """Figures, printed output and details have pages of their own."""
    assert len(README.splitlines()) <= 150


def test_every_strategy_is_in_the_guides_table() -> None:
    guide = (ROOT / "docs" / "guide" / "strategies.md").read_text()
    for name, strategy in STRATEGIES.items():
        assert f"| `{name}` | {strategy.summary} | {strategy.cost} | {strategy.promise} |" in guide


def test_five_strategies_with_their_promise() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (\w+) \| .* \|$", README, re.MULTILINE)
    assert len(rows) == 5
    for name, promise in rows:
        assert STRATEGIES[name].promise == promise, name


def test_every_command_is_shown() -> None:
    for name in COMMANDS:
        assert f"gradsync {name} " in README


def test_the_tree_is_complete() -> None:
    tree = (ROOT / "ARCHITECTURE.md").read_text().partition("src/gradsync/\n")[2]
    for path in (ROOT / "src" / "gradsync").iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert f"  {path.name}/ " in tree, path.name


def test_the_index_has_every_decision() -> None:
    """With its title, which begins with the number that its file name has."""
    index = (DECISIONS / "README.md").read_text()
    pages = sorted(DECISIONS.glob("D*.md"))
    assert pages
    for page in pages:
        number, _, title = page.read_text().splitlines()[0].removeprefix("# ").partition(". ")
        assert page.name.startswith(f"{number}-")
        assert f"- [{number}]({page.name}): {title}\n" in index
