"""The guides tell the truth: their Python runs, their tables are the code's."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from gradsync.comm.reductions import ALGORITHMS
from gradsync.lint.rules import RULES, lint
from gradsync.lint.script import Script
from gradsync.sync.options import Recipe
from gradsync.sync.registry import STRATEGIES
from support.launchers import run_python

GUIDES = sorted((Path(__file__).parents[2] / "docs" / "guide").glob("*.md"))
STRATEGIES_PAGE = next(path for path in GUIDES if path.name == "strategies.md").read_text()
PROCESS_GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


# A page ends with reductions on a group of torch's own: a gloo worker that still needs Python's
# lock when the interpreter ends would abort the process.
EPILOGUE = """
from gradsync.runtime.gloo_group import wait_until_workers_sleep
assert wait_until_workers_sleep(20.0)
"""


def python_of(text: str) -> str:
    """All Python of a page, one block after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize(
    "guide", [g for g in GUIDES if python_of(g.read_text())], ids=lambda g: g.name
)
def test_python_runs_on_one_rank(guide: Path) -> None:
    """In the order of the page, each block with the names of those before it."""
    program = PROCESS_GROUP + python_of(guide.read_text()) + EPILOGUE
    done = run_python(["-W", "error", "-c", program]).ok()
    assert done.stdout == ""


def test_scripts_that_people_come_from() -> None:
    """They are Python without known mistakes, and the rules named beside them exist."""
    page = next(path for path in GUIDES if path.name == "moving.md").read_text()
    scripts = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(scripts) == 4
    for script in scripts:
        assert {found.rule.level for found in lint(Script("theirs", script))} <= {"note"}
    assert set(re.findall(r"\bGS\d+", page)) <= {rule.id for rule in RULES}


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_has_its_section(name: str) -> None:
    """With a picture, costs, its promise, options and a measured line."""
    strategy = STRATEGIES[name]
    section = STRATEGIES_PAGE.partition(f"\n### `{name}`\n")[2].partition("\n##")[0]
    assert section.count("```") == 2
    assert "- **Costs** " in section
    assert f"**Promise** {strategy.promise}" in section
    assert "**Choose it** " in section
    assert f"<!-- measured: {name} -->\n*Measured*" in section
    if strategy.recipe is not None:
        assert "**Options** the engine's" in section
    else:
        inherited = STRATEGIES["ddp"].options if name == "powersgd" else ()
        for option in set(strategy.options) - set(inherited):
            assert f"`{option}" in section, option


def test_the_table_of_recipes_is_the_registry() -> None:
    for name, strategy in STRATEGIES.items():
        if strategy.recipe is not None:
            recipe = strategy.recipe
            parts = [recipe.grouping, "yes" if recipe.overlap else "no", recipe.order]
            parts += [recipe.reduction, recipe.wire, recipe.shard]
            assert f"| `{name}` | {' | '.join(parts)} |" in STRATEGIES_PAGE


def test_every_choice_of_the_engine_is_named() -> None:
    picture = STRATEGIES_PAGE.partition("## What a strategy is made of")[2].partition("| name")[0]
    for field in fields(Recipe):
        assert field.name in picture
        for value in re.findall(r"'(\w+)'", str(field.type)):
            assert value in picture, value


def test_the_table_of_algorithms_is_the_code() -> None:
    """The bytes in it are counted in tests/ranks/test_p2p_collectives.py."""
    table = STRATEGIES_PAGE.partition("| `backend` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", f"| `backend` |{table}", re.M) == list(ALGORITHMS)
